"""An audit as data: what `--json` prints, and what tables and pages are made of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from cadenza.tools.audit import savings
from cadenza.tools.audit.counting import CLASSES
from cadenza.tools.audit.options import AuditOptions
from cadenza.tools.audit.prediction import CADENZA, PartCost, Prediction, Share
from cadenza.tools.audit.trace import PASSES

TITLES = {
    "products": "matrix products",
    "attention": "attention",
    "memory": "memory-bound operations",
    "optimizer": "optimizer",
    "communication": "communication",
    "other": "other",
}
NAMES = {"eager": "before, eager", "compiled": "before, compiled", "cadenza": "after, Cadenza"}


@dataclass(frozen=True)
class Report:
    """A prediction of a subject, what it rests on, and perhaps what was measured."""

    name: str
    about: list[str]
    prediction: Prediction
    options: AuditOptions
    measured: list[dict[str, Any]] = field(default_factory=list)

    def saving(self, precision: str) -> savings.Saving:
        """What Cadenza saves of a step: as measured, where all of it was, else as predicted."""
        whole = [m for m in self.measured if m["layers"] in (None, self.prediction.layers)]
        times = {m["variant"]: m["quartiles"] for m in whole if "quartiles" in m}
        own = precision == self.prediction.precisions[0]
        if own and CADENZA in times and self.prediction.before in times:
            return savings.measured(times[self.prediction.before], times[CADENZA])
        return savings.predicted(self.prediction.saved(precision), self.options.spread)

    @property
    def assumptions(self) -> list[str]:
        """Everything that the figures rest on."""
        missing = [f"no {name}: {why}" for name, why in self.prediction.missing.items()]
        fused = (
            "compiled: torch.compile's own graphs; arithmetic between the same products is one "
            "kernel, which reads each value from outside once and writes each needed value once"
        )
        seen = (
            "measured: steps after warming up, their kernels by torch.profiler; attention sees "
            "all earlier tokens, in the prediction beside it too"
        )
        measured = [seen] if self.measured else []
        return [*self.about, fused, *self.prediction.rates.assumptions(), *missing, *measured]


def as_json(report: Report) -> dict[str, Any]:
    """The report as data, in the structure that `cadenza audit --json` promises."""
    prediction = report.prediction
    return {
        "target": report.name,
        "gpu": prediction.rates.gpu.name,
        "before": prediction.before,
        "step": {
            precision: {
                variant: _share(prediction.step(variant, precision))
                for variant in prediction.variants
            }
            for precision in prediction.precisions
        },
        "parts": {
            variant: [_part(part, prediction) for part in parts]
            for variant, parts in prediction.variants.items()
        },
        "missing": prediction.missing,
        "savings": {
            precision: savings.amounts(report.saving(precision), report.options)
            for precision in prediction.precisions
            if CADENZA in prediction.variants
        },
        "measured": report.measured,
        "assumptions": report.assumptions,
    }


def _share(share: Share) -> dict[str, Any]:
    return {"ms": 1e3 * share.total, "classes": milliseconds(share)}


def milliseconds(share: Share) -> dict[str, float]:
    """Milliseconds by class, of those that there are."""
    return {name: 1e3 * share.seconds[name] for name in CLASSES if share.seconds[name]}


def _part(part: PartCost, prediction: Prediction) -> dict[str, Any]:
    precisions = prediction.precisions
    return {
        "name": part.name,
        "count": part.count,
        "layer": part.is_layer,
        "times": {p: _share(prediction.part(part, p)) for p in precisions},
        "kernels": {name: list(_kernels(part, name, prediction)) for name in PASSES},
    }


def _kernels(part: PartCost, name: str, prediction: Prediction) -> Iterable[dict[str, Any]]:
    for one in prediction.timed(part, prediction.precisions[0], (name,)):
        yield {
            "name": one.name, "class": one.kind, "flops": one.flops, "bytes": one.bytes,
            "us": 1e6 * one.seconds,
        }  # fmt: skip
