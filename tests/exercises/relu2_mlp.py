"""A solution of `examples/exercises/relu2_mlp.py`."""

import cadenza as cz
from cadenza import lang as L


@cz.block(shapes={"x": "M D", "w_up": "F D", "w_down": "D F"})
def relu2_mlp(x, w_up, w_down):
    z = L.linear(x, w_up)
    active = L.row_sum(L.where(z > 0.0, 1.0, 0.0))
    return L.linear(L.relu2(z), w_down), active
