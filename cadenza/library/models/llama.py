"""Llama through Cadenza's programs, with the state_dict of its stock twin."""

from __future__ import annotations

from torch import Tensor, nn

from cadenza.library import blocks
from cadenza.library.cross_entropy import linear_cross_entropy
from cadenza.library.models.config import LlamaConfig, check_length
from cadenza.library.models.stock import INITIAL_DEVIATION, rotary_tables
from cadenza.library.nn import DecoderLayer


class Trunk(nn.Module):
    """All but the output layer: tokens `[B, S]` to normalised `[B, S, width]`."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList(
            DecoderLayer(
                config.width, config.heads, config.key_value_heads, config.feed_forward, config.eps
            )
            for _ in range(config.layers)
        )
        self.norm = nn.RMSNorm(config.width, eps=config.eps)

    def forward(self, tokens: Tensor) -> Tensor:
        """The last layer's stream, normalised."""
        x = self.embed_tokens(tokens)
        tables = rotary_tables(self.config, tokens.shape[-1], like=x)
        cos, sin = (table.expand(*tokens.shape, -1) for table in tables)
        squares = blocks.square_sum(x)
        for layer in self.layers:
            x, squares = layer(x, squares, cos, sin)
        return blocks.final_norm(x, squares, self.norm.weight, eps=self.config.eps)


class Llama(nn.Module):
    """Llama over Cadenza's programs; weights are drawn from torch's global random state."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Trunk(config)
        self.lm_head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.apply(_initialise)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits `[B, S, vocabulary]` of tokens `[B, S]` int64, in the parameters' dtype.

        With targets `[B, S]` int64: their mean cross-entropy instead, a scalar in float32
        (float64 for a model in float64), computed in chunks of rows; targets of -100 don't
        count. Raises ValueError where S is above `config.context`.
        """
        check_length(tokens.shape[-1], self.config.context)
        x = self.model(tokens)
        if targets is None:
            return self.lm_head(x)
        return linear_cross_entropy(x, self.lm_head.weight, targets)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=INITIAL_DEVIATION)
