"""Results on disk: one file a suite, a record for each variant of each case, the last one measured.

Ratios are formed within one run, round by round: what was measured at other times, or elsewhere,
says nothing about them. Files are written whole, under a lock, after every case.
"""

from __future__ import annotations

import fcntl
import json
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cadenza.tools.atomic import write_whole
from cadenza.tools.bench.case import Record
from cadenza.tools.fault import Fault

KEY = ("device", "pattern", "size", "dtype", "mode", "variant")


@dataclass
class Results:
    """Records of one suite, and the runs that they are of, by name."""

    suite: str
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)

    def merge(self, other: Results) -> None:
        """Takes over records; of two for the same the later run's stays, the other's if equal.

        A failure takes no figure away: the record keeps it, with the failure as `failed_since`.
        """
        known = {key(record): record for record in self.records}
        runs = {**self.runs, **other.runs}
        for record in other.records:
            old = known.get(key(record))
            known[key(record)] = record if old is None else _of_both(old, record, runs)
        self.records = list(known.values())
        used = {record["run"] for record in self.records}
        self.runs = {name: run for name, run in runs.items() if name in used}

    def text(self) -> str:
        """As JSON, one line a record."""
        runs = ",\n".join(f"  {_line(name)}: {_line(run)}" for name, run in self.runs.items())
        records = ",\n".join(f"  {_line(record)}" for record in self.records)
        return (
            f'{{"suite": {_line(self.suite)},\n "runs": {{\n{runs}\n }},\n'
            f' "records": [\n{records}\n ]}}\n'
        )


def _of_both(old: Record, new: Record, runs: Mapping[str, Mapping[str, Any]]) -> Record:
    """What two records of the same tell: the later figure, and a failure that came after it."""
    by_date = sorted((old, new), key=lambda record: runs[record["run"]]["date"])
    measured = [record for record in by_date if "failed" not in record]
    if not measured:
        return by_date[-1]
    date = runs[measured[-1]["run"]]["date"]
    failures = [one["failed_since"] for one in measured if "failed_since" in one]
    failures += [
        {"date": runs[one["run"]]["date"], "reason": one["failed"]}
        for one in by_date
        if "failed" in one
    ]
    since = max(failures, key=lambda failure: str(failure["date"]), default=None)
    kept = {name: value for name, value in measured[-1].items() if name != "failed_since"}
    return {**kept, "failed_since": since} if since and since["date"] > date else kept


def standing(records: Sequence[Record]) -> list[Record]:
    """The records as they stand: a figure that a later run could not repeat has failed."""
    return [
        {name: record[name] for name in (*KEY, "run")}
        | {"failed": record["failed_since"]["reason"]}
        if "failed_since" in record
        else record
        for record in records
    ]


def _line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def key(record: Record) -> tuple[Any, ...]:
    """What a record is about; there is one for each."""
    return tuple(record[name] for name in KEY)


def ratio(record: Record, other: Record) -> float | None:
    """How many times as long a record's variant takes as the other: the median over rounds.

    None unless both were timed in the same run.
    """
    if record["run"] != other["run"] or not {"samples"} <= record.keys() & other.keys():
        return None
    pairs = zip(record["samples"], other["samples"], strict=True)
    return statistics.median(mine / theirs for mine, theirs in pairs)


def cases(records: Sequence[Record]) -> Iterator[dict[str, Record]]:
    """The records of each case, by variant."""
    found: dict[tuple[Any, ...], dict[str, Record]] = {}
    for record in records:
        found.setdefault(key(record)[:-1], {})[record["variant"]] = record
    yield from found.values()


def path_of(folder: Path, suite: str) -> Path:
    """Where a suite's results are."""
    return folder / f"{suite}.json"


def load(folder: Path, suite: str) -> Results:
    """A suite's results, none where there is no file. Raises Fault for a file that isn't one."""
    path = path_of(folder, suite)
    if not path.is_file():
        return Results(suite)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        results = Results(found["suite"], found["runs"], found["records"])
        if any(record["run"] not in results.runs for record in results.records):
            raise KeyError("run")
        list(map(key, results.records))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise Fault(
            f"{path} holds no results ({type(error).__name__}): move it away, or choose --out"
        ) from None
    return results


def add(folder: Path, new: Results) -> Results:
    """Puts records into a suite's file; all that it holds then."""
    with _locked(folder):
        results = load(folder, new.suite)
        results.merge(new)
        write_whole(path_of(folder, new.suite), results.text().encode())
    return results


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time: shards may write to the same folder."""
    held = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)
