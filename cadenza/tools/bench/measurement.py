"""Times variants side by side: in each round all of them, in shuffled order, on the same device.

Sustained: launches back to back, which is how training runs. On a GPU a whole round is enqueued
behind a wait on the device, so that the host is ahead, and there is one synchronisation a round.
Alone: the same, but each variant runs until the clock that its own power leaves has settled. Burst:
one launch after a pause. Samples are seconds a call, one a round for each variant.
"""

from __future__ import annotations

import gc
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import cycle
from typing import Any, NamedTuple

import torch

Call = Callable[[], Any]
Calls = Sequence[Call]  # of one variant on copies of its operands, taken in turn
Reading = Callable[[], float]

SAMPLE = 5e-3  # seconds that a sample should take
MOST_CALLS = 20  # of a sample
LONG = 20e-3  # a call as long as this needs none before it that isn't measured
LEAST_ROUNDS, MOST_ROUNDS = 5, 100
WARMING = 0.15  # of the time to measure, before it
PAUSE = 10e-3
SETTLES, BLOCK = 0.25, 0.15  # seconds that a variant runs alone, unmeasured and then measured
QUEUE = 1000  # calls, about, after which the host waits for a GPU
CYCLES = 2e9  # a second, at most, of a GPU's clock
LEAD = 300e-6  # how far the host is ahead at least


class Effort(NamedTuple):
    """How long to measure a variant, in seconds, and in which of `MODES`."""

    seconds: float = 1.0
    mode: str = "sustained"


class Entry:
    """A variant being measured: its calls, and what one takes of host and device, in seconds."""

    def __init__(self, calls: Calls) -> None:
        self._next = cycle(calls)
        self.host, self.device = 0.0, 0.0

    def call(self) -> None:
        """Runs the next of the calls."""
        next(self._next)()

    @property
    def calls(self) -> int:
        """How many calls a sample takes."""
        return min(MOST_CALLS, max(1, round(SAMPLE / max(self.device, 1e-9))))

    @property
    def ahead(self) -> int:
        """How many calls go before a sample, so that it starts as it goes on."""
        return int(self.device < LONG)

    @property
    def lag(self) -> float:
        """How much longer the host takes over a sample than the device, in seconds."""
        return (self.calls + self.ahead) * max(0.0, self.host - self.device)


class Stopwatch(ABC):
    """Takes the time of calls on one kind of device."""

    @abstractmethod
    def lead(self, seconds: float) -> None:
        """Lets the host get ahead of the device."""

    @abstractmethod
    def sample(self, entry: Entry, calls: int) -> Reading:
        """Starts some calls; what it returns gives seconds a call, once all is done."""

    @abstractmethod
    def finish(self) -> None:
        """Waits until all is done."""


class HostWatch(Stopwatch):
    """For a CPU, where a call is done when it returns."""

    def lead(self, seconds: float) -> None:
        """Nothing to get ahead of."""

    def sample(self, entry: Entry, calls: int) -> Reading:
        """By the host's clock."""
        start = time.perf_counter()
        for _ in range(calls):
            entry.call()
        taken = (time.perf_counter() - start) / calls
        return lambda: taken

    def finish(self) -> None:
        """All is done."""


class GpuWatch(Stopwatch):
    """For a GPU of CUDA, by events in its queue."""

    def lead(self, seconds: float) -> None:
        """Occupies the device."""
        torch.cuda._sleep(int(seconds * CYCLES))

    def sample(self, entry: Entry, calls: int) -> Reading:
        """By two events."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            entry.call()
        end.record()
        return lambda: start.elapsed_time(end) * 1e-3 / calls

    def finish(self) -> None:
        """Waits for the queue."""
        torch.cuda.synchronize()


def stopwatch(device: torch.device) -> Stopwatch:
    """The one for a device."""
    return GpuWatch() if device.type == "cuda" else HostWatch()


def measure(
    variants: Mapping[str, Calls], effort: Effort, watch: Stopwatch
) -> dict[str, list[float]]:
    """Samples by variant, of as many rounds as the effort allows; each has been called before."""
    entries = {name: Entry(calls) for name, calls in variants.items()}
    for entry in entries.values():
        gauge(entry, watch)
    one = MODES[effort.mode]
    budget = effort.seconds * len(entries)
    samples: dict[str, list[float]] = {name: [] for name in entries}
    with without_collection():
        for _ in _rounds(WARMING * budget, 1, MOST_ROUNDS):
            one(entries, watch)
        for _ in _rounds(budget, LEAST_ROUNDS, MOST_ROUNDS):
            gc.collect()
            for name, seconds in one(entries, watch).items():
                samples[name].append(seconds)
    return samples


@contextmanager
def without_collection() -> Iterator[None]:
    """Garbage is collected only when it is asked for, and then only what was made inside."""
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def _rounds(seconds: float, least: int, most: int) -> Iterator[int]:
    start = time.perf_counter()
    for done in range(most):
        if done >= least and time.perf_counter() - start > seconds:
            return
        yield done


def gauge(entry: Entry, watch: Stopwatch) -> None:
    """Finds what a call takes of the host, then of the device while the host is ahead."""
    watch.finish()
    start = time.perf_counter()
    entry.call()
    entry.host = time.perf_counter() - start
    watch.finish()
    watch.lead(4 * entry.host + LEAD)
    entry.call()
    reading = watch.sample(entry, 2)
    watch.finish()
    entry.device = reading()


def sustained_round(entries: Mapping[str, Entry], watch: Stopwatch) -> dict[str, float]:
    """A sample of each, back to back."""
    watch.lead(1.5 * sum(entry.lag for entry in entries.values()) + LEAD)
    readings = {}
    for name in shuffled(entries):
        entry = entries[name]
        for _ in range(entry.ahead):
            entry.call()
        readings[name] = watch.sample(entry, entry.calls)
    watch.finish()
    return {name: reading() for name, reading in readings.items()}


def alone_round(entries: Mapping[str, Entry], watch: Stopwatch) -> dict[str, float]:
    """A sample of each, after it alone has run for a while."""
    readings = {}
    for name in shuffled(entries):
        entry = entries[name]
        settles, calls = (max(1, round(t / max(entry.device, 1e-9))) for t in (SETTLES, BLOCK))
        behind = min(settles + calls, QUEUE) * max(0.0, entry.host - entry.device)
        watch.lead(1.5 * behind + LEAD)
        for _ in range(settles):
            entry.call()
        readings[name] = watch.sample(entry, calls)
        watch.finish()
    return {name: reading() for name, reading in readings.items()}


def burst_round(entries: Mapping[str, Entry], watch: Stopwatch) -> dict[str, float]:
    """One call of each, on a device that has rested."""
    found = {}
    for name in shuffled(entries):
        watch.finish()
        time.sleep(PAUSE)
        watch.lead(1.5 * max(0.0, entries[name].host - entries[name].device) + LEAD / 3)
        reading = watch.sample(entries[name], 1)
        watch.finish()
        found[name] = reading()
    return found


MODES = {"sustained": sustained_round, "alone": alone_round, "burst": burst_round}


def shuffled(names: Mapping[str, Any]) -> list[str]:
    """The names in a new order."""
    return random.sample(list(names), len(names))
