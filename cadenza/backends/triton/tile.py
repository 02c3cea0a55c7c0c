"""A kernel's tile as emitted text: runs of columns, indices, masks, boxes, and lines so far."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from cadenza.backends.triton.arguments import Arguments, Vectors
from cadenza.backends.triton.columns import FIRST, ROWS, Frame, Layout, Space, Spaces, Unsupported
from cadenza.core.ir import Node
from cadenza.core.ops import Dim
from cadenza.core.plan import Kernel


class Move(NamedTuple):
    """That a kernel reads or writes a matrix at a frame."""

    node: Node
    frame: Frame | None
    written: bool


class Tile:
    """The lines of one kernel so far, and what is known of its tile's columns."""

    def __init__(
        self, kernel: Kernel, arguments: Arguments, vectors: Vectors,
        layout: Layout, holds_rows: bool = False,
    ) -> None:  # fmt: skip
        self.kernel, self.arguments, self.vectors = kernel, arguments, vectors
        self.layout, self.holds_rows = layout, holds_rows
        self.pairs, self.width = layout.pairs, layout.width
        self.loads, self.body = set(kernel.loads), set(kernel.body)
        self.spaces = Spaces(layout.pairs, dict(self._roots()))
        self.head: list[str] = []  # what depends on columns alone
        self.lines: list[str] = []
        self.moves: list[Move] = []  # of matrices, in the order of the lines
        self.runs: set[str] = set()
        self.unit = 1  # columns of a part must be a multiple of this
        self.part: int | None = None  # columns of a part, where it may be moved as a box
        self.tiled = 1  # and of all parts together
        self.boxes: set[str] = set()  # arguments of which some parts can be moved as boxes
        self.scattered: set[str] = set()  # and those of which some can't
        self._known: dict[tuple[Node, Frame | None], str] = {}
        self._indices: dict[Frame, str] = {}
        self.grouped: dict[Node, bool] = {}
        self._masks: dict[tuple[Frame, Dim], str] = {}
        self._blocks: dict[str, str] = {}
        self._used: set[str] = set()
        self._serial = 0
        matrices = [kernel.product] if kernel.product is not None else []
        matrices += [n for n in (*kernel.body, *kernel.loads) if n.type.is_matrix]
        heights = {n.type.rows for n in matrices}
        if len(heights) > 1:
            raise Unsupported("matrices of different numbers of rows")

    def _roots(self) -> Iterable[tuple[Node, Space]]:
        if self.kernel.product is not None:
            yield self.kernel.product, Space("half" if self.layout.product_is_half else "full")
            return
        for load in self.kernel.loads:
            if int(load.type.columns) == self.width:
                yield load, Space("full")

    def line(self, text: str, stem: str = "e", name: str = "") -> str:
        """A line that gives a value a new name, this one if it is free; the name."""
        taken = self._used if name else self._used.union(self.arguments.names.values())
        while not name or name in taken:
            self._serial += 1
            name = f"{stem}{self._serial}"
        self._used.add(name)
        self.lines.append(f"{name} = {text}")
        return name

    def ahead(self, frame: Frame, text: str, stem: str) -> str:
        """The same for what depends on columns alone, if the frame is one of columns."""
        name = self.line(text, stem)
        if frame.run not in ("r", "z"):
            self.head.append(self.lines.pop())
        return name

    # --- indices and masks ------------------------------------------------------------------------

    def index(self, frame: Frame) -> str:
        """The vector of column numbers of a frame."""
        if frame not in self._indices:
            self._indices[frame] = self._index(frame)
        return self._indices[frame]

    def _index(self, frame: Frame) -> str:
        self.runs.add(frame.run)
        if frame in (ROWS, FIRST):
            return "rows" if frame == ROWS else "tl.arange(0, 1)"
        if not frame.steps:
            return frame.run
        kind, *counts = frame.steps[-1]
        before = Frame(frame.run, frame.steps[:-1])
        if kind == "mod" and before.run in ("c", "h") and before.shift is not None:
            start = f"{before.run}_start, {before.shift}"
            return self.ahead(frame, f"device.wrapped({start}, W, {counts[0]})", "i")
        return self.ahead(frame, STEPS[kind](self.index(before), *counts), "i")

    def mask(self, frame: Frame, width: Dim) -> str:
        """Which elements of a frame are columns of a value `width` wide."""
        if frame == ROWS and (self.body or not isinstance(width, int)):
            return "row_ok"
        key = (frame, width)
        if key not in self._masks:
            self._masks[key] = self._mask(frame, width)
        return self._masks[key]

    def _mask(self, frame: Frame, width: Dim) -> str:
        self.runs.add(frame.run)
        if not frame.steps and frame.run not in "rz" and width == self.run_width(frame.run):
            return self._exists(frame.run)
        index, inside = self.index(frame), f"{self._exists(frame.run)} & "
        inside = "" if frame.run == "z" else inside
        return self.ahead(frame, f"{inside}({index} >= 0) & ({index} < {width})", "m")

    def _exists(self, run: str) -> str:
        """The mask of a run; both lanes have that of the half."""
        return {"r": "row_ok", "c0": "h_ok", "c1": "h_ok"}.get(run, f"{run}_ok")

    def run_width(self, run: str) -> int:
        """How many columns a run goes over in all tiles."""
        if run == "h":
            return self.width // 2
        return self.width // int(run[1:]) if run.startswith("g") else self.width

    def block_mask(self, mask: str) -> str:
        """A mask over rows too."""
        if mask not in self._blocks:
            self._blocks[mask] = self.line(f"row_ok[:, None] & {mask}[None, :]", "b")
        return self._blocks[mask]

    def columns_of(self, run: str) -> str:
        """How many columns a part of a run has, as text."""
        if not run.startswith("g"):
            return "W"
        return f"(W // {self.of_lane(int(run[1:]))})"

    def of_lane(self, size: int) -> int:
        """How many columns of a lane (of the tile, without pairs) a group has."""
        lane = size if self.pairs is None else size // 2
        if self.pairs is not None and lane % self.pairs:
            raise Unsupported(f"groups of {size} columns cut pairs at {self.pairs}")
        if lane & (lane - 1):
            raise Unsupported(f"groups of {size} columns: not a power of two")
        self.unit = max(self.unit, lane)
        return lane

    # --- boxes ----------------------------------------------------------------------------------

    def box(self, argument: str, frame: Frame) -> str:
        """Where the box of a part begins and whether it is one; empty where it can't be."""
        start = self._first(frame) if self.part else None
        if start is None:
            self.scattered.add(argument)
            return ""
        self.boxes.add(argument)
        return f"i * BM, {start}, {argument}_box"

    def _first(self, frame: Frame) -> str | None:
        """The first column of a part in a frame that is a run of columns, else None."""
        assert self.part is not None
        shift = frame.shift
        if shift is not None and shift < 0:
            return None  # an H200 takes no box that begins before the first column
        if frame.run in ("c", "h") and shift is not None:
            return f"{frame.run}_start + {shift}"
        if frame.run in ("c0", "c1") and shift is not None and self.pairs:
            if self.pairs % self.part or (self.width // 2) % self.tiled:
                return None  # a part past the half would lie in the other lane
            first = int(frame.run[1]) * self.pairs + shift
            if 2 * self.pairs == self.width:
                return f"h_start + {first}"
            return f"h_start // {self.pairs} * {2 * self.pairs} + h_start % {self.pairs} + {first}"
        if frame.run in ("c", "h") and len(frame.steps) == 1 and frame.steps[0][0] == "mod":
            count = frame.steps[0][1]
            return f"{frame.run}_start % {count}" if count % self.part == 0 else None
        return None


STEPS = {
    "shift": lambda index, count: f"{index} + {count}" if count > 0 else f"{index} - {-count}",
    "mod": lambda index, count: f"{index} % {count}",
    "div": lambda index, count: f"{index} // {count}",
    "pair": lambda index, part, inner: (
        f"({index} // {inner}) * {2 * inner} + {part * inner} + {index} % {inner}"
    ),
    "unpair": lambda index, inner: f"({index} // {2 * inner}) * {inner} + {index} % {inner}",
}
