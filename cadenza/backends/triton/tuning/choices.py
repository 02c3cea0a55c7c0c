"""The entrance of selection: for each kernel of a plan, the fastest of its candidates on a device.

`CADENZA_TUNE=off` takes defaults, `first` (the default) measures what has no entry yet before the
first result of a signature, `full` measures a longer list. A kernel's choice is fixed for the
process once it is made. What goes wrong costs a candidate or the measurement, never a result.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import torch

from cadenza.backends.triton import templates
from cadenza.backends.triton.columns import Unsupported
from cadenza.backends.triton.configuration import Facts
from cadenza.backends.triton.launch import version
from cadenza.backends.triton.launches import Launch, PointwiseLaunch, ProductLaunch
from cadenza.backends.triton.memory import Step
from cadenza.backends.triton.program import Choice, Choose, Program
from cadenza.backends.triton.target import Target
from cadenza.backends.triton.tuning import candidates, records
from cadenza.backends.triton.tuning.candidates import product_candidates, strip_candidates
from cadenza.backends.triton.tuning.recipes import NOWHERE, Call, KernelCall, Sketch
from cadenza.backends.triton.tuning.worker import Compile, Measure
from cadenza.backends.triton.tuning.workers import WORKERS, Hangs
from cadenza.core.errors import BackEndError, explanation
from cadenza.core.ir import Node
from cadenza.core.ops import M
from cadenza.core.plan import Kernel, Plan
from cadenza.core.plan_text import PairText

log = logging.getLogger("cadenza")
Tensor = torch.Tensor
MODES = ("off", "first", "full")
WORTH = 2**33  # floating-point operations from which on a product's kernel is measured
WORTH_BYTES = 2**26  # of a kernel without a product
MOST = 16  # kernels that are compiled at a time
SPILL = 128  # bytes a thread; candidates that spill more are out
OF_KERNEL = {"first": 0.6, "full": 2.0}  # seconds of measuring
COMPILING = {"first": 45.0, "full": 300.0}  # seconds of compilation for a plan
LAUNCHING = 30.0  # seconds beyond measuring after which a kernel counts as hanging
_decided: dict[str, Choice] = {}
Tell = Callable[[str], None]


def mode() -> str:
    """What CADENZA_TUNE says. Raises BackEndError for an unknown word."""
    given = os.environ.get("CADENZA_TUNE") or "first"
    if given not in MODES:
        raise BackEndError(
            explanation(
                "no such way to choose kernels", repr(given), f"one of {', '.join(MODES)}", "",
                "CADENZA_TUNE",
            )
        )  # fmt: skip
    return given


class Setting(NamedTuple):
    """Where a plan runs, and on what: the device, the number of rows, its inputs' layouts."""

    target: Target
    device: torch.device
    rows: int
    inputs: Mapping[Node, Tensor]

    @staticmethod
    def of(plan: Plan, target: Target, tensors: Sequence[Tensor], rows: int) -> Setting:
        """That of a call."""
        inputs = dict(zip(plan.graph.inputs, tensors, strict=True))
        return Setting(target, tensors[0].device, rounded(rows), inputs)

    @property
    def programs(self) -> int:
        """How many programs run at a time."""
        return torch.cuda.get_device_properties(self.device).multi_processor_count


def rounded(rows: int) -> int:
    """The number of rows that stands for this one: the next power of two."""
    return 1 << max(0, rows - 1).bit_length()


@dataclass
class Contest:
    """A kernel, its key, and the candidates with what each would do."""

    kernel: Kernel
    key: str
    title: str
    choices: list[Choice]
    calls: list[list[Call]]


def choices(plan: Plan, text: PairText | None, setting: Setting) -> Choose | None:
    """What was measured to be fastest for each kernel; None where nothing is measured."""
    how = mode()
    if how == "off" or not setting.target.backend:
        return None
    keys = keys_of(plan, text, setting)
    missing = [k for k in keys.values() if k not in _decided]
    if missing:
        _recall(missing, how)
        if any(k not in _decided for k in missing):
            _measure_missing(plan, text, setting, how)
    return _chosen(keys)


def _chosen(keys: Mapping[Kernel, str]) -> Choose:
    return {kernel: _decided[key] for kernel, key in keys.items() if key in _decided}.get


def keys_of(plan: Plan, text: PairText | None, setting: Setting) -> dict[Kernel, str]:
    """The key of each kernel that is worth measuring: all that its time depends on."""
    found: dict[Kernel, str] = {}

    def note(kernel: Kernel, steps: Sequence[Step], make: Any) -> None:
        if _competes(kernel, steps, setting):
            found[kernel] = _key(kernel, steps, setting)

    Program(plan, None, text, setting.target, note)
    return found


def _competes(kernel: Kernel, steps: Sequence[Step], setting: Setting) -> bool:
    return _worth(kernel, setting) and all(isinstance(step, Launch) for step in steps)


def _worth(kernel: Kernel, setting: Setting) -> bool:
    def size(dim: Any) -> int:
        return setting.rows if dim == M else int(dim)

    if kernel.product is None:
        cells = [size(n.type.rows) * size(n.type.columns) for n in (*kernel.loads, *kernel.stores)]
        return 2 * sum(cells) >= WORTH_BYTES
    left, turned = kernel.product.inputs[0], kernel.product.attributes["transpose_a"]
    depth = size(left.type.rows if turned else left.type.columns)
    rows, columns = (size(d) for d in kernel.product.type[:2])
    return 2 * rows * columns * depth >= WORTH


def _key(kernel: Kernel, steps: Sequence[Step], setting: Setting) -> str:
    parts: list[Any] = [
        version(),
        torch.__version__,
        _templates(),
        candidates.LISTS,
        setting.target,
    ]
    name = torch.cuda.get_device_name(setting.device)
    parts += [name, setting.programs, setting.rows]
    for step in steps:
        assert isinstance(step, Launch), step
        assert step.source is not None
        parts += [step.source.text, step.signature(), step.constants(), step.options()]
    operands = kernel.product.inputs if kernel.product is not None else ()
    parts += [_layout(setting.inputs.get(n)) for n in (*operands, *kernel.loads)]
    return hashlib.sha256("\n".join(map(repr, parts)).encode()).hexdigest()[:32]


def _layout(tensor: Tensor | None) -> tuple[Any, ...]:
    """What of a tensor's layout decides how it is read."""
    if tensor is None:
        return ()
    aligned = tensor.data_ptr() % 16 == 0
    strides = tuple(1 if s == 1 else s * tensor.element_size() % 16 for s in tensor.stride())
    return aligned, strides


def _templates() -> str:
    """A digest of the fixed text that kernels call."""
    places = sorted(Path(templates.__path__[0]).glob("*.py"))
    return hashlib.sha256(b"".join(place.read_bytes() for place in places)).hexdigest()


def _recall(keys: Sequence[str], how: str) -> None:
    """Takes entries of the file; with `full`, those that were measured so alone."""
    entries = records.read()
    for key in keys:
        entry = entries.get(key)
        choice = records.choice_of(entry) if entry else None
        if choice is not None and (how == "first" or entry.get("full")):
            _decided[key] = choice


# --- measuring ------------------------------------------------------------------------------------


def _measure_missing(plan: Plan, text: PairText | None, setting: Setting, how: str) -> None:
    with records.alone():
        contests = contests_of(plan, text, setting, how == "full")
        _recall([c.key for c in contests], how)  # another process may have measured meanwhile
        missing = list({c.key: c for c in contests if c.key not in _decided}.values())
        if not missing:
            return
        log.info("%s: measuring %d kernels (CADENZA_TUNE=off leaves it out)", plan.graph.name,
                 len(missing))  # fmt: skip
        found = {}
        for contest, times in measured(missing, setting, how):
            entry = _entry(contest, times, how)
            if entry is not None:
                found[contest.key] = entry
                _decided[contest.key] = records.choice_of(entry) or contest.choices[0]
        for contest in missing:
            _decided.setdefault(contest.key, contest.choices[0])
        records.add(found)
        chosen = _chosen(keys_of(plan, text, setting))
        _compile_ahead(Program(plan, chosen, text, setting.target), setting)


def contests_of(plan: Plan, text: PairText | None, setting: Setting, full: bool) -> list[Contest]:
    """The kernels that are worth measuring, with their candidates."""
    sketch = _sketch(setting)
    offers: dict[Step, list[tuple[Choice, Sequence[Step]]]] = {}
    starts: dict[Step, Contest] = {}

    def note(kernel: Kernel, steps: Sequence[Step], make: Any) -> None:
        if not _competes(kernel, steps, setting):
            return
        made: list[tuple[Choice, Sequence[Step]]] = []
        for choice in _candidates(steps[-1], setting, full):
            try:
                made.append((choice, make(choice)))
            except Unsupported:
                continue
        offers[steps[0]] = made
        starts[steps[0]] = Contest(kernel, _key(kernel, steps, setting), "", [], [])

    program = Program(plan, None, text, setting.target, note)
    for step in program.steps:
        if step in offers:
            contest = starts[step]
            assert step.source is not None
            contest.title = step.source.text.split("\n", 1)[0].strip('"')
            for choice, steps in offers[step]:
                contest.choices.append(choice)
                contest.calls.append(sketch.trial(steps))
        sketch.run(step)
    return list(starts.values())


def _sketch(setting: Setting) -> Sketch:
    sketch = Sketch(setting.rows, setting.device)
    for node, tensor in setting.inputs.items():
        sketch.values[node] = _without_numbers(node, tensor, setting.rows)
        sketch.alive.append(sketch.values[node])
    return sketch


def _compile_ahead(program: Program, setting: Setting) -> None:
    """Compiles what a program launches in parallel, so that its first call finds it done."""
    sketch = _sketch(setting)
    for step in program.steps:
        sketch.run(step)
    calls = [c for c in sketch.calls if isinstance(c, KernelCall) and c.text]
    for future in _compiled([calls], setting.target, COMPILING["first"]).values():
        future.result()


def _without_numbers(node: Node, tensor: Tensor, rows: int) -> Tensor:
    """A graph's input as it is laid out, with the rounded number of rows."""
    shape = [rows if d == M else int(d) for d in node.type[:2]]
    if not node.type.is_matrix:
        return torch.empty(shape[0] * shape[1], dtype=tensor.dtype, device=NOWHERE)
    if tensor.stride(1) == 1:
        strides = (max(tensor.stride(0), shape[1]), 1)
    elif tensor.stride(0) == 1:
        strides = (1, max(tensor.stride(1), shape[0]))
    else:
        strides = (shape[1], 1)
    return torch.empty_strided(shape, strides, dtype=tensor.dtype, device=NOWHERE)


def _candidates(launch: Launch, setting: Setting, full: bool) -> Sequence[Choice]:
    assert launch.source is not None
    if isinstance(launch, ProductLaunch):
        size = launch.plan.dtypes[launch.operands[0]].itemsize
        facts = Facts.of(launch.source, launch.product, size)
        rows = setting.rows if facts.M is None else facts.M
        return product_candidates(facts, setting.target, rows, setting.programs, full)
    assert isinstance(launch, PointwiseLaunch)
    return strip_candidates(launch.strip, launch.source.unit, launch.holds, full)


def measured(contests: Sequence[Contest], setting: Setting, how: str) -> Any:
    """Each contest with the µs of each candidate, or why there are none, as they come."""
    calls = [each for contest in contests for each in contest.calls]
    reports = _compiled(calls, setting.target, COMPILING[how])
    for number, contest in enumerate(contests):
        faults = [_fault(reports, call, setting.target) for call in contest.calls]
        yield contest, _times(contest, faults, setting, OF_KERNEL[how])
        log.debug("measured %d of %d: %s", number + 1, len(contests), contest.title)


def _compiled(
    candidates: Sequence[Sequence[Call]], target: Target, seconds: float
) -> dict[str, Future[Any]]:
    """The report of each kernel, or why there is none, as soon as it is there."""
    calls = {repr(c): c for each in candidates for c in each if isinstance(c, KernelCall)}
    found: dict[str, Future[Any]] = {key: Future() for key in calls}
    keys = list(calls)
    count = min(MOST, os.cpu_count() or 1)
    task = Compile(list(calls.values()), target, count)
    Thread(target=_compile, args=(task, [found[k] for k in keys], seconds), daemon=True).start()
    return found


def _compile(task: Compile, futures: Sequence[Future[Any]], seconds: float) -> None:
    try:
        WORKERS.ask(task, seconds, "compile", lambda said: futures[said[0]].set_result(said[1]))
        problem = "it was not compiled"
    except (Hangs, OSError) as error:
        problem = f"compiling it: {error}"
    for future in futures:
        if not future.done():
            future.set_result(problem)


def _fault(reports: Mapping[str, Any], calls: Sequence[Call], target: Target) -> str:
    """Why a candidate is not launched; "" if it is."""
    for call in calls:
        if isinstance(call, KernelCall):
            report = reports[repr(call)].result()
            if isinstance(report, str):
                return report
            if report.spilled > SPILL or report.shared > target.shared:
                return "; ".join(report.faults(target))
    return ""


def _times(
    contest: Contest, faults: Sequence[str], setting: Setting, seconds: float
) -> list[float | str]:
    """The µs of each candidate, or why there are none."""
    found: list[float | str] = [fault or "not timed" for fault in faults]
    while True:
        entrants = [n for n, text in enumerate(found) if text == "not timed"]
        if not entrants:
            return found
        index = setting.device.index or 0
        task = Measure(index, [contest.calls[n] for n in entrants], seconds)
        try:
            answers = WORKERS.ask(task, seconds + LAUNCHING, "measure")
        except Hangs as error:
            said = error.said if isinstance(error.said, int) else len(entrants)
            if said >= len(entrants):  # it is not known which
                return [str(error) if text == "not timed" else text for text in found]
            found[entrants[said]] = str(error)
            continue
        for number, answer in zip(entrants, answers, strict=True):
            found[number] = answer
        return found


def _entry(contest: Contest, times: Sequence[float | str], how: str) -> dict[str, Any] | None:
    """What is kept of a contest; None if nobody finished."""
    finished = [n for n, t in enumerate(times) if not isinstance(t, str)]
    named = {_named(c): t for c, t in zip(contest.choices, times, strict=True)}
    if not finished:
        log.warning("%s: none of its candidates runs: %s", contest.title, named)
        return None
    best = min(finished, key=lambda n: float(times[n]))
    entry = records.entry_of(contest.choices[best], named, contest.title)
    return entry | {"full": how == "full"}


def _named(choice: Choice) -> str:
    """A choice in few words."""
    default = type(choice)()
    fields = {n: v for n, v in vars(choice).items() if v != getattr(default, n) or n in SAID}
    return " ".join(f"{n}={v}" for n, v in fields.items())


SAID = ("BM", "BN", "W")
