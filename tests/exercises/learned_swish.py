"""A solution of `examples/exercises/learned_swish.py`."""

import cadenza as cz
from cadenza import lang as L


@cz.epilogue(shapes={"x": "M D", "w": "F D", "bias": "1 F", "beta": "1 F"})
def learned_swish(acc, bias, beta):  # acc [M, F], bias and beta [1, F]
    z = acc + bias
    return z * L.sigmoid(beta * z)
