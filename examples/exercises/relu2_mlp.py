"""Exercise: an MLP with squared ReLU, and how many of its units are active.

z = x · w_upᵀ, y = max(z, 0)² · w_downᵀ, and for each row the number of columns of z above 0.

x [M, D], w_up [F, D], w_down [D, F]; returns y [M, D] and the count [M, 1], a real number without
gradient. Two products: a block. The count is a sum over the tile that the first one has at hand.
"""

import torch.nn.functional as F

import cadenza as cz
from cadenza import lang as L


def relu2_mlp_reference(x, w_up, w_down):
    """What it should be, in PyTorch."""
    z = F.linear(x, w_up)
    return F.linear(F.relu(z) ** 2, w_down), (z > 0).sum(1, keepdim=True).to(z.dtype)


@cz.block(shapes={"x": "M D", "w_up": "F D", "w_down": "D F"})
def relu2_mlp(x, w_up, w_down):
    raise NotImplementedError
