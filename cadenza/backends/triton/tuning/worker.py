"""A process that compiles or launches what it is told, run as a module.

It answers each task on its standard output, as pickles behind their lengths; what the code that it
runs prints goes to standard error. A kernel that hangs, hangs here; the parent ends the process.
"""

from __future__ import annotations

import os
import pickle
import random
import statistics
import struct
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO, NamedTuple

import torch

from cadenza.backends.triton import modules
from cadenza.backends.triton.compiled import CompilationError, Report, report_of
from cadenza.backends.triton.fallbacks import library_product
from cadenza.backends.triton.launch import Descriptor, Launcher
from cadenza.backends.triton.target import Target
from cadenza.backends.triton.tuning.recipes import NOWHERE, Call, KernelCall, Room, views

SAMPLE = 2.0  # milliseconds of launches between two events
MOST = 20  # launches between two events
BACKLOG = 2_000_000  # cycles that the GPU waits, so that the host is ahead of it
FEWEST = 5  # rounds, however long they take


class Compile(NamedTuple):
    """A task: compile a launch for a target; the answer is a Report, or why there is none."""

    call: KernelCall
    target: Target

    def run(self, say: Callable[[Any], None]) -> Report | str:
        """Compiles as a launch does, so that a launch finds it in Triton's cache."""
        _pretend(self.target)
        room = _Sizes(NOWHERE)
        room.prepare([self.call])
        given = [room.argument(a) for a in self.call.arguments]
        given = [a.public() if isinstance(a, Descriptor) else a for a in given]
        function = modules.function(self.call.text)
        try:
            kernel = function.warmup(
                *given, grid=self.call.grid, **self.call.constants, **self.call.options
            )
            return report_of(kernel, self.target)
        except CompilationError as error:
            return str(error)
        except Exception as error:  # noqa: BLE001  # whatever a compiler raises
            return f"{type(error).__name__}: {error}"


class Measure(NamedTuple):
    """A task: time candidates, each a few launches; the answer is µs of each, or why not.

    Before a candidate is launched for the first time, its number is said.
    """

    device: int
    candidates: Sequence[Sequence[Call]]
    seconds: float

    def run(self, say: Callable[[Any], None]) -> list[float | str]:
        """Launches all of them in shuffled order, again and again, while time lasts."""
        device = torch.device("cuda", self.device)
        with torch.cuda.device(device), torch.no_grad():
            room = Room(device)
            found: list[float | str] = []
            runs: dict[int, Callable[[], None]] = {}
            for number, calls in enumerate(self.candidates):
                say(number)
                try:
                    room.prepare(calls)
                    runs[number] = _started(room, calls)
                    found.append("not timed")
                except Exception as error:  # noqa: BLE001  # out of memory, or what a driver says
                    found.append(f"{type(error).__name__}: {error}".splitlines()[0])
            say(len(self.candidates))
            for number, microseconds in _timed(runs, self.seconds).items():
                found[number] = microseconds
        del room, runs
        torch.cuda.empty_cache()
        return found


class _Sizes(Room):
    """Memory without numbers."""

    def prepare(self, calls: Sequence[Call]) -> None:
        for call in calls:
            for view in views(call):
                self.bases[view.base] = torch.empty(1, device=NOWHERE)

    def tensor(self, view: Any) -> torch.Tensor:
        dtype = getattr(torch, view.dtype)
        return torch.empty_strided(view.shape, view.strides, dtype=dtype, device=NOWHERE)


def _pretend(target: Target) -> None:
    """Lets Triton believe in a device of this kind: compiling needs none."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    class Absent:
        def get_current_target(self) -> Any:
            return GPUTarget(target.backend, target.arch, target.warp)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

    driver.set_active(Absent())


def _started(room: Room, calls: Sequence[Call]) -> Callable[[], None]:
    """What makes these calls; it has made them once, and they ended."""
    runs = [_callable(room, call) for call in calls]

    def run() -> None:
        for each in runs:
            each()

    run()
    torch.cuda.synchronize()
    run()
    torch.cuda.synchronize()
    return run


def _callable(room: Room, call: Call) -> Callable[[], Any]:
    if not isinstance(call, KernelCall):
        left, right = room.tensor(call.left), room.tensor(call.right)
        return lambda: library_product(left, right, getattr(torch, call.dtype))
    launcher = Launcher(modules.function(call.text), call.constants, call.options)
    given = [room.argument(a) for a in call.arguments]
    return lambda: launcher(call.grid, given, room.device)


def _timed(runs: dict[int, Callable[[], None]], seconds: float) -> dict[int, float]:
    """The median time of each in microseconds, under load."""
    if not runs:
        return {}
    counts = {number: _count(run) for number, run in runs.items()}
    samples: dict[int, list[float]] = {number: [] for number in runs}
    start, rounds = time.perf_counter(), 0
    while rounds < FEWEST or time.perf_counter() - start < seconds:
        rounds += 1
        order = list(runs)
        random.shuffle(order)
        torch.cuda._sleep(BACKLOG)
        pairs = [(number, _between_events(runs[number], counts[number])) for number in order]
        torch.cuda.synchronize()
        for number, (first, last) in pairs:
            samples[number].append(first.elapsed_time(last) / counts[number] * 1e3)
    return {number: statistics.median(found) for number, found in samples.items()}


def _count(run: Callable[[], None]) -> int:
    first, last = _between_events(run, 2)
    torch.cuda.synchronize()
    once = max(first.elapsed_time(last) / 2, 1e-3)
    return max(1, min(MOST, round(SAMPLE / once)))


def _between_events(run: Callable[[], None], count: int) -> tuple[Any, Any]:
    run()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(count):
        run()
    last.record()
    return first, last


# --- the process ----------------------------------------------------------------------------------


def send(stream: BinaryIO, value: Any) -> None:
    """Writes a value behind its length."""
    content = pickle.dumps(value)
    stream.write(struct.pack("<Q", len(content)) + content)
    stream.flush()


def receive(stream: BinaryIO) -> Any:
    """The next value; EOFError if there is none."""
    head = stream.read(8)
    if len(head) < 8:
        raise EOFError
    return pickle.loads(stream.read(struct.unpack("<Q", head)[0]))


def main() -> None:
    """Answers tasks until there are no more: `(False, said)` underway, `(True, answer)` at last."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while True:
        try:
            task = receive(sys.stdin.buffer)
        except EOFError:
            return
        send(answers, (True, task.run(lambda said: send(answers, (False, said)))))


if __name__ == "__main__":
    main()
