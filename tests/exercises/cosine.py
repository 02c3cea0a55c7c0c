"""A solution of `examples/exercises/cosine.py`."""

import cadenza as cz
from cadenza import lang as L


@cz.epilogue(shapes={"x": "M D", "w": "2*N D"})
def cosine(acc):  # acc [M, 2N]
    a, b = L.split(acc)
    return L.row_sum(a * b) * L.rsqrt(L.row_sum(a**2) * L.row_sum(b**2))
