"""The time of each of several calls on a GPU, under load: in turns, and by itself.

In turns all have one clock, and the fewest cycles win. Large products run at the power limit, where
the clock is what a kernel's own energy leaves: by itself for a while, as in training, the least
energy wins. Of two kernels of equal cycles one can take 8 % longer then.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, TypeVar

import torch

Key = TypeVar("Key", bound=Hashable)
Run = Callable[[], None]
SAMPLE = 2.0  # milliseconds of launches between two events
MOST = 20  # launches between two events, in turns
BACKLOG = 2_000_000  # cycles that the GPU waits, so that the host is ahead of it
SETTLES = 0.8  # of the time that a call has by itself, until its clock has settled
SAMPLES, LEAST = 20, 5  # of a call by itself: fewer only where one call fills a sample
ORDER = random.Random()  # of its own: Python's is the caller's


def timed(runs: Mapping[Key, Run], seconds: float) -> dict[Key, float]:
    """The median time of each in microseconds, under load, launched in shuffled order."""
    if not runs:
        return {}
    once = {key: _once(run) for key, run in runs.items()}
    samples: dict[Key, list[float]] = {key: [] for key in runs}
    left = seconds if sum(once.values()) < 1e3 * seconds else 0.0
    taken = 0.0  # by the last round
    while left > taken:
        start, order = time.perf_counter(), list(runs)
        ORDER.shuffle(order)
        torch.cuda._sleep(BACKLOG)
        pairs = [(key, _between_events(runs[key], *_counted(once[key]))) for key in order]
        torch.cuda.synchronize()
        for key, (first, last) in pairs:
            samples[key].append(first.elapsed_time(last) / _counted(once[key])[0] * 1e3)
        taken = time.perf_counter() - start
        left -= taken
    return {key: statistics.median(found or [once[key] * 1e3]) for key, found in samples.items()}


def spent(microseconds: Iterable[float], seconds: float) -> float:
    """The seconds that `timed` took at most, of the times that it found."""
    once = [us / 1e3 for us in microseconds]
    a_round = sum(ms * sum(_counted(ms)) for ms in once) / 1e3
    gauged = sum(once) / 1e3
    return gauged + (max(seconds, a_round) if gauged < seconds else 0.0)


def timed_alone(runs: Mapping[Key, Run], seconds: float) -> dict[Key, float]:
    """The median time of each in microseconds once its clock has settled, one after the other."""
    found = {}
    for key, run in runs.items():
        once = _once(run)
        fitting, more = 1e3 * seconds / len(runs) / once - 1, _counted(once)[1]
        samples = max(LEAST if more else 1, min(SAMPLES, int(fitting / (1 + more))))
        count = max(1, int(fitting / samples) - more)
        torch.cuda._sleep(BACKLOG)
        pairs = [_between_events(run, count, more) for _ in range(samples)]
        torch.cuda.synchronize()
        settled = pairs[int(SETTLES * samples) :]
        times = [first.elapsed_time(last) / count * 1e3 for first, last in settled]
        found[key] = statistics.median(times)
    return found


def _counted(milliseconds: float) -> tuple[int, int]:
    """Launches in a sample of such calls, and how many more before it: none where one fills it."""
    return max(1, min(MOST, round(SAMPLE / milliseconds))), int(milliseconds < SAMPLE)


def _once(run: Run) -> float:
    """Milliseconds of a call that was made before, about."""
    first, last = _between_events(run, 1, 0)
    torch.cuda.synchronize()
    return max(first.elapsed_time(last), 1e-3)


def _between_events(run: Run, count: int, more: int) -> tuple[Any, Any]:
    for _ in range(more):
        run()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(count):
        run()
    last.record()
    return first, last
