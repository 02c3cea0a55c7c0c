"""The compiler: programs as graphs, their derivatives, and the kernels that they become.

Nothing here knows torch or a device. Read in this order: ops (the closed set and its types), ir
(nodes, graphs, the verifier), trace and lang (how a function becomes a graph), text and parse (its
printed form), vjp (derivatives), rules and rewrite (simplification); then readiness (when a value
exists), defer and euler (what leaves a product, and what that saves), partition and saved (what
backward keeps), schedule and plan (kernels), and pipeline: all of it as one straight function.
"""
