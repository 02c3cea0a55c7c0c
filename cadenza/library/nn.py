"""Modules over the built-in blocks, with the parameter names and shapes of stock Llama.

Projections stay separate parameters, in torch.nn.Linear modules; they are put together for the
products that share an operand. A layer ends at its residual stream and the sums of squares of its
rows; the next layer applies its own norm and QKV, so each weight is used inside its own layer.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cadenza.library import blocks
from cadenza.library.cross_entropy import linear_cross_entropy

__all__ = ["Attention", "DecoderLayer", "FeedForward", "LinearCrossEntropy"]


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) · up(x)), `[..., width]` to the same."""

    def __init__(self, width: int, feed_forward: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, feed_forward, bias=False)
        self.up_proj = nn.Linear(width, feed_forward, bias=False)
        self.down_proj = nn.Linear(feed_forward, width, bias=False)

    def gate_up(self) -> Tensor:
        """The weights of gate and up as one, `[2 * feed_forward, width]`."""
        return torch.cat((self.gate_proj.weight, self.up_proj.weight))

    def forward(self, x: Tensor) -> Tensor:
        """x `[..., width]` to `[..., width]`, in x's dtype."""
        return blocks.llama_mlp(x, self.gate_up(), self.down_proj.weight)


class Attention(nn.Module):
    """The projections of causal grouped-query attention, and attention between them."""

    def __init__(self, width: int, heads: int, key_value_heads: int) -> None:
        super().__init__()
        self.heads, self.key_value_heads, self.head_dim = heads, key_value_heads, width // heads
        narrow = key_value_heads * self.head_dim
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, narrow, bias=False)
        self.v_proj = nn.Linear(width, narrow, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def qkv(self) -> Tensor:
        """The weights of queries, keys and values as one, `[N, width]`."""
        return torch.cat((self.q_proj.weight, self.k_proj.weight, self.v_proj.weight))

    def forward(self, qkv: Tensor) -> Tensor:
        """Causal attention of rotated heads qkv `[B, S, N]`: `[B, S, width]`."""
        sizes = (self.heads, self.key_value_heads, self.key_value_heads)
        heads = qkv.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        query, key, value = heads.split(sizes, dim=1)
        grouped = self.heads != self.key_value_heads
        mixed = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=grouped
        )
        return mixed.transpose(1, 2).flatten(-2)


class DecoderLayer(nn.Module):
    """One Llama decoder layer, from one residual stream to the next."""

    def __init__(
        self, width: int, heads: int, key_value_heads: int, feed_forward: int, eps: float = 1e-5
    ) -> None:
        super().__init__()
        self.eps = eps
        self.self_attn = Attention(width, heads, key_value_heads)
        self.mlp = FeedForward(width, feed_forward)
        self.input_layernorm = nn.RMSNorm(width, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(width, eps=eps)

    def forward(
        self, x: Tensor, squares: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The next stream `[B, S, width]` and its rows' sums of squares `[B, S, 1]`, float32.

        `squares` are those of x; cos and sin `[B, S, head_dim / 2]` are the rotary tables.
        """
        attention, mlp = self.self_attn, self.mlp
        qkv = blocks.attention_input(
            x, squares, self.input_layernorm.weight, attention.qkv(), cos, sin,
            head_dim=attention.head_dim, heads=attention.heads + attention.key_value_heads,
            eps=self.eps,
        )  # fmt: skip
        y = attention(qkv)
        norm = self.post_attention_layernorm.weight
        output = attention.o_proj.weight
        down = mlp.down_proj.weight
        return blocks.attention_output(x, y, output, norm, mlp.gate_up(), down, eps=self.eps)


class LinearCrossEntropy(nn.Module):
    """The cross-entropy of linear logits, never all of them at once; `weight` [V, D]."""

    def __init__(
        self, width: int, vocabulary: int, ignore_index: int = -100, reduction: str = "mean"
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocabulary, width))
        nn.init.normal_(self.weight, std=width**-0.5)
        self.ignore_index, self.reduction = ignore_index, reduction

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """The loss of x `[..., width]` against target `[...]`: a scalar, or `[...]` for "none"."""
        return linear_cross_entropy(
            x, self.weight, target, ignore_index=self.ignore_index, reduction=self.reduction
        )
