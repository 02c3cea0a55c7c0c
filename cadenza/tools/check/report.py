"""Judgements for people: a table a program, with what to change under what fails."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cadenza.tools.check.findings import Finding, Judgement

MARKS = {True: ("ok", "green"), False: ("FAILS", "bold red"), None: ("–", "dim")}
WIDE = 160  # columns where there is no terminal that has its own


def show(judgements: Sequence[Judgement], console: Console | None = None) -> None:
    """Prints a table for each program."""
    console = console or Console(file=sys.stdout, highlight=False)
    if not console.is_terminal:
        console.width = WIDE
    for judgement in judgements:
        console.print(table_of(judgement))


def table_of(judgement: Judgement) -> Table:
    """The findings on a program, a row each."""
    verdict = "all holds" if judgement.holds else "does not hold"
    table = Table(title=f"{judgement.name}: {verdict}", title_justify="left")
    table.add_column("check", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("found", overflow="fold")
    for finding in judgement.findings:
        table.add_row(finding.check, Text(*MARKS[finding.holds]), _found(finding))
    return table


def _found(finding: Finding) -> Text:
    found = Text(finding.figure)
    if finding.cure:
        found.append(f"\nchange: {finding.cure}", "yellow")
    return found
