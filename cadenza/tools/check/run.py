"""Runs `cadenza check`: judges each program that is named, prints what was found."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.status import Status

from cadenza.backends import has_triton
from cadenza.tools.bench.options import split
from cadenza.tools.check.device import NONE, device_finding, usable_device
from cadenza.tools.check.findings import Finding, Judgement
from cadenza.tools.check.kernels import kernel_data, plan_findings
from cadenza.tools.check.options import Options
from cadenza.tools.check.report import show
from cadenza.tools.check.subject import Subject, find_subjects
from cadenza.tools.check.tracing import traced
from cadenza.tools.check.values import Values
from cadenza.tools.check.watch import watch
from cadenza.tools.emitted import TARGETS
from cadenza.tools.explain import Explanation, explain
from cadenza.tools.fault import Fault, one_line
from cadenza.tools.target import DTYPES, parse_sizes

Say = Callable[[str], Any]
DEFAULT_GPU = "h100"
NO_GPU = "none"
FIRST = "what fails above comes first"
SMALLER = "smaller sizes, by --size, where the memory does not suffice"


def run_check(text: str, options: Options, *, as_json: bool, watched: bool) -> int:
    """Judges what `text` names; 0 if all holds, 1 if something does not.

    Raises Fault for a target, size, dtype or GPU that there is not.
    """
    gpus = gpus_of(options)
    if options.dtype not in DTYPES:
        raise Fault(f"unknown --dtype {options.dtype!r}: one of {', '.join(DTYPES)}")
    if not watched:
        return _once(text, options, gpus, as_json)
    place = _file(text)

    def again() -> None:
        try:
            sys.modules.pop(text.rpartition(":")[0], None)  # so that a module is run anew, too
            _once(text, options, gpus, as_json)
        except Fault as fault:  # half a file, saved while it is written
            print("cadenza:", one_line(str(fault)), file=sys.stderr)

    watch(place, again)
    return 0


def gpus_of(options: Options) -> list[str]:
    """The GPUs to compile for. Raises Fault for one that is not known."""
    names = [name.lower() for name in split(options.gpu)] or [DEFAULT_GPU]
    if names == [NO_GPU]:
        return []
    for name in names:
        if name not in TARGETS:
            raise Fault(f"unknown --gpu {name!r}: one of {', '.join(TARGETS)}, or {NO_GPU}")
    return list(dict.fromkeys(names))


def _file(text: str) -> Path:
    """The file that is watched. Raises Fault for a target that has none."""
    place = text if text.endswith(".py") else text.rpartition(":")[0]
    if place.endswith(".py") and Path(place).is_file():
        return Path(place)
    _, found = find_subjects(text, {}, DTYPES[0])
    if found is None:
        raise Fault(f"--watch needs a file, and {text} is built in: name FILE.py")
    return found


def _once(text: str, options: Options, gpus: Sequence[str], as_json: bool) -> int:
    given = parse_sizes(options.size or ())
    subjects, _ = find_subjects(text, given, options.dtype)
    console = Console(stderr=True)
    with console.status("check") as status:
        judgements = [judge(subject, gpus, _saying(status, subject)) for subject in subjects]
    holds = all(judgement.holds for judgement in judgements)
    if as_json:
        programs = [judgement.as_json() for judgement in judgements]
        print(json.dumps({"target": text, "holds": holds, "programs": programs}, indent=2))
    else:
        show(judgements)
    return 0 if holds else 1


def _saying(status: Status, subject: Subject) -> Say:
    return lambda words: status.update(f"{subject.name}: {words}")


def judge(subject: Subject, gpus: Sequence[str], say: Say = str) -> Judgement:
    """All findings on one program. Raises Fault where a size is missing."""
    judgement = Judgement(subject.name)
    say("tracing")
    found = traced(subject)
    judgement.findings += found.findings
    if found.target is None or found.graph is None:
        judgement.findings.append(Finding("values, kernels", None, FIRST))
        return judgement
    say("values and gradients")
    judgement.findings += Values(subject, found.target, found.graph).findings()
    judgement.findings += _of_kernels(subject, gpus, judgement, say)
    return judgement


def _of_kernels(
    subject: Subject, gpus: Sequence[str], judgement: Judgement, say: Say
) -> Iterator[Finding]:
    """Findings on the plans and their kernels; their details go into the judgement."""
    say("planning")
    try:
        found = explain(subject.large())
    except Fault as fault:
        cure = "sizes at which it is a program: --size NAME=NUMBER"
        yield Finding("kernels", False, one_line(str(fault)), cure)
        return
    judgement.kernels = kernel_data(found)
    yield from plan_findings(found, gpus[0] if gpus else DEFAULT_GPU)
    yield from _compiled(found, gpus, judgement, say)
    yield from _on_device(subject, found, judgement, say)


def _compiled(
    found: Explanation, gpus: Sequence[str], judgement: Judgement, say: Say
) -> Iterator[Finding]:
    if not gpus or not has_triton():
        why = "Triton is not installed" if gpus else f"not asked: --gpu {NO_GPU}"
        yield Finding("compiles", None, why)
        return
    from cadenza.tools.check.compiling import compile_finding, compiled  # Triton is slow to import

    for gpu in gpus:
        say(f"compiling for {gpu}")
        made = compiled(found, gpu)
        judgement.compiled += [one.as_json(gpu) for one in made]
        yield compile_finding(made, gpu)


def _on_device(
    subject: Subject, found: Explanation, judgement: Judgement, say: Say
) -> Iterator[Finding]:
    device = usable_device()
    if device is None:
        yield Finding("agrees on a GPU", None, NONE)
        return
    from cadenza.tools.check.timing import timed

    say("running")
    try:
        yield device_finding(subject, device)
        findings, judgement.times = timed(subject, found, device, say)
    except RuntimeError as error:  # out of memory, mostly; whatever else a driver says
        said = " ".join(f"{type(error).__name__}: {error}".split())
        yield Finding("runs on the GPU", False, said, SMALLER)
        return
    yield from findings
