"""What `cadenza explain` and `tune` can be asked, besides a target. It loads no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

SIZES, FROZEN = "sizes by name: D=4096,F=14336", "operands that need no gradient: x,w"
SOURCE = "print the Triton module of this kernel (F2, B3) or vector (s1); of all, if left open"
WHY = "say why this value is stored, computed again, deferred"
TEMPLATE = "of --source: plain, or pingpong, Hopper's, where it takes the product"


@dataclass(frozen=True)
class Sizes:
    """Options of `tune`."""

    size: list[str] | None = field(default=None, metadata={"help": SIZES})
    frozen: list[str] | None = field(default=None, metadata={"help": FROZEN})
    dtype: str = field(default="bfloat16", metadata={"help": "dtype of the operands"})


@dataclass(frozen=True)
class Question:
    """Options of `explain`; lists may be repeated, and each text may hold several by commas."""

    size: list[str] | None = field(default=None, metadata={"help": SIZES})
    frozen: list[str] | None = field(default=None, metadata={"help": FROZEN})
    dtype: str = field(default="bfloat16", metadata={"help": "dtype of the operands"})
    gpu: str = field(default="h100", metadata={"help": "the GPU of the rooflines"})
    why: str | None = field(default=None, metadata={"help": WHY})
    source: str | None = field(default=None, metadata={"help": SOURCE})
    template: str = field(default="plain", metadata={"help": TEMPLATE})
