"""What `cadenza check` can be asked, besides its target. Importing this file loads no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

SIZES = "sizes by name: D=4096,F=14336; of others, small ones for values, large ones for kernels"
GPUS = "compile for these: h100,a100 (default h100); none compiles nothing"


@dataclass(frozen=True)
class Options:
    """Options of `check` that have a value; lists may be repeated, a text may hold several."""

    size: list[str] | None = field(default=None, metadata={"help": SIZES})
    dtype: str = field(default="bfloat16", metadata={"help": "dtype of floating operands"})
    gpu: list[str] | None = field(default=None, metadata={"help": GPUS})
