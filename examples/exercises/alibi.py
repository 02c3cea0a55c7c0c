"""Exercise: causal scores with a distance penalty, and the log-sum-exp of each row.

s = q · kᵀ − slope · (i − j) for j ≤ i, else −10000, at row i and column j; and ln Σⱼ exp sⱼ.

q [M, D], k [C, D], slope one number; returns s [M, C] and the log-sum-exp [M, 1].
"""

import torch

import cadenza as cz
from cadenza import lang as L


def alibi_reference(q, k, slope):
    """What it should be, in PyTorch."""
    s = q @ k.T
    i, j = torch.arange(s.shape[0])[:, None], torch.arange(s.shape[1])[None]
    s = torch.where(j <= i, s - slope * (i - j), -1e4)
    return s, s.logsumexp(1, keepdim=True)


@cz.block(shapes={"q": "M D", "k": "C D", "slope": "1 1"})
def alibi(q, k, slope):
    raise NotImplementedError
