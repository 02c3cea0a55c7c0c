"""What a step takes, by class of work: before, eager and compiled, and after, by Cadenza.

A variant of the model is its parts, each with what it launches in forward, backward and the
optimizer. Times are those of a GPU's rates, in the model's own precision and with 8-bit products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from cadenza.core.cost import itemsize
from cadenza.tools.audit.compiled import compiled
from cadenza.tools.audit.counting import CLASSES, OPTIMIZER, PRODUCTS, Launch
from cadenza.tools.audit.parts import REST, Model, Part
from cadenza.tools.audit.rates import EIGHT, SHORT, Rates, Timed
from cadenza.tools.audit.trace import PASSES, Step, traced, updated
from cadenza.tools.blame import is_ours

EAGER, COMPILED, CADENZA = "eager", "compiled", "cadenza"
VARIANTS = (EAGER, COMPILED, CADENZA)
BEFORE = (COMPILED, EAGER)  # what is compared with, the first that there is


@dataclass(frozen=True)
class PartCost:
    """A part's launches by pass, `count` times a step."""

    name: str
    count: int
    is_layer: bool
    step: Step

    def launches(self, passes: Sequence[str] = PASSES) -> Iterator[Launch]:
        """Those of some passes, in order."""
        for name in passes:
            yield from self.step.get(name, ())


Variant = list[PartCost]


class Share(NamedTuple):
    """Seconds by class of work."""

    seconds: dict[str, float]

    @property
    def total(self) -> float:
        """Of all classes."""
        return sum(self.seconds.values())


@dataclass(frozen=True)
class Prediction:
    """The variants of a model on a GPU; `missing` says why one is not there."""

    rates: Rates
    variants: dict[str, Variant]
    missing: dict[str, str] = field(default_factory=dict)

    @property
    def before(self) -> str:
        """The variant that Cadenza is compared with."""
        return next(name for name in BEFORE if name in self.variants)

    @property
    def layers(self) -> int:
        """How many layers a step runs."""
        return sum(part.count for part in self.variants[self.before] if part.is_layer)

    @property
    def precisions(self) -> list[str]:
        """The model's own, by that of most of its products, and with 8-bit products."""
        flops: dict[str, int] = {}
        for part in self.variants[self.before]:
            for launch in part.launches():
                if launch.kind == PRODUCTS:
                    flops[launch.dtype] = flops.get(launch.dtype, 0) + launch.flops * part.count
        own = max(flops, key=lambda dtype: flops[dtype], default="bfloat16")
        eight = self.rates.has_eight and itemsize(own) == 2
        return [SHORT.get(own, own), *([EIGHT] if eight else [])]

    def like(self, part: PartCost, variant: str) -> PartCost:
        """The part of a variant that is called as this one; an empty one if there is none."""
        empty = PartCost(part.name, 0, part.is_layer, {})
        return next((own for own in self.variants[variant] if own.name == part.name), empty)

    def step(self, variant: str, precision: str) -> Share:
        """A whole step."""
        found = dict.fromkeys(CLASSES, 0.0)
        for part in self.variants[variant]:
            for kind, seconds in self.part(part, precision).seconds.items():
                found[kind] += part.count * seconds
        return Share(found)

    def part(self, part: PartCost, precision: str) -> Share:
        """One run of a part."""
        found = dict.fromkeys(CLASSES, 0.0)
        for one in self.timed(part, precision):
            found[one.kind] += one.seconds
        return Share(found)

    def timed(
        self, part: PartCost, precision: str, passes: Sequence[str] = PASSES
    ) -> Iterator[Timed]:
        """The kernels of a part with their times."""
        for launch in part.launches(passes):
            yield from self.rates.timed(launch, precision)

    def saved(self, precision: str) -> float:
        """The share of a step's time that Cadenza saves."""
        before = self.step(self.before, precision).total
        after = self.step(CADENZA, precision).total if CADENZA in self.variants else before
        return 1.0 - after / before if before else 0.0


def costs(parts: Sequence[Part], run: Callable[[Part], Step]) -> Variant:
    """The parts of a model by what they launch, as traced or as compiled."""
    found = []
    for part in parts:
        step = {**run(part), OPTIMIZER: updated(part)}
        step = step if part.name != REST else {name: _wide(step[name]) for name in step}
        found.append(PartCost(part.name, part.count, part.is_layer, step))
    return found


def _wide(launches: Sequence[Launch]) -> list[Launch]:
    """What stays in 16 bits: a model's head."""
    return [launch._replace(narrow=False) for launch in launches]


def predict(
    rates: Rates, before: Callable[[], Model], after: Callable[[], Model | str]
) -> Prediction:
    """The prediction of a model. `after` gives a reason where Cadenza recognises no layer."""
    parts, missing = before().parts(), {}
    variants = {EAGER: costs(parts, traced)}
    try:
        variants[COMPILED] = costs(parts, compiled)
    except Exception as error:  # what torch.compile can't trace, it says itself
        if is_ours(error):
            raise
        missing[COMPILED] = _reason(error)
    found = after()
    if isinstance(found, str):
        missing[CADENZA] = found
    else:
        variants[CADENZA] = costs(found.parts(), compiled if COMPILED in variants else traced)
    return Prediction(rates, variants, missing)


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"torch.compile cannot trace it: {type(error).__name__}: {lines[0]}"
