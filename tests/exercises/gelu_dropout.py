"""A solution of `examples/exercises/gelu_dropout.py`."""

import cadenza as cz
from cadenza import lang as L


@cz.epilogue(shapes={"x": "M D", "w": "N D", "bias": "1 N", "seed": "1 1 int64"})
def gelu_dropout(acc, bias, seed, p=0.25):  # acc [M, N], bias [1, N], seed [1, 1]
    a = L.gelu(acc + bias)
    kept = L.random(a, seed) >= p
    return L.where(kept, a / (1.0 - p), 0.0), L.row_sum(L.where(kept, 1.0, 0.0))
