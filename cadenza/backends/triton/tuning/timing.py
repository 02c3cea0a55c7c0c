"""The time of each of several calls on a GPU, under load, in turns."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import torch

Key = TypeVar("Key", bound=Hashable)
Run = Callable[[], None]
SAMPLE = 2.0  # milliseconds of launches between two events
MOST = 20  # launches between two events
BACKLOG = 2_000_000  # cycles that the GPU waits, so that the host is ahead of it
FEWEST = 3  # rounds, however long they take
ORDER = random.Random()  # of its own: Python's is the caller's


def timed(runs: Mapping[Key, Run], seconds: float) -> dict[Key, float]:
    """The median time of each in microseconds, under load, launched in shuffled order."""
    if not runs:
        return {}
    counts = {key: _count(run) for key, run in runs.items()}
    samples: dict[Key, list[float]] = {key: [] for key in runs}
    start, rounds = time.perf_counter(), 0
    while rounds < FEWEST or time.perf_counter() - start < seconds:
        rounds += 1
        order = list(runs)
        ORDER.shuffle(order)
        torch.cuda._sleep(BACKLOG)
        pairs = [(key, _between_events(runs[key], counts[key])) for key in order]
        torch.cuda.synchronize()
        for key, (first, last) in pairs:
            samples[key].append(first.elapsed_time(last) / counts[key] * 1e3)
    return {key: statistics.median(found) for key, found in samples.items()}


def _count(run: Run) -> int:
    first, last = _between_events(run, 2)
    torch.cuda.synchronize()
    once = max(first.elapsed_time(last) / 2, 1e-3)
    return max(1, min(MOST, round(SAMPLE / once)))


def _between_events(run: Run, count: int) -> tuple[Any, Any]:
    run()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(count):
        run()
    last.record()
    return first, last
