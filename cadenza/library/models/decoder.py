"""A dense decoder of today over Cadenza's programs, with the names of Hugging Face's models.

`cz.nn.DecoderLayer` is all of it but embedding, last norm and output layer. Each weight is used
inside its own module, as wrappers that shard or hook modules expect; tied weights are one parameter
under two names.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from cadenza.library.blocks import square_sum
from cadenza.library.cross_entropy import linear_cross_entropy
from cadenza.library.models.config import check_length
from cadenza.library.models.decoder_config import DecoderConfig
from cadenza.library.nn import DecoderLayer, RMSNorm
from cadenza.library.rotary import packed_positions, rotary_tables

INITIAL_DEVIATION = 0.02


class Head(nn.Linear):
    """The output layer, and the loss of its logits: `weight` `[vocabulary, width]`."""

    def forward(self, x: Tensor, targets: Tensor | None = None, **loss: Any) -> Tensor:
        """Logits `[..., vocabulary]` of x `[..., width]`, or their loss against targets `[...]`.

        Raises TypeError for options of a loss without targets.
        """
        if targets is None and loss:
            raise TypeError(
                f"{', '.join(loss)} without targets: only a loss takes options, so give targets "
                "too; the model itself takes tokens and cumulative_lengths"
            )
        if targets is None:
            return F.linear(x, self.weight)
        return linear_cross_entropy(x, self.weight, targets, **loss)


class Trunk(nn.Module):
    """All but the output layer: tokens `[B, S]` to normalised `[B, S, width]`."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList(
            DecoderLayer(
                config.width, config.heads, config.key_value_heads, config.feed_forward,
                config.eps, architecture=config.family, head_dim=config.head_dim,
            )
            for _ in range(config.layers)
        )  # fmt: skip
        self.norm = RMSNorm(config.width, config.eps)

    def forward(self, tokens: Tensor, cumulative_lengths: Tensor | None = None) -> Tensor:
        """The last layer's stream, normalised."""
        x = self.embed_tokens(tokens)
        cos, sin = self._tables(tokens, cumulative_lengths, wide=x.dtype == torch.float64)
        squares = square_sum(x)
        for layer in self.layers:
            x, squares = layer(x, squares, cos, sin, cumulative_lengths)
        return self.norm(x, squares)

    def _tables(
        self, tokens: Tensor, cumulative_lengths: Tensor | None, wide: bool
    ) -> tuple[Tensor, Tensor]:
        """cos and sin `[B, S, R]` of each token's position, in its own sequence where packed."""
        positions = torch.arange(tokens.shape[-1], device=tokens.device)
        if cumulative_lengths is not None:
            positions = packed_positions(cumulative_lengths, tokens.numel()).view(tokens.shape)
        dtype = torch.float64 if wide else torch.float32
        cos, sin = rotary_tables(self.config.rotary, positions, dtype=dtype)
        return cos.expand(*tokens.shape, -1), sin.expand(*tokens.shape, -1)


class Decoder(nn.Module):
    """A dense decoder: Llama 3, Qwen 3 and what has their layers.

    Made of a `DecoderConfig`; weights are drawn from torch's global random state, in float32.
    `saves_head` says whether a tied output layer is written to checkpoints, too: some hold it.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.saves_head = not config.tied
        self.model = Trunk(config)
        self.lm_head = Head(config.width, config.vocabulary, bias=False)
        self.tie()
        initialise(self)

    def tie(self) -> None:
        """Make the output layer's weight the embedding's, where the configuration says so."""
        if self.config.tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        cumulative_lengths: Tensor | None = None,
        **loss: Any,
    ) -> Tensor:
        """Logits `[B, S, vocabulary]` of tokens `[B, S]` int64, in the parameters' dtype.

        With targets `[B, S]` int64: the loss instead, a scalar in float32 (float64 for a model in
        float64), computed in chunks of rows; `loss` are options of
        `cz.ops.linear_cross_entropy`, as reduction or num_items_in_batch. targets stand under the
        token before them: nothing is shifted. `cumulative_lengths` `[sequences + 1]` are where
        sequences start and end that are packed into the B · S tokens.

        Raises ValueError where S is above `config.context`.
        """
        check_length(tokens.shape[-1], self.config.context)
        return self.lm_head(self.model(tokens, cumulative_lengths), targets, **loss)


@torch.no_grad()
def initialise(model: nn.Module, device: torch.device | str | None = None) -> None:
    """Draw matrices from a normal distribution of deviation 0.02 and set norms to one.

    Each is drawn in float32 on `device` (its own by default) from torch's global random state, in
    the order of names: two models of equal names get equal weights.
    """
    for _, weight in sorted(model.named_parameters()):
        if weight.dim() == 1:
            weight.fill_(1.0)
            continue
        drawn = torch.empty(weight.shape, dtype=torch.float32, device=device or weight.device)
        weight.copy_(drawn.normal_(std=INITIAL_DEVIATION))


def checkpoint_layers(model: nn.Module) -> None:
    """Have a model's layers compute their values again in backward instead of keeping them.

    The model's memory for a step is then its layers' inputs and one layer's values; its time grows
    by a forward pass. No bit of a loss or a gradient changes. `model.model.layers` are its layers.
    Raises TypeError for a model that has none.
    """
    if not isinstance(getattr(getattr(model, "model", None), "layers", None), nn.ModuleList):
        raise TypeError(
            f"cz.models.checkpoint_layers of a {type(model).__name__}: give a model with layers at "
            "model.layers, as cz.models.Decoder; of other modules use torch.utils.checkpoint"
        )
    for layer in model.model.layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
