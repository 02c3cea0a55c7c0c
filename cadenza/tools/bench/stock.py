"""What torch runs, eager or compiled, to compute what the programs do: idiomatic, no tricks.

A norm's row factor is applied where the norm stands, so inputs here are normalised already.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

Tensor = torch.Tensor
EPS = 1e-5


def wide(x: Tensor) -> Tensor:
    """x as float32, or float64 as it is."""
    return x if x.dtype == torch.float64 else x.float()


def residual_rms(y: Tensor, w: Tensor, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """The residual stream x1 and its RMSNorm h."""
    x1 = x + F.linear(y, w)
    return x1, F.rms_norm(x1, (x1.shape[-1],), g, EPS)


def gated(z: Tensor) -> Tensor:
    """SwiGLU of [gate; up]."""
    gate, up = z.chunk(2, dim=-1)
    return F.silu(gate) * up


def swiglu(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """The product z and its SwiGLU u."""
    z = F.linear(x, w)
    return z, gated(z)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads x [M, heads, head_dim] rotated, as Hugging Face does; cos, sin [M, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    half = torch.cat((-second, first), dim=-1)
    return x * cos[:, None] + half * sin[:, None]


def rope(
    x: Tensor, w: Tensor, cos: Tensor, sin: Tensor, head_dim: int, heads: int
) -> tuple[Tensor, Tensor]:
    """Queries and keys, rotated, and values: the first `heads` heads and the rest."""
    qk, v = F.linear(x, w).tensor_split((heads * head_dim,), dim=-1)
    return rotated(qk.unflatten(-1, (heads, head_dim)), cos, sin).flatten(-2), v


def rms_backward(
    dz: Tensor, w: Tensor, x: Tensor, r: Tensor, g: Tensor, dres: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dx and dg of RMSNorm with a residual, and the normalised n · g, which its dW needs."""
    da = wide(dz @ w)
    n, dn = wide(x) * r, da * wide(g)
    dx = dres + r * (dn - n * (dn * n).mean(-1, keepdim=True))
    return dx.to(x.dtype), (da * n).sum(0).to(g.dtype), (n * g).to(x.dtype)


def swiglu_backward(dx: Tensor, w: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """dz of SwiGLU, and its activation u again, which the weight gradient needs."""
    du = dx @ w
    gate, up = z.chunk(2, dim=-1)
    a = F.silu(gate)
    dgate = torch.ops.aten.silu_backward(du * up, gate)
    return torch.cat((dgate, du * a), dim=-1), a * up


def dw(dz: Tensor, n: Tensor) -> Tensor:
    """The gradient of a weight; n is the normalised activation."""
    return dz.T @ n


def dx(dz: Tensor, w: Tensor) -> Tensor:
    """The gradient of a product's left operand."""
    return dz @ w


def cross_entropy(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    """Each row's loss."""
    return F.cross_entropy(wide(F.linear(x, w)), target, reduction="none")


def linear_loss(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    """The mean loss."""
    return F.cross_entropy(wide(F.linear(x, w)), target)


def bias_gelu(x: Tensor, w: Tensor, bias: Tensor) -> tuple[Tensor]:
    """The first half of GPT-2's MLP."""
    return (F.gelu(F.linear(x, w, bias), approximate="tanh"),)


def layer(
    x: Tensor, y: Tensor, weights: Mapping[str, Tensor], tables: tuple[Tensor, Tensor], heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Llama between two attentions: the stream x, rotated queries and keys, values."""
    width, head_dim = (x.shape[-1],), tables[0].shape[-1]
    x = x + F.linear(y, weights["wo"])
    h = F.rms_norm(x, width, weights["norm"], EPS)
    x = x + F.linear(gated(F.linear(h, weights["w_gate_up"])), weights["w_down"])
    h = F.rms_norm(x, width, weights["next_norm"], EPS)
    qk, v = rope(h, weights["w_qkv"], *tables, head_dim, heads)
    return x, qk, v
