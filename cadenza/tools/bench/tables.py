"""Results as tables: a row a case, a column a variant, its time and how it compares to ours."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from rich.console import Console
from rich.table import Table

from cadenza.core.cost import Work
from cadenza.tools.bench.case import DTYPES, Record
from cadenza.tools.bench.machine import known_gpu
from cadenza.tools.bench.results import Results, cases, ratio, standing
from cadenza.tools.bench.stage import UNCOMPARED, VARIANTS

Case = Mapping[str, Record]
GROUP = ("device", "dtype", "mode")
COMPILED = ("compile", "autotune")
NONE = "–"
GIB = 2**30
WIDE = 220  # columns where there is no terminal that has its own


def show(results: Results, console: Console | None = None) -> None:
    """Prints all tables of a suite, and why figures are missing."""
    console = console or Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDE
    groups: dict[tuple[str, ...], list[Record]] = {}
    for record in standing(results.records):
        groups.setdefault(tuple(record[name] for name in GROUP), []).append(record)
    for (device, dtype, mode), records in groups.items():
        title = ", ".join(filter(None, (results.suite, dtype, mode, device)))
        for table in tables_of(title, records):
            console.print(table)
        for line in failures(records):
            console.print(line, markup=False)


def tables_of(title: str, records: Sequence[Record]) -> list[Table]:
    """The tables of records of one device, dtype and mode."""
    if any("errors" in record for record in records):
        return [error_table(title, records)]
    if any("host_us" in record for record in records):
        return [host_table(title, records)]
    if any("held_out" in record for record in records):
        return [loss_table(title, records)]
    makers = {"tokens": rate_table, "peak_bytes": peak_table}
    about = {name: [record for record in records if name in record] for name in makers}
    more = [make(title, about[name]) for name, make in makers.items() if about[name]]
    return [time_table(title, records), *more]


def present(records: Iterable[Record]) -> list[str]:
    """The variants that there are records of, in their usual order."""
    there = {record["variant"] for record in records}
    return [name for name in VARIANTS if name in there]


def _row_names(case: Case) -> tuple[str, str]:
    record = next(iter(case.values()))
    return record["pattern"], record["size"]


def failures(records: Iterable[Record]) -> list[str]:
    """One line for each reason that figures are missing for."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for record in records:
        if "failed" in record:
            where = f"{record['pattern']} {record['size']}"
            reasons.setdefault((record["variant"], record["failed"]), []).append(where)
    return [f"{name}: {reason} [{', '.join(w)}]" for (name, reason), w in reasons.items()]


# --- times ----------------------------------------------------------------------------------------


def time_table(title: str, records: Sequence[Record]) -> Table:
    """Microseconds; `÷ ours` is a variant's time over ours, `ours ÷` ours over the variant's."""
    variants = present(records)
    table = Table(title=title, title_justify="left")
    table.add_column("pattern")
    table.add_column("size")
    for name in variants:
        table.add_column(_header(name), justify="right")
    compiled = all(name in variants for name in COMPILED) and "ours" in variants
    for header in (*(["best compiled ÷ ours"] if compiled else []), "TFLOP/s", "of roofline"):
        table.add_column(header, justify="right")
    for case in cases(records):
        best = [_best(case)] if compiled else []
        cells = [_time(case, name) for name in variants]
        table.add_row(*_row_names(case), *cells, *best, *_rates(case))
    return table


def rate_table(title: str, records: Sequence[Record]) -> Table:
    """Tokens a second."""
    return _figures(f"{title}: tokens a second", records, "", _rate)


def peak_table(title: str, records: Sequence[Record]) -> Table:
    """GiB allocated at most, less those allocated before the call.

    Where it is known, also what is there before: a model's weights and its optimizer's moments.
    """
    known = any("held_bytes" in record for record in records)
    more = {"held besides": _held} if known else {}
    return _figures(f"{title}: peak memory", records, " GiB", _peak, more)


def _figures(
    title: str,
    records: Sequence[Record],
    unit: str,
    cell: Callable[[Case, str], str],
    more: Mapping[str, Callable[[Case], str]] | None = None,
) -> Table:
    """A row a case, a column a variant, and more columns behind."""
    variants, more = present(records), more or {}
    table = Table(title=title, title_justify="left")
    table.add_column("pattern")
    table.add_column("size")
    for name in (*variants, *more):
        table.add_column(f"{name}{unit}", justify="right")
    for case in cases(records):
        cells = [cell(case, name) for name in variants]
        table.add_row(*_row_names(case), *cells, *(make(case) for make in more.values()))
    return table


def _header(name: str) -> str:
    if name == "ours":
        return "ours µs"
    return f"{name} µs, ours ÷" if name in UNCOMPARED else f"{name} µs, ÷ ours"


def compared(case: Case, name: str) -> float | None:
    """A variant's time over ours; ours over its where it computes less."""
    ours, other = case.get("ours"), case.get(name)
    if ours is None or other is None or name == "ours":
        return None
    return ratio(ours, other) if name in UNCOMPARED else ratio(other, ours)


def _time(case: Case, name: str) -> str:
    record = case.get(name)
    if record is None or "us" not in record:
        return NONE if record is None else "failed"
    lower, upper = record["quartiles"]
    time = f"{record['us']:,.1f}"
    if name == "ours":
        return f"{time} ±{50 * (upper - lower) / record['us']:.1f}%"
    found = compared(case, name)
    return time if found is None else f"{time}  {found:.3f}"


def best_compiled(case: Case) -> float | None:
    """The better of torch.compile's modes over ours."""
    found = [compared(case, name) for name in COMPILED]
    return min((one for one in found if one is not None), default=None)


def _best(case: Case) -> str:
    found = best_compiled(case)
    return NONE if found is None else f"{found:.3f}"


def _rates(case: Case) -> tuple[str, str]:
    ours = case.get("ours", {})
    if "us" not in ours or not ours.get("flops"):
        return NONE, NONE
    rate = f"{ours['flops'] / ours['us'] / 1e6:.1f}"
    gpu = known_gpu(ours["device"])
    if gpu is None:
        return rate, NONE
    least = Work(ours["flops"], ours["bytes"]).seconds(gpu, torch_name(ours["dtype"]))
    return rate, f"{100e6 * least / ours['us']:.0f}%"


def torch_name(dtype: str) -> str:
    """bfloat16 of bf16."""
    return str(DTYPES[dtype]).removeprefix("torch.")


def _peak(case: Case, name: str) -> str:
    size = case.get(name, {}).get("peak_bytes")
    return NONE if size is None else f"{size / GIB:.2f}"


def _held(case: Case) -> str:
    size = next(iter(case.values())).get("held_bytes")
    return NONE if size is None else f"{size / GIB:.2f}"


def _rate(case: Case, name: str) -> str:
    record = case.get(name, {})
    return f"{1e6 * record['tokens'] / record['us']:,.0f}" if "us" in record else NONE


# --- errors ---------------------------------------------------------------------------------------


def error_table(title: str, records: Sequence[Record]) -> Table:
    """Relative errors of each output, and ours over torch.compile's (or eager's)."""
    variants = present(records)
    against = next((name for name in ("compile", "eager") if name in variants), None)
    table = Table(title=title, title_justify="left")
    for header in ("pattern", "size", "output"):
        table.add_column(header)
    for header in (*variants, f"ours ÷ {against}"):
        table.add_column(header, justify="right")
    found: list[float] = []
    for case in cases(records):
        for output in dict.fromkeys(o for r in case.values() for o in r.get("errors", {})):
            share = error_ratio(case, output, against)
            found += [] if share is None else [share]
            errors = [case.get(name, {}).get("errors", {}).get(output) for name in variants]
            cells = [NONE if e is None else f"{e:.3e}" for e in errors]
            table.add_row(
                *_row_names(case), output, *cells, NONE if share is None else f"{share:.3f}"
            )
    if found:
        mean = math.exp(sum(map(math.log, found)) / len(found))
        table.caption = f"geometric mean {mean:.3f}, at most {max(found):.3f}"
    return table


def error_ratio(case: Case, output: str, against: str | None) -> float | None:
    """Our error over another's, of one output; None unless both are there and of one run."""
    ours, other = case.get("ours", {}), case.get(against or "", {})
    pair = [one.get("errors", {}).get(output) for one in (ours, other)]
    if None in pair or 0.0 in pair or ours["run"] != other["run"]:
        return None
    return float(pair[0] / pair[1])


# --- the host -------------------------------------------------------------------------------------


def host_table(title: str, records: Sequence[Record]) -> Table:
    """Microseconds that the host is busy, by what it does."""
    variants = present(records)
    table = Table(title=title, title_justify="left")
    for header in ("pattern", "size", "what"):
        table.add_column(header)
    for name in variants:
        table.add_column(f"{name} µs", justify="right")
    for case in cases(records):
        for what in dict.fromkeys(w for r in case.values() for w in r.get("host_us", {})):
            found = [case.get(name, {}).get("host_us", {}).get(what) for name in variants]
            table.add_row(
                *_row_names(case), what, *(NONE if f is None else f"{f:.1f}" for f in found)
            )
    return table


# --- trainings ------------------------------------------------------------------------------------


def loss_table(title: str, records: Sequence[Record]) -> Table:
    """Losses of the held-out text, and how far ours and another order are from stock."""
    variants = present(records)
    table = Table(title=f"{title}: held-out loss", title_justify="left")
    for header in ("pattern", "size", "step", *variants):
        table.add_column(header, justify="right" if header in ("step", *variants) else "left")
    for case in cases(records):
        known = {name: dict(case.get(name, {}).get("held_out", ())) for name in variants}
        for step in dict.fromkeys(step for points in known.values() for step in points):
            losses = [points.get(step) for points in known.values()]
            cells = [NONE if loss is None else f"{loss:.4f}" for loss in losses]
            table.add_row(*_row_names(case), str(step), *cells)
    table.caption = "\n".join(filter(None, map(verdict, cases(records)))) or None
    return table


def verdict(case: Case) -> str:
    """Whether ours is nearer to stock than stock on the same data in another order is."""
    ours, other = case.get("ours", {}), case.get("reordered", {})
    if "inside" not in ours or ours["run"] != other.get("run"):
        return ""
    where = "inside" if ours["inside"] else "OUTSIDE"
    return (
        f"ours is at most {ours['difference']:.4f} from eager, reordered "
        f"{other['difference']:.4f}: {where} the spread"
    )
