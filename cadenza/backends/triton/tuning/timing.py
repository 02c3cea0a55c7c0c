"""The time of each of several calls on a GPU, under load: in turns, and by itself.

In turns all have one clock, and the fewest cycles win. Large products run at the power limit, where
the clock is what a kernel's own energy leaves: by itself for a while, as in training, the least
energy wins. Of two kernels of equal cycles one can take 8 % longer then.
"""

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
MOST = 20  # launches between two events, in turns
BACKLOG = 2_000_000  # cycles that the GPU waits, so that the host is ahead of it
FEWEST = 3  # rounds, however long they take
SETTLES = 0.75  # of the time that a call has by itself, until its clock has settled
SAMPLES, LEAST = 20, 5  # of a call by itself: fewer only where one call fills a sample
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


def timed_alone(runs: Mapping[Key, Run], seconds: float) -> dict[Key, float]:
    """The median time of each in microseconds once its clock has settled, one after the other."""
    found = {}
    for key, run in runs.items():
        fitting = 1e3 * seconds / len(runs) / _once(run)
        samples = max(LEAST, min(SAMPLES, round(fitting / 2)))  # each begins with one call more
        count = max(1, round(fitting / samples) - 1)
        torch.cuda._sleep(BACKLOG)
        pairs = [_between_events(run, count) for _ in range(samples)]
        torch.cuda.synchronize()
        settled = pairs[int(SETTLES * samples) :]
        times = [first.elapsed_time(last) / count * 1e3 for first, last in settled]
        found[key] = statistics.median(times)
    return found


def _count(run: Run) -> int:
    return max(1, min(MOST, round(SAMPLE / _once(run))))


def _once(run: Run) -> float:
    """Milliseconds of a call, about."""
    first, last = _between_events(run, 2)
    torch.cuda.synchronize()
    return max(first.elapsed_time(last) / 2, 1e-3)


def _between_events(run: Run, count: int) -> tuple[Any, Any]:
    run()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(count):
        run()
    last.record()
    return first, last
