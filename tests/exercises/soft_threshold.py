"""A solution of `examples/exercises/soft_threshold.py`."""

import cadenza as cz
from cadenza import lang as L


@cz.epilogue(shapes={"x": "M D", "w": "N D", "threshold": "M 1"})
def soft_threshold(acc, threshold):  # acc [M, N], threshold [M, 1]
    y = L.relu(acc - threshold) - L.relu(-acc - threshold)
    return y, L.row_mean(L.where(L.abs(acc) > threshold, 1.0, 0.0))
