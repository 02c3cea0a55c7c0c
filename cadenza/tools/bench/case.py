"""What is measured: cases of a suite, each with its sizes, and what a suite is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from cadenza.tools.bench.measurement import Effort
from cadenza.tools.fault import Fault

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
Record = dict[str, Any]
Sizes = Mapping[str, int]


class Unavailable(Exception):
    """A variant that there is not, here or at all; the text says why."""


@dataclass(frozen=True)
class Case:
    """One pattern at one size, whose name is `size`, in one dtype (a key of DTYPES)."""

    suite: str
    pattern: str
    size: str
    sizes: Sizes
    dtype: str

    def __str__(self) -> str:
        return f"{self.pattern} {self.size} {self.dtype}"

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch has it."""
        return DTYPES[self.dtype]

    @property
    def seed(self) -> int:
        """Of the case's random operands: of the case alone, so that it can be repeated."""
        return sum(ord(letter) << (position % 24) for position, letter in enumerate(str(self)))


class Bench(NamedTuple):
    """How cases are measured: where, which variants, how long, whom to tell; a text to learn."""

    device: torch.device
    variants: Sequence[str]
    effort: Effort
    say: Callable[[str], None]
    text: str | None = None


def no_text(_: Sequence[Case], text: str | None) -> None:
    """Raises Fault where a text is given."""
    if text is not None:
        raise Fault("--text is for the suite model-loss: leave it out, or choose that suite")


@dataclass(frozen=True)
class Suite:
    """Cases of one kind: `sizes` gives those of a pattern by their names.

    `changed` are the sizes of a pattern with some of them given. A suite that isn't `timed`
    doesn't depend on how its calls are spaced. `check` raises Fault for a text that isn't one for
    some cases.
    """

    name: str
    variants: tuple[str, ...]
    patterns: tuple[str, ...]
    sizes: Callable[[str], Mapping[str, Sizes]]
    changed: Callable[[str, Sizes], Sizes]
    run: Callable[[Case, Bench], list[Record]]
    dtypes: tuple[str, ...] = ("bf16",)
    timed: bool = True
    check: Callable[[Sequence[Case], str | None], None] = no_text
