"""A solution of `examples/exercises/unit_heads.py`."""

import cadenza as cz
from cadenza import lang as L


@cz.epilogue(shapes={"x": "M D", "w": "H*head_dim D", "scale": "1 H"})
def unit_heads(acc, scale, head_dim=16, eps=1e-6):  # acc [M, H * head_dim], scale [1, H]
    r = L.rsqrt(L.group_sum(acc**2, head_dim) + eps)
    return acc * L.repeat(r * scale, head_dim)
