"""Exercise: the focal loss of linear logits.

loss = (1 − p)² · (−ln p) for each row, p the softmax of x · wᵀ at the target.

x [M, D], w [V, D], target [M] whole numbers; returns the loss [M, 1]. −ln p is one number a row,
and the rest is a function of it.
"""

import torch
import torch.nn.functional as F

import cadenza as cz
from cadenza import lang as L


def focal_loss_reference(x, w, target):
    """What it should be, in PyTorch."""
    cost = F.cross_entropy(F.linear(x, w), target, reduction="none")[:, None]
    return (1.0 - torch.exp(-cost)) ** 2 * cost


@cz.epilogue(shapes={"x": "M D", "w": "V D", "target": "M 1 int64"})
def focal_loss(acc, target):  # acc [M, V], target [M, 1]
    raise NotImplementedError
