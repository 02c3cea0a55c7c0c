"""Exercise: a contrastive loss over a product of similarities.

s = (a / |a|) · bᵀ / temperature, loss = ln Σⱼ exp sⱼ − s_target for each row.

a [M, D], b [C, D], target [M] whole numbers, temperature one number; returns the loss [M, 1].
1 / |a| is one number a row: it leaves the product, and no normalised row is ever stored.
"""

import torch.nn.functional as F

import cadenza as cz
from cadenza import lang as L


def contrastive_reference(a, b, target, temperature):
    """What it should be, in PyTorch."""
    s = F.linear(a / a.norm(dim=1, keepdim=True), b) / temperature
    return F.cross_entropy(s, target, reduction="none")[:, None]


@cz.block(shapes={"a": "M D", "b": "C D", "target": "M 1 int64", "temperature": "1 1"})
def contrastive(a, b, target, temperature):
    raise NotImplementedError
