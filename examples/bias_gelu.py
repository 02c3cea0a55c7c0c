"""The first half of GPT-2's MLP: y = gelu(x · wᵀ + b), gelu by tanh as GPT-2 has it.

x [..., K], w [N, K], b [N]; y [..., N].
"""

import torch
import torch.nn.functional as F

import cadenza as cz
from cadenza import lang as L


@cz.epilogue
def bias_gelu(acc, bias):  # acc [M, N], bias [1, N]
    z = acc + bias
    return L.gelu(z, approximate="tanh")


def main() -> None:
    """Compares value and gradients with PyTorch's own functions and with `plain`."""
    x = torch.randn(4, 16, 32, requires_grad=True)
    w = torch.randn(64, 32, requires_grad=True)
    bias = torch.randn(64, requires_grad=True)

    y = bias_gelu(x, w, bias=bias)
    torch.testing.assert_close(y, F.gelu(F.linear(x, w, bias), approximate="tanh"))

    weight = torch.randn_like(y)
    derived = torch.autograd.grad(y, (x, w, bias), weight)
    plain = torch.autograd.grad(bias_gelu.plain(x, w, bias=bias), (x, w, bias), weight)
    torch.testing.assert_close(derived, plain, rtol=1e-4, atol=1e-4)
    print(f"bias_gelu: {tuple(x.shape)} to {tuple(y.shape)}, value and 3 gradients equal plain's")


if __name__ == "__main__":
    main()
