"""`Decoder` in stock PyTorch modules: the twin that it is measured against.

Nothing here comes from Cadenza's compiler, so agreement of the two is evidence. Parameters carry
the names and shapes of Hugging Face's models.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cadenza.library.models.config import check_length
from cadenza.library.models.decoder_config import DecoderConfig
from cadenza.library.models.stock import StockMlp, rotate_halves
from cadenza.library.rotary import rotary_tables


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of heads x `[..., S, head_dim]`, of their first columns, in x's dtype."""
    turning, kept = x.split((2 * cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]), dim=-1)
    return torch.cat((rotate_halves(turning, cos, sin).to(x.dtype), kept), dim=-1)


def _normed(heads: Tensor, norm: nn.RMSNorm) -> Tensor:
    # Under autocast heads are narrower than weights, which PyTorch's fused norm doesn't take.
    return norm(heads.to(norm.weight.dtype)).to(heads.dtype)


class StockAttention(nn.Module):
    """Causal grouped-query attention with rotary embedding, `[B, S, width]` to the same.

    Qwen 3 norms each query and key head before it rotates.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.head_dim, self.normed = config.head_dim, config.family == "qwen3"
        wide, narrow = (n * config.head_dim for n in (config.heads, config.key_value_heads))
        self.q_proj = nn.Linear(config.width, wide, bias=False)
        self.k_proj = nn.Linear(config.width, narrow, bias=False)
        self.v_proj = nn.Linear(config.width, narrow, bias=False)
        self.o_proj = nn.Linear(wide, config.width, bias=False)
        if self.normed:
            self.q_norm = nn.RMSNorm(config.head_dim, eps=config.eps)
            self.k_norm = nn.RMSNorm(config.head_dim, eps=config.eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query, key, value = (
            project(x).unflatten(-1, (-1, self.head_dim))
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.normed:
            query, key = _normed(query, self.q_norm), _normed(key, self.k_norm)
        query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        mixed = F.scaled_dot_product_attention(
            rotated(query, cos, sin), rotated(key, cos, sin), value, is_causal=True, enable_gqa=True
        )
        return self.o_proj(mixed.transpose(1, 2).flatten(-2))


class StockLayer(nn.Module):
    """One decoder layer: attention, then SwiGLU, each normalised before and added after."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.self_attn = StockAttention(config)
        self.mlp = StockMlp(config)
        self.input_layernorm = nn.RMSNorm(config.width, eps=config.eps)
        self.post_attention_layernorm = nn.RMSNorm(config.width, eps=config.eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class StockTrunk(nn.Module):
    """All but the output layer: tokens `[B, S]` to normalised `[B, S, width]`."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList(StockLayer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=config.eps)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        positions = torch.arange(tokens.shape[-1], device=tokens.device)
        dtype = torch.promote_types(x.dtype, torch.float32)
        cos, sin = rotary_tables(self.config.rotary, positions, dtype=dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)


class StockDecoder(nn.Module):
    """Llama 3 and Qwen 3 in stock PyTorch; weights are those that PyTorch's modules start with."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.model = StockTrunk(config)
        self.lm_head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.tie()

    def tie(self) -> None:
        """Make the output layer's weight the embedding's, where the configuration says so."""
        if self.config.tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits `[B, S, vocabulary]` of tokens `[B, S]` int64, in the parameters' dtype.

        With targets `[B, S]` int64: their mean cross-entropy instead, a scalar in float32
        (float64 for a model in float64); targets of -100 don't count. Raises ValueError where
        S is above `config.context`.
        """
        check_length(tokens.shape[-1], self.config.context)
        logits = self.lm_head(self.model(tokens))
        if targets is None:
            return logits
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(wide.flatten(0, -2), targets.flatten())
