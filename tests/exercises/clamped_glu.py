"""A solution of `examples/exercises/clamped_glu.py`."""

import cadenza as cz
from cadenza import lang as L


@cz.epilogue(shapes={"x": "M D", "w": "2*F D"})
def clamped_glu(acc, limit=1.0, slope=1.702):  # acc [M, 2F]
    gate, up = L.split(acc)
    gate = L.minimum(gate, limit)
    up = L.minimum(L.maximum(up, -limit), limit)
    return gate * L.sigmoid(slope * gate) * (up + 1.0)
