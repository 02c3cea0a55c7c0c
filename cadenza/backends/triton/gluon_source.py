"""The text of product kernels in Gluon, for Hopper: the plain template's epilogue, pingpong around.

The lines of a part of a tile are those of plain Triton; names change their prefix, ranges and
broadcasts get their layout from `gluon_device`, and the accumulator is arranged first.
"""

from __future__ import annotations

import re
from dataclasses import replace

from cadenza.backends.triton.body import Body
from cadenza.backends.triton.columns import Layout, Unsupported
from cadenza.backends.triton.configuration import Configuration
from cadenza.backends.triton.modules import entry
from cadenza.backends.triton.readable import readable
from cadenza.backends.triton.source import (
    Source,
    accumulators,
    indented,
    lines_of_part,
    lines_of_tile,
    parameters,
    quoted,
)

COLUMNS, BLOCK = 128, 64  # of a tile, of an instruction: as `gluon_device` has them
PART = 32  # columns of a lane in a part of a tile, where groups are no wider
# What plain Triton does without a layout, or has and Gluon has not.
OF_DEVICE = ("arange", "broadcast_to", "sigmoid")

HEADER = '''"""{said}"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from cadenza.backends.triton.templates import gluon_device as device

'''

KERNEL = """
@gluon.jit
def part(
    {accumulators}, start, i, rows, row_ok, {names},
    ROWS, BM: gl.constexpr, W: gl.constexpr,
):
{body}

@gluon.jit
def epilogue(acc, i, j, pointers, ROWS):
    {names}, = pointers
    BM: gl.constexpr = {block}
    BN: gl.constexpr = {columns}
    W: gl.constexpr = {width}
    rows = device.rows_of(i)
    row_ok = rows < ROWS
{tile}

@gluon.jit
def consume(
    memory, pointers, ROWS, N: gl.constexpr, K, ME: gl.constexpr, BM: gl.constexpr,
    BK: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, TA: gl.constexpr, TB: gl.constexpr,
    ABREAST: gl.constexpr,
):
    BLOCKS: gl.constexpr = BM // {block}
    row_tiles = gl.cdiv(ROWS, BM)
    column_tiles: gl.constexpr = (N + {columns} - 1) // {columns} // ABREAST
    steps = gl.cdiv(K, BK)
    turns: gl.constexpr = 2 // ABREAST
    done = (turns - 1) * ME * steps
    phase = 1 - ME
    programs = gl.num_programs(0)
    first = gl.program_id(0) + (turns - 1) * ME * programs
    for t in range(first, row_tiles * column_tiles, turns * programs):
        i, j = device.tile_at(t, row_tiles, column_tiles, GROUP)
        acc0, acc1, acc2 = device.products(
            memory, done, steps, phase, ME, BLOCKS, STAGES, TA, TB, ABREAST
        )
        j = j * ABREAST + (ABREAST - 1) * ME
        block = i * BLOCKS
        epilogue(acc0, block, j, pointers, ROWS)
        if BLOCKS > 1:
            if (block + 1) * {block} < ROWS:
                epilogue(acc1, block + 1, j, pointers, ROWS)
        if BLOCKS > 2:
            if (block + 2) * {block} < ROWS:
                epilogue(acc2, block + 2, j, pointers, ROWS)
        done += turns * steps
        phase = phase ^ 1


@gluon.jit
def {kernel}(
    a, b, {names},
    ROWS, {depth}BM: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    TA: gl.constexpr, TB: gl.constexpr, ABREAST: gl.constexpr,
):
    N: gl.constexpr = {product}
{known_depth}    memory = device.ring(a, b, BM, BK, STAGES, TA, TB, ABREAST)
    pointers = ({names},)
    gl.warp_specialize([
        (consume, (memory, pointers, ROWS, N, K, 0, BM, BK, STAGES, GROUP, TA, TB, ABREAST)),
        (consume, (memory, pointers, ROWS, N, K, 1, BM, BK, STAGES, GROUP, TA, TB, ABREAST)),
        (device.produce, (
            a, b, memory, ROWS, N, K, BM, BK, STAGES, GROUP, TA, TB, ABREAST, {pairs}, {whole}
        )),
    ], [4, 1], [240, 24])
"""


def apart(layout: Layout) -> bool:
    """Whether the two lanes of a tile are runs of their own; else the columns are in order."""
    if layout.lanes == 1:
        return False
    inner = int(layout.pairs or 1)
    return 2 * inner == layout.width or inner % (COLUMNS // 2) == 0


def cut_of(layout: Layout, unit: int, cut: Configuration) -> Configuration:
    """The tile of this template with parts that hold whole groups of `unit` columns.

    Of `cut` the rows, stages and groups of row tiles count. Unsupported if no part holds a group.
    """
    lane, width = COLUMNS // layout.lanes, max(PART, unit)
    if width > lane:
        raise Unsupported(f"groups of {unit * layout.lanes} columns in tiles of {COLUMNS}")
    if layout.lanes == 2 and not apart(layout) and width % int(layout.pairs or 1):
        raise Unsupported(f"pairs at {layout.pairs} columns in parts of {width}")
    return replace(cut, BN=COLUMNS, warps=4, parts=lane // width)


def gluon_product_source(
    body: Body, title: str, text: str, cut: Configuration, depth: int | None
) -> Source:
    """The text of a product kernel for Hopper; `depth` is the K that is known, else an argument."""
    assert body.kernel.product is not None
    lines, reductions = lines_of_part(body)
    cut, layout = cut_of(body.layout, body.unit, cut), body.layout
    arguments = tuple(body.arguments.found.values())
    names = ", ".join(parameters(arguments))
    given, two = accumulators(body), apart(layout)
    lines = [*(f"{name} = device.arranged({name})" for name in given), *lines]
    emitted = KERNEL.format(
        kernel=entry(title, "product"),
        accumulators=", ".join(given), names=names, body=indented(map(_blockwise, lines), 1),
        tile=indented(lines_of_tile(body, cut.parts, not two, names, reductions), 1),
        block=BLOCK, columns=COLUMNS, width=cut.width(layout.lanes),
        product=int(body.kernel.product.type.columns), depth="K, " if depth is None else "",
        known_depth="" if depth is None else f"    K: gl.constexpr = {depth}\n",
        pairs=layout.pairs if two else 0, whole=2 * int(layout.pairs or 0) == layout.width,
    )  # fmt: skip
    renamed = re.sub(r"\btl\.(\w+)", _renamed, readable(emitted))
    whole, moves = HEADER.format(said=quoted(title, text)) + renamed, tuple(body.moves)
    return Source(whole, arguments, body.unit, layout, moves)


def _renamed(found: re.Match[str]) -> str:
    return f"{'device' if found[1] in OF_DEVICE else 'gl'}.{found[1]}"


def _blockwise(line: str) -> str:
    """A line of a part that reaches matrices by the number of its block, and settles its rows."""
    if line.startswith("return "):
        pieces = line.removeprefix("return ").split(", ")
        return "return " + ", ".join(p if "(" in p else f"device.settled({p})" for p in pieces)
    return re.sub(r"(device\.(?:load|load_whole|store)\(\w+,) rows,", r"\1 i,", line)
