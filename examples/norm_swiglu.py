"""RMSNorm and the first half of a gated MLP: y = silu(gate) · up, [gate, up] = rmsnorm(x) · wᵀ.

The norm's factor r = 1 / √(mean(x²) + eps) is one number a row, so it commutes with the product:
(r · x) · wᵀ = r · (x · wᵀ). It is applied to the accumulator, and the normalised x is never stored.
The norm's own weight is folded into the columns of w.

x [..., K], w [2F, K], rstd [..., 1]; y [..., F].
"""

import torch
import torch.nn.functional as F

import cadenza as cz
from cadenza import lang as L


@cz.epilogue
def norm_swiglu(acc, rstd):  # acc [M, 2F], rstd [M, 1]
    gate, up = L.split(acc * rstd)
    return L.silu(gate) * up


def main() -> None:
    """Compares with the textbook order, norm first, also through the gradient of the norm."""
    x = torch.randn(4, 16, 32, requires_grad=True)
    w = torch.randn(2 * 48, 32, requires_grad=True)

    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
    y = norm_swiglu(x, w, rstd=rstd)
    gate, up = F.linear(F.rms_norm(x, (32,), eps=1e-5), w).chunk(2, -1)
    textbook = F.silu(gate) * up
    torch.testing.assert_close(y, textbook, rtol=1e-4, atol=1e-4)

    weight = torch.randn_like(y)
    derived = torch.autograd.grad(y, (x, w), weight, retain_graph=True)
    expected = torch.autograd.grad(textbook, (x, w), weight)
    torch.testing.assert_close(derived, expected, rtol=1e-4, atol=1e-4)

    y_plain = norm_swiglu.plain(x, w, rstd=rstd)
    torch.testing.assert_close(y, y_plain)
    plain = torch.autograd.grad(y_plain, (x, w), weight)
    torch.testing.assert_close(derived, plain, rtol=1e-4, atol=1e-4)
    print(f"norm_swiglu: {tuple(x.shape)} to {tuple(y.shape)}, equal to norm, product, SwiGLU")


if __name__ == "__main__":
    main()
