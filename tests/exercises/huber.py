"""A solution of `examples/exercises/huber.py`."""

import cadenza as cz
from cadenza import lang as L


@cz.epilogue(shapes={"x": "M D", "w": "N D", "target": "M N"})
def huber(acc, target, delta=0.5):  # acc and target [M, N]
    e = L.abs(acc - target)
    near = L.minimum(e, delta)
    return L.row_mean(near * (e - 0.5 * near))
