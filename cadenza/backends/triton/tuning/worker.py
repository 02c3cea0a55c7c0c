"""A process that compiles or launches what it is told, run as a module.

It answers each task on its standard output, as pickles behind their lengths; what the code that it
runs prints goes to standard error. A kernel that hangs, hangs here; the parent ends the process.
"""

from __future__ import annotations

import os
import pickle
import select
import struct
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, BinaryIO, NamedTuple

import torch

from cadenza.backends.triton import modules
from cadenza.backends.triton.compiled import CompilationError, Report, report_of
from cadenza.backends.triton.fallbacks import library_product
from cadenza.backends.triton.launch import Descriptor, Launcher
from cadenza.backends.triton.target import Target
from cadenza.backends.triton.tuning.recipes import NOWHERE, Call, KernelCall, Room, views
from cadenza.backends.triton.tuning.timing import timed, timed_alone

COMPILE, MEASURE = "compile", "measure"  # what processes are for; only one touches the GPU


EMPTY = """{prefix}


@{jit}
def kernel(x):
    pass
"""
PLAIN = EMPTY.format(prefix="import triton", jit="triton.jit")
GLUON = EMPTY.format(prefix="from triton.experimental import gluon", jit="gluon.jit")
WARM = KernelCall(PLAIN, {}, {"num_warps": 4}, (1, 1), (16,))


class Compile(NamedTuple):
    """A task: compile launches for a target, so many at a time.

    Of each, as it is done, its number and a Report, or why there is none, are said.
    """

    calls: Sequence[KernelCall]
    target: Target
    processes: int

    def run(self, say: Callable[[Any], None]) -> None:
        """Compiles each in a process forked from this one, which has loaded what that takes."""
        _pretend(self.target)
        _load(self.target)
        waiting = list(enumerate(self.calls))[::-1]
        running: dict[int, tuple[int, int]] = {}
        while waiting or running:
            while waiting and len(running) < self.processes:
                number, call = waiting.pop()
                process, handle = _forked(call, self.target)
                running[handle] = number, process
            for handle in select.select(list(running), [], [])[0]:
                number, process = running.pop(handle)
                with os.fdopen(handle, "rb") as answer:
                    say((number, _answer(answer)))
                os.waitpid(process, 0)


def _load(target: Target) -> None:
    """Loads what compiling takes, so that processes forked from this one have it."""
    for call in (WARM, WARM._replace(text=GLUON)):
        _compiled(call, target)


def _forked(call: KernelCall, target: Target) -> tuple[int, int]:
    """A process that compiles a launch, and where its answer can be read."""
    outlet, inlet = os.pipe()
    process = os.fork()
    if process:
        os.close(inlet)
        return process, outlet
    try:
        with os.fdopen(inlet, "wb") as answer:
            send(answer, _compiled(call, target))
    finally:
        os._exit(0)


def _answer(stream: BinaryIO) -> Any:
    try:
        return receive(stream)
    except EOFError:
        return "the compiler crashed"


def _compiled(call: KernelCall, target: Target) -> Report | str:
    """Compiles as a launch does, so that a launch finds it in Triton's cache."""
    room = _Sizes(NOWHERE)
    room.prepare([call])
    given = [room.argument(a) for a in call.arguments]
    given = [a.public() if isinstance(a, Descriptor) else a for a in given]
    try:
        function = modules.function(call.text)
        kernel = function.warmup(*given, grid=call.grid, **call.constants, **call.options)
        _link(kernel, target)
        return report_of(kernel, target)
    except CompilationError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001  # whatever a compiler raises
        return f"{type(error).__name__}: {error}"


def _link(kernel: Any, target: Target) -> None:
    """Builds the C function that launches it, which takes as long as the kernel."""
    if target.backend != "cuda":
        return
    from triton.backends.nvidia.driver import CudaLauncher

    with suppress(Exception):  # what fails here, a launch will say
        CudaLauncher(kernel.src, kernel.metadata)


class Measure(NamedTuple):
    """A task: time candidates, each a few launches; the answer is µs of each, or why not.

    Before a candidate is launched for the first time, its number is said.
    """

    device: int
    candidates: Sequence[Sequence[Call]]
    seconds: float
    alone: bool = False

    def run(self, say: Callable[[Any], None]) -> list[float | str]:
        """Launches all of them in shuffled order, again and again, or each by itself."""
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
            take = timed_alone if self.alone else timed
            for number, microseconds in take(runs, self.seconds).items():
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
    if sys.argv[1:] == [MEASURE]:
        torch.cuda.init()
    while True:
        try:
            task = receive(sys.stdin.buffer)
        except EOFError:
            return
        send(answers, (True, task.run(lambda said: send(answers, (False, said)))))


if __name__ == "__main__":
    main()
