"""What `cadenza audit` can be asked, besides its target. Importing this file loads no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

SPREAD = "how far from what is predicted savings may lie, as a share of them"
COMPUTING = "share of the nominal rate that products sustain (default: that of `explain`)"
MOVING = "share of the nominal bandwidth that is sustained (default: that of `explain`)"
ATTENTION = "share of the nominal rate that attention sustains (default: 0.4)"
MEASURE = "profile real steps too (default: where there is a GPU)"
VARIANTS = "what to measure, by commas"
GPU = "the GPU of the prediction (default: the one in this machine, else h100)"


def _option(default: Any, about: str) -> Any:
    return field(default=default, metadata={"help": about})


@dataclass(frozen=True)
class AuditOptions:
    """Options of `audit` that have a value."""

    gpu: str | None = _option(None, GPU)
    batch: int = _option(4, "sequences of a step")
    sequence: int | None = _option(None, "tokens of a sequence (default: 4096, or what fits)")
    layers: int | None = _option(None, "layers of the model (default: all; measured: what fits)")
    hours: float | None = _option(None, "GPU-hours that training takes now")
    price: float | None = _option(None, "what a GPU-hour costs")
    spread: float = _option(0.3, SPREAD)
    computing: float | None = _option(None, COMPUTING)
    moving: float | None = _option(None, MOVING)
    attention: float | None = _option(None, ATTENTION)
    html: str | None = _option(None, "write a page with pictures to this file")
    measure: bool | None = _option(None, MEASURE)
    variants: str = _option("eager,compiled,cadenza", VARIANTS)
    steps: int = _option(5, "steps to profile")
