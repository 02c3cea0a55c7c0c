"""The sizes of a Llama model, checked when they are made.

One frozen record serves `Llama` and its stock twin. A record that exists is consistent: nothing
that takes one checks a size again.
"""

from __future__ import annotations

from dataclasses import dataclass

SIZES = ("vocabulary", "width", "layers", "heads", "key_value_heads", "feed_forward", "context")


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a Llama model; raises ValueError naming the cure where they don't fit together.

    `width` is split over `heads` query heads; each of the `key_value_heads` serves an equal
    number of them. `context` is the longest sequence, `feed_forward` the width between gate and
    down, `rope_base` the base of the rotary frequencies, `eps` what RMSNorm adds to the mean.
    """

    vocabulary: int
    width: int
    layers: int
    heads: int
    key_value_heads: int
    feed_forward: int
    context: int
    rope_base: float = 10000.0
    eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        """Columns of one head."""
        return self.width // self.heads

    def __post_init__(self) -> None:
        for name in SIZES:
            check_positive(name, getattr(self, name))
        check_divides("width", self.width, "heads", self.heads)
        check_divides("heads", self.heads, "key_value_heads", self.key_value_heads)
        if self.head_dim % 2:
            raise ValueError(
                f"width {self.width} over heads {self.heads} gives heads of {self.head_dim} "
                f"columns, which rotary embedding cannot halve: choose width a multiple of "
                f"{2 * self.heads}, as {2 * self.heads * ((self.head_dim + 1) // 2)}"
            )
        if not (self.rope_base > 0 and self.eps > 0):
            raise ValueError(
                f"rope_base {self.rope_base} and eps {self.eps} must be positive: "
                "choose values above 0, as 10000.0 and 1e-5"
            )


def check_positive(name: str, size: int) -> None:
    """Raise ValueError unless the size is a whole number from 1 on."""
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"{name} is {size!r}, not a positive whole number: choose 1 or more")


def check_divides(name: str, size: int, part_name: str, part: int) -> None:
    """Raise ValueError unless `part` divides `size`."""
    if size % part:
        raise ValueError(
            f"{name} {size} is not divisible by {part_name} {part}: "
            f"choose {name} a multiple of {part}, as {part * (size // part + 1)}"
        )


def check_length(length: int, context: int) -> None:
    """Raise ValueError for a sequence longer than a model's context."""
    if length > context:
        raise ValueError(
            f"{length} tokens don't fit in a context of {context}: "
            "shorten the sequence or make the model with a larger context"
        )
