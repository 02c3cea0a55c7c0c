"""Exercise: magnitudes of interleaved complex numbers.

y = √(re² + im² + eps), re and im the even and the odd columns of x · wᵀ.

x [M, D], w [2N, D]; returns y [M, N]. `L.split` can take the columns apart in more than one way.
"""

import torch
import torch.nn.functional as F

import cadenza as cz
from cadenza import lang as L


def magnitude_reference(x, w, eps=1e-6):
    """What it should be, in PyTorch."""
    pairs = F.linear(x, w).unflatten(1, (-1, 2))
    return torch.sqrt(pairs.square().sum(-1) + eps)


@cz.epilogue(shapes={"x": "M D", "w": "2*N D"})
def magnitude(acc, eps=1e-6):  # acc [M, 2N]
    raise NotImplementedError
