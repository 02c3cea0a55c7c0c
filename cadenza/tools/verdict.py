"""What a comparison found: how far losses drift apart, and whether that is within bounds.

A difference is relative to the stock twin's loss of the same step. What is not a number counts as
infinitely far, so that no bound holds by accident.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# dtype: the largest relative difference of ours from stock, and over how many first steps.
LIMITS = {"float32": (1e-4, 500), "float64": (1e-9, 50)}
DRIFT_RATIO = 3.0
# One unit in the last place of a loss in float32: no drift is measured finer than that.
RESOLUTION = 2.0**-23
# JSON has no infinity.
FAR = sys.float_info.max


@dataclass(frozen=True)
class Bound:
    """A named value that must not pass its limit."""

    name: str
    value: float
    limit: float

    @property
    def holds(self) -> bool:
        """Whether the value is at most the limit."""
        return self.value <= self.limit


@dataclass(frozen=True)
class Drift:
    """Relative differences from stock: by training step, and by step of validation."""

    training: list[float]
    validation: dict[int, float]

    def largest(self, steps: int | None = None) -> float:
        """The largest of both over the first `steps` steps, or over all."""
        late = math.inf if steps is None else steps
        held_out = [value for step, value in self.validation.items() if step <= late]
        return max([*self.training[:steps], *held_out], default=0.0)


def drift(result: Mapping[str, Any], stock: Mapping[str, Any]) -> Drift:
    """How far a contender's losses are from the stock twin's, step by step."""
    validation = {
        ours["step"]: relative(ours["loss"], theirs["loss"])
        for ours, theirs in zip(result["validation"], stock["validation"], strict=True)
    }
    return Drift(_differences(result["training"], stock["training"]), validation)


def _differences(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    return [relative(a, b) for a, b in zip(ours, theirs, strict=True)]


def relative(value: float, reference: float) -> float:
    """|value − reference| / |reference|, and far for what is not finite."""
    if value == reference:
        return 0.0
    difference = abs(value - reference) / abs(reference) if reference else math.inf
    return difference if math.isfinite(difference) else FAR


def bounds(dtype: str, ours: Drift, perturbed: Drift) -> list[Bound]:
    """What must hold in that dtype; a bound made for a number of steps looks at the first ones."""
    if dtype not in LIMITS:
        return []
    limit, steps = LIMITS[dtype]
    largest = ours.largest(steps)
    found = [Bound(f"ours from stock, first {steps} steps", largest, limit)]
    if dtype == "float32":
        yardstick = max(perturbed.largest(steps), RESOLUTION)
        name = "ours from stock, in drifts of stock from perturbed stock"
        found.append(Bound(name, largest / yardstick, DRIFT_RATIO))
    return found
