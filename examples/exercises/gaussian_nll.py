"""Exercise: the loss of a head that predicts means and log-variances.

loss = ½ Σⱼ (vⱼ + (targetⱼ − mⱼ)² · exp(−vⱼ)) for each row, [m, v] the halves of x · wᵀ.

x [M, D], w [2N, D], target [M, N]; returns the loss [M, 1].
"""

import torch.nn.functional as F

import cadenza as cz
from cadenza import lang as L


def gaussian_nll_reference(x, w, target):
    """What it should be, in PyTorch."""
    mean, log_variance = F.linear(x, w).chunk(2, 1)
    losses = F.gaussian_nll_loss(mean, target, log_variance.exp(), eps=0.0, reduction="none")
    return losses.sum(1, keepdim=True)


@cz.epilogue(shapes={"x": "M D", "w": "2*N D", "target": "M N"})
def gaussian_nll(acc, target):  # acc [M, 2N], target [M, N]
    raise NotImplementedError
