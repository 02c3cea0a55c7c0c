"""Compiles the kernels of a program for a GPU, without one, in processes of their own.

Run as a module it is such a process: it reads kernels as plain data, compiles each, and writes what
each takes. There Triton compiles, whatever TRITON_INTERPRET says here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from cadenza.backends.triton import modules
from cadenza.backends.triton.compiled import CompilationError, Report, report
from cadenza.backends.triton.configuration import Configuration
from cadenza.backends.triton.launches import Launch, ProductLaunch
from cadenza.backends.triton.program import Choose
from cadenza.backends.triton.target import Target
from cadenza.tools.check.findings import Finding
from cadenza.tools.emitted import TARGETS, named_steps
from cadenza.tools.explain import Explanation

ROOT = Path(__file__).resolve().parents[3]
MOST = 8  # processes
LIGHTER = (
    "fewer loads, stores and reductions in one epilogue: return a value, use it in a later one"
)
SMALLER = "fewer loads and stores in one epilogue: their parts of a tile take shared memory"
REPORT = "a fault of Cadenza's or of Triton's: please report it, with the program"


@dataclass(frozen=True, eq=False)
class Kernel:
    """A kernel as plain data, which Triton can compile."""

    text: str
    types: Mapping[str, str]
    values: Mapping[str, Any]
    resources: Mapping[str, Any]

    @cached_property
    def function(self) -> Any:
        """The function of the emitted text."""
        return modules.function(self.text)

    def signature(self, descriptors: bool = False) -> Mapping[str, str]:
        """Triton's types of the parameters that are no constants."""
        return self.types

    def constants(self, descriptors: bool = False) -> Mapping[str, Any]:
        """The values of those that are."""
        return self.values

    def options(self) -> Mapping[str, Any]:
        """Warps, stages and what else the compiler is told."""
        return self.resources

    @cached_property
    def line(self) -> str:
        """All of it as one line of text, equal for equal kernels."""
        return json.dumps(asdict(self))


class Emitted(NamedTuple):
    """A kernel, the name of what it computes, and its tile if it is a product's."""

    name: str
    kernel: Kernel
    tile: Configuration | None


class Compiled(NamedTuple):
    """What an emitted kernel takes, or why it can't be compiled.

    `narrow` is the same of one with a tile half as wide, where the default one spills.
    """

    emitted: Emitted
    said: Report | str
    narrow: Report | str | None = None

    def problems(self, target: Target) -> list[tuple[str, str]]:
        """What is wrong with it on a target, each with its cure."""
        if isinstance(self.said, str):
            return [(self.said, REPORT)]
        if self.said.spilled and self.is_spared(target):
            return []
        return [(f, LIGHTER if "spilled" in f else SMALLER) for f in self.said.faults(target)]

    def is_spared(self, target: Target) -> bool:
        """Whether half of the tile fits, which tuning measures beside it."""
        return isinstance(self.narrow, Report) and not self.narrow.faults(target)

    def as_json(self, gpu: str) -> dict[str, Any]:
        """As data."""
        cut = self.emitted.tile
        known = {"gpu": gpu, "target": TARGETS[gpu], "kernel": self.emitted.name}
        known |= {"tile": [cut.BM, cut.BN, cut.BK] if cut else None}
        said = {"error": self.said} if isinstance(self.said, str) else self.said._asdict()
        narrow = self.narrow._asdict() if isinstance(self.narrow, Report) else self.narrow
        return {**known, **said, "half as wide": narrow}


_REPORTS: dict[tuple[str, str], Report | str] = {}  # kept from one run of --watch to the next


def compiled(found: Explanation, gpu: str) -> list[Compiled]:
    """Every emitted kernel of both passes, each of equal ones once, compiled for a GPU."""
    target = Target.named(TARGETS[gpu])
    first = emitted_kernels(found, gpu)
    said = dict(zip(first, _reports([e.kernel for e in first], target), strict=True))
    spilled = {
        e.name: e.tile
        for e, one in said.items()
        if isinstance(one, Report) and one.spilled and e.tile is not None
    }
    if not spilled:
        return [Compiled(e, said[e]) for e in first]
    halves = {name: _half(tile) for name, tile in spilled.items()}
    again = [e for e in emitted_kernels(found, gpu, halves) if e.name in spilled and e.tile]
    takes = _reports([e.kernel for e in again], target)
    narrow = {e.name: one for e, one in zip(again, takes, strict=True)}
    return [Compiled(e, said[e], narrow.get(e.name) if e.tile else None) for e in first]


def compile_finding(found: Sequence[Compiled], gpu: str) -> Finding:
    """Whether all of them compile for a GPU without spilling, and what they take at most."""
    check, target = f"compiles for {gpu}", Target.named(TARGETS[gpu])
    problems = [(c.emitted.name, *p) for c in found for p in c.problems(target)]
    if problems:
        return Finding(check, False, "\n".join(f"{n}: {p}" for n, p, _ in problems), problems[0][2])
    reports = [(c.emitted.name, c.said) for c in found if isinstance(c.said, Report)]
    if not reports:
        return Finding(check, None, "no kernel is emitted for it")
    registers, shared = (max(getattr(r, n) for _, r in reports) for n in ("registers", "shared"))
    spills = [
        f"{name} spills {r.spilled} bytes by its default tile, none by one half as wide"
        for name, r in reports
        if r.spilled
    ]
    takes = f"at most {registers} registers and {shared / 1024:.0f} KiB of shared memory"
    return Finding(check, True, "\n".join([f"{len(reports)} kernels, {takes}", *spills]))


def emitted_kernels(
    found: Explanation, gpu: str, tiles: Mapping[str, Configuration] | None = None
) -> list[Emitted]:
    """The kernels of both passes, each of equal ones once; `tiles` are other than the default."""
    kernels: dict[str, Emitted] = {}
    for plan in found.plans.values():
        cuts = {text.kernel: (tiles or {}).get(text.name) for text in plan.kernels}
        for one in _launches(found, gpu, plan, cuts.get):
            kernels.setdefault(one.kernel.line, one)
    return list(kernels.values())


def _launches(found: Explanation, gpu: str, plan: Any, choose: Choose) -> Iterator[Emitted]:
    described = Target.named(TARGETS[gpu]).tma
    for name, step in named_steps(plan, found.text, gpu, choose):
        if isinstance(step, Launch):
            assert step.source is not None
            types, values = step.signature(described), step.constants(described)
            tile = step.configuration if isinstance(step, ProductLaunch) else None
            yield Emitted(name, Kernel(step.source.text, types, values, step.options()), tile)


def _half(tile: Configuration) -> Configuration:
    return replace(tile, BN=tile.BN // 2, parts=max(1, tile.parts // 2))


# --- processes ------------------------------------------------------------------------------------


def _reports(kernels: Sequence[Kernel], target: Target) -> list[Report | str]:
    """What each takes; those not compiled before are compiled, in processes side by side."""
    new = [k for k in kernels if (k.line, target.name) not in _REPORTS]
    count = min(MOST, os.cpu_count() or 1, len(new))
    shares = [new[start::count] for start in range(count)]
    processes = [_started(share, target) for share in shares]
    for share, process in zip(shares, processes, strict=True):
        assert process.stdout is not None
        said = [json.loads(line) for line in process.stdout]
        process.wait()
        said += ["the compiler crashed"] * (len(share) - len(said))
        for kernel, one in zip(share, said, strict=True):
            _REPORTS[kernel.line, target.name] = one if isinstance(one, str) else Report(*one)
    return [_REPORTS[k.line, target.name] for k in kernels]


def _started(share: Sequence[Kernel], target: Target) -> subprocess.Popen[str]:
    """A process that has been told what to compile."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    paths = [str(ROOT), environment.get("PYTHONPATH", "")]
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile("w+") as told:  # not a pipe: no process waits for another to read
        told.writelines(f"{kernel.line}\n" for kernel in share)
        told.seek(0)
        return subprocess.Popen(
            [sys.executable, "-m", "cadenza.tools.check.compiling", target.name],
            stdin=told, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment,
            text=True,
        )  # fmt: skip


def main() -> None:
    """Compiles each line of the input; what else is printed goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    target = Target.named(sys.argv[1])
    for line in sys.stdin:
        answers.write(json.dumps(_said(Kernel(**json.loads(line)), target)) + "\n")
        answers.flush()


def _said(kernel: Kernel, target: Target) -> Sequence[int] | str:
    try:
        return report(kernel, target)
    except CompilationError as error:
        return str(error)


if __name__ == "__main__":
    main()
