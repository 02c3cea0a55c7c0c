"""Exercise: bias, GELU and dropout by a counter, and how many units each row keeps.

a = gelu(x · wᵀ + bias), y = a / (1 − p) where u ≥ p, else 0, with u = L.random(a, seed).

x [M, D], w [N, D], bias [N], seed one whole number; returns y [M, N] and, for each row, how many
columns are kept [M, 1]. u is a function of seed, row and column, so backward makes it again and no
mask is stored. On tensors `L.random` gives the same numbers: the reference takes them there.
"""

import torch
import torch.nn.functional as F

import cadenza as cz
from cadenza import lang as L


def gelu_dropout_reference(x, w, bias, seed, p=0.25):
    """What it should be, in PyTorch."""
    a = F.gelu(F.linear(x, w, bias))
    kept = L.random(a, seed) >= p
    return torch.where(kept, a / (1.0 - p), 0.0), kept.sum(1, keepdim=True).to(a.dtype)


@cz.epilogue(shapes={"x": "M D", "w": "N D", "bias": "1 N", "seed": "1 1 int64"})
def gelu_dropout(acc, bias, seed, p=0.25):  # acc [M, N], bias [1, N], seed [1, 1]
    raise NotImplementedError
