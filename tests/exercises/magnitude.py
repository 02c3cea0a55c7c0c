"""A solution of `examples/exercises/magnitude.py`."""

import cadenza as cz
from cadenza import lang as L


@cz.epilogue(shapes={"x": "M D", "w": "2*N D"})
def magnitude(acc, eps=1e-6):  # acc [M, 2N]
    re, im = L.split(acc, inner=1)
    return L.sqrt(re**2 + im**2 + eps)
