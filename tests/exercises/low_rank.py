"""A solution of `examples/exercises/low_rank.py`."""

import cadenza as cz
from cadenza import lang as L


@cz.block(shapes={"x": "M D", "w": "N D", "down": "R D", "up": "N R"})
def low_rank(x, w, down, up, scale=2.0):
    return L.linear(x, w) + scale * L.linear(L.linear(x, down), up)
