"""The compiler: programs as graphs, their derivatives and their printed form.

Nothing here knows torch or a device. Read in this order: ops (the closed set and its types), ir
(nodes, graphs, the verifier), trace and lang (how a function becomes a graph), text (its printed
form), vjp (derivatives), rules and rewrite (simplification), partition (what backward keeps),
pipeline (all of it as one straight function).
"""
