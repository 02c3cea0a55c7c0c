"""What `cz.accelerate` did: which modules were replaced, which were left alone, and why."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """A module by its path: what programs do of it now, and what they leave, with the reason.

    `warned` names what would be replaced if nothing wrapped, watched, quantised or sharded it: a
    warning says it, too. Of a module that is not known there is none.
    """

    path: str
    kind: str
    replaced: tuple[str, ...]
    left: tuple[str, ...] = ()
    warned: tuple[str, ...] = ()

    @property
    def pattern(self) -> tuple[str, str, tuple[str, ...], tuple[str, ...]]:
        """What modules have in common that are printed as one."""
        return re.sub(r"\d+", "*", self.path), self.kind, self.replaced, self.left


@dataclass(frozen=True)
class Report:
    """The entries of a model's modules in order; a table when printed.

    `notes` are printed below it, as they are at that time.
    """

    entries: tuple[Entry, ...] = ()
    notes: tuple[object, ...] = ()

    @property
    def replaced(self) -> tuple[Entry, ...]:
        """Modules of which programs do a part at least."""
        return tuple(entry for entry in self.entries if entry.replaced)

    @property
    def left(self) -> tuple[Entry, ...]:
        """Modules of which something is left to the model's own code."""
        return tuple(entry for entry in self.entries if entry.left)

    def __str__(self) -> str:
        if not self.entries:
            return "nothing replaced: there is no list of layers, and no head"
        rows = [("module", "class", "replaced", "left alone")]
        rows += [
            (_span(group), group[0].kind, ", ".join(group[0].replaced) or "-",
             "; ".join(group[0].left) or "-")
            for group in _groups(self.entries)
        ]  # fmt: skip
        return "\n".join((*_table(rows), *filter(None, map(str, self.notes))))


def _groups(entries: Iterable[Entry]) -> list[list[Entry]]:
    """Entries that follow each other and differ in their number only, together."""
    groups: dict[object, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(entry.pattern, []).append(entry)
    return list(groups.values())


def _span(group: list[Entry]) -> str:
    """The paths of a group as one: model.layers.0-15."""
    if len(group) == 1:
        return group[0].path or "(the model)"
    numbers = [[int(n) for n in re.findall(r"\d+", entry.path)] for entry in group]
    varying = next(i for i, values in enumerate(zip(*numbers, strict=True)) if len({*values}) > 1)
    parts = re.split(r"(\d+)", group[0].path)
    parts[2 * varying + 1] = _ranges(sorted(values[varying] for values in numbers))
    return "".join(parts)


def _ranges(numbers: list[int]) -> str:
    """Numbers as ranges: 0-3,5."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(f"{a}-{b}" if a != b else str(a) for a, b in ranges)


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    ruled = [rows[0], tuple("-" * width for width in widths), *rows[1:]]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in ruled
    ]
