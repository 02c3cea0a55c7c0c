"""RMSNorm, the query-key-value product and rotary embedding: qkv = rope(r · (x · wᵀ)).

A pair of columns (p, q) of a query or key head turns by its row's angle θ:
(p · cos θ − q · sin θ, p · sin θ + q · cos θ). Value heads, the last columns, stay.

x [..., K], w [(query + key + value heads) · head_dim, K], rstd [..., 1], cos and sin
[..., head_dim/2].
"""

import torch
import torch.nn.functional as F

import cadenza as cz
from cadenza import lang as L

HEAD_DIM, QUERY, KEY = 16, 4, 2


@cz.epilogue
def rope_qkv(acc, rstd, cos, sin, head_dim, heads):  # acc [M, N], rstd [M, 1]
    qkv = acc * rstd
    return L.rope(qkv, cos, sin, head_dim, heads=heads)


def rotate_half(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The embedding as Hugging Face models write it, for heads [..., heads, head_dim]."""
    first, second = heads.chunk(2, -1)
    cos, sin = (torch.cat([t, t], -1)[..., None, :] for t in (cos, sin))
    return heads * cos + torch.cat([-second, first], -1) * sin


def main() -> None:
    """Compares with the usual formulation, and the gradients with `plain`."""
    x = torch.randn(2, 8, 32, requires_grad=True)
    w = torch.randn((QUERY + 2 * KEY) * HEAD_DIM, 32, requires_grad=True)
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
    positions = torch.arange(8.0).expand(2, 8)[..., None]
    angles = positions / 10_000 ** (torch.arange(HEAD_DIM // 2) * 2 / HEAD_DIM)
    named = {"rstd": rstd, "cos": angles.cos(), "sin": angles.sin()}

    qkv = rope_qkv(x, w, **named, head_dim=HEAD_DIM, heads=QUERY + KEY)
    raw = F.linear(F.rms_norm(x, (32,), eps=1e-5), w).unflatten(-1, (-1, HEAD_DIM))
    turned, values = raw.split([QUERY + KEY, KEY], -2)
    textbook = torch.cat([rotate_half(turned, named["cos"], named["sin"]), values], -2).flatten(-2)
    torch.testing.assert_close(qkv, textbook, rtol=1e-4, atol=1e-4)

    weight = torch.randn_like(qkv)
    derived = torch.autograd.grad(qkv, (x, w), weight, retain_graph=True)
    again = rope_qkv.plain(x, w, **named, head_dim=HEAD_DIM, heads=QUERY + KEY)
    plain = torch.autograd.grad(again, (x, w), weight)
    torch.testing.assert_close(derived, plain, rtol=1e-4, atol=1e-4)
    print(f"rope_qkv: {tuple(x.shape)} to {tuple(qkv.shape)}, {QUERY + KEY} heads turned")


if __name__ == "__main__":
    main()
