"""A solution of `examples/exercises/head_affine.py`."""

import cadenza as cz
from cadenza import lang as L


@cz.epilogue(shapes={"x": "M D", "w": "H*head_dim D", "scale": "1 H", "shift": "1 H"})
def head_affine(acc, scale, shift, head_dim=16):  # acc [M, H * head_dim], scale and shift [1, H]
    return acc * L.repeat(scale, head_dim) + L.repeat(shift, head_dim)
