"""GEGLU with dropout: y = keep · gelu(gate) · up / (1 − p), [gate, up] = x · wᵀ, keep = [u ≥ p].

u is uniform in [0, 1), a function of seed, row and column. Backward computes it again, so no mask
is stored, and one seed gives one mask on every device.

x [..., K], w [2F, K], seed an int64 tensor of one element; y [..., F].
"""

import torch
import torch.nn.functional as F

import cadenza as cz
from cadenza import lang as L


@cz.epilogue
def geglu_dropout(acc, seed, p=0.25):  # acc [M, 2F], seed [1, 1]
    gate, up = L.split(acc)
    y = L.gelu(gate) * up
    return L.dropout(y, p, seed)


def main() -> None:
    """Compares what is kept with PyTorch, gradients with `plain`, and masks of two seeds."""
    x = torch.randn(4, 16, 32, requires_grad=True)
    w = torch.randn(2 * 48, 32, requires_grad=True)
    seed = torch.tensor(1234)

    y = geglu_dropout(x, w, seed=seed)
    gate, up = F.linear(x, w).chunk(2, -1)
    kept = y != 0.0
    torch.testing.assert_close(y[kept], (F.gelu(gate) * up / 0.75)[kept])
    assert torch.equal(y, geglu_dropout(x, w, seed=seed))
    assert not torch.equal(y, geglu_dropout(x, w, seed=seed + 1))

    weight = torch.randn_like(y)
    derived = torch.autograd.grad(y, (x, w), weight)
    plain = torch.autograd.grad(geglu_dropout.plain(x, w, seed=seed), (x, w), weight)
    torch.testing.assert_close(derived, plain, rtol=1e-4, atol=1e-4)
    print(f"geglu_dropout: {kept.float().mean():.1%} kept at p = 25 %, gradients equal plain's")


if __name__ == "__main__":
    main()
