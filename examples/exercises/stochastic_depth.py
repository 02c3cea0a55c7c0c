"""Exercise: a residual branch that is dropped row by row.

y = residual + z / (1 − p) where u ≥ p, else residual; z = x · wᵀ, one u for each row.

x [M, D], w [N, D], residual [M, N], seed one whole number; returns y [M, N]. u is
`L.random(column, seed)` of a column [M, 1], which may be any: only its shape counts.
"""

import torch
import torch.nn.functional as F

import cadenza as cz
from cadenza import lang as L


def stochastic_depth_reference(x, w, residual, seed, p=0.25):
    """What it should be, in PyTorch."""
    z = F.linear(x, w)
    kept = L.random(z[:, :1], seed) >= p
    return residual + torch.where(kept, z / (1.0 - p), 0.0)


@cz.epilogue(shapes={"x": "M D", "w": "N D", "residual": "M N", "seed": "1 1 int64"})
def stochastic_depth(acc, residual, seed, p=0.25):  # acc and residual [M, N], seed [1, 1]
    raise NotImplementedError
