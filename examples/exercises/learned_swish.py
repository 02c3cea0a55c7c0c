"""Exercise: swish with a learned slope for each column.

y = z · σ(beta · z), z = x · wᵀ + bias.

x [M, D], w [F, D], bias and beta [F]; returns y [M, F]. The gradients of bias and beta are sums
over rows: each tile leaves its part of them.
"""

import torch
import torch.nn.functional as F

import cadenza as cz
from cadenza import lang as L


def learned_swish_reference(x, w, bias, beta):
    """What it should be, in PyTorch."""
    z = F.linear(x, w, bias)
    return z * torch.sigmoid(beta * z)


@cz.epilogue(shapes={"x": "M D", "w": "F D", "bias": "1 F", "beta": "1 F"})
def learned_swish(acc, bias, beta):  # acc [M, F], bias and beta [1, F]
    raise NotImplementedError
