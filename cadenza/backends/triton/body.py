"""What one kernel computes of a part of its tile, as lines of Triton.

Values are asked for at frames, from what is stored and reduced down to the accumulator, loads and
vectors: so an operation on columns is a change of frame. A value is one line, made once a frame.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from cadenza.backends.triton.columns import FIRST, ROWS, Frame, Layout, Space, Spaces, Unsupported
from cadenza.backends.triton.readable import value_name
from cadenza.backends.triton.texts import ELEMENTWISE, number
from cadenza.core.ir import Node, topological
from cadenza.core.ops import BOOLEAN, INTEGER, REAL, Dim, Op
from cadenza.core.plan import Kernel
from cadenza.core.readiness import reduces_matrix

# Operations on vectors that take no line of their own: they change which elements are read.
IN_PLACE = (
    Op.CONSTANT, Op.COLUMN_INDEX, Op.ROW_INDEX, Op.COLUMNS, Op.CONCAT, Op.SPLIT, Op.JOIN,
    Op.REPEAT, Op.TILE, Op.TRANSPOSE,
)  # fmt: skip
COLUMN_REDUCTIONS = (Op.COLUMN_SUM, Op.COLUMN_MAX)
SUFFIXES = {"load": "_in", "vector": "_in", "partial": "_parts", "store": "_out",
            "reduction": "_out"}  # fmt: skip
PARTIALS = {Op.ROW_VARIANCE: ("mean", "squares"), Op.LOGSUMEXP: ("top", "total")}


@dataclass(frozen=True)
class Argument:
    """A pointer of an emitted kernel: what it points to, and its name there.

    `role` is load, vector, partial (of an earlier kernel, to be finished here), store or reduction;
    `piece` tells apart the buffers of one reduction.
    """

    role: str
    node: Node
    name: str
    piece: str = ""


@dataclass
class Arguments:
    """The arguments of one kernel in order of first use, with names that clash with nothing."""

    names: dict[Node, str]
    found: dict[tuple[str, Node, str], Argument] = field(default_factory=dict)

    def get(self, role: str, node: Node, piece: str = "") -> Argument:
        """The argument of this content."""
        key = (role, node, piece)
        if key not in self.found:
            name = f"{self.name(node)}_{piece}" if piece else self.name(node)
            self.found[key] = Argument(role, node, name + SUFFIXES[role], piece)
        return self.found[key]

    def name(self, node: Node) -> str:
        """A value's own name, or one made for it."""
        if node not in self.names:
            taken = set(self.names.values())
            serial = len(self.names)
            while f"v{serial}" in taken:
                serial += 1
            self.names[node] = f"v{serial}"
        return self.names[node]


class Vectors:
    """What is known of the partials that earlier kernels have left.

    `few` are row reductions of which a kernel merges the partials itself: their number. `merged`
    are those that this kernel, one of vectors, merges: columns in all and in a tile.
    """

    def __init__(
        self, few: Mapping[Node, int] | None = None,
        merged: Mapping[Node, tuple[int, int]] | None = None,
    ) -> None:  # fmt: skip
        self.few, self.merged = few or {}, merged or {}


def in_memory(vector: Node) -> bool:
    """Whether a vector that is not finished where it is needed is finished in memory."""
    return vector.op not in ELEMENTWISE and vector.op not in IN_PLACE


class Body:
    """The lines of one kernel."""

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
        self.runs: set[str] = set()
        self.unit = 1  # columns of a part must be a multiple of this
        self.part: int | None = None  # columns of a part, where it may be moved as a box
        self.tiled = 1  # and of all parts together
        self.boxes: set[str] = set()  # arguments of which some parts can be moved as boxes
        self.scattered: set[str] = set()  # and those of which some can't
        self._known: dict[tuple[Node, Frame | None], str] = {}
        self._indices: dict[Frame, str] = {}
        self._grouped: dict[Node, bool] = {}
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

    # --- values -----------------------------------------------------------------------------------

    def at(self, node: Node, frame: Frame | None) -> str:
        """The name of a value, or a constant, at a frame."""
        if node.type[:2] == (1, 1):
            frame = None
        key = (node, frame)
        if key not in self._known:
            text = self._text(node, frame)
            atom = text.isidentifier() or node.op is Op.CONSTANT
            self._known[key] = text if atom else self.line(text, name=self._named(node, frame))
        return self._known[key]

    def _named(self, node: Node, frame: Frame | None) -> str:
        lane = frame.run[1] if frame is not None and frame.run in ("c0", "c1") else ""
        return value_name(self.arguments.names.get(node, ""), lane)

    def real(self, node: Node, frame: Frame | None) -> str:
        """A value as a real number."""
        text = self.at(node, frame)
        whole = node.type.kind != REAL and node.op is not Op.CONSTANT
        return f"{text}.to(tl.float32)" if whole else text

    def block(self, node: Node, frame: Frame) -> str:
        """A value as a block that can be spread and stored, which a constant's number is not."""
        text = self.at(node, frame)
        return f"tl.full((1, 1), {text}, tl.float32)" if node.op is Op.CONSTANT else text

    def within(self, node: Node, user: Node, frame: Frame | None) -> str:
        """An input of `user`, which is at `frame`, as a real number where it is used as one."""
        if user.type.is_matrix and not node.type.is_matrix and node.type.columns == 1:
            frame = ROWS
        whole = user.op in (Op.COMPARE, Op.WHERE)
        return self.at(node, frame) if whole else self.real(node, frame)

    def _text(self, node: Node, frame: Frame | None) -> str:
        if node is self.kernel.product:
            return self._accumulator(frame)
        if node.op is Op.CONSTANT:
            return number(node.attributes["value"])
        if node in self.loads:
            return self._load(node, frame)
        if not node.type.is_matrix and self._is_leaf(node):
            return self._vector(node, frame)
        if node.op in SPECIAL and frame is None and not reduces_matrix(node):
            block = f"tl.zeros((1, 1), tl.float32) + {SPECIAL[node.op](self, node, FIRST)}"
            return f"tl.sum(tl.sum({block}, 1), 0)"
        if node.op in SPECIAL:
            return SPECIAL[node.op](self, node, frame)
        if node.op in ELEMENTWISE:
            inputs = [self.within(i, node, frame) for i in node.inputs]
            if node.op is Op.COMPARE:
                inputs = _compared(node, inputs)
            return ELEMENTWISE[node.op](*inputs, **node.attributes)
        raise Unsupported(f"{node.op.label} in a kernel")

    def _accumulator(self, frame: Frame | None) -> str:
        names = {Frame("c"): "acc", Frame("c0"): "acc0", Frame("c1"): "acc1"}
        if self.layout.product_is_half:
            names = {Frame("h"): "acc"}
        if frame not in names:
            raise Unsupported("columns of the accumulator that a part of its tile does not hold")
        self.runs.add(frame.run)
        return names[frame]

    def _load(self, node: Node, frame: Frame | None) -> str:
        assert frame is not None
        argument = self.arguments.get("load", node).name
        mask = self.block_mask(self.mask(frame, int(node.type.columns)))
        given = f"{argument}, rows, {self.index(frame)}, {argument}_stride, {mask}"
        if node.type.kind != REAL:
            return f"device.load_whole({given})"
        box = self.box(argument, frame)
        return f"device.load_part({given}, {box})" if box else f"device.load({given})"

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

    # --- vectors ----------------------------------------------------------------------------------

    def _is_leaf(self, node: Node) -> bool:
        held = node in self.body and reduces_matrix(node)
        if held or not in_memory(node):
            return False
        if any(i in self.body and reduces_matrix(i) for i in topological([node])):
            raise Unsupported(f"a {node.op.label} of numbers that the same kernel makes")
        return True

    def _vector(self, node: Node, frame: Frame | None) -> str:
        if frame is None:
            text = f"tl.load({self.arguments.get('vector', node).name})"
            return f"{text}.to(tl.float32)" if node.type.kind == REAL else text
        suffix = "[:, None]" if frame.run == "r" else "[None, :]"
        if frame == ROWS and (node in self.vectors.few or node in self.vectors.merged):
            return self._merged(node) + suffix
        pointer = self.arguments.get("vector", node).name
        length = node.type.rows if node.type.columns == 1 else int(node.type.columns)
        mask = self.mask(frame, length)
        function = "load_vector" if node.type.kind == REAL else "load_whole_vector"
        return f"device.{function}({pointer}, {self.index(frame)}, {mask}){suffix}"

    def _merged(self, node: Node) -> str:
        """A reduction whose partials are merged where it is needed."""
        name = node.op.name.lower().replace("column_", "row_")
        if node in self.vectors.few:
            partials = self.arguments.get("partial", node).name
            size = next_power(self.vectors.few[node])
            return f"device.finish_{name}({partials}, rows, row_ok, ROWS, {partials}_tiles, {size})"
        pieces = PARTIALS.get(node.op, ("",))
        given = [self.arguments.get("partial", node, piece).name for piece in pieces]
        columns, tile = self.vectors.merged[node]
        counts = f", {columns}, {tile}" if node.op is Op.ROW_VARIANCE else ""
        call = f"{', '.join(given)}, rows, row_ok, ROWS, {given[0]}_tiles, BM{counts}"
        if node.op is not Op.LOGSUMEXP:
            return f"device.merge_{name}({call})"
        shift = self.real(node.inputs[1], ROWS)
        shift = shift if node.inputs[1].type[:2] == (1, 1) else f"tl.reshape({shift}, (BM,))"
        return f"(device.merge_{name}({call}) - {shift})"

    # --- reductions -------------------------------------------------------------------------------

    def space(self, node: Node) -> Space:
        """The space of a value that is stored or reduced; its tiles hold all of its columns."""
        columns = int(node.type.columns)
        half = self.pairs is not None and 2 * columns == self.width
        found = self.spaces.of(node)
        if found is None:
            found = Space("half" if half and not self._groups(node) else "full")
        if self.kernel.product is None:
            found = self._loaded(found, columns)
        if found.shift > 0 or columns > self.run_width(found.run) + found.shift:
            raise Unsupported(f"{columns} columns that tiles of {self.width} do not hold")
        return found

    def _loaded(self, space: Space, columns: int) -> Space:
        """The space of a value in a kernel that can read what it loads from any column on."""
        narrow = space.kind == "half" and 2 * columns > self.width
        return Space("full") if narrow else Space(space.kind)

    def blocks(self, node: Node) -> list[tuple[str, str, Frame]]:
        """A matrix as blocks that fill the part: text, mask over columns, frame."""
        found = []
        for frame in self.spaces.frames(self.space(node)):
            mask = self.mask(frame, int(node.type.columns))
            text = self.block(node, frame) if node.op is Op.CONSTANT else self.real(node, frame)
            shape = f"(BM, {self.columns_of(frame.run)})"
            found.append((f"tl.broadcast_to({text}, {shape})", mask, frame))
        return found

    def reduced_rows(self, node: Node) -> list[str]:
        """The pieces of a row reduction over this part: one name, or two."""
        if node.op is Op.ROW_VARIANCE and not self.holds_rows:
            self._require_even(node.inputs[0])
        blocks = self.blocks(node.inputs[0])
        pieces: list[str] = []
        for text, mask, _ in blocks:
            block = self.line(text)
            made = self._reduced(node.op, block, f"{mask}[None, :]")
            pieces = made if not pieces else self._combined(node.op, pieces, made, blocks, mask)
        return pieces

    def _require_even(self, node: Node) -> None:
        """Moments of tiles are merged by how many columns each has: all but the last, as many."""
        space, loaded = self.space(node), self.kernel.product is None and self.pairs is None
        share = {"full": 1, "half": 2}.get(space.kind) or int(space.kind)
        even = space.shift == 0 and share * int(node.type.columns) == self.width
        if not even and not (loaded and share == 1):
            raise Unsupported(f"a variance of {node.type.columns} columns of {self.width} in tiles")

    def _reduced(self, op: Op, block: str, mask: str) -> list[str]:
        if op is Op.ROW_SUM:
            return [self.line(f"tl.sum(tl.where({mask}, {block}, 0.0), 1)", "s")]
        if op is Op.ROW_MAX:
            inside = f"tl.where({mask}, {block}, float('-inf'))"
            return [self.line(f"device.largest({inside}, 1)", "s")]
        names = self.pair_of_names()
        if op is Op.LOGSUMEXP:
            self.lines.append(f"{', '.join(names)} = device.online({block}, {mask})")
        else:
            count = f"tl.sum({mask}.to(tl.float32))"
            self.lines.append(f"{', '.join(names)} = device.moments({block}, {mask}, {count})")
        return names

    def pair_of_names(self) -> list[str]:
        """Two new names."""
        self._serial += 1
        return [f"s{self._serial}", f"s{self._serial}_b"]

    def _combined(
        self, op: Op, a: list[str], b: list[str], blocks: list[tuple[str, str, Frame]], mask: str
    ) -> list[str]:
        if op is Op.ROW_SUM:
            return [self.line(f"{a[0]} + {b[0]}", "s")]
        if op is Op.ROW_MAX:
            return [self.line(f"device.maximum({a[0]}, {b[0]})", "s")]
        names = self.pair_of_names()
        if op is Op.LOGSUMEXP:
            call = f"device.merged_online({', '.join([*a, *b])})"
        else:
            counts = [f"tl.sum({m}.to(tl.float32))" for m in (blocks[0][1], mask)]
            call = f"device.merged_moments({', '.join([*a, counts[0], *b, counts[1]])})"
        self.lines.append(f"{', '.join(names)} = {call}")
        return names

    # --- columns ----------------------------------------------------------------------------------

    def _columns(self, node: Node, frame: Frame) -> str:
        frame = frame.shifted(int(node.attributes["start"]))
        return self.within(node.inputs[0], node, frame)

    def _tile(self, node: Node, frame: Frame) -> str:
        frame = frame.wrapped(int(node.inputs[0].type.columns))
        return self.within(node.inputs[0], node, frame)

    def _concat(self, node: Node, frame: Frame) -> str:
        offset, ends, parts = 0, [], []
        for part in node.inputs:
            parts.append(self.within(part, node, frame.shifted(-offset)))
            offset += int(part.type.columns)
            ends.append(offset)
        index = self.index(frame)
        suffix = "[:, None]" if frame.run == "r" else "[None, :]"
        text = parts[-1]
        for part_text, end in reversed(list(zip(parts[:-1], ends[:-1], strict=True))):
            text = f"tl.where(({index} < {end}){suffix}, {part_text}, {text})"
        return text

    def _split(self, node: Node, frame: Frame) -> str:
        inner, part = int(node.attributes["inner"]), int(node.attributes["part"])
        shift = frame.shift
        if frame.run == "h" and inner == self.pairs and shift is not None and shift % inner == 0:
            return self.real(node.inputs[0], Frame(f"c{part}").shifted(2 * shift))
        return self.real(node.inputs[0], frame.then("pair", part, inner))

    def _join(self, node: Node, frame: Frame) -> str:
        inner, shift = int(node.attributes["inner"]), frame.shift
        paired = frame.run in ("c0", "c1") and inner == self.pairs
        if paired and shift is not None and shift % (2 * inner) == 0:
            part = node.inputs[int(frame.run[1])]
            return self.within(part, node, Frame("h").shifted(shift // 2))
        index = self.index(frame)
        suffix = "[:, None]" if frame.run == "r" else "[None, :]"
        parts = [self.within(i, node, frame.then("unpair", inner)) for i in node.inputs]
        return f"tl.where((({index} // {inner}) % 2 == 0){suffix}, {parts[0]}, {parts[1]})"

    def _repeat(self, node: Node, frame: Frame) -> str:
        times, shift = int(node.attributes["times"]), frame.shift
        if not node.type.is_matrix or not self._groups(node.inputs[0]):
            return self.within(node.inputs[0], node, frame.then("div", times))
        if frame.run not in ("c", "c0", "c1") or shift is None or shift % times:
            raise Unsupported("a sum over groups of columns that are not those of the tile")
        lane = self.of_lane(times)
        group = self.at(node.inputs[0], Frame(f"g{times}").shifted(shift // times))
        spread = f"tl.broadcast_to({group}, (BM, W // {lane}))"
        return f"device.repeated({spread}, BM, W, {lane})"

    def _groups(self, node: Node) -> bool:
        """Whether a matrix is made of sums over groups in this kernel."""
        if node in self.loads or not node.type.is_matrix:
            return False
        if node not in self._grouped:
            grouped = node.op in (Op.GROUP_SUM, Op.GROUP_MAX)
            self._grouped[node] = grouped or any(self._groups(i) for i in node.inputs)
        return self._grouped[node]

    def _group(self, node: Node, frame: Frame) -> str:
        size = int(node.attributes["size"])
        if frame.run != f"g{size}" or frame.shift is None:
            raise Unsupported("a sum over groups of columns that are not those of the tile")
        lane = self.of_lane(size)
        texts = []
        for run in ["c"] if self.pairs is None else ["c0", "c1"]:
            source = Frame(run).shifted(frame.shift * size)
            block = f"tl.broadcast_to({self.within(node.inputs[0], node, source)}, (BM, W))"
            function = "group_sum" if node.op is Op.GROUP_SUM else "group_max"
            texts.append(f"device.{function}({block}, BM, W, {lane})")
        if len(texts) == 1:
            return texts[0]
        a, b = texts
        return f"{a} + {b}" if node.op is Op.GROUP_SUM else f"device.maximum({a}, {b})"

    def _held(self, node: Node, frame: Frame | None) -> str:
        if not self.holds_rows:
            raise Unsupported("a reduction of whole rows where a tile holds a part of them")
        if frame not in (ROWS, None):
            raise Unsupported("a number of each row as a number of each column")
        names = self.reduced_rows(node)
        return f"{self.finished(node, names)}[:, None]"

    def finished(self, node: Node, names: list[str]) -> str:
        """A row reduction made of its pieces over all columns."""
        if node.op is Op.ROW_VARIANCE:
            return f"({names[1]} / {float(int(node.inputs[0].type.columns))})"
        if node.op is Op.LOGSUMEXP:
            shift = node.inputs[1]
            text = self.within(shift, node, ROWS)
            text = text if shift.type[:2] == (1, 1) else f"tl.reshape({text}, (BM,))"
            return f"(({names[0]} - {text}) + tl.log({names[1]}))"
        return names[0]

    def _numbers(self, node: Node, frame: Frame) -> str:
        """Row numbers of a column, also where that is read as a row, or column numbers of a row."""
        suffix = "[:, None]" if frame.run == "r" else "[None, :]"
        return f"{self.index(frame)}{suffix}"

    def _random(self, node: Node, frame: Frame) -> str:
        if not node.type.is_matrix:
            raise Unsupported("random numbers of a vector")
        seed = node.inputs[0]
        text = self.at(seed, None)
        if seed.op is Op.CONSTANT:
            text = f"tl.full((), {text}, tl.int64)"
        return f"device.uniform({text}, rows, {self.index(frame)})"

    def _transpose(self, node: Node, frame: Frame) -> str:
        return self.real(node.inputs[0], frame)


def next_power(count: int) -> int:
    """The least power of two that is not less."""
    return 1 << max(0, count - 1).bit_length()


def _compared(node: Node, texts: list[str]) -> list[str]:
    """Whole numbers are compared as such; a condition as a number."""
    kinds = [i.type.kind for i in node.inputs]
    found = []
    for value, text, other in zip(node.inputs, texts, reversed(kinds), strict=True):
        constant = value.attributes["value"] if value.op is Op.CONSTANT else None
        whole = constant is not None and float(constant).is_integer()
        if whole and other == INTEGER:
            found.append(number(int(constant)))  # type: ignore[arg-type]
        elif value.type.kind == BOOLEAN and constant is None:
            found.append(f"{text}.to(tl.float32)")
        else:
            found.append(text)
    return found


STEPS = {
    "shift": lambda index, count: f"{index} + {count}" if count > 0 else f"{index} - {-count}",
    "mod": lambda index, count: f"{index} % {count}",
    "div": lambda index, count: f"{index} // {count}",
    "pair": lambda index, part, inner: (
        f"({index} // {inner}) * {2 * inner} + {part * inner} + {index} % {inner}"
    ),
    "unpair": lambda index, inner: f"({index} // {2 * inner}) * {inner} + {index} % {inner}",
}

SPECIAL = {
    Op.COLUMNS: Body._columns,
    Op.CONCAT: Body._concat,
    Op.SPLIT: Body._split,
    Op.JOIN: Body._join,
    Op.REPEAT: Body._repeat,
    Op.TILE: Body._tile,
    Op.GROUP_SUM: Body._group,
    Op.GROUP_MAX: Body._group,
    Op.ROW_SUM: Body._held,
    Op.ROW_MAX: Body._held,
    Op.ROW_VARIANCE: Body._held,
    Op.LOGSUMEXP: Body._held,
    Op.ROW_INDEX: Body._numbers,
    Op.COLUMN_INDEX: Body._numbers,
    Op.RANDOM: Body._random,
    Op.TRANSPOSE: Body._transpose,
}
