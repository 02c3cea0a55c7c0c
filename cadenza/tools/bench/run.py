"""Runs `cadenza bench`: measures the cases asked for one by one, and keeps each result at once."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cadenza.tools.atomic import prepare_folder
from cadenza.tools.bench import results
from cadenza.tools.bench.case import Bench, Case, Record, Suite
from cadenza.tools.bench.contest import failure
from cadenza.tools.bench.machine import new_run
from cadenza.tools.bench.measurement import Effort, stopwatch
from cadenza.tools.bench.options import Options
from cadenza.tools.bench.suites import SUITES, chosen_cases, chosen_variants, find_suite
from cadenza.tools.bench.tables import show
from cadenza.tools.fault import Fault


def run_bench(name: str | None, options: Options, *, mode: str, shown: bool, as_json: bool) -> int:
    """Measure a suite, or only show or merge results; 1 if no variant of any case has a figure.

    Raises Fault for a suite, pattern, size, variant, dtype, device or shard that there is not.
    """
    folder = Path(options.out)
    if options.merge:
        return _merge(options.merge, folder, as_json)
    if shown:
        names = [find_suite(name).name] if name else list(SUITES)
        return _show(folder, names, as_json)
    suite = find_suite(name)
    cases, variants = chosen_cases(suite, options), chosen_variants(suite, options)
    device, effort = _device(options.device), Effort(_seconds(options.seconds), mode)
    suite.check(cases, options.text)
    prepare_folder(folder)
    results.load(folder, suite.name)
    bench = Bench(device, variants, effort, print, options.text)
    run = _Run(suite, bench, folder, options.shard or "1/1")
    records = run.measure(cases)
    _print([results.Results(suite.name, run.runs, records)], as_json)
    _draw(results.load(folder, suite.name), folder)
    return 0 if not records or any("failed" not in record for record in records) else 1


class _Run:
    """One run: its cases share a name under which ratios are formed."""

    def __init__(self, suite: Suite, bench: Bench, folder: Path, shard: str) -> None:
        self.suite, self.folder = suite, folder
        self.name, facts = new_run(bench.device, shard)
        self.runs = {self.name: facts}
        self.mode = bench.effort.mode if suite.timed else ""
        self.console = Console(stderr=True, highlight=False)
        self.bench = bench._replace(say=self._say)

    def _say(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)

    def measure(self, cases: Sequence[Case]) -> list[Record]:
        """Every case, written when it is done; the records."""
        made: list[Record] = []
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
        terminal = self.console.is_terminal
        with Progress(
            *columns, TimeElapsedColumn(), console=self.console, disable=not terminal
        ) as bar:
            task = bar.add_task(self.suite.name, total=len(cases))
            for number, case in enumerate(cases, 1):
                bar.update(task, description=str(case))
                self._say(f"[{number}/{len(cases)}] {case}")
                made += self._case(case)
                bar.advance(task)
                if not self._device_answers():
                    self._say("the GPU has failed, and answers this process no more: stopped here")
                    break
        return made

    def _device_answers(self) -> bool:
        # An illegal access by any variant ends the context; what came after would only fail.
        try:
            stopwatch(self.bench.device).finish()
        except RuntimeError:
            return False
        return True

    def _case(self, case: Case) -> list[Record]:
        start = time.perf_counter()
        common = {
            "device": self.runs[self.name]["device"],
            "pattern": case.pattern,
            "size": case.size,
            "sizes": dict(case.sizes),
            "dtype": case.dtype,
            "mode": self.mode,
            "run": self.name,
        }
        found = [{**common, **record} for record in self._measured(case)]
        results.add(self.folder, results.Results(self.suite.name, self.runs, found))
        self._say(f"  {_figures(found)} ({time.perf_counter() - start:.1f} s)")
        return found

    def _measured(self, case: Case) -> list[Record]:
        try:
            return self.suite.run(case, self.bench)
        except Exception as error:  # noqa: BLE001  # operands that don't fit the memory, mostly
            self._say(f"  {failure(error)['failed']}")
            return [{"variant": variant, **failure(error)} for variant in self.bench.variants]


def _figures(records: Sequence[Record]) -> str:
    timed = [f"{record['variant']} {record['us']:,.1f} µs" for record in records if "us" in record]
    return ", ".join(timed) or "measured"


def _device(name: str | None) -> torch.device:
    there = torch.cuda.is_available()
    name = name or ("cuda" if there else "cpu")
    if name not in ("cuda", "cpu"):
        raise Fault(f"unknown --device {name!r}: cuda or cpu")
    if name == "cuda" and not there:
        raise Fault(
            "--device cuda: torch sees no GPU; --device cpu measures the reference back end"
        )
    return torch.device(name)


def _seconds(seconds: float) -> float:
    if not 0.0 < seconds <= 600.0:
        raise Fault(f"--seconds {seconds:g} is no time to measure: above 0, and at most 600")
    return seconds


def _merge(folders: Sequence[str], out: Path, as_json: bool) -> int:
    for folder in map(Path, folders):
        found = [name for name in SUITES if results.path_of(folder, name).is_file()]
        if not found:
            raise Fault(f"--merge {folder} holds no results: {', '.join(SUITES)}, each a .json")
        prepare_folder(out)
        for name in found:
            _draw(results.add(out, results.load(folder, name)), out)
    return _show(out, list(SUITES), as_json)


def _draw(found: results.Results, folder: Path) -> None:
    from cadenza.tools.bench.pictures import draw_pictures  # matplotlib is slow to import

    draw_pictures(found, folder)


def _show(folder: Path, names: Sequence[str], as_json: bool) -> int:
    found = [one for one in (results.load(folder, name) for name in names) if one.records]
    if not found:
        raise Fault(f"no results of {', '.join(names)} in {folder}: measure some, or give --out")
    _print(found, as_json)
    return 0


def _print(found: Sequence[results.Results], as_json: bool) -> None:
    if as_json:
        print(json.dumps([_data(one) for one in found], indent=1, ensure_ascii=False))
        return
    for one in found:
        show(one)


def _data(one: results.Results) -> dict[str, Any]:
    """Without samples, with the ratios that they are for."""
    records = []
    for variants in results.cases(one.records):
        for name, record in variants.items():
            ratios = {
                other: results.ratio(record, r) for other, r in variants.items() if other != name
            }
            kept = {label: value for label, value in record.items() if label != "samples"}
            records.append({**kept, "ratios": {o: r for o, r in ratios.items() if r is not None}})
    return {"suite": one.suite, "runs": one.runs, "records": records}
