"""The sizes of a dense decoder of today, checked when they are made.

One frozen record serves `Decoder`, its stock twin and its checkpoints. A record that exists is
consistent: nothing that takes one checks a size again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cadenza.library.models.config import check_divides, check_positive
from cadenza.library.rotary import Rotary

FAMILIES = ("llama", "qwen3")
COUNTS = (
    "vocabulary", "width", "layers", "heads", "key_value_heads", "feed_forward", "head_dim",
    "context",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Sizes of a dense decoder; raises ValueError naming the cure where they don't fit together.

    `family` is "llama" or "qwen3": the `cz.nn.Architecture` of the layers. `heads` query heads of
    `head_dim` columns each, whatever `width` is; each of the `key_value_heads` serves an equal
    number of them. `context` is the longest sequence, `rotary` what heads rotate by, `eps` what
    RMSNorm adds to the mean; `tied` says that the output layer's weight is the embedding's.

    `published` is the config.json that the sizes were read from, written back as it was as long
    as the sizes are the same. It is no part of equality.
    """

    family: str
    vocabulary: int
    width: int
    layers: int
    heads: int
    key_value_heads: int
    feed_forward: int
    head_dim: int
    context: int
    rotary: Rotary
    eps: float = 1e-5
    tied: bool = False
    published: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ValueError(
                f"no family {self.family!r}: choose one of {', '.join(FAMILIES)}, or build the "
                "model of cz.nn.DecoderLayer"
            )
        for name in COUNTS:
            check_positive(name, getattr(self, name))
        check_divides("heads", self.heads, "key_value_heads", self.key_value_heads)
        if self.rotary.columns > self.head_dim:
            raise ValueError(
                f"rotary embedding of {self.rotary.columns} columns in heads of {self.head_dim}: "
                f"choose Rotary({self.head_dim}, ...)"
            )
        if not self.eps > 0:
            raise ValueError(f"eps {self.eps} must be positive: choose a value above 0, as 1e-5")
