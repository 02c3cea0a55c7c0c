"""Exercise: the divergence from a teacher's log-probabilities.

loss = Σⱼ exp(tⱼ) · (tⱼ − ln softmax(z)ⱼ) for each row, z = x · wᵀ, t the teacher's, Σⱼ exp tⱼ = 1.

x [M, D], w [V, D], teacher [M, V]; returns the loss [M, 1]. As it stands, the sum waits for each
row's log-sum-exp. Since Σⱼ exp tⱼ = 1 that leaves the sum, as the reference has it.
"""

import torch.nn.functional as F

import cadenza as cz
from cadenza import lang as L


def distillation_reference(x, w, teacher):
    """What it should be, in PyTorch."""
    z = F.linear(x, w)
    return (teacher.exp() * (teacher - z)).sum(1, keepdim=True) + z.logsumexp(1, keepdim=True)


@cz.epilogue(shapes={"x": "M D", "w": "V D", "teacher": "M V"})
def distillation(acc, teacher):  # acc and teacher [M, V]
    raise NotImplementedError
