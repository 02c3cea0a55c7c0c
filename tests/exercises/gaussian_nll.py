"""A solution of `examples/exercises/gaussian_nll.py`."""

import cadenza as cz
from cadenza import lang as L


@cz.epilogue(shapes={"x": "M D", "w": "2*N D", "target": "M N"})
def gaussian_nll(acc, target):  # acc [M, 2N], target [M, N]
    mean, log_variance = L.split(acc)
    squares = (target - mean) ** 2 * L.exp(-log_variance)
    return 0.5 * L.row_sum(log_variance + squares)
