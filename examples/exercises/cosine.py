"""Exercise: the cosine of two projections of one input.

c = Σⱼ aⱼ bⱼ / √(Σⱼ aⱼ² · Σⱼ bⱼ²) for each row, a and b the halves of x · wᵀ.

x [M, D], w [2N, D], one projection's rows above the other's; returns c [M, 1]. As one product, a
and b are in the same tile, and neither has to be stored for c.
"""

import torch.nn.functional as F

import cadenza as cz
from cadenza import lang as L


def cosine_reference(x, w):
    """What it should be, in PyTorch."""
    a, b = F.linear(x, w).chunk(2, 1)
    return F.cosine_similarity(a, b, dim=1)[:, None]


@cz.epilogue(shapes={"x": "M D", "w": "2*N D"})
def cosine(acc):  # acc [M, 2N]
    raise NotImplementedError
