"""Measures one case: each variant made ready and called once, then all of them side by side."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from cadenza.tools.bench.case import Bench, Case, Record, Unavailable
from cadenza.tools.bench.machine import Meter
from cadenza.tools.bench.measurement import Calls, measure, stopwatch
from cadenza.tools.bench.stage import UNCOMPARED, Stage
from cadenza.tools.memory import PeakMemory

REASON = 300  # characters of why a variant failed that are kept


def contest(make: Callable[[Case, torch.device], Stage], case: Case, bench: Bench) -> list[Record]:
    """A record for each variant: its times, or why there are none."""
    forget()
    stage = make(case, bench.device)
    with torch.set_grad_enabled(stage.gradients):
        ready, found = _prepared(stage, bench)
        found |= _measured(ready, found, bench)
    work = stage.work()
    facts = {"flops": work.flops, "bytes": work.bytes, **stage.facts()}
    return [{"variant": variant, **facts, **found[variant]} for variant in bench.variants]


def _prepared(stage: Stage, bench: Bench) -> tuple[dict[str, Calls], dict[str, Record]]:
    """The calls of variants that can be called, and what is known of each so far."""
    ready: dict[str, Calls] = {}
    found: dict[str, Record] = {}
    for variant in bench.variants:
        try:
            calls, seconds = _first_call(stage, variant)
            found[variant] = {"first_call_s": round(seconds, 3)}
            if stage.peaks and variant not in UNCOMPARED:
                found[variant]["peak_bytes"] = peak(calls, stage.device)
            ready[variant] = calls
        except Exception as error:  # noqa: BLE001  # whatever fails is that variant's result
            found[variant] = failure(error)
            _let_go()
        bench.say(_told(variant, found[variant]))
    return ready, found


def _first_call(stage: Stage, variant: str) -> tuple[Calls, float]:
    start = time.perf_counter()
    calls = stage.calls(variant)
    calls[0]()
    stopwatch(stage.device).finish()
    seconds = time.perf_counter() - start
    for call in calls[1:]:
        call()
    stopwatch(stage.device).finish()
    return calls, seconds


def peak(calls: Calls, device: torch.device) -> int:
    """Bytes allocated at most during a call, less those allocated before."""
    stopwatch(device).finish()
    memory = PeakMemory(device)
    kept = calls[0]()
    stopwatch(device).finish()
    most = memory.bytes()
    del kept
    return most


def _measured(ready: dict[str, Calls], found: dict[str, Record], bench: Bench) -> dict[str, Record]:
    try:
        with Meter(bench.device) as meter:
            samples = measure(ready, bench.effort, stopwatch(bench.device)) if ready else {}
    except Exception as error:  # noqa: BLE001  # all at once may be too much where each alone isn't
        return {variant: found[variant] | failure(error) for variant in ready}
    means = meter.means()
    return {v: found[v] | timing(seconds) | means for v, seconds in samples.items()}


def timing(seconds: Sequence[float]) -> Record:
    """Samples as microseconds: median, quartiles, all."""
    all_of_them = [float(f"{1e6 * s:.6g}") for s in seconds]
    found = statistics.quantiles(all_of_them, n=4, method="inclusive")
    lower, median, upper = (round(value, 3) for value in found)
    return {"us": median, "quartiles": [lower, upper], "samples": all_of_them}


def failure(error: BaseException) -> Record:
    """Why there is no figure, in one line."""
    text = " ".join(str(error).split()) or "no reason given"
    reason = text if isinstance(error, Unavailable) else f"{type(error).__name__}: {text}"
    return {"failed": reason[:REASON]}


def _told(variant: str, record: dict[str, Any]) -> str:
    if "failed" in record:
        return f"  {variant}: {record['failed']}"
    return f"  {variant}: first call {record['first_call_s']:.2f} s"


def _let_go() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def forget() -> None:
    """Gives back what the case before left: memory, and compiled forms of the same functions."""
    torch.compiler.reset()
    _let_go()
