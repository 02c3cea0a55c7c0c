"""Exercise: the Huber loss of a linear head.

e = |x · wᵀ − target|; e² / 2 where e ≤ delta, else delta · (e − delta / 2); the mean of each row.

x [M, D], w [N, D], target [M, N]; returns the mean over N, [M, 1].
"""

import torch.nn.functional as F

import cadenza as cz
from cadenza import lang as L


def huber_reference(x, w, target, delta=0.5):
    """What it should be, in PyTorch."""
    return F.huber_loss(F.linear(x, w), target, reduction="none", delta=delta).mean(1, keepdim=True)


@cz.epilogue(shapes={"x": "M D", "w": "N D", "target": "M N"})
def huber(acc, target, delta=0.5):  # acc and target [M, N]
    raise NotImplementedError
