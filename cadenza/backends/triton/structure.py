"""Operations that choose columns or rows: which lines, or which other frame, each becomes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cadenza.backends.triton.columns import ROWS, Frame, Unsupported
from cadenza.core.ir import Node
from cadenza.core.ops import Op

if TYPE_CHECKING:
    from cadenza.backends.triton.body import Body


def _columns(body: Body, node: Node, frame: Frame) -> str:
    frame = frame.shifted(int(node.attributes["start"]))
    return body.within(node.inputs[0], node, frame)


def _tile(body: Body, node: Node, frame: Frame) -> str:
    frame = frame.wrapped(int(node.inputs[0].type.columns))
    return body.within(node.inputs[0], node, frame)


def _concat(body: Body, node: Node, frame: Frame) -> str:
    offset, ends, parts = 0, [], []
    for part in node.inputs:
        parts.append(body.within(part, node, frame.shifted(-offset)))
        offset += int(part.type.columns)
        ends.append(offset)
    index = body.index(frame)
    suffix = "[:, None]" if frame.run == "r" else "[None, :]"
    text = parts[-1]
    for part_text, end in reversed(list(zip(parts[:-1], ends[:-1], strict=True))):
        text = f"tl.where(({index} < {end}){suffix}, {part_text}, {text})"
    return text


def _split(body: Body, node: Node, frame: Frame) -> str:
    inner, part = int(node.attributes["inner"]), int(node.attributes["part"])
    shift = frame.shift
    if frame.run == "h" and inner == body.pairs and shift is not None and shift % inner == 0:
        return body.real(node.inputs[0], Frame(f"c{part}").shifted(2 * shift))
    return body.real(node.inputs[0], frame.then("pair", part, inner))


def _join(body: Body, node: Node, frame: Frame) -> str:
    inner, shift = int(node.attributes["inner"]), frame.shift
    paired = frame.run in ("c0", "c1") and inner == body.pairs
    if paired and shift is not None and shift % (2 * inner) == 0:
        part = node.inputs[int(frame.run[1])]
        return body.within(part, node, Frame("h").shifted(shift // 2))
    index = body.index(frame)
    suffix = "[:, None]" if frame.run == "r" else "[None, :]"
    parts = [body.within(i, node, frame.then("unpair", inner)) for i in node.inputs]
    return f"tl.where((({index} // {inner}) % 2 == 0){suffix}, {parts[0]}, {parts[1]})"


def _repeat(body: Body, node: Node, frame: Frame) -> str:
    times, shift = int(node.attributes["times"]), frame.shift
    if not node.type.is_matrix or not has_groups(body, node.inputs[0]):
        return body.within(node.inputs[0], node, frame.then("div", times))
    if frame.run not in ("c", "c0", "c1") or shift is None or shift % times:
        raise Unsupported("a sum over groups of columns that are not those of the tile")
    lane = body.of_lane(times)
    group = body.at(node.inputs[0], Frame(f"g{times}").shifted(shift // times))
    spread = f"tl.broadcast_to({group}, (BM, W // {lane}))"
    return f"device.repeated({spread}, BM, W, {lane})"


def has_groups(body: Body, node: Node) -> bool:
    """Whether a matrix is made of sums over groups in this kernel."""
    if node in body.loads or not node.type.is_matrix:
        return False
    if node not in body.grouped:
        grouped = node.op in (Op.GROUP_SUM, Op.GROUP_MAX)
        body.grouped[node] = grouped or any(has_groups(body, i) for i in node.inputs)
    return body.grouped[node]


def _group(body: Body, node: Node, frame: Frame) -> str:
    size = int(node.attributes["size"])
    if frame.run != f"g{size}" or frame.shift is None:
        raise Unsupported("a sum over groups of columns that are not those of the tile")
    lane = body.of_lane(size)
    texts = []
    for run in ["c"] if body.pairs is None else ["c0", "c1"]:
        source = Frame(run).shifted(frame.shift * size)
        block = f"tl.broadcast_to({body.within(node.inputs[0], node, source)}, (BM, W))"
        function = "group_sum" if node.op is Op.GROUP_SUM else "group_max"
        texts.append(f"device.{function}({block}, BM, W, {lane})")
    if len(texts) == 1:
        return texts[0]
    a, b = texts
    return f"{a} + {b}" if node.op is Op.GROUP_SUM else f"device.maximum({a}, {b})"


def _held(body: Body, node: Node, frame: Frame | None) -> str:
    if not body.holds_rows:
        raise Unsupported("a reduction of whole rows where a tile holds a part of them")
    if frame not in (ROWS, None):
        raise Unsupported("a number of each row as a number of each column")
    names = body.reduced_rows(node)
    return f"{finished(body, node, names)}[:, None]"


def finished(body: Body, node: Node, names: list[str]) -> str:
    """A row reduction made of its pieces over all columns."""
    if node.op is Op.ROW_VARIANCE:
        return f"({names[1]} / {float(int(node.inputs[0].type.columns))})"
    if node.op is Op.LOGSUMEXP:
        shift = node.inputs[1]
        text = body.within(shift, node, ROWS)
        text = text if shift.type[:2] == (1, 1) else f"tl.reshape({text}, (BM,))"
        return f"(({names[0]} - {text}) + tl.log({names[1]}))"
    return names[0]


def _numbers(body: Body, node: Node, frame: Frame) -> str:
    """Row numbers of a column, also where that is read as a row, or column numbers of a row."""
    suffix = "[:, None]" if frame.run == "r" else "[None, :]"
    return f"{body.index(frame)}{suffix}"


def _random(body: Body, node: Node, frame: Frame) -> str:
    if not node.type.is_matrix:
        raise Unsupported("random numbers of a vector")
    seed = node.inputs[0]
    text = body.at(seed, None)
    if seed.op is Op.CONSTANT:
        text = f"tl.full((), {text}, tl.int64)"
    return f"device.uniform({text}, rows, {body.index(frame)})"


def _transpose(body: Body, node: Node, frame: Frame) -> str:
    return body.real(node.inputs[0], frame)


SPECIAL = {
    Op.COLUMNS: _columns,
    Op.CONCAT: _concat,
    Op.SPLIT: _split,
    Op.JOIN: _join,
    Op.REPEAT: _repeat,
    Op.TILE: _tile,
    Op.GROUP_SUM: _group,
    Op.GROUP_MAX: _group,
    Op.ROW_SUM: _held,
    Op.ROW_MAX: _held,
    Op.ROW_VARIANCE: _held,
    Op.LOGSUMEXP: _held,
    Op.ROW_INDEX: _numbers,
    Op.COLUMN_INDEX: _numbers,
    Op.RANDOM: _random,
    Op.TRANSPOSE: _transpose,
}
