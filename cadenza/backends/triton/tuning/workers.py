"""Worker processes: started when they are needed, ended when they hang or have been idle long.

One compiles, and forks a process for each kernel; one launches.
"""

from __future__ import annotations

import atexit
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from cadenza.backends.triton import settings
from cadenza.backends.triton.tuning.worker import send

Hear = Callable[[Any], None]
ROOT = Path(__file__).resolve().parents[4]
IDLE = 60.0  # seconds after which processes without a task end


class Hangs(Exception):
    """A worker did not answer in time, or ended; `said` is the last that it said underway."""

    def __init__(self, problem: str, said: Any) -> None:
        super().__init__(problem)
        self.said = said


def _nothing(said: Any) -> None:
    """Hears nothing."""


class Worker:
    """One process."""

    def __init__(self, kind: str) -> None:
        environment = settings.loaded(os.environ)
        environment.pop("TRITON_INTERPRET", None)
        paths = [str(ROOT), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(p for p in paths if p)
        environment |= {"OMP_NUM_THREADS": "1", "CADENZA_TUNE": "off"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "cadenza.backends.triton.tuning.worker", kind],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            env=environment, start_new_session=True,
        )  # fmt: skip
        self.buffer = b""

    def ask(self, task: Any, seconds: float, hear: Hear = _nothing) -> Any:
        """The answer to a task; Hangs, and the process is ended, if there is none in time."""
        said, until = None, time.monotonic() + seconds
        try:
            assert self.process.stdin is not None
            send(self.process.stdin, task)
            while True:
                final, value = self._next(until)
                if final:
                    return value
                said = value
                hear(value)
        except (OSError, EOFError, TimeoutError) as error:
            self.end()
            problem = "no answer in time" if isinstance(error, TimeoutError) else "the process died"
            raise Hangs(problem, said) from error

    def end(self) -> None:
        """Ends the process."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # with what it has forked
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def _next(self, until: float) -> Any:
        head = self._read(8, until)
        return pickle.loads(self._read(struct.unpack("<Q", head)[0], until))

    def _read(self, count: int, until: float) -> bytes:
        assert self.process.stdout is not None
        handle = self.process.stdout.fileno()
        while len(self.buffer) < count:
            ready, _, _ = select.select([handle], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise TimeoutError
            more = os.read(handle, 1 << 20)
            if not more:
                raise EOFError
            self.buffer += more
        found, self.buffer = self.buffer[:count], self.buffer[count:]
        return found


class Workers:
    """Processes by what they are for; each is used by one thread at a time."""

    def __init__(self) -> None:
        self.free: dict[str, list[Worker]] = {}
        self.lock = threading.Lock()
        self.timer: threading.Timer | None = None
        atexit.register(self.end)

    def ask(self, task: Any, seconds: float, kind: str, hear: Hear = _nothing) -> Any:
        """The answer of a free process, or of a new one; Hangs as Worker.ask."""
        with self.lock:
            free = self.free.setdefault(kind, [])
            worker = free.pop() if free else Worker(kind)
        answer = worker.ask(task, seconds, hear)
        with self.lock:
            self.free.setdefault(kind, []).append(worker)
        self._end_later()
        return answer

    def prepare(self, kind: str) -> None:
        """Starts a process for the next task if none is free: it loads what it needs meanwhile."""
        with self.lock:
            if not self.free.get(kind):
                self.free[kind] = [Worker(kind)]
        self._end_later()

    def _end_later(self) -> None:
        with self.lock:
            if self.timer is not None:
                self.timer.cancel()
            self.timer = threading.Timer(IDLE, self.end)
            self.timer.daemon = True
            self.timer.start()

    def end(self) -> None:
        """Ends all processes that have nothing to do."""
        with self.lock:
            idle = [worker for free in self.free.values() for worker in free]
            self.free.clear()
        for worker in idle:
            worker.end()


WORKERS = Workers()
