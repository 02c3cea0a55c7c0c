"""Which columns of a value a block of a tile holds: frames, and the space that a value lives in.

A kernel's tile is seen in one of two ways. Without pairs it is a run of columns `c` of the
accumulator. With pairs (columns seen as (outer, 2, inner)) it is two lanes, `c0` and `c1`, over a
run `h` of the columns of a half. Groups of columns are a run `g<size>`, rows are `r`. A frame is
such a run and the steps from its index to that of the value's columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from cadenza.core.ir import Node
from cadenza.core.ops import Op

Step = tuple[Any, ...]  # its kind, then one number or two


class Unsupported(Exception):
    """A template can't make this kernel; the text says why."""


class Frame(NamedTuple):
    """A run of a tile, and steps from its index to a column: shift, mod, div, pair, unpair."""

    run: str
    steps: tuple[Step, ...] = ()

    def shifted(self, count: int) -> Frame:
        """The frame of a value whose columns are `count` further."""
        if self.steps and self.steps[-1][0] == "shift":
            return Frame(self.run, self.steps[:-1]).shifted(count + self.steps[-1][1])
        return Frame(self.run, (*self.steps, ("shift", count))) if count else self

    def wrapped(self, count: int) -> Frame:
        """The frame of a pattern of `count` columns that repeats."""
        steps = self.steps
        if steps and steps[-1][0] == "shift" and steps[-1][1] % count == 0:
            steps = steps[:-1]
        return Frame(self.run, (*steps, ("mod", count)))

    def then(self, kind: str, *counts: int) -> Frame:
        """The frame after another step."""
        return Frame(self.run, (*self.steps, (kind, *counts)))

    @property
    def shift(self) -> int | None:
        """How far it is shifted, None if it is more than shifted."""
        if not self.steps:
            return 0
        kind, count = self.steps[0][:2]
        return count if kind == "shift" and len(self.steps) == 1 else None


ROWS = Frame("r")
FIRST = Frame("z")  # of a value of one column or more, the first alone


class Space(NamedTuple):
    """How a value's columns stand to the tile's: its kind of run, and how far it is shifted."""

    kind: str  # full, half, or the size of a group as text
    shift: int = 0

    @property
    def run(self) -> str:
        """The run, or one of the runs, that a tile of it is."""
        return {"full": "c", "half": "h"}.get(self.kind, f"g{self.kind}")


class Layout(NamedTuple):
    """How a kernel's tile is seen: `width` columns in all, paired at `pairs` if that is given.

    The product's columns are all of these, or those of a half where the epilogue joins it to pairs.
    """

    width: int
    pairs: int | None = None
    product_is_half: bool = False

    @property
    def lanes(self) -> int:
        """How many lanes of a tile there are in the accumulator."""
        return 2 if self.pairs is not None and not self.product_is_half else 1


class Spaces:
    """The spaces of one kernel's values; `known` are those given, of its roots."""

    def __init__(self, pairs: int | None, known: Mapping[Node, Space]) -> None:
        self.pairs = pairs
        self._found: dict[Node, Space | None] = dict(known)

    def of(self, node: Node) -> Space | None:
        """The space of a value, None if it fits any."""
        if node not in self._found:
            self._found[node] = self._find(node) if node.type.is_matrix else None
        return self._found[node]

    def _find(self, node: Node) -> Space | None:
        found = [(position, s) for position, i in enumerate(node.inputs) if (s := self.of(i))]
        if not found:
            return None
        position, (kind, shift) = found[0]
        match node.op:
            case Op.COLUMNS:
                return Space(kind, shift - int(node.attributes["start"]))
            case Op.CONCAT:
                before = node.inputs[:position]
                return Space(kind, shift + sum(int(i.type.columns) for i in before))
            case Op.SPLIT:
                return self._half(shift, int(node.attributes["inner"])) if kind == "full" else None
            case Op.JOIN:
                fits = kind == "half" and node.attributes["inner"] == self.pairs
                return Space("full", 2 * shift) if fits else None
            case Op.GROUP_SUM | Op.GROUP_MAX:
                size = int(node.attributes["size"])
                fits = kind == "full" and shift % size == 0
                return Space(str(size), shift // size) if fits else None
            case Op.REPEAT:
                times = int(node.attributes["times"])
                return Space("full", shift * times) if kind == str(times) else None
            case Op.TILE:
                return None
        return Space(kind, shift)

    def _half(self, shift: int, inner: int) -> Space | None:
        fits = inner == self.pairs and shift % (2 * inner) == 0
        return Space("half", shift // 2) if fits else None

    def frames(self, space: Space) -> list[Frame]:
        """The frames that together hold a tile of a value of this space."""
        if space.kind == "full":
            runs = ["c"] if self.pairs is None else ["c0", "c1"]
        else:
            runs = ["h" if space.kind == "half" else f"g{space.kind}"]
        return [Frame(run).shifted(space.shift) for run in runs]
