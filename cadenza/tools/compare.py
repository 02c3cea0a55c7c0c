"""`cadenza train --compare`: Cadenza's model against its twin in stock PyTorch.

Three trainings from the same weights on the same batches, one after another, each in a process of
its own: ours, the stock twin, and a stock twin whose weights were moved by one unit in the last
place. The last shows how far rounding alone drives two trainings apart.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import cadenza
from cadenza.tools.atomic import write_whole
from cadenza.tools.contender import OURS, PERTURBED, STOCK, TIMING, Request
from cadenza.tools.corpus import corpus_of
from cadenza.tools.plot import comparison_plot
from cadenza.tools.runs import COMPARISON, COMPARISON_PLOT, fresh_folder, fresh_settings
from cadenza.tools.settings import COMPARED_STEPS, Settings, check_steps
from cadenza.tools.trainer import device_named
from cadenza.tools.verdict import LIMITS, Bound, Drift, bounds, drift

PARTS = (OURS, STOCK, PERTURBED, TIMING)
Results = dict[str, Any]


class PartError(Exception):
    """A part of the comparison ended early and has said why; with its exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def compare(given: dict[str, Any], *, out: str | None, steps: int | None) -> int:
    """Train all three and report; 0 if every bound holds, 1 if not. Raises Fault on bad input."""
    settings = fresh_settings(given)
    steps = COMPARED_STEPS[settings.arithmetic] if steps is None else steps
    check_steps(steps)
    device_named(settings.device)
    unit = corpus_of(settings).tokenizer.unit
    folder = fresh_folder(out)
    print(f"comparison in {folder}: {steps} steps in {settings.arithmetic}", flush=True)
    try:
        results = {part: measure(part, settings, steps) for part in PARTS}
    except PartError as error:
        _remove_if_empty(folder)
        return error.code
    except KeyboardInterrupt:
        _remove_if_empty(folder)
        print("stopped; a comparison is not resumed, start it again")
        return 130
    return _report(folder, settings, results, unit)


def measure(part: str, settings: Settings, steps: int) -> Results:
    """The result of one part, from a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        request = Request(part, settings, steps, str(Path(folder, "result.json")))
        code = launch(request)
        if code:
            raise PartError(code)
        return json.loads(Path(request.result).read_text())


def launch(request: Request) -> int:
    """Have a new process answer the request; its exit code."""
    # A checkout in which nothing is installed is on our path, not on a new process's.
    source = str(Path(cadenza.__file__).parent.parent)
    path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "cadenza.tools.contender"]
    environment = os.environ | {"PYTHONPATH": path}
    run = subprocess.run(command, input=request.to_json(), text=True, env=environment, check=False)
    return run.returncode


def _remove_if_empty(folder: Path) -> None:
    if not any(folder.iterdir()):
        folder.rmdir()


def _report(folder: Path, settings: Settings, results: Results, unit: str) -> int:
    drifts = {part: drift(results[part], results[STOCK]) for part in (OURS, PERTURBED)}
    verdict = bounds(settings.arithmetic, drifts[OURS], drifts[PERTURBED])
    passed = all(bound.holds for bound in verdict)
    report = _as_json(settings, results, drifts, verdict)
    write_whole(folder / COMPARISON, json.dumps(report, indent=1).encode())
    write_whole(folder / COMPARISON_PLOT, _picture(settings, results, drifts, unit))
    print("\n".join(_lines(results, drifts, verdict)))
    print(f"written: {folder / COMPARISON}, {folder / COMPARISON_PLOT}")
    return 0 if passed else 1


def _as_json(
    settings: Settings, results: Results, drifts: dict[str, Drift], verdict: list[Bound]
) -> Results:
    return {
        "settings": dataclasses.asdict(settings),
        "steps": len(results[STOCK]["training"]),
        "contenders": {part: results[part] for part in (OURS, STOCK, PERTURBED)},
        "largest_differences": {
            part: {
                "training": max(one.training),
                "validation": max(one.validation.values()),
            }
            for part, one in drifts.items()
        },
        "interleaved_seconds_per_step": results[TIMING],
        "bounds": [dataclasses.asdict(bound) | {"holds": bound.holds} for bound in verdict],
        "passed": all(bound.holds for bound in verdict),
    }


def _picture(settings: Settings, results: Results, drifts: dict[str, Drift], unit: str) -> bytes:
    curves = {
        part: (
            results[part]["training"],
            {point["step"]: point["loss"] for point in results[part]["validation"]},
        )
        for part in (OURS, STOCK, PERTURBED)
    }
    differences = {part: one.training for part, one in drifts.items()}
    limit, _ = LIMITS.get(settings.arithmetic, (None, 0))
    return comparison_plot(curves, differences, limit, unit)


def _lines(results: Results, drifts: dict[str, Drift], verdict: list[Bound]) -> list[str]:
    lines = [f"{'':<10} {'held-out loss':>14} {'time a step':>12} {'peak memory':>12}"]
    for part in (OURS, STOCK, PERTURBED):
        result = results[part]
        loss, seconds = result["validation"][-1]["loss"], result["seconds_per_step"]
        size = f"{result['peak_bytes'] / 2**20:.0f} MiB"
        lines.append(f"{part:<10} {loss:>14.4f} {seconds * 1e3:>9.1f} ms {size:>12}")
    lines.append(f"time a step, taken in turn: {_timing(results[TIMING])}")
    for part, one in drifts.items():
        largest = f"training {max(one.training):.2e}, held out {max(one.validation.values()):.2e}"
        lines.append(f"largest relative difference, {part} from stock: {largest}")
    for bound in verdict:
        mark = "pass" if bound.holds else "FAIL"
        lines.append(f"{mark}: {bound.name}: {bound.value:.2e}, at most {bound.limit:.0e}")
    return lines


def _timing(timing: Results) -> str:
    if not timing:
        return f"{OURS} and {STOCK} don't fit in memory together"
    ours, stock = timing[OURS] * 1e3, timing[STOCK] * 1e3
    return f"{OURS} {ours:.1f} ms, {STOCK} {stock:.1f} ms, ratio {timing['ratio']:.2f}"
