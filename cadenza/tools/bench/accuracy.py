"""The suite `accuracy`: errors against float64 on the same numbers, over five seeds.

An error is relative, in the Frobenius norm, of all seeds together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from cadenza.tools.bench.case import Bench, Case, Record, Sizes, Suite, Unavailable
from cadenza.tools.bench.contest import failure
from cadenza.tools.bench.draw import Draw
from cadenza.tools.bench.kernels import BY_NAME, kernel_sizes
from cadenza.tools.bench.layer import sizes_of
from cadenza.tools.bench.patterns import Pattern
from cadenza.tools.bench.stage import TRANSFORMS
from cadenza.tools.bench.subject import Forward, Layer

Tensor = torch.Tensor
Outputs = dict[str, Tensor]
Trial = Callable[[Any], Outputs]  # what a variant makes of one draw
LAYER, SEEDS = "layer", range(5)


class Pooled:
    """Squared errors and squared references of each output, over draws."""

    def __init__(self) -> None:
        self.sums: dict[str, list[float]] = {}

    def add(self, found: Mapping[str, Tensor], oracle: Mapping[str, Tensor]) -> None:
        """The outputs that both have."""
        for name in found.keys() & oracle.keys():
            sums = self.sums.setdefault(name, [0.0, 0.0])
            sums[0] += float((found[name].double() - oracle[name]).square().sum())
            sums[1] += float(oracle[name].square().sum())

    def errors(self) -> dict[str, float]:
        """By output, in their order by name."""
        relative = {name: math.sqrt(e / r) if r else 0.0 for name, (e, r) in self.sums.items()}
        return {name: float(f"{error:.6g}") for name, error in sorted(relative.items())}


class Trials(Protocol):
    """What is judged: draws, and what each variant and float64 make of one."""

    def draw(self, draw: Draw, sizes: Sizes) -> Any:
        """The operands of all sides."""

    def oracle(self, drawn: Any) -> Outputs:
        """The outputs in float64."""

    def trial(self, variant: str) -> Trial:
        """A variant as a function of a draw."""


class KernelTrials:
    """A pattern of the suite `kernels`: what each variant, and float64, make of a draw."""

    def __init__(self, pattern: Pattern) -> None:
        self.pattern = pattern

    def draw(self, draw: Draw, sizes: Sizes) -> Any:
        """The operands of both sides."""
        return self.pattern.draw(draw, sizes)

    def oracle(self, drawn: Any) -> Outputs:
        """Torch's function in float64."""
        return self.pattern.stock(_widened(drawn.stock))

    def trial(self, variant: str) -> Trial:
        """A variant as a function of a draw."""
        pattern = self.pattern
        if variant == "ours":
            return lambda drawn: pattern.aligned(
                _widened(drawn.ours), _widened(pattern.program(**drawn.ours))
            )
        function = TRANSFORMS[variant](pattern.function)
        return lambda drawn: pattern.named(function(**drawn.stock))


class LayerTrials:
    """The layer: its outputs, and all gradients as d and the operand's name."""

    def draw(self, draw: Draw, sizes: Sizes) -> Layer:
        """A layer."""
        return Layer.drawn(draw, sizes)

    def oracle(self, layer: Layer) -> Outputs:
        """Torch's layer in float64."""
        wide = layer.widened()
        return self._results(layer, wide.stock(layer.function))

    def trial(self, variant: str) -> Trial:
        """A variant as a function of a draw."""
        if variant == "ours":
            return lambda layer: self._results(layer, layer.ours())
        function = TRANSFORMS[variant](Layer.function)
        return lambda layer: self._results(layer, layer.stock(function))

    def _results(self, layer: Layer, forward: Forward) -> Outputs:
        with torch.enable_grad():
            outputs = forward.call()
            gradients = torch.autograd.grad(outputs, forward.leaves, forward.upstream)
        named = layer.named([output.detach() for output in outputs])
        return named | {f"d{n}": g for n, g in zip(layer.leaves, gradients, strict=True)}


def _widened(operands: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in operands.items()
    }


def run(case: Case, bench: Bench) -> list[Record]:
    """A record for each variant: its errors by output, or why there are none."""
    return judged(
        LayerTrials() if case.pattern == LAYER else KernelTrials(BY_NAME[case.pattern]), case, bench
    )


def judged(trials: Trials, case: Case, bench: Bench) -> list[Record]:
    """A record for each variant: its errors by output, or why there are none."""
    torch.compiler.reset()
    known = [variant for variant in bench.variants if variant in ("ours", *TRANSFORMS)]
    ready: dict[str, Trial] = {}
    pools = {variant: Pooled() for variant in known}
    nothing = failure(Unavailable(f"{case.suite} is of ours and of torch alone"))
    failed = {variant: nothing for variant in bench.variants if variant not in known}
    for seed in SEEDS:
        drawn = trials.draw(Draw(case.torch_dtype, bench.device, seed), case.sizes)
        oracle = trials.oracle(drawn)
        for variant in [name for name in known if name not in failed]:
            try:
                if variant not in ready:
                    ready[variant] = trials.trial(variant)
                with torch.no_grad():
                    pools[variant].add(ready[variant](drawn), oracle)
            except Exception as error:  # noqa: BLE001  # whatever fails is that variant's result
                failed[variant] = failure(error)
    found = {variant: {"errors": pool.errors()} for variant, pool in pools.items()} | failed
    return [{"variant": variant, **found[variant]} for variant in bench.variants]


def _changed(pattern: str, given: Sizes) -> Sizes:
    if pattern == LAYER:
        known = {"M": 2048, **{n: s for n, s in given.items() if n not in ("D", "N", "K", "heads")}}
        return sizes_of(given.get("D", 1024), **known)
    return kernel_sizes(pattern, {"M": 2048, "N": 1024, "K": 1024, **given})


def _sizes(pattern: str) -> dict[str, Sizes]:
    return {"2048x1024": _changed(pattern, {})}


ACCURACY = Suite(
    "accuracy",
    ("ours", "compile", "eager"),
    (*BY_NAME, LAYER),
    _sizes,
    _changed,
    run,
    ("bf16", "fp16"),
    timed=False,
)
