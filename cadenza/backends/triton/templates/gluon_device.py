"""What emitted Gluon kernels call on Hopper: the two consumers' products, the producer, the memory.

A program has a producer warp, which fills a ring of stages by descriptors, and two consumer
warpgroups, which take the program's tiles in turn: one multiplies while the other runs its
epilogue. Or, with ABREAST = 2, both multiply at once, two neighbouring tiles that share their rows.
A tile is BM rows, in blocks of 64, by 128 columns. Blocks of an epilogue are 64 rows in `LAYOUT`,
whatever their columns; vectors over rows and over columns are slices of it. Functions of `device`
that name no layout serve here too.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from cadenza.backends.triton.templates import device
from cadenza.backends.triton.templates.device import (
    halves,
    largest,
    maximum,
    merged_moments,
    merged_online,
    minimum,
    moments,
    negative_zero,
    online,
    tanh,
    tile_at,
    uniform,
)

__all__ = [
    "arange", "arranged", "broadcast_to", "finish_row_max", "finish_row_sum", "group_max",
    "group_sum", "halves", "lane", "lanes", "largest", "load", "load_vector", "load_whole",
    "load_whole_vector", "maximum", "merged_moments", "merged_online", "minimum", "moments",
    "negative_zero", "online", "produce", "products", "repeated", "ring", "rows_of", "settled",
    "sigmoid", "store", "store_vector", "tanh", "tile_at", "uniform", "wrapped",
]  # fmt: skip

# Newer releases of Triton have another name for it.
bring = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
BLOCK = gl.constexpr(64)  # rows that one instruction multiplies
COLUMNS = gl.constexpr(128)  # of a tile
# A warp keeps the 16 rows that it has in the accumulator, so arranging needs no barrier; a thread
# has 8 columns, which is 16 bytes of what is loaded and stored.
LAYOUT = gl.constexpr(gl.BlockedLayout([2, 8], [8, 4], [4, 1], [1, 0]))
ROW = gl.constexpr(gl.SliceLayout(1, LAYOUT.value))
COLUMN = gl.constexpr(gl.SliceLayout(0, LAYOUT.value))
SETTLED = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
PRODUCT = gl.constexpr(
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16])
)


# --- blocks ---------------------------------------------------------------------------------------


@gluon.jit
def arranged(acc):
    """A part of an accumulator as a block of an epilogue."""
    return gl.convert_layout(acc, LAYOUT)


@gluon.jit
def settled(x):
    """What a part has reduced of its rows, through shared memory: so it is there at once.

    The compiler would else put off reductions until all parts are merged, and keep the elements of
    all of them in registers.
    """
    return gl.convert_layout(x, SETTLED)


@gluon.jit
def arange(START: gl.constexpr, END: gl.constexpr):
    """START, START + 1, … END - 1, over columns."""
    return gl.arange(START, END, COLUMN)


@gluon.jit
def rows_of(block):
    """The numbers of the rows of a block of rows."""
    return block * BLOCK + gl.arange(0, BLOCK, ROW)


@gluon.jit
def broadcast_to(x, shape):
    """A block, a row or a column of one, or a number, as a block of this shape."""
    block, _ = gl.broadcast(gl.to_tensor(x), gl.zeros(shape, gl.float32, LAYOUT))
    return block


@gluon.jit
def lanes(x, ROWS: gl.constexpr, WIDTH: gl.constexpr, INNER: gl.constexpr):
    """The two parts of columns seen as (outer, 2, INNER), [ROWS, WIDTH / 2] each."""
    if INNER == 2 or INNER == 4:  # the accumulator has these columns in several threads
        return device.lanes(gl.convert_layout(x, LAYOUT), ROWS, WIDTH, INNER)
    else:
        return device.lanes(x, ROWS, WIDTH, INNER)


@gluon.jit
def group_sum(x, ROWS: gl.constexpr, WIDTH: gl.constexpr, SIZE: gl.constexpr):
    """The sums of groups of SIZE columns."""
    if SIZE == WIDTH:
        return gl.sum(x, 1)[:, None]
    else:
        return gl.convert_layout(gl.sum(gl.reshape(x, (ROWS, WIDTH // SIZE, SIZE)), 2), LAYOUT)


@gluon.jit
def group_max(x, ROWS: gl.constexpr, WIDTH: gl.constexpr, SIZE: gl.constexpr):
    """The largest of groups of SIZE columns."""
    if SIZE == WIDTH:
        return largest(x, 1)[:, None]
    else:
        return gl.convert_layout(largest(gl.reshape(x, (ROWS, WIDTH // SIZE, SIZE)), 2), LAYOUT)


@gluon.jit
def repeated(x, ROWS: gl.constexpr, WIDTH: gl.constexpr, TIMES: gl.constexpr):
    """Each of WIDTH / TIMES columns, TIMES times."""
    if TIMES == WIDTH:
        return broadcast_to(x, (ROWS, WIDTH))
    else:
        like = gl.reshape(gl.zeros((ROWS, WIDTH), x.dtype, LAYOUT), (ROWS, WIDTH // TIMES, TIMES))
        sliced: gl.constexpr = gl.SliceLayout(2, like.type.layout)
        spread, _ = gl.broadcast(gl.convert_layout(x, sliced)[:, :, None], like)
        return gl.convert_layout(gl.reshape(spread, (ROWS, WIDTH)), LAYOUT)


# --- memory ---------------------------------------------------------------------------------------
# A block of a matrix is reached from its first row, so that offsets in it fit 32 bits: a thread's
# registers are short beside accumulators. Its elements are used once: they may leave the cache.


@gluon.jit
def _block(pointer, block, columns, stride):
    """Pointers to the columns of 64 rows, the block-th of a matrix."""
    first = pointer + block.to(gl.int64) * BLOCK * stride
    return first + ((gl.arange(0, BLOCK, ROW) * stride)[:, None] + columns[None, :])


@gluon.jit
def load(pointer, block, columns, stride, mask):
    """A block of a stored matrix of real numbers, as float32."""
    at = _block(pointer, block, columns, stride)
    return gl.load(at, mask=mask, other=0.0, eviction_policy="evict_first").to(gl.float32)


@gluon.jit
def load_whole(pointer, block, columns, stride, mask):
    """A block of a stored matrix of whole numbers or conditions."""
    at = _block(pointer, block, columns, stride)
    return gl.load(at, mask=mask, other=0, eviction_policy="evict_first")


@gluon.jit
def store(pointer, block, columns, stride, mask, value):
    """Rounds a block once, to the dtype of what it is stored in."""
    rounded = broadcast_to(value, mask.shape).to(pointer.dtype.element_ty)
    at = _block(pointer, block, columns, stride)
    gl.store(at, rounded, mask=mask, eviction_policy="evict_first")


@gluon.jit
def load_vector(pointer, index, mask):
    """Some numbers of a vector, as float32."""
    return gl.load(pointer + index, mask=mask, other=0.0).to(gl.float32)


@gluon.jit
def load_whole_vector(pointer, index, mask):
    """Some whole numbers of a vector."""
    return gl.load(pointer + index, mask=mask, other=0)


@gluon.jit
def store_vector(pointer, index, mask, value):
    """Rounds numbers of a vector once, to the dtype of what they are stored in."""
    placed = gl.convert_layout(value, index.type.layout)
    gl.store(pointer + index, placed.to(pointer.dtype.element_ty), mask=mask)


# --- elementwise and indices ----------------------------------------------------------------------
# Without remainders where an index is a run: of what they divide by the compiler knows nothing, and
# would move element by element.


@gluon.jit
def sigmoid(x):
    """1 / (1 + exp(-x)) by the hardware's powers and reciprocals, which are right to a few ulp."""
    e = gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * -1.4426950408889634],
        dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + e],
        dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def wrapped(start, SHIFT: gl.constexpr, WIDTH: gl.constexpr, COUNT: gl.constexpr):
    """Columns from start + SHIFT on modulo COUNT, a run where it stays one; WIDTH divides start."""
    if COUNT % WIDTH == 0 and SHIFT % WIDTH == 0:
        first = start + SHIFT
        return first - (first // COUNT) * COUNT + arange(0, WIDTH)
    else:
        return (start + SHIFT + arange(0, WIDTH)) % COUNT


@gluon.jit
def lane(start, WIDTH: gl.constexpr, INNER: gl.constexpr, PART: gl.constexpr, WHOLE: gl.constexpr):
    """The columns of a part of pairs at INNER, from column `start` of the half on."""
    if WHOLE:
        return start + PART * INNER + arange(0, WIDTH)
    elif INNER % WIDTH == 0:
        return start + (start // INNER) * INNER + PART * INNER + arange(0, WIDTH)
    else:
        half = start + arange(0, WIDTH)
        return (half // INNER) * (2 * INNER) + PART * INNER + half % INNER


# --- finishes -------------------------------------------------------------------------------------


@gluon.jit
def _partials(pointer, rows, row_ok, ROWS, tiles, SIZE: gl.constexpr, other):
    number = arange(0, SIZE)
    mask = row_ok[:, None] & (number < tiles)[None, :]
    pointers = pointer + number.to(gl.int64)[None, :] * ROWS + rows[:, None]
    return gl.load(pointers, mask=mask, other=other)


@gluon.jit
def finish_row_sum(pointer, rows, row_ok, ROWS, tiles, SIZE: gl.constexpr):
    """The sum of at most SIZE partials of each row."""
    return gl.sum(_partials(pointer, rows, row_ok, ROWS, tiles, SIZE, 0.0), 1)


@gluon.jit
def finish_row_max(pointer, rows, row_ok, ROWS, tiles, SIZE: gl.constexpr):
    """The largest of at most SIZE partials of each row."""
    return largest(_partials(pointer, rows, row_ok, ROWS, tiles, SIZE, float("-inf")), 1)


# --- the ring -------------------------------------------------------------------------------------
# A stage is full when the producer's bytes have come, and empty when a consumer has multiplied it.
# `turn` hands the ring from one consumer to the other: a consumer waits for stages of its tile only
# after the other has waited for all of those before. Without it a wait could be more than a round
# of the ring early, and the one bit of a barrier's phase could not tell the rounds apart.
# Where tiles are taken ABREAST = 2 at a time, side by side, a stage holds the columns of both, and
# each consumer takes its part of every stage: it is empty when both have.


@gluon.jit
def ring(
    a, b, BM: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    TA: gl.constexpr, TB: gl.constexpr, ABREAST: gl.constexpr,
):  # fmt: skip
    """Memory for stages of both operands, and barriers: full and empty stages, turns."""
    SIDES: gl.constexpr = STAGES * ABREAST
    BLOCKS: gl.constexpr = STAGES * (BM // BLOCK)
    left: gl.constexpr = [BLOCKS, BK, BLOCK] if TA else [BLOCKS, BLOCK, BK]
    right: gl.constexpr = [SIDES, COLUMNS, BK] if TB else [SIDES, BK, COLUMNS]
    a_stages = gl.allocate_shared_memory(a.dtype, left, a.layout)
    b_stages = gl.allocate_shared_memory(b.dtype, right, b.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=ABREAST)
    mbarrier.init(turn.index(0), count=1)
    mbarrier.init(turn.index(1), count=1)
    return a_stages, b_stages, full, empty, turn


@gluon.jit
def _after(stage, phase, STAGES: gl.constexpr):
    """The stage that comes next, and its phase."""
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def _bring_right(
    b, stage, full, j, k, TB: gl.constexpr, PAIRS: gl.constexpr, WHOLE: gl.constexpr
):  # fmt: skip
    """A step of the right operand: a run of 128 columns, or with PAIRS two of 64 of a half."""
    if PAIRS == 0:
        if TB:
            bring(b, [j * COLUMNS, k], full, stage)
        else:
            bring(b, [k, j * COLUMNS], full, stage)
    else:
        HALF: gl.constexpr = COLUMNS // 2
        start = j * HALF
        if not WHOLE:
            start = (start // PAIRS) * (2 * PAIRS) + start % PAIRS
        for part in gl.static_range(2):
            column = start + part * PAIRS
            if TB:
                at = stage.slice(part * HALF, HALF, 0)
                bring(b, [column, k], full, at)
            else:
                at = stage.slice(part * HALF, HALF, 1)
                bring(b, [k, column], full, at)


@gluon.jit
def produce(
    a, b, memory, ROWS, N: gl.constexpr, K, BM: gl.constexpr, BK: gl.constexpr,
    STAGES: gl.constexpr, GROUP: gl.constexpr, TA: gl.constexpr, TB: gl.constexpr,
    ABREAST: gl.constexpr, PAIRS: gl.constexpr, WHOLE: gl.constexpr,
):  # fmt: skip
    """Brings in the operands of all tiles of this program, one step of K after the other."""
    a_stages, b_stages, full, empty, _ = memory
    BLOCKS: gl.constexpr = BM // BLOCK
    BYTES: gl.constexpr = (BM + ABREAST * COLUMNS) * BK * (a.dtype.primitive_bitwidth // 8)
    row_tiles = gl.cdiv(ROWS, BM)
    column_tiles: gl.constexpr = (N + COLUMNS - 1) // COLUMNS // ABREAST
    stage = 0
    phase = 1  # that of a barrier before its first: new stages are empty
    for t in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        i, j = tile_at(t, row_tiles, column_tiles, GROUP)
        for k in range(0, K, BK):
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(full.index(stage), BYTES)
            for block in gl.static_range(BLOCKS):
                row = i * BM + block * BLOCK
                at = a_stages.index(stage * BLOCKS + block)
                if TA:
                    bring(a, [k, row], full.index(stage), at)
                else:
                    bring(a, [row, k], full.index(stage), at)
            for side in gl.static_range(ABREAST):
                at = b_stages.index(stage * ABREAST + side)
                _bring_right(b, at, full.index(stage), j * ABREAST + side, k, TB, PAIRS, WHOLE)
            stage, phase = _after(stage, phase, STAGES)


@gluon.jit
def _turned(stage, TURNED: gl.constexpr):
    if TURNED:
        return stage.permute((1, 0))
    else:
        return stage


@gluon.jit
def products(
    memory, done, steps, turn_phase, ME: gl.constexpr, BLOCKS: gl.constexpr,
    STAGES: gl.constexpr, TA: gl.constexpr, TB: gl.constexpr, ABREAST: gl.constexpr,
):  # fmt: skip
    """The accumulators of one tile, a block of 64 rows each; those past BLOCKS are 0.

    `done` is how many stages were full before its first, `steps` how many this tile has.
    """
    SIDE: gl.constexpr = (ABREAST - 1) * ME
    a_stages, b_stages, full, empty, turn = memory
    stage = done % STAGES
    phase = (done // STAGES) & 1
    if ABREAST == 1:
        mbarrier.wait(turn.index(ME), turn_phase)
    acc0 = gl.zeros((BLOCK, COLUMNS), gl.float32, PRODUCT)
    acc1 = gl.zeros((BLOCK, COLUMNS), gl.float32, PRODUCT)
    acc2 = gl.zeros((BLOCK, COLUMNS), gl.float32, PRODUCT)
    for k in range(steps):
        mbarrier.wait(full.index(stage), phase)
        b = _turned(b_stages.index(stage * ABREAST + SIDE), TB)
        first = stage * BLOCKS
        x = _turned(a_stages.index(first), TA)
        acc0 = warpgroup_mma(x, b, acc0, use_acc=k > 0, is_async=True)
        if BLOCKS > 1:
            y = _turned(a_stages.index(first + 1), TA)
            acc1 = warpgroup_mma(y, b, acc1, use_acc=k > 0, is_async=True)
        if BLOCKS > 2:
            z = _turned(a_stages.index(first + 2), TA)
            acc2 = warpgroup_mma(z, b, acc2, use_acc=k > 0, is_async=True)
        # This step's products go on; those of the step before are done, and its stage is free.
        acc0, acc1, acc2 = _waited(acc0, acc1, acc2, BLOCKS, BLOCKS)
        before = gl.where(stage == 0, STAGES - 1, stage - 1)
        mbarrier.arrive(empty.index(before), count=1, pred=k > 0)
        stage, phase = _after(stage, phase, STAGES)
    if ABREAST == 1:
        mbarrier.arrive(turn.index(1 - ME), count=1)
    acc0, acc1, acc2 = _waited(acc0, acc1, acc2, 0, BLOCKS)
    mbarrier.arrive(empty.index(gl.where(stage == 0, STAGES - 1, stage - 1)), count=1)
    return acc0, acc1, acc2


@gluon.jit
def _waited(acc0, acc1, acc2, PENDING: gl.constexpr, BLOCKS: gl.constexpr):
    """The accumulators when at most PENDING products are under way."""
    if BLOCKS == 1:
        acc0 = warpgroup_mma_wait(PENDING, deps=(acc0,))
    elif BLOCKS == 2:
        acc0, acc1 = warpgroup_mma_wait(PENDING, deps=(acc0, acc1))
    else:
        acc0, acc1, acc2 = warpgroup_mma_wait(PENDING, deps=(acc0, acc1, acc2))
    return acc0, acc1, acc2
