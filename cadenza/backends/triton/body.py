"""What one kernel computes of a part of its tile, as lines of Triton.

Values are asked for at frames, from what is stored and reduced down to the accumulator, loads and
vectors: so an operation on columns is a change of frame. A value is one line, made once a frame.
"""

from __future__ import annotations

from cadenza.backends.triton.arguments import PARTIALS, in_memory, next_power
from cadenza.backends.triton.columns import FIRST, ROWS, Frame, Space, Unsupported
from cadenza.backends.triton.readable import value_name
from cadenza.backends.triton.structure import SPECIAL, has_groups
from cadenza.backends.triton.texts import ELEMENTWISE, number
from cadenza.backends.triton.tile import Move, Tile
from cadenza.core.ir import Node, topological
from cadenza.core.ops import BOOLEAN, INTEGER, REAL, Op
from cadenza.core.readiness import reduces_matrix


class Body(Tile):
    """The lines of one kernel."""

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
        self.moves.append(Move(node, frame, written=False))
        argument = self.arguments.get("load", node).name
        mask = self.block_mask(self.mask(frame, int(node.type.columns)))
        given = f"{argument}, rows, {self.index(frame)}, {argument}_stride, {mask}"
        if node.type.kind != REAL:
            return f"device.load_whole({given})"
        box = self.box(argument, frame)
        return f"device.load_part({given}, {box})" if box else f"device.load({given})"

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
        return f"device.merge_{name}({call}, {shift})"

    # --- reductions -------------------------------------------------------------------------------

    def space(self, node: Node) -> Space:
        """The space of a value that is stored or reduced; its tiles hold all of its columns."""
        columns = int(node.type.columns)
        half = self.pairs is not None and 2 * columns == self.width
        found = self.spaces.of(node)
        if found is None:
            found = Space("half" if half and not has_groups(self, node) else "full")
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


def _compared(node: Node, texts: list[str]) -> list[str]:
    """Whole numbers are compared as such; a condition as a number."""
    kinds = [i.type.kind for i in node.inputs]
    found = []
    for value, text, other in zip(node.inputs, texts, reversed(kinds), strict=True):
        if value.op is Op.CONSTANT:
            constant = float(value.attributes["value"])
            whole = other == INTEGER and constant.is_integer() and abs(constant) < 2.0**63
            found.append(number(int(constant)) if whole else text)
        elif value.type.kind == BOOLEAN:
            found.append(f"{text}.to(tl.float32)")
        else:
            found.append(text)
    return found
