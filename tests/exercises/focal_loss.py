"""A solution of `examples/exercises/focal_loss.py`."""

import cadenza as cz
from cadenza import lang as L


@cz.epilogue(shapes={"x": "M D", "w": "V D", "target": "M 1 int64"})
def focal_loss(acc, target):  # acc [M, V], target [M, 1]
    cost = L.logsumexp(acc, L.pick(acc, target))
    return (1.0 - L.exp(-cost)) ** 2 * cost
