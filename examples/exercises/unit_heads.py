"""Exercise: heads of unit length, each with a learned scale.

y = z / √(Σ z² + eps) · scaleₕ, the sum over the head_dim columns of head h; z = x · wᵀ.

x [M, D], w [H · head_dim, D], scale [H]; returns y [M, H · head_dim]. A sum over a group stays
inside of a tile, so nothing has to wait for a whole row.
"""

import torch
import torch.nn.functional as F

import cadenza as cz
from cadenza import lang as L


def unit_heads_reference(x, w, scale, head_dim=16, eps=1e-6):
    """What it should be, in PyTorch."""
    heads = F.linear(x, w).unflatten(1, (-1, head_dim))
    norms = torch.sqrt(heads.square().sum(-1, keepdim=True) + eps)
    return (heads / norms * scale[:, None]).flatten(1)


@cz.epilogue(shapes={"x": "M D", "w": "H*head_dim D", "scale": "1 H"})
def unit_heads(acc, scale, head_dim=16, eps=1e-6):  # acc [M, H * head_dim], scale [1, H]
    raise NotImplementedError
