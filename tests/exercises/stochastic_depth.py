"""A solution of `examples/exercises/stochastic_depth.py`."""

import cadenza as cz
from cadenza import lang as L


@cz.epilogue(shapes={"x": "M D", "w": "N D", "residual": "M N", "seed": "1 1 int64"})
def stochastic_depth(acc, residual, seed, p=0.25):  # acc and residual [M, N], seed [1, 1]
    kept = L.random(L.row_index(acc), seed) >= p
    return residual + L.where(kept, acc / (1.0 - p), 0.0)
