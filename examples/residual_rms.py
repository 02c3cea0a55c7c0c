"""The end of a sub-layer: x ← x + y · wᵀ, and beside it the sum of squares of each new row.

The next RMSNorm needs r = 1 / √(Σⱼ xᵢⱼ² / N + eps), one number a row. The sum costs no pass over x
here; `norm_swiglu.py` and `rope_qkv.py` apply r after the next product, where it is one factor.

y [..., K], w [N, K], x [..., N]; returns x [..., N] and the sum [..., 1].
"""

import torch
import torch.nn.functional as F

import cadenza as cz
from cadenza import lang as L


@cz.epilogue
def residual_rms(acc, residual):  # acc, residual [M, N]
    x = residual + acc
    return x, L.row_sum(x**2)


def main() -> None:
    """Compares with PyTorch's RMSNorm, and value and gradients with `plain`."""
    y = torch.randn(4, 16, 32, requires_grad=True)
    w = torch.randn(64, 32, requires_grad=True)
    residual = torch.randn(4, 16, 64, requires_grad=True)

    x, square_sum = residual_rms(y, w, residual=residual)
    rstd = torch.rsqrt(square_sum / 64 + 1e-5)
    torch.testing.assert_close(x * rstd, F.rms_norm(residual + F.linear(y, w), (64,), eps=1e-5))

    operands, adjoints = (y, w, residual), (torch.randn_like(x), torch.randn_like(square_sum))
    derived = torch.autograd.grad((x, square_sum), operands, adjoints)
    plain = torch.autograd.grad(residual_rms.plain(y, w, residual=residual), operands, adjoints)
    torch.testing.assert_close(derived, plain, rtol=1e-4, atol=1e-4)
    print(
        f"residual_rms: {tuple(x.shape)} and {tuple(square_sum.shape)}, 3 gradients equal plain's"
    )


if __name__ == "__main__":
    main()
