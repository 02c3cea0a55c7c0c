"""A dense decoder in stock PyTorch modules, as Hugging Face's models compute it.

Norms are RMSNorm in float32 by single operations, or torch's LayerNorm; rotary embedding turns
halves by a concatenation; the loss is cross-entropy of the logits in float32. Dropout is left out.
Nothing here comes from Cadenza's compiler.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cadenza.tools.audit.decoder import Decoder

ROTARY_BASE = 500000.0


def gelu_new(x: Tensor) -> Tensor:
    """GELU by tanh, written out."""
    inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
    return 0.5 * x * (1.0 + torch.tanh(inner))


ACTIVATED: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_new": gelu_new,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


class StockNorm(nn.Module):
    """RMSNorm, computed in float32; with `offset` weights are stored minus it."""

    def __init__(self, width: int, eps: float, offset: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((width,), 1.0 - offset))
        self.eps, self.offset = eps, offset

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.offset:
            return (normed * (self.offset + self.weight.float())).type_as(x)
        return self.weight * normed.type_as(x)


def norm(decoder: Decoder, width: int | None = None) -> nn.Module:
    """A norm of the decoder's kind."""
    make = decoder.architecture
    if make.norm == "layer":
        return nn.LayerNorm(width or decoder.width, decoder.eps, bias=make.norm_bias)
    return StockNorm(width or decoder.width, decoder.eps, make.norm_offset)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of the first columns of heads x [B, H, S, D], cos and sin [B, S, R]."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    turning, still = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turning.chunk(2, dim=-1)
    turning = turning * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((turning, still), dim=-1) if still.shape[-1] else turning


class StockAttention(nn.Module):
    """Causal grouped-query attention, [B, S, width] to the same."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        make, self.head_dim = decoder.architecture, decoder.head_dim
        wide, narrow = (n * decoder.head_dim for n in (decoder.heads, decoder.key_value_heads))
        self.sizes = (wide, narrow, narrow)
        if decoder.joined:
            self.qkv_proj = nn.Linear(decoder.width, sum(self.sizes), bias=make.qkv_bias)
        else:
            self.q_proj, self.k_proj, self.v_proj = (
                nn.Linear(decoder.width, size, bias=make.qkv_bias) for size in self.sizes
            )
        self.o_proj = nn.Linear(wide, decoder.width, bias=make.output_bias)
        self.by_row = make.qk_norm == "row"
        self.joined, self.normed = decoder.joined, make.qk_norm is not None
        if self.normed:
            self.q_norm = norm(decoder, wide if self.by_row else decoder.head_dim)
            self.k_norm = norm(decoder, narrow if self.by_row else decoder.head_dim)

    def _projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.joined:
            query, key, value = self.qkv_proj(x).split(self.sizes, dim=-1)
        else:
            query, key, value = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.by_row:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = (z.unflatten(-1, (-1, self.head_dim)) for z in (query, key))
        if self.normed and not self.by_row:
            query, key = self.q_norm(query), self.k_norm(key)
        value = value.unflatten(-1, (-1, self.head_dim))
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)

    def forward(self, x: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
        query, key, value = self._projected(x)
        if cos is not None and sin is not None:
            query, key = turned(query, cos, sin), turned(key, cos, sin)
        mixed = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=query.shape[1] != key.shape[1]
        )
        return self.o_proj(mixed.transpose(1, 2).contiguous().flatten(-2))


class StockMlp(nn.Module):
    """The feed-forward, with a gate or without, [B, S, width] to the same."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        bias = decoder.architecture.feed_forward_bias
        self.act_fn, self.gated = ACTIVATED[decoder.activation], decoder.gated
        self.joined = decoder.joined and decoder.gated
        width, feed_forward = decoder.width, decoder.feed_forward
        if self.joined:
            self.gate_up_proj = nn.Linear(width, 2 * feed_forward, bias=bias)
        else:
            self.up_proj = nn.Linear(width, feed_forward, bias=bias)
            if self.gated:
                self.gate_proj = nn.Linear(width, feed_forward, bias=bias)
        self.down_proj = nn.Linear(feed_forward, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        if not self.gated:
            return self.down_proj(self.act_fn(self.up_proj(x)))
        if self.joined:
            gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        else:
            gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj(self.act_fn(gate) * up)


class StockLayer(nn.Module):
    """One decoder layer, with norms before its branches, after them, or both."""

    def __init__(self, decoder: Decoder, window: int | None) -> None:
        super().__init__()
        self.attention_window = window
        self.placement = decoder.architecture.placement
        self.self_attn, self.mlp = StockAttention(decoder), StockMlp(decoder)
        if self.placement != "after":
            self.input_layernorm = norm(decoder)
        self.post_attention_layernorm = norm(decoder)
        if self.placement == "both":
            self.pre_feedforward_layernorm = norm(decoder)
        if self.placement != "before":
            self.post_feedforward_layernorm = norm(decoder)

    def forward(self, x: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
        if self.placement == "before":
            x = x + self.self_attn(self.input_layernorm(x), cos, sin)
            return x + self.mlp(self.post_attention_layernorm(x))
        both = self.placement == "both"
        h = self.input_layernorm(x) if both else x
        x = x + self.post_attention_layernorm(self.self_attn(h, cos, sin))
        h = self.pre_feedforward_layernorm(x) if both else x
        return x + self.post_feedforward_layernorm(self.mlp(h))


class StockDecoder(nn.Module):
    """Tokens and targets [B, S] to the mean cross-entropy."""

    def __init__(self, decoder: Decoder, length: int) -> None:
        super().__init__()
        self.decoder = decoder
        self.embed_tokens = nn.Embedding(decoder.vocabulary, decoder.width)
        if decoder.positions is not None:
            self.embed_positions = nn.Embedding(decoder.positions, decoder.width)
        windows = decoder.windows_within(length)
        self.layers = nn.ModuleList(StockLayer(decoder, window) for window in windows)
        self.norm = norm(decoder)
        self.lm_head = nn.Linear(decoder.width, decoder.vocabulary, bias=False)
        if decoder.tied:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = embedded(self, tokens)
        cos, sin = tables(self.decoder, tokens, x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits = self.lm_head(self.norm(x))
        cap = self.decoder.softcap
        logits = logits if cap is None else cap * torch.tanh(logits / cap)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def embedded(model: Any, tokens: Tensor) -> Tensor:
    """The stream that the first layer of a StockDecoder or TwinDecoder is given, [B, S, width]."""
    decoder: Decoder = model.decoder
    x: Tensor = model.embed_tokens(tokens)
    if decoder.positions is not None:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = x + model.embed_positions(places)
    return x * decoder.width**0.5 if decoder.scaled else x


def tables(
    decoder: Decoder, tokens: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """cos and sin [B, S, rotary columns], both halves alike; None where nothing rotates."""
    if not decoder.rotary:
        return None, None
    places = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
    exponents = torch.arange(0, decoder.rotary, 2, device=tokens.device) / decoder.rotary
    angles = places.unsqueeze(-1).float() * ROTARY_BASE**-exponents
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)
