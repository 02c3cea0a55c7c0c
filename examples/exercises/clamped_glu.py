"""Exercise: a gated unit whose gate and value are clamped, with its gradient.

gate = min(g, limit), up = min(max(u, −limit), limit), with [g, u] the halves of x · wᵀ;
y = gate · σ(slope · gate) · (up + 1).

x [M, D], w [2F, D]; returns y [M, F]. Where a value is cut off no gradient comes back: that follows
from the language's own minimum and maximum.
"""

import torch
import torch.nn.functional as F

import cadenza as cz
from cadenza import lang as L


def clamped_glu_reference(x, w, limit=1.0, slope=1.702):
    """What it should be, in PyTorch."""
    gate, up = F.linear(x, w).chunk(2, -1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(slope * gate) * (up + 1.0)


@cz.epilogue(shapes={"x": "M D", "w": "2*F D"})
def clamped_glu(acc, limit=1.0, slope=1.702):  # acc [M, 2F]
    raise NotImplementedError
