"""The same decoder over Cadenza's programs: `cz.nn.DecoderLayer` and the loss of linear logits."""

from __future__ import annotations

from torch import Tensor, nn

from cadenza.library import ops
from cadenza.library.nn import DecoderLayer
from cadenza.library.nn.norms import norm_module, norm_options
from cadenza.tools.audit.decoder import Decoder
from cadenza.tools.audit.stock import embedded, tables


class TwinLayer(DecoderLayer):
    """The library's layer, with the window that its attention would have."""

    def __init__(self, decoder: Decoder, window: int | None) -> None:
        super().__init__(
            decoder.width, decoder.heads, decoder.key_value_heads, decoder.feed_forward,
            decoder.eps, architecture=decoder.architecture, head_dim=decoder.head_dim,
        )  # fmt: skip
        self.attention_window = window


class TwinDecoder(nn.Module):
    """Tokens and targets [B, S] to the mean cross-entropy, as `StockDecoder`."""

    def __init__(self, decoder: Decoder, length: int) -> None:
        super().__init__()
        self.decoder = decoder
        self.embed_tokens = nn.Embedding(decoder.vocabulary, decoder.width)
        if decoder.positions is not None:
            self.embed_positions = nn.Embedding(decoder.positions, decoder.width)
        windows = decoder.windows_within(length)
        self.layers = nn.ModuleList(TwinLayer(decoder, window) for window in windows)
        self.norm = norm_module(decoder.width, decoder.eps, decoder.architecture)
        self.lm_head = nn.Linear(decoder.width, decoder.vocabulary, bias=False)
        if decoder.tied:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = embedded(self, tokens)
        cos, sin = tables(self.decoder, tokens, x.dtype)
        if cos is not None and sin is not None:
            cos, sin = (table.chunk(2, dim=-1)[0] for table in (cos, sin))
        takes_squares = self.decoder.architecture.norm == "rms"
        squares = ops.square_sum(x) if takes_squares else None
        for layer in self.layers:
            x, found = layer(x, squares, cos, sin)
            squares = found if takes_squares else None
        return ops.linear_cross_entropy(
            self._normed(x, squares), self.lm_head.weight, targets, softcap=self.decoder.softcap
        )

    def _normed(self, x: Tensor, squares: Tensor | None) -> Tensor:
        options = norm_options(self.norm)
        kind, weight, bias = (options.get(f"norm{end}") for end in ("", "_weight", "_bias"))
        return ops.norm(
            x, weight, bias, squares=squares if kind == "rms" else None, kind=kind,
            offset=options.get("norm_offset", 0.0), eps=options["eps"],
        )  # fmt: skip
