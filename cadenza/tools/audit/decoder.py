"""What a dense decoder is made of, whatever its family: sizes, and how its layers are built."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cadenza.library.nn.architecture import Architecture
from cadenza.library.programs.parts import is_gated

# What configurations call activations, and ours of them: plain, and with a gate.
ACTIVATIONS = {
    "silu": ("silu", "swiglu"),
    "swish": ("silu", "swiglu"),
    "gelu": ("gelu", "geglu"),
    "gelu_new": ("gelu_tanh", "geglu_tanh"),
    "gelu_pytorch_tanh": ("gelu_tanh", "geglu_tanh"),
    "relu": ("relu", "reglu"),
}


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """A dense decoder's sizes.

    `activation` is a configuration's word for it. `windows` gives each layer's sliding window, None
    for all tokens; `positions` the number of learned positions, None where heads rotate, `rotary`
    of their columns. `joined` says that queries, keys and values, and gate and up, are one weight
    each; `softcap` is that of the logits, `scaled` that embeddings are multiplied by √width.
    """

    name: str
    architecture: Architecture
    vocabulary: int
    width: int
    heads: int
    key_value_heads: int
    head_dim: int
    feed_forward: int
    windows: tuple[int | None, ...]
    activation: str = "silu"
    rotary: int = 0
    positions: int | None = None
    eps: float = 1e-6
    tied: bool = False
    joined: bool = False
    softcap: float | None = None
    scaled: bool = False

    @property
    def layers(self) -> int:
        """How many layers."""
        return len(self.windows)

    @property
    def gated(self) -> bool:
        """Whether the feed-forward has a gate."""
        return is_gated(self.architecture.activation)

    def of_layers(self, layers: int | None) -> Decoder:
        """The same with its first layers alone; all of them for None."""
        return self if layers is None else replace(self, windows=self.windows[:layers])

    def windows_within(self, length: int) -> tuple[int | None, ...]:
        """Each layer's window where it hides tokens of a sequence, else None."""
        return tuple(w if w is not None and w < length else None for w in self.windows)
