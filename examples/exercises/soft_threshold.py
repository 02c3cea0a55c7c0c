"""Exercise: a product made sparse by a learned threshold of each row.

y = sign(z) · max(|z| − threshold, 0), z = x · wᵀ, and the share of z that is not cut to 0.

x [M, D], w [N, D], threshold [M, 1] above 0; returns y [M, N] and the share [M, 1], which has no
gradient. There is no sign in the language, and none is needed.
"""

import torch.nn.functional as F

import cadenza as cz
from cadenza import lang as L


def soft_threshold_reference(x, w, threshold):
    """What it should be, in PyTorch."""
    z = F.linear(x, w)
    y = z.sign() * F.relu(z.abs() - threshold)
    return y, (y != 0).to(z.dtype).mean(1, keepdim=True)


@cz.epilogue(shapes={"x": "M D", "w": "N D", "threshold": "M 1"})
def soft_threshold(acc, threshold):  # acc [M, N], threshold [M, 1]
    raise NotImplementedError
