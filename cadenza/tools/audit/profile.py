"""A profile of PyTorch's, as its kernels with what launched each: read from a Chrome trace."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

from cadenza.tools.audit.sorting import sort_kernel

Event = Mapping[str, Any]
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
HOST = ("cpu_op", "user_annotation")
RUNTIME = ("cuda_runtime", "cuda_driver", "hip_runtime")


class Kernel(NamedTuple):
    """One launch as it was seen: its class of work and its seconds."""

    name: str
    kind: str
    seconds: float


def profiled(run: Callable[[], None]) -> list[Kernel]:
    """The kernels of what `run` does on the GPU."""
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as found:
        run()
        torch.cuda.synchronize()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        found.export_chrome_trace(str(path))
        return kernels_of(json.loads(path.read_text(encoding="utf-8"))["traceEvents"])


def kernels_of(events: Iterable[Event]) -> list[Kernel]:
    """The kernels of a trace, in order, sorted by class."""
    events = [event for event in events if event.get("ph") == "X"]
    launched = {_argument(e, "correlation"): e for e in events if e.get("cat") in RUNTIME}
    threads = _threads(events)
    found = []
    for event in sorted(events, key=lambda one: float(one["ts"])):
        if event.get("cat") in DEVICE:
            launch = launched.get(_argument(event, "correlation"))
            origins = threads[launch["tid"]].around(launch) if launch is not None else []
            kind = sort_kernel(event["name"], origins)
            found.append(Kernel(event["name"], kind, float(event["dur"]) * 1e-6))
    return found


def _argument(event: Event, name: str) -> Any:
    return event.get("args", {}).get(name)


class _Thread:
    """The operations of one thread, which lie within one another or apart."""

    def __init__(self, events: list[Event]) -> None:
        self.events = sorted(events, key=lambda e: (float(e["ts"]), -float(e["dur"])))
        self.starts = [float(event["ts"]) for event in self.events]
        self.outer: list[int] = []
        open_ones: list[int] = []
        for place, event in enumerate(self.events):
            while open_ones and _end(self.events[open_ones[-1]]) <= float(event["ts"]):
                open_ones.pop()
            self.outer.append(open_ones[-1] if open_ones else -1)
            open_ones.append(place)

    def around(self, launch: Event) -> list[str]:
        """The names of what a launch lies within, the innermost first."""
        place, names = bisect_right(self.starts, float(launch["ts"])) - 1, []
        while place >= 0:
            event = self.events[place]
            if _end(event) >= float(launch["ts"]):
                names.append(str(event["name"]))
            place = self.outer[place]
        return names


def _end(event: Event) -> float:
    return float(event["ts"]) + float(event["dur"])


def _threads(events: Iterable[Event]) -> dict[Any, _Thread]:
    by_thread: dict[Any, list[Event]] = defaultdict(list)
    for event in events:
        if event.get("cat") in (*HOST, *RUNTIME):
            by_thread[event["tid"]] += [event] if event["cat"] in HOST else []
    return {thread: _Thread(own) for thread, own in by_thread.items()}
