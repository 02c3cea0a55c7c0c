"""An audit as tables: milliseconds by class of work, before and after, and what is saved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cadenza.tools.audit.counting import CLASSES
from cadenza.tools.audit.prediction import CADENZA, Share
from cadenza.tools.audit.rates import EIGHT
from cadenza.tools.audit.report import NAMES, TITLES, Report
from cadenza.tools.audit.savings import Saving

NONE = "–"
WIDE = 130  # columns where there is no terminal that has its own
Shares = Mapping[tuple[str, str], Share]  # by precision and variant


def show(report: Report, console: Console | None = None) -> None:
    """Prints all of it."""
    console = console or Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDE
    prediction = report.prediction
    keys = [(p, v) for p in prediction.precisions for v in prediction.variants]
    whole = {(p, v): prediction.step(v, p) for p, v in keys}
    console.print(share_table(f"{report.name} on {prediction.rates.gpu.name}, a step", whole))
    for part in prediction.variants[prediction.before]:
        one = {(p, v): prediction.part(prediction.like(part, v), p) for p, v in keys}
        console.print(share_table(f"{part.name}, {part.count} × a step", one))
    if report.measured:
        console.print(measured_table(report))
    for line in (*_savings(report), *_assumptions(report)):
        console.print(line, soft_wrap=True)


def share_table(title: str, shares: Shares) -> Table:
    """Milliseconds and shares of each class, a column a precision and variant."""
    table = Table(title=title, title_justify="left")
    table.add_column("ms, share of the time")
    for precision, variant in shares:
        table.add_column(f"{precision}\n{NAMES[variant].replace(', ', chr(10))}", justify="right")
    for kind in CLASSES:
        if any(share.seconds[kind] for share in shares.values()):
            table.add_row(TITLES[kind], *(_cell(share, kind) for share in shares.values()))
    table.add_section()
    table.add_row("all", *(figure(1e3 * share.total) for share in shares.values()), style="bold")
    return table


def _cell(share: Share, kind: str) -> str:
    seconds = share.seconds[kind]
    if not seconds:
        return NONE
    return f"{figure(1e3 * seconds)} {100 * seconds / share.total:3.0f}%"


def figure(milliseconds: float) -> str:
    """A time, with as many digits as it deserves."""
    return f"{milliseconds:,.1f}" if milliseconds >= 100 else f"{milliseconds:,.2f}"


def measured_table(report: Report) -> Table:
    """What was measured beside what was predicted for it."""
    count = report.measured[0]["layers"]
    title = f"measured on {report.measured[0]['device']}" + (f", {count} layers" if count else "")
    table = Table(title=title, title_justify="left")
    for header in ("ms a step", "predicted", "measured", "measured ÷ predicted"):
        table.add_column(header, justify="left" if header == "ms a step" else "right")
    for one in report.measured:
        if "failed" in one:
            table.add_row(NAMES[one["variant"]], NONE, one["failed"], NONE)
            continue
        for name, title in {"ms": NAMES[one["variant"]], **TITLES}.items():
            predicted, measured = (_number(one[side], name) for side in ("predicted", "measured"))
            if predicted or measured:
                ratio = f"{measured / predicted:.2f}" if predicted and measured else NONE
                cells = (figure(n) if n else NONE for n in (predicted, measured))
                label = title if name == "ms" else f"  {title}"
                table.add_row(label, *cells, ratio, style="bold" if name == "ms" else None)
    return table


def _number(side: Mapping[str, Any], name: str) -> float:
    """Milliseconds of a class, or of all."""
    return float(side["ms"] if name == "ms" else side["classes"].get(name, 0.0))


def _savings(report: Report) -> Iterator[Text]:
    prediction, options = report.prediction, report.options
    if CADENZA not in prediction.variants:
        return
    for precision in prediction.precisions:
        saving = report.saving(precision)
        text = saved_words(saving)
        if options.hours is not None:
            text += f"; of {options.hours:,.0f} GPU-hours {amount(saving, options.hours)}"
        if options.hours is not None and options.price is not None:
            text += f", or {amount(saving, options.hours * options.price)} in money"
        once = ", once epilogues store it" if precision == EIGHT else ""
        yield Text(f"{precision}{once}: {text}", "bold")


def saved_words(saving: Saving) -> str:
    """The share of a step in words."""
    ends = f"{100 * saving.least:.1f} to {100 * saving.most:.1f} %"
    return f"saves {100 * saving.share:.1f} % of a step ({ends}; {saving.basis})"


def amount(saving: Saving, factor: float) -> str:
    """A number of hours, or money, with its range."""
    middle, least, most = saving.times(factor)
    return f"{middle:,.0f} ({least:,.0f} to {most:,.0f})"


def _assumptions(report: Report) -> Iterator[Text]:
    yield Text("assumptions", "bold green")
    for line in report.assumptions:
        yield Text(f"- {line}")
