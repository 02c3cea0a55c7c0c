"""Compiles the kernels of built-in blocks at large sizes, and of losses of every option, and writes
what each takes, as JSON.

Run as a program where TRITON_INTERPRET is unset, by `reports`, in two processes that each take
every other kernel. Kernels with equal texts, types and constants are compiled once a target.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from loss_options import example
from planned import large_call
from test_numbers import every_number

from cadenza.backends.triton.compiled import CompilationError, report
from cadenza.backends.triton.launches import Launch
from cadenza.backends.triton.program import Program
from cadenza.backends.triton.target import Target
from cadenza.core.pipeline import compile_program
from cadenza.core.plan import Plan
from cadenza.core.trace import Operand, Signature
from cadenza.library import specialize
from cadenza.library.blocks import BUILT_IN
from cadenza.library.cross_entropy import linear_cross_entropy
from cadenza.tools import target
from cadenza.tools.explain import explain

LOSSES, NUMBERS, LIBRARY = "losses", "numbers", "library"
TERMS = (
    {},
    {"bias": True, "label_smoothing": 0.1, "z_loss": 1e-3},
    {"weight": True, "label_smoothing": 0.1, "softcap": 30.0},
)
WORKERS = 2
FOLDER = Path(__file__).resolve().parent


class Task(NamedTuple):
    """Blocks in a dtype for a target; only the first `kernels` of forward plans if that is > 0."""

    target: str
    dtype: str = "bfloat16"
    blocks: Sequence[str] = ()
    kernels: int = 0


class Compiled(NamedTuple):
    """What was compiled, where it occurs first, and what it takes or why it can't be compiled."""

    target: str
    kernel: str
    figures: Sequence[int]  # of a Report: registers, spilled bytes, shared memory
    faults: Sequence[str]


def reports(tasks: Sequence[Task], cache: Path) -> list[Compiled]:
    """Compiles in processes of their own; AssertionError with the words of one that fails."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {
        "TRITON_CACHE_DIR": str(cache / "triton"), "CADENZA_CACHE": str(cache / "kernels"),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(FOLDER.parent), os.environ.get("PYTHONPATH", "")]),
    }  # fmt: skip
    started = []
    for number in range(WORKERS):
        out = cache / f"{number}.json"
        command = [sys.executable, __file__, str(number), json.dumps(tasks), str(out)]
        log = (cache / f"{number}.log").open("w+")
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        started.append((process, log, out))
    found = []
    for process, log, out in started:
        code = process.wait()
        log.seek(0)
        assert code == 0, log.read()
        log.close()
        found += [Compiled(*fields) for fields in json.loads(out.read_text())]
    return found


# --- in a process of its own ----------------------------------------------------------------------


def plans(task: Task) -> Iterator[tuple[str, Plan]]:
    """The plans of a task with their names."""
    if LOSSES in task.blocks:
        yield from plans_of_losses()
        return
    if NUMBERS in task.blocks:
        yield "numbers", plan_of_numbers(task.dtype)
        return
    if LIBRARY in task.blocks:
        yield from plans_of_the_library(task.dtype)
        return
    for name in task.blocks or BUILT_IN:
        pair = large_call(name, task.dtype).pair()
        yield f"{name} forward", pair.forward_plan
        if pair.backward_plan is not None and not task.kernels:
            yield f"{name} backward", pair.backward_plan


def plan_of_numbers(dtype: str) -> Plan:
    """The plan of a program with constants that Triton may print or fold in its own way."""
    sizes = {"x": ("M", 256), "w": (256, 256), "r": ("M", 1)}
    operands = tuple(Operand(name, *size, dtype) for name, size in sizes.items())
    return compile_program(every_number, Signature(operands)).forward_plan


def plans_of_the_library(dtype: str) -> Iterator[tuple[str, Plan]]:
    """The plans of every program that `cadenza explain` knows, but the built-in blocks."""
    for name in target.LIBRARY:
        pair = explain(target.find_target(name, dtype=dtype)).text.pair
        yield f"{name} forward", pair.forward_plan
        if pair.backward_plan is not None:
            yield f"{name} backward", pair.backward_plan


def plans_of_losses() -> Iterator[tuple[str, Plan]]:
    """The plans that losses run on a CPU, of several chunks and of one, lean too."""
    found: list[Plan] = []
    compile_plan = specialize.compile_plan

    def recorded(plan: Plan, *rest: Any) -> Any:
        found.append(plan)
        return compile_plan(plan, *rest)

    specialize.compile_plan = recorded
    for options in TERMS:
        case = example(options, 40, 64, 1000, torch.bfloat16)
        leaves = {n: v.requires_grad_() for n, v in case.operands.items() if n in ("x", "w")}
        for lean, chunk in ((False, 16), (False, 64), (True, 256)):
            given = {**case.operands, **leaves, **case.options}
            linear_cross_entropy(**given, lean=lean, chunk=chunk).backward()
    specialize.compile_plan = compile_plan
    yield from ((f"a loss, plan {number}", plan) for number, plan in enumerate(found))


def launches(task: Task) -> Iterator[tuple[str, Launch]]:
    """Launches with default configurations, each of equal ones once; float32 is cut to tf32."""
    gpu, seen = replace(Target.named(task.target), tf32=task.dtype == "float32"), set()
    for name, plan in plans(task):
        steps = Program(plan, target=gpu).steps
        given = [(k, step) for k, step in enumerate(steps) if isinstance(step, Launch)]
        for position, launch in given[: task.kernels or None]:
            key = str((launch.source, launch.signature(gpu.tma), launch.constants(gpu.tma)))
            if key not in seen:
                seen.add(key)
                yield f"{name} step {position} ({task.dtype})", launch


def compiled(task: Task, name: str, launch: Launch) -> Compiled:
    """One kernel."""
    gpu = Target.named(task.target)
    title = f"{name}, {getattr(launch, 'configuration', getattr(launch, 'strip', ''))}"
    try:
        found = report(launch, gpu)
    except CompilationError as error:
        return Compiled(task.target, title, (), [str(error)])
    return Compiled(task.target, title, found, found.faults(gpu))


def main(number: int, tasks: Sequence[Task], out: Path) -> None:
    """Compiles this worker's share."""
    found: list[Any] = []
    for task in tasks:
        for position, (name, launch) in enumerate(launches(task)):
            if position % WORKERS == number:
                found.append(compiled(task, name, launch))
                print(*found[-1], flush=True)
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), [Task(*fields) for fields in json.loads(sys.argv[2])], Path(sys.argv[3]))
