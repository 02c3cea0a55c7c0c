"""A solution of `examples/exercises/tempered_norm.py`."""

import cadenza as cz
from cadenza import lang as L


@cz.block(shapes={"x": "M D", "gain": "1 D", "bias": "1 D", "temperature": "1 1", "w": "N D"})
def tempered_norm(x, gain, bias, temperature, w):
    h = L.layer_norm(x, gain, bias)
    return L.linear(h / temperature, w)
