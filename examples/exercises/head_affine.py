"""Exercise: scale and shift of each head.

y = z · scaleₕ + shiftₕ for the head_dim columns of head h, with z = x · wᵀ.

x [M, D], w [H · head_dim, D], scale and shift [H]; returns y [M, H · head_dim]. One number a group
of columns has to be spread over the group.
"""

import torch.nn.functional as F

import cadenza as cz
from cadenza import lang as L


def head_affine_reference(x, w, scale, shift, head_dim=16):
    """What it should be, in PyTorch."""
    heads = F.linear(x, w).unflatten(1, (-1, head_dim))
    return (heads * scale[:, None] + shift[:, None]).flatten(1)


@cz.epilogue(shapes={"x": "M D", "w": "H*head_dim D", "scale": "1 H", "shift": "1 H"})
def head_affine(acc, scale, shift, head_dim=16):  # acc [M, H * head_dim], scale and shift [1, H]
    raise NotImplementedError
