"""`cadenza bench`: what programs take, beside what else computes the same: docs/benchmarks.md."""
