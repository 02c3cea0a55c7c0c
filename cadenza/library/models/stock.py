"""A Llama in stock PyTorch modules: the twin that `Llama` is measured against.

Nothing here comes from Cadenza's compiler, so agreement of the two is evidence. Parameters carry
the names and shapes of Hugging Face's Llama; input and output embeddings are not tied.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cadenza.library.models.config import LlamaConfig, check_length

INITIAL_DEVIATION = 0.02


def rotary_tables(config: LlamaConfig, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine `[length, head_dim / 2]` of each position and frequency, as `like`.

    Computed in float64 and rounded once, so that they don't limit a model in float64.
    """
    wide = {"dtype": torch.float64, "device": like.device}
    exponents = torch.arange(0, config.head_dim, 2, **wide) / config.head_dim
    positions = torch.arange(length, **wide)
    angles = torch.outer(positions, config.rope_base**-exponents)
    return angles.cos().to(like), angles.sin().to(like)


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x `[..., S, head_dim]`: column i turns with column i + head_dim / 2."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class StockAttention(nn.Module):
    """Causal grouped-query attention with rotary embedding, `[B, S, width]` to the same."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        narrow = config.key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.width, config.width, bias=False)
        self.k_proj = nn.Linear(config.width, narrow, bias=False)
        self.v_proj = nn.Linear(config.width, narrow, bias=False)
        self.o_proj = nn.Linear(config.width, config.width, bias=False)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query = rotate_halves(self._heads(self.q_proj(x)), cos, sin)
        key = rotate_halves(self._heads(self.k_proj(x)), cos, sin)
        value = self._heads(self.v_proj(x))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(-2))


class StockMlp(nn.Module):
    """SwiGLU, `[..., width]` to the same."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.width, config.feed_forward, bias=False)
        self.up_proj = nn.Linear(config.width, config.feed_forward, bias=False)
        self.down_proj = nn.Linear(config.feed_forward, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class StockLayer(nn.Module):
    """One decoder layer: attention, then SwiGLU, each normalised before and added after."""

    def __init__(self, config: LlamaConfig) -> None:
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

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList(StockLayer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=config.eps)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        cos, sin = rotary_tables(self.config, tokens.shape[-1], like=x)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)


class StockLlama(nn.Module):
    """Llama in stock PyTorch; weights are drawn from torch's global random state."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.model = StockTrunk(config)
        self.lm_head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.apply(_initialise)

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


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=INITIAL_DEVIATION)
