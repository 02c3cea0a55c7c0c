"""How long a program takes on a GPU, beside its bare products and torch.compile, side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from cadenza.core.cost import Work
from cadenza.core.ir import Node
from cadenza.core.ops import M
from cadenza.library.operands import as_matrix
from cadenza.tools.bench.case import Bench, Case, Record
from cadenza.tools.bench.contest import contest
from cadenza.tools.bench.measurement import Call, Calls, Effort
from cadenza.tools.bench.patterns import Product
from cadenza.tools.bench.results import ratio
from cadenza.tools.bench.stage import Stage, Transform
from cadenza.tools.check.agreement import labelled, upstream_of
from cadenza.tools.check.findings import Finding
from cadenza.tools.check.operands import Arguments, cast, drawn, index_limits, is_float
from cadenza.tools.check.subject import Subject
from cadenza.tools.check.tracing import graph_of
from cadenza.tools.explain import Explanation

Tensor = torch.Tensor
VARIANTS = ("ours", "compile", "bare")
PASSES = {"forward": ("forward",), "forward and backward": ("forward", "backward")}
SLOWER = 1.05  # of torch.compile's time: what is less is noise of a short measurement
SECONDS = 0.5
TUNE = "cadenza tune {} --full measures more tiles; where compile stays ahead, use it there"


class Timed(Stage):
    """A program at the sizes of an explanation, forward alone or with backward."""

    def __init__(self, case: Case, device: torch.device, found: Explanation) -> None:
        super().__init__(case, device)
        self.found, self.target = found, found.target
        self.passes = PASSES[case.pattern]
        self.gradients = "backward" in self.passes
        limits = index_limits(graph_of(self.target))
        dtype = getattr(torch, case.dtype)
        self.arguments = cast(drawn(self.target, self.target.rows, limits, device), dtype)

    def ours(self) -> Calls:
        """The program."""
        return self._calls(self.target.program, self.arguments)

    def stock(self, transform: Transform) -> Calls:
        """The author's own function on tensors, transformed."""
        function = transform(self.target.program.specializations.function)
        return self._calls(function, self._matrices())

    def bare_products(self) -> Sequence[tuple[Mapping[str, Tensor], Sequence[Product]]]:
        """The products of the plans on random operands of their sizes."""
        operands: dict[str, Tensor] = {}
        products = []
        for number, product in enumerate(self._products()):
            names = f"a{number}", f"b{number}"
            operands |= dict(zip(names, map(self._like, product.inputs), strict=True))
            turned = (bool(product.attributes[f"transpose_{side}"]) for side in "ab")
            products.append(Product(*names, *turned))
        return [(operands, products)]

    def work(self) -> Work:
        """Of all kernels of the passes."""
        works = [work for name in self.passes for work in self.found.fused(name)]
        return Work(sum(w.flops for w in works), sum(w.bytes for w in works))

    def _products(self) -> Iterator[Node]:
        plans = (self.found.plans[name] for name in self.passes)
        kernels = (text.kernel for plan in plans for text in plan.kernels)
        return (k.product for k in kernels if k is not None and k.product is not None)

    def _like(self, node: Node) -> Tensor:
        rows, columns = (self.target.rows if d == M else int(d) for d in node.type[:2])
        options: dict[str, Any] = {"device": self.device, "dtype": getattr(torch, self.case.dtype)}
        return torch.randn(rows, columns, **options)

    def _matrices(self) -> Arguments:
        """The arguments as the function sees them while it is traced, two-dimensional."""
        flat = {
            o.name: as_matrix(
                self.arguments[o.name], self.target.rows if o.rows == M else o.rows, o.columns
            )
            for o in self.target.signature.operands
        }
        return {**self.arguments, **flat}

    def _calls(self, function: Callable[..., Any], arguments: Arguments) -> Calls:
        if not self.gradients:
            return [partial(function, **arguments)]
        upstream = upstream_of(function, arguments)
        leaves = {n: v.detach().requires_grad_() for n, v in arguments.items() if is_float(v)}
        return [_both(partial(function, **{**arguments, **leaves}), leaves, upstream)]


def _both(call: Call, leaves: Mapping[str, Tensor], upstream: Mapping[str, Tensor]) -> Call:
    def run() -> Sequence[Tensor | None]:
        outputs = labelled(call())
        sources = [outputs[name] for name in upstream]
        wanted = list(leaves.values())
        return torch.autograd.grad(sources, wanted, list(upstream.values()), allow_unused=True)

    return run


def timed(
    subject: Subject, found: Explanation, device: torch.device, say: Callable[[str], None]
) -> tuple[list[Finding], list[Record]]:
    """A finding a pass, and its records: of ours, torch.compile and the bare products."""
    findings, records = [], []
    for name, passes in PASSES.items():
        if not set(passes) <= set(found.plans):
            continue
        case = Case("check", name, "given", {}, subject.dtype)
        bench = Bench(device, VARIANTS, Effort(SECONDS), say)
        stage = partial(_stage, found)
        made = [{**r, "run": name} for r in contest(stage, case, bench)]
        findings.append(time_finding(subject.target, name, {r["variant"]: r for r in made}))
        records += [{k: v for k, v in r.items() if k != "samples"} for r in made]
    return findings, records


def _stage(found: Explanation, case: Case, device: torch.device) -> Stage:
    return Timed(case, device, found)


def time_finding(target: str, name: str, records: Mapping[str, Record]) -> Finding:
    """Whether ours is no slower than torch.compile, and how it stands to the bare products."""
    check, ours = f"time, {name}", records["ours"]
    if "us" not in ours:
        return Finding(check, False, str(ours["failed"]), "the failure first: run it with plain")
    parts, slower = [f"{ours['us']:.1f} us"], False
    for variant, what in (("bare", "the bare products"), ("compile", "torch.compile")):
        other = records.get(variant, {"failed": "not measured"})
        factor = ratio(ours, other) if "us" in other else None
        if factor is None:
            parts.append(f"{what}: {other.get('failed', 'not measured')}")
            continue
        parts.append(f"{factor:.2f} x {what}")
        slower |= variant == "compile" and factor > SLOWER
    return Finding(check, not slower, ", ".join(parts), TUNE.format(target) if slower else "")
