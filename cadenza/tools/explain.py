"""`cadenza explain TARGET`: what a program compiles to, what its kernels cost, and why.

Colours on a terminal, plain text in a pipe, `--json` for programs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from cadenza.core.cost import GPUS, Gpu, Work, bytes_of, kernel_work, vector_product_work
from cadenza.core.errors import ProgramError
from cadenza.core.ir import Graph
from cadenza.core.pipeline import compile_program
from cadenza.core.plan_text import KernelText, Line, PairText, PlanText, counts
from cadenza.core.reasons import reasons
from cadenza.core.storage import dtypes_of
from cadenza.core.text import show
from cadenza.core.trace import trace
from cadenza.core.unfused import Unfused
from cadenza.tools.emitted import TARGETS as EMITTED_FOR
from cadenza.tools.emitted import (
    TEMPLATES,
    Emitted,
    asked,
    emitted,
    fallen,
    show_sources,
    sources_json,
)
from cadenza.tools.fault import Fault
from cadenza.tools.question import Question
from cadenza.tools.target import Target, find_target, place_of

STYLES = {
    "store": "bold",
    "runs": "yellow",
    "partial": "magenta",
    "reduce": "magenta",
    "finish": "cyan",
}


@dataclass(frozen=True, eq=False)
class Explanation:
    """A compiled target with what its kernels, and those of the unfused program, do."""

    target: Target
    text: PairText
    works: dict[str, Work]
    unfused: dict[str, list[Work]]

    @property
    def plans(self) -> dict[str, PlanText]:
        """The plans by pass; no backward where no input needs a gradient."""
        both = {"forward": self.text.forward, "backward": self.text.backward}
        return {name: plan for name, plan in both.items() if plan is not None}

    def fused(self, name: str) -> list[Work]:
        """What the kernels of one pass do."""
        plan = self.plans[name]
        return [self.works[kernel.name] for kernel in (*plan.kernels, *plan.beside)]


def explain(target: Target) -> Explanation:
    """Compiles a target and its textbook counterpart. Raises Fault if it is no program."""
    function, name = target.program.specializations.function, target.program.__name__
    try:
        pair = compile_program(function, target.signature, needed=target.needed, name=name)
        unfused = Unfused(trace(function, target.signature, name=name), target.rows)
    except ProgramError as error:
        raise Fault(str(error.moved(place_of(error, target.program)))) from None
    text = PairText(pair)
    plans = [plan for plan in (text.forward, text.backward) if plan is not None]
    works = {k: w for plan in plans for k, w in _works(plan, target.rows)}
    passes = {"forward": unfused.forward(), "backward": unfused.backward(target.needed)}
    return Explanation(target, text, works, passes)


def _works(text: PlanText, rows: int) -> Iterator[tuple[str, Work]]:
    graph = text.plan.graph
    dtypes = dtypes_of(graph)
    for kernel in text.kernels:
        assert kernel.kernel is not None
        yield kernel.name, kernel_work(kernel.kernel, dtypes, rows)
    for kernel in text.beside:
        assert kernel.node is not None
        yield kernel.name, vector_product_work(kernel.node, dtypes, rows)


def total(works: Sequence[Work], gpu: Gpu, dtype: str) -> dict[str, Any]:
    """FLOPs and bytes of some kernels, and the sum of their roofline times."""
    return {
        "flops": sum(w.flops for w in works),
        "bytes": sum(w.bytes for w in works),
        "roofline_us": _microseconds(sum(w.seconds(gpu, dtype) for w in works)),
    }


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)


# --- for programs ---------------------------------------------------------------------------------


def as_json(found: Explanation, gpu: Gpu, dtype: str) -> dict[str, Any]:
    """The explanation as data, in the structure that `cadenza explain --json` promises."""
    kernels = {
        name: [
            _kernel_json(k, found, gpu, dtype)
            for plan in [found.plans.get(name)] if plan
            for k in (*plan.kernels, *plan.beside)
        ]
        for name in ("forward", "backward")
    }  # fmt: skip
    everything = [work for name in found.plans for work in found.fused(name)]
    textbook = [work for name in found.plans for work in found.unfused[name]]
    sides = {"unfused": total(textbook, gpu, dtype), "fused": total(everything, gpu, dtype)}
    return {**kernels, "saved": list(_saved_json(found)), **sides}


def _kernel_json(text: KernelText, found: Explanation, gpu: Gpu, dtype: str) -> dict[str, Any]:
    names, kernel, work = found.text.names, text.kernel, found.works[text.name]
    made = {
        "loads": [*kernel.loads, *kernel.vectors],
        "stores": kernel.stores,
        "partials": kernel.reductions,
    } if kernel else {"loads": [], "stores": [text.node], "partials": []}  # fmt: skip
    return {
        "name": text.name,
        "kind": kernel.kind if kernel else "vector",
        "product": text.product or None,
        **{key: [names[node] for node in nodes] for key, nodes in made.items()},
        **total([work], gpu, dtype),
    }


def _saved_json(found: Explanation) -> Iterator[dict[str, Any]]:
    for held in found.text.held():
        rows, columns = held.node.type[:2]
        shape = [found.target.rows if rows == "M" else rows, columns]
        size = bytes_of(held.node.type, held.dtype, found.target.rows)
        yield {"name": held.name, "shape": shape, "bytes": size}


# --- for people -----------------------------------------------------------------------------------


def render(found: Explanation, gpu: Gpu, dtype: str, instead: Mapping[str, str]) -> Iterator[Text]:
    """The explanation line by line; `instead` is what torch does of kernels and vectors."""
    name = found.text.pair.program.name
    yield Text(f"{name}, {dtype}, M = {found.target.rows}, on {gpu.name}", "bold underline")
    yield Text(
        f"data sheet: {gpu.nominal(dtype):g} TFLOP/s and {gpu.memory:g} TB/s nominal; a roofline "
        f"takes {gpu.flops(dtype) / 1e12:.0f} and {gpu.bytes / 1e12:.2f} sustained"
    )
    yield Text(
        f"sustained: {gpu.computing:g} of the arithmetic, as measured on an H200, and "
        f"{gpu.moving:g} of the bandwidth, assumed"
    )
    for title, plan in found.plans.items():
        about = "deferred graph" if title == "forward" else "derived graph"
        yield from _heading(f"{title}: {about}")
        yield from _graph(plan.plan.graph, found)
        yield from _heading(f"{title}: {counts(plan.plan)}")
        for kernel in (*plan.kernels, *plan.beside):
            yield from _kernel(kernel, found.works[kernel.name], gpu, dtype)
            yield from _instead(instead.get(kernel.name))
        yield from map(_line, plan.ends)
    yield from _vectors_by_torch(found, instead)
    yield from _heading("saved for backward")
    yield from _saved(found)
    yield from _heading("beside the unfused program")
    yield from _totals(found, gpu, dtype)


def _heading(text: str) -> Iterator[Text]:
    yield Text()
    yield Text(text, "bold green")


def _graph(graph: Graph, found: Explanation) -> Iterator[Text]:
    for line in show(graph, found.text.names).splitlines():
        yield Text(line)


def _kernel(kernel: KernelText, work: Work, gpu: Gpu, dtype: str) -> Iterator[Text]:
    time = f"{_microseconds(work.seconds(gpu, dtype)):.1f} us"
    bound = "memory" if work.bytes / gpu.bytes > work.flops / gpu.flops(dtype) else "compute"
    yield Text()
    yield Text.assemble((f"{kernel.name:<4}", "bold yellow"), (kernel.title, "yellow"))
    cost = f"{work.flops / 1e9:.1f} GFLOP, {work.bytes / 1e6:.1f} MB, {time} ({bound})"
    yield Text(f"    {'cost':<8}{cost}", "dim")
    yield from map(_line, kernel.lines)


def _instead(reason: str | None) -> Iterator[Text]:
    if reason is not None:
        yield _line(Line("runs", reason))


def _vectors_by_torch(found: Explanation, instead: Mapping[str, str]) -> Iterator[Text]:
    kernels = {k.name for plan in found.plans.values() for k in (*plan.kernels, *plan.beside)}
    vectors = {name: reason for name, reason in instead.items() if name not in kernels}
    if vectors:
        yield from _heading("vectors made by torch")
    for name, reason in vectors.items():
        yield Text(f"    {name}: {reason}")


def _line(line: Line) -> Text:
    return Text.assemble(f"    {line.role:<8}", (line.text, STYLES.get(line.role, "")))


def _saved(found: Explanation) -> Iterator[Text]:
    values = list(_saved_json(found))
    for held, value in zip(found.text.held(), values, strict=True):
        yield Text(f"    {held.name}: {held.dtype}{held.node.type}  {value['bytes'] / 1e6:.1f} MB")
    yield Text(f"    {sum(v['bytes'] for v in values) / 1e6:.1f} MB in all")


def _totals(found: Explanation, gpu: Gpu, dtype: str) -> Iterator[Text]:
    yield Text(f"    {'':<18}{'kernels':>8}{'TFLOP':>10}{'GB':>10}{'roofline ms':>13}", "bold")
    for name in found.plans:
        for kind, works in (("fused", found.fused(name)), ("unfused", found.unfused[name])):
            sums = total(works, gpu, dtype)
            yield Text(
                f"    {name + ' ' + kind:<18}{len(works):>8}{sums['flops'] / 1e12:>10.3f}"
                f"{sums['bytes'] / 1e9:>10.3f}{sums['roofline_us'] / 1e3:>13.3f}"
            )


def _why(text: PairText, name: str) -> Iterator[Text]:
    found = reasons(text, name)
    if not found:
        known = ", ".join(dict.fromkeys(text.names.values()))
        raise Fault(f"--why {name!r}: no value is called so; there are {known}")
    yield from map(Text, found)


def run_explain(text: str, question: Question, machine: bool) -> int:
    """Prints the explanation of a target, or of one value of it, or its emitted kernels."""
    if question.gpu.lower() not in GPUS:
        raise Fault(f"unknown --gpu {question.gpu!r}: one of {', '.join(GPUS)}")
    if machine and question.why is not None:
        raise Fault("--why answers in words: leave --json out")
    if question.why is not None and question.source is not None:
        raise Fault("--why and --source are two questions: ask one at a time")
    _check_template(question)
    gpu, dtype = GPUS[question.gpu.lower()], question.dtype
    found = explain(find_target(text, question.size or (), dtype, question.frozen or ()))
    steps = []
    if question.why is None:
        steps = emitted(found.text, question.gpu.lower(), question.template)
    chosen = asked(steps, question.source) if question.source else []
    if machine:
        sources = {"sources": sources_json(chosen)} if chosen else {}
        json.dump(as_json(found, gpu, dtype) | sources, sys.stdout, indent=2)
        print()
        return 0
    _print(found, question, steps, chosen)
    return 0


def _check_template(question: Question) -> None:
    if question.template not in TEMPLATES:
        known = ", ".join(TEMPLATES)
        raise Fault(f"unknown --template {question.template!r:.60}: one of {known}")
    if question.template == "plain":
        return
    if question.source is None:
        raise Fault("--template says which text --source prints: add --source")
    if EMITTED_FOR[question.gpu.lower()] != "sm_90":
        raise Fault("--template pingpong is Hopper's: --gpu h100 or --gpu h200")


def _print(
    found: Explanation, question: Question, steps: Sequence[Emitted], chosen: Sequence[Emitted]
) -> None:
    console = Console(highlight=False)
    if chosen:
        show_sources(chosen, console)
        return
    if question.why is not None:
        lines = _why(found.text, question.why)
    else:
        lines = render(found, GPUS[question.gpu.lower()], question.dtype, fallen(steps))
    for line in lines:
        console.print(line, soft_wrap=True)
