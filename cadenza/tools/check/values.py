"""Values and gradients of a program: against float64, its reference, differences, ragged sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from cadenza.core.errors import ProgramError
from cadenza.core.ir import Graph
from cadenza.core.ops import REAL, Op
from cadenza.tools.blame import OURS, is_ours
from cadenza.tools.check.agreement import (
    ROUNDING,
    Function,
    Problem,
    Results,
    is_rounding,
    labelled,
    lasting_problem,
    relative,
    results,
    slopes_agree,
    upstream_of,
    worst_of,
)
from cadenza.tools.check.findings import Finding
from cadenza.tools.check.operands import cast, drawn, index_limits
from cadenza.tools.check.subject import ROWS, Subject
from cadenza.tools.check.tracing import graph_of, summary
from cadenza.tools.target import Target

Tensor = torch.Tensor
RAGGED = (0, 1, 127, 129)
FORMULA = 1e-9  # of a value's size: how far a reference's other order of operations may be off
KEPT = "outputs of one shape: a reduction of each row is [M, 1], with keepdim=True in torch"
GUARD = "keep logarithms, roots and divisions from zero: L.maximum(x, 1e-6), or add an eps"
JUMPS = "the function jumps there, or its pieces don't meet: make it continuous"
FOUND_AGAIN = "L.stored(x) first: another kernel sees what is compared for equality rounded"


class Values:
    """One program on one set of random operands, by itself and by what it is compared with."""

    def __init__(self, subject: Subject, target: Target, graph: Graph) -> None:
        self.subject, self.target, self.graph = subject, target, graph
        self.dtype = getattr(torch, subject.dtype)
        self.program = partial(target.program, backend="reference")
        self.plain: Function = target.program.plain
        self.arguments = drawn(target, ROWS, index_limits(graph))
        self.upstream = upstream_of(self.plain, self.arguments)
        self.exact = results(self.plain, self.arguments, self.upstream)
        self.ours = results(self.program, self.arguments, self.upstream)
        self.three = self._in_dtype(0)
        self.rounds = _narrowest(target)
        self.allowed = torch.finfo(self.rounds).eps if self.rounds else ROUNDING

    def findings(self) -> Iterator[Finding]:
        """All of them, in order."""
        yield self._value()
        if self.subject.reference is not None:
            yield self._reference(self.subject.reference)
        yield from (self._gradient(name) for name in self.target.needed)
        yield self._ragged_rows()
        yield self._odd_widths()

    def _in_dtype(self, seed: int) -> tuple[Results, Results, Results]:
        """By the program and by torch's operations in the dtype, and on the same in float64."""
        arguments = drawn(self.target, ROWS, index_limits(self.graph), seed=seed)
        low, upstream = cast(arguments, self.dtype), cast(self.upstream, self.dtype)
        wide = cast(low, torch.float64), cast(upstream, torch.float64)
        return (
            results(self.program, low, upstream),
            results(self.plain, low, upstream),
            results(self.plain, *wide),
        )

    def _curing(self, problem: Problem) -> Problem:
        """A problem in the dtype; its cure is another one where values are found again."""
        text, cure = problem
        return f"{text} in {self.subject.dtype}", FOUND_AGAIN if _equals(self.graph) else cure

    # --- values -----------------------------------------------------------------------------------

    def _value(self) -> Finding:
        check = "value"
        for label, exact in self.exact.outputs.items():
            if not exact.isfinite().all():
                return Finding(check, False, f"output {label} is not finite in float64", GUARD)
            if not is_rounding(self.ours.outputs[label], exact, self.allowed):
                apart = relative(self.ours.outputs[label], exact)
                return Finding(check, False, f"output {label} is {apart:.1e} off plain's", OURS)
        outputs = [found.outputs for found in self.three]
        problem = lasting_problem(
            lambda seed: [found.outputs for found in self._in_dtype(seed)], outputs
        )
        if problem:
            text, cure = self._curing(problem)
            return Finding(check, False, f"output {text}", cure)
        wide = max(relative(self.ours.outputs[n], y) for n, y in self.exact.outputs.items())
        return Finding(
            check, True, f"float64 {wide:.0e}; {self.subject.dtype} {worst_of(*outputs)}"
        )

    def _reference(self, reference: Function) -> Finding:
        """Outputs and gradients against what the author says they should be."""
        check, name = "reference", getattr(reference, "__name__", "the reference")
        try:
            outputs = labelled(_asked(reference, **self.arguments))
            said = _otherwise(self.exact.outputs, outputs, name)
            if said:
                return Finding(check, False, *said)
            expected = _asked(results, reference, self.arguments, self.upstream)
        except _Failed as failed:
            said = " ".join(f"{name} raises {failed.kind}: {failed}".split())
            call = f"def {name}({', '.join(self.arguments)}): the call's own arguments"
            return Finding(check, False, said, OURS if failed.ours else call)
        problem = _apart(self.exact, expected, name, max(FORMULA, self.allowed))
        if problem:
            return Finding(check, False, problem, f"compare the formula with {name}'s")
        return Finding(check, True, f"outputs and gradients are {name}'s, in float64")

    # --- gradients --------------------------------------------------------------------------------

    def _gradient(self, name: str) -> Finding:
        check, ours = f"gradient of {name}", self.ours.gradients[name]
        exact = self.exact.gradients[name]
        if not exact.isfinite().all():
            return Finding(check, False, "not finite in float64", GUARD)
        if not is_rounding(ours, exact, self.allowed):
            return Finding(check, False, f"{relative(ours, exact):.1e} off autograd's", OURS)
        if not exact.any():
            return Finding(check, True, "zero: no output depends on it but by comparisons")
        if not all(y.isfinite().all() for y in self.exact.outputs.values()):
            return Finding(check, None, "an output is not finite, so no differences")
        slope = "it rounds, so no differences"
        if not self.rounds:
            slope, holds = self._slope(name)
            if not holds:
                return Finding(check, False, slope, JUMPS)
        one = [{name: found.gradients[name]} for found in self.three]
        problem = lasting_problem(
            lambda seed: [{name: f.gradients[name]} for f in self._in_dtype(seed)], one
        )
        if problem:
            text, cure = self._curing(problem)
            return Finding(check, False, text, cure)
        figures = f"float64 {relative(ours, exact):.0e}; {slope}"
        return Finding(check, True, f"{figures}; {self.subject.dtype} {worst_of(*one)}")

    def _slope(self, name: str) -> tuple[str, bool]:
        holds, apart = slopes_agree(self.program, self.arguments, name, self.ours, self.upstream)
        return (f"differences {apart:.0e}" if holds else f"{apart:.1e} off differences"), holds

    # --- sizes ------------------------------------------------------------------------------------

    def _ragged_rows(self) -> Finding:
        for rows in RAGGED:
            problem = self._off(self.target, rows)
            if problem:
                return Finding("ragged rows", False, f"{rows} rows: {problem}", OURS)
        return Finding("ragged rows", True, f"{', '.join(map(str, RAGGED[:-1]))} and {RAGGED[-1]}")

    def _odd_widths(self) -> Finding:
        """At odd sizes of all names at once, or of each that allows it."""
        check, sizes = "odd widths", self.subject.odd()
        if not sizes:
            return Finding(check, True, "no size is free")
        allowed, refusal = self._allowed(sizes)
        for changed in allowed:
            problem = self._off(self.subject.small(**changed), RAGGED[-1])
            if problem:
                return Finding(check, False, f"{_sizes(changed)}: {problem}", OURS)
        return Finding(check, True, "; ".join(map(_sizes, allowed)) or f"none fits: {refusal}")

    def _allowed(self, sizes: Mapping[str, int]) -> tuple[list[dict[str, int]], str]:
        """The changes of sizes at which the function is a program, and why another is none."""
        refusal = ""
        allowed: list[dict[str, int]] = []
        for changed in (dict(sizes), *({name: size} for name, size in sizes.items())):
            try:
                graph_of(self.subject.small(**changed))
            except ProgramError as error:
                refusal = summary(error)
                continue
            allowed.append(changed)
            if len(changed) == len(sizes):
                break
        return allowed, refusal

    def _off(self, target: Target, rows: int) -> str:
        """What differs from plain in float64 at these sizes, or nothing."""
        arguments = drawn(target, rows, index_limits(graph_of(target)))
        upstream = upstream_of(self.plain, arguments)
        exact = results(self.plain, arguments, upstream)
        return _apart(results(self.program, arguments, upstream), exact, "plain", self.allowed)


def _narrowest(target: Target) -> torch.dtype | None:
    """The coarsest dtype to which the program rounds where all operands are float64, if any."""
    operands = target.signature.operands
    wide = tuple(o._replace(dtype="float64") if "float" in o.dtype else o for o in operands)
    graph = graph_of(replace(target, signature=target.signature._replace(operands=wide)))
    dtypes = {n.attributes["dtype"] for n in graph.nodes() if n.op is Op.CAST} - {"float64"}
    found = [getattr(torch, name) for name in dtypes]
    return max(found, key=lambda dtype: torch.finfo(dtype).eps, default=None)


def _apart(ours: Results, theirs: Results, name: str, allowed: float) -> str:
    """The first output or gradient in which two results differ by more than rounding."""
    for kind, found, expected in zip(("output", "gradient of"), ours, theirs, strict=True):
        for label, value in expected.items():
            if not is_rounding(found[label], value, allowed):
                return f"{kind} {label} is {relative(found[label], value):.1e} off {name}'s"
    return ""


class _Failed(Exception):
    """What an author's reference raises, and whether the fault is ours."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.kind, self.ours = type(error).__name__, is_ours(error)


def _asked(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What it returns. Raises _Failed."""
    try:
        return function(*args, **kwargs)
    except Exception as error:
        raise _Failed(error) from error


def _otherwise(ours: Mapping[str, Tensor], theirs: Mapping[str, Any], name: str) -> Problem | None:
    """How a reference's outputs are no tensors of ours' labels and shapes."""
    if list(theirs) != list(ours):
        said = f"{len(ours)} outputs, {len(theirs)} of {name}"
        return said, f"return what {name} returns, in its structure"
    for label, value in theirs.items():
        if not isinstance(value, Tensor):
            return f"output {label} of {name} is a {type(value).__name__}", "return tensors there"
        if ours[label].shape != value.shape:
            shapes = f"{list(ours[label].shape)}, {name}'s {list(value.shape)}"
            return f"output {label} is {shapes}", KEPT
    return None


def _equals(graph: Graph) -> bool:
    """Whether real values are compared for equality."""
    return any(
        n.op is Op.COMPARE
        and n.attributes["relation"] == "=="
        and all(i.type.kind == REAL for i in n.inputs)
        for n in graph.nodes()
    )


def _sizes(changed: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in changed.items())
