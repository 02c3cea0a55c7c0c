"""Emitted kernels: the text of a kernel of a plan, and what it is called with.

A product kernel is persistent: its programs take tiles of the product one after the other, and
run the body on parts of the accumulator. A pointwise kernel goes down strips of rows. A vector
kernel finishes reductions and makes vectors of vectors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cadenza.backends.triton.arguments import COLUMN_REDUCTIONS, PARTIALS, Argument
from cadenza.backends.triton.body import Body
from cadenza.backends.triton.columns import Frame, Layout
from cadenza.backends.triton.modules import entry
from cadenza.backends.triton.readable import readable
from cadenza.backends.triton.tile import Move
from cadenza.core.ir import Node
from cadenza.core.ops import BOOLEAN, Op

HEADER = '''"""{said}"""

import triton
import triton.language as tl

from cadenza.backends.triton.templates import device

'''


@dataclass(frozen=True)
class Source:
    """The text of one emitted kernel, called `kernel`, and its pointers in order."""

    text: str
    arguments: tuple[Argument, ...]
    unit: int
    layout: Layout
    moves: tuple[Move, ...] = ()
    boxes: tuple[str, ...] = ()  # arguments that have a constant, whether they move as boxes
    movable: frozenset[str] = frozenset()  # those of them for which it may be true


def module(title: str, text: str, definitions: str) -> str:
    """An emitted module: what its kernel is, in the plan's own words, then its definitions."""
    return HEADER.format(said=quoted(title, text)) + readable(definitions)


def quoted(title: str, text: str) -> str:
    """What a module's docstring says between its quotes."""
    said = f"{title}\n\n{text}\n" if text else title
    return said.replace("\\", "\\\\").replace('"""', "'''")


def indented(lines: Iterable[str], depth: int) -> str:
    """Lines of a block."""
    return "".join(f"{'    ' * depth}{line}\n" if line else "\n" for line in lines)


# --- what bodies have in common -------------------------------------------------------------------


def fill(body: Body) -> tuple[list[list[str]], list[tuple[Node, Frame, str, str]]]:
    """Writes stores and reductions; the pieces of row reductions, and the column sums of blocks."""
    for node in body.kernel.stores:
        _store(body, node)
    rows, columns = [], []
    for node in left_in_parts(body):
        if node.op in COLUMN_REDUCTIONS:
            columns += _column_reduction(body, node)
        else:
            rows.append(body.reduced_rows(node))
    for node in body.kernel.reductions:
        if node in body.body:  # finished in the kernel, which holds rows
            _store_vector(body, node, body.block(node, HELD))
    return rows, columns


def left_in_parts(body: Body) -> list[Node]:
    """The reductions of which the kernel leaves partials."""
    return [node for node in body.kernel.reductions if node not in body.body]


def _store_vector(body: Body, node: Node, text: str) -> None:
    value = f"tl.reshape(tl.broadcast_to({text}, (BM, 1)), (BM,))"
    pointer = body.arguments.get("store", node).name
    body.lines.append(f"device.store_vector({pointer}, rows, row_ok, {value})")


HELD = Frame("r")


def _store(body: Body, node: Node) -> None:
    pointer = body.arguments.get("store", node).name
    width = int(node.type.columns)
    for frame in body.spaces.frames(body.space(node)):
        value = body.block(node, frame)
        mask = body.block_mask(body.mask(frame, width))
        index = body.index(frame)
        given = f"{pointer}, rows, {index}, {width}, {mask}, {value}"
        box = body.box(pointer, frame)
        call = f"device.store_part({given}, {box})" if box else f"device.store({given})"
        body.lines.append(call)
        body.moves.append(Move(node, frame, written=True))


def _column_reduction(body: Body, node: Node) -> Iterable[tuple[Node, Frame, str, str]]:
    for text, mask, frame in body.blocks(node.inputs[0]):
        if node.op is Op.COLUMN_SUM:
            made = f"tl.sum(tl.where(row_ok[:, None], {text}, 0.0), 0)"
        else:
            made = f"device.largest(tl.where(row_ok[:, None], {text}, float('-inf')), 0)"
        yield node, frame, mask, body.line(made, "s")


def runs(body: Body, start: str) -> list[str]:
    """Definitions of the runs of columns that a body uses, from its first column or half column."""
    lines = []
    if body.pairs is None:
        lines += [f"c_start = {start}", "c = c_start + tl.arange(0, W)", f"c_ok = c < {body.width}"]
    else:
        half, whole = body.width // 2, 2 * body.pairs == body.width
        lines += [f"h_start = {start}", "h = h_start + tl.arange(0, W)", f"h_ok = h < {half}"]
        for part in (0, 1):
            if f"c{part}" in body.runs:
                lines.append(f"c{part} = device.lane(h_start, W, {body.pairs}, {part}, {whole})")
    for run in sorted(r for r in body.runs if r.startswith("g")):
        size = int(run[1:])
        lane, first = body.of_lane(size), "c_start" if body.pairs is None else "h_start"
        lines.append(f"{run} = {first} // {lane} + tl.arange(0, W // {lane})")
        lines.append(f"{run}_ok = {run} < {body.width // size}")
    return lines


def pieces_of(node: Node) -> tuple[str, ...]:
    """The names of the buffers that a reduction's partials are in."""
    return PARTIALS.get(node.op, ("",))


def parameters(arguments: Sequence[Argument]) -> list[str]:
    """Pointers, and the strides of what is loaded."""
    found = [a.name for a in arguments]
    found += [f"{a.name}_stride" for a in arguments if a.role == "load"]
    return found + [f"{a.name}_tiles" for a in arguments if a.role == "partial"]


# --- product kernels ------------------------------------------------------------------------------

PRODUCT = """
@triton.jit
def part(
    {accumulators}, start, i, rows, row_ok, {names}{typed_boxes},
    ROWS, BM: tl.constexpr, W: tl.constexpr,
):
{body}

@triton.jit
def {kernel}(
    a, b, a_stride, b_stride, {names},
    ROWS, {depth}BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    A_TMA: tl.constexpr, B_TMA: tl.constexpr, TA: tl.constexpr, TB: tl.constexpr,
    WIDE: tl.constexpr, PRECISION: tl.constexpr, FLATTEN: tl.constexpr{typed_boxes},
):
    N: tl.constexpr = {columns}
{known_depth}    W: tl.constexpr = BN{cuts}
    row_tiles = tl.cdiv(ROWS, BM)
    column_tiles: tl.constexpr = (N + BN - 1) // BN
    for t in tl.range(
        tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0), flatten=FLATTEN
    ):
        i, j = device.tile_at(t, row_tiles, column_tiles, GROUP)
        acc = device.product(
            a, b, a_stride, b_stride, i, j, ROWS, N, K, BM, BN, BK,
            A_TMA, B_TMA, TA, TB, {pairs}, {natural}, WIDE, PRECISION,
        )
        rows = i * BM + tl.arange(0, BM)
        row_ok = rows < ROWS
{parts}"""


def product_source(
    body: Body, title: str, text: str, parts: int, natural: bool, depth: int | None
) -> Source:
    """The text of a product kernel whose epilogue works on `parts` parts of a tile.

    `natural` tells that the accumulator's columns are in order, although pairs are far apart.
    """
    assert body.kernel.product is not None
    lines, reductions = lines_of_part(body)
    arguments = tuple(body.arguments.found.values())
    names = ", ".join(parameters(arguments))
    boxes = [f"{name}_box" for name in sorted(body.boxes)]
    masks = {a.name for a in arguments if a.node.type.kind == BOOLEAN}  # which no device boxes
    called = ", ".join([names, *boxes])
    emitted = PRODUCT.format(
        kernel=entry(title, "product"),
        typed_boxes="".join(f", {box}: tl.constexpr" for box in boxes),
        accumulators=", ".join(accumulators(body)), names=names, body=indented(lines, 1),
        depth="K, " if depth is None else "", columns=int(body.kernel.product.type.columns),
        known_depth="" if depth is None else f"    K: tl.constexpr = {depth}\n",
        cuts=f" // {cuts}" if (cuts := parts * body.layout.lanes) > 1 else "",
        pairs=body.pairs if body.layout.lanes == 2 else 0, natural=natural,
        parts=indented(lines_of_tile(body, parts, natural, called, reductions), 2),
    )  # fmt: skip
    return Source(
        module(title, text, emitted), arguments, body.unit, body.layout, tuple(body.moves),
        boxes=tuple(sorted(body.boxes)), movable=frozenset(body.boxes - body.scattered - masks),
    )  # fmt: skip


def accumulators(body: Body) -> list[str]:
    """The names in a part of the product's columns: those of the tile, or of its two lanes."""
    return ["acc"] if body.layout.lanes == 1 else ["acc0", "acc1"]


def lines_of_part(body: Body) -> tuple[list[str], list[Node]]:
    """What a part of a product's tile does; the row reductions of which it returns the pieces."""
    row_pieces, column_sums = fill(body)
    reductions = [n for n in left_in_parts(body) if n.op not in COLUMN_REDUCTIONS]
    returned = [name for names in row_pieces for name in names]
    counts = [f"tl.sum({m}.to(tl.float32))" for m in _counts(body, reductions)]
    for node, frame, mask, name in column_sums:
        pointer = body.arguments.get("reduction", node).name
        width = int(node.type.columns)
        row = f"{pointer} + i.to(tl.int64) * {width}"
        body.lines.append(f"device.store_vector({row}, {body.index(frame)}, {mask}, {name})")
    for node in reductions:
        for piece in pieces_of(node):
            body.arguments.get("reduction", node, piece)
    result = [f"return {', '.join([*returned, *counts])}"] if returned else []
    return [*runs(body, "start"), *body.head, *body.lines, *result], reductions


def _counts(body: Body, reductions: Iterable[Node]) -> list[str]:
    """For each variance, the mask of the columns that a part holds, so that parts can be merged."""
    return [_mask_of(body, n.inputs[0]) for n in reductions if n.op is Op.ROW_VARIANCE]


def _mask_of(body: Body, node: Node) -> str:
    frames = body.spaces.frames(body.space(node))
    masks = [body.mask(frame, int(node.type.columns)) for frame in frames]
    return masks[0] if len(masks) == 1 else f"({' + '.join(f'{m}.to(tl.int32)' for m in masks)})"


def lines_of_tile(
    body: Body, parts: int, natural: bool, names: str, reductions: Sequence[Node]
) -> Iterable[str]:
    """Cuts the accumulator, runs the body on each part and merges what they return."""
    lanes = body.layout.lanes == 2
    if not lanes:
        given = yield from _cut(["acc"], "BN", parts)
        calls = [[name] for name in given]
    elif natural:
        given = yield from _cut(["acc"], "BN", parts)
        for name in given:
            yield f"{name}_0, {name}_1 = device.lanes({name}, BM, 2 * W, {body.pairs})"
        calls = [[f"{name}_0", f"{name}_1"] for name in given]
    else:
        yield "acc_0, acc_1 = device.halves(acc, BM, BN)"
        first = yield from _cut(["acc_0"], "BN // 2", parts)
        second = yield from _cut(["acc_1"], "BN // 2", parts)
        calls = [[a, b] for a, b in zip(first, second, strict=True)]
    width = "BN // 2" if lanes else "BN"
    yielded: list[list[str]] = []
    for number, accumulators in enumerate(calls):
        start = f"j * ({width})" + (f" + {number} * W" if number else "")
        call = f"part({', '.join(accumulators)}, {start}, i, rows, row_ok, {names}, ROWS, BM, W)"
        results = _results(reductions, number)
        yielded.append(results)
        yield f"{', '.join(results)} = {call}" if results else call
    yield from _merge(yielded, reductions)
    for position, (node, piece) in enumerate((n, p) for n in reductions for p in pieces_of(node=n)):
        pointer = body.arguments.get("reduction", node, piece).name
        at = f"{pointer} + j.to(tl.int64) * ROWS"
        yield f"device.store_vector({at}, rows, row_ok, {yielded[0][position]})"


def _cut(names: list[str], width: str, parts: int) -> Iterable[str]:
    """Halves accumulators until there are `parts`; their names."""
    count = 1
    while count < parts:
        halved = []
        for name in names:
            left, right = f"{name}l", f"{name}r"
            cut = f"({width}) // {count}" if count > 1 else width
            yield f"{left}, {right} = device.halves({name}, BM, {cut})"
            halved += [left, right]
        names, count = halved, 2 * count
    return names


def _results(reductions: Sequence[Node], number: int) -> list[str]:
    results = [f"p{number}_{k}" for k in range(sum(len(pieces_of(n)) for n in reductions))]
    variances = [n for n in reductions if n.op is Op.ROW_VARIANCE]
    return results + [f"n{number}_{k}" for k in range(len(variances))]


def _merge(results: list[list[str]], reductions: Sequence[Node]) -> Iterable[str]:
    """Merges the partials of later parts into those of the first."""
    total = sum(len(pieces_of(n)) for n in reductions)
    first = results[0]
    for other in results[1:]:
        position, variances = 0, 0
        for node in reductions:
            if node.op is Op.ROW_SUM:
                yield f"{first[position]} = {first[position]} + {other[position]}"
            elif node.op is Op.ROW_MAX:
                a, b = first[position], other[position]
                yield f"{a} = device.maximum({a}, {b})"
            else:
                names = [first[position], first[position + 1]]
                more = [other[position], other[position + 1]]
                function = "merged_online"
                if node.op is Op.ROW_VARIANCE:
                    counts = first[total + variances], other[total + variances]
                    names_in, more_in = [*names, counts[0]], [*more, counts[1]]
                    function = "merged_moments"
                    yield _assign(names, function, [*names_in, *more_in])
                    yield f"{counts[0]} = {counts[0]} + {counts[1]}"
                    variances += 1
                else:
                    yield _assign(names, function, [*names, *more])
            position += len(pieces_of(node))


def _assign(names: Sequence[str], function: str, given: Sequence[str]) -> str:
    return f"{', '.join(names)} = device.{function}({', '.join(given)})"


# --- pointwise kernels ----------------------------------------------------------------------------

POINTWISE = """
@triton.jit
def {kernel}(
    {names},
    ROWS, BM: tl.constexpr, W: tl.constexpr,
):
    j = tl.program_id(1)
{head}    for i in range(tl.program_id(0), tl.cdiv(ROWS, BM), tl.num_programs(0)):
        rows = i * BM + tl.arange(0, BM)
        row_ok = rows < ROWS
{body}{tail}"""


def pointwise_source(body: Body, title: str, text: str) -> Source:
    """The text of a kernel without a product."""
    row_pieces, column_sums = fill(body)
    reductions = [n for n in left_in_parts(body) if n.op not in COLUMN_REDUCTIONS]
    for node, names in zip(reductions, row_pieces, strict=True):
        for piece, name in zip(pieces_of(node), names, strict=True):
            pointer = body.arguments.get("reduction", node, piece).name
            at = f"{pointer} + j.to(tl.int64) * ROWS + rows"
            body.lines.append(f"tl.store({at}, {name}, mask=row_ok)")
    head = [*runs(body, "j * W"), *body.head]
    tail = []
    for position, (node, frame, mask, name) in enumerate(column_sums):
        kept = f"k{position}"
        empty = "0.0" if node.op is Op.COLUMN_SUM else "float('-inf')"
        head.append(f"{kept} = tl.full(({body.columns_of(frame.run)},), {empty}, tl.float32)")
        added = f"{kept} + {name}" if node.op is Op.COLUMN_SUM else (
            f"device.maximum({kept}, {name})")  # fmt: skip
        body.lines.append(f"{kept} = {added}")
        pointer = body.arguments.get("reduction", node).name
        row = f"{pointer} + tl.program_id(0).to(tl.int64) * {int(node.type.columns)}"
        tail.append(f"device.store_vector({row}, {body.index(frame)}, {mask}, {kept})")
    arguments = tuple(body.arguments.found.values())
    emitted = POINTWISE.format(
        kernel=entry(title, "pointwise"),
        names=", ".join(parameters(arguments)), head=indented(head, 1),
        body=indented(body.lines, 2), tail=indented(tail, 1),
    )  # fmt: skip
    moves = tuple(body.moves)
    return Source(module(title, text, emitted), arguments, body.unit, body.layout, moves)


# --- vector kernels -------------------------------------------------------------------------------

VECTORS = """
@triton.jit
def {kernel}({names}, ROWS, BM: tl.constexpr):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    row_ok = rows < ROWS
{body}"""


def vector_source(body: Body, nodes: Sequence[Node], title: str, text: str) -> Source:
    """The text of a kernel that makes vectors of one length, of partials and other vectors."""
    for node in nodes:
        if node.type[:2] == (1, 1):
            _store_vector(body, node, f"tl.zeros((BM, 1), tl.float32) + {body.real(node, None)}")
        else:
            _store_vector(body, node, body.block(node, HELD))
    arguments = tuple(body.arguments.found.values())
    emitted = VECTORS.format(
        kernel=entry(title, "vectors"), names=", ".join(parameters(arguments)),
        body=indented(body.lines, 1),
    )  # fmt: skip
    return Source(module(title, text, emitted), arguments, 1, body.layout)
