"""Device functions that emitted kernels call: tiles, loads and stores, halves, merges of partials.

Blocks are [rows, columns]; arithmetic is float32. Offsets are 64-bit. A mask is always given for
what may lie outside of a tensor; what is outside reads as 0.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_at(t, row_tiles, column_tiles, GROUP: tl.constexpr):
    """The row and column of tile number t: row tiles in groups, so that operands stay in cache."""
    width = GROUP * column_tiles
    first = (t // width) * GROUP
    height = min(row_tiles - first, GROUP)
    return first + (t % width) % height, (t % width) // height


@triton.jit
def factor(x, WIDE: tl.constexpr, PRECISION: tl.constexpr):
    """The operand of a product as it is, in float32 where `tl.dot` can't take it, or to the nearest
    of tf32, to which `tl.dot` cuts: with both operands cut a product is 0.07 % too small.
    """
    if WIDE:
        return x.to(tl.float32)
    elif PRECISION == "tf32":
        nearest = (tl.cast(x, tl.int32, bitcast=True) + 0x1000) & -0x2000
        return tl.where(x == x, tl.cast(nearest, tl.float32, bitcast=True), x)
    else:
        return x


@triton.jit
def negative_zero():
    """-0.0, whose sign Triton drops where it is a constant."""
    return tl.cast(-2147483648, tl.float32, bitcast=True)


# --- columns of an accumulator --------------------------------------------------------------------


@triton.jit
def halves(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The left and the right half of the columns."""
    return tl.split(tl.permute(tl.reshape(x, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))


@triton.jit
def lanes(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr):
    """The two parts of columns seen as (outer, 2, INNER), [ROWS, COLUMNS / 2] each."""
    if INNER == 1:
        return tl.split(tl.reshape(x, (ROWS, COLUMNS // 2, 2)))
    elif 2 * INNER == COLUMNS:
        return halves(x, ROWS, COLUMNS)
    else:
        pairs = tl.reshape(x, (ROWS, COLUMNS // (2 * INNER), 2, INNER))
        a, b = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
        return tl.reshape(a, (ROWS, COLUMNS // 2)), tl.reshape(b, (ROWS, COLUMNS // 2))


@triton.jit
def group_sum(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SIZE: tl.constexpr):
    """The sums of groups of SIZE columns."""
    return tl.sum(tl.reshape(x, (ROWS, COLUMNS // SIZE, SIZE)), 2)


@triton.jit
def group_max(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SIZE: tl.constexpr):
    """The largest of groups of SIZE columns."""
    return largest(tl.reshape(x, (ROWS, COLUMNS // SIZE, SIZE)), 2)


@triton.jit
def repeated(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TIMES: tl.constexpr):
    """Each of COLUMNS / TIMES columns, TIMES times."""
    spread = tl.broadcast_to(tl.expand_dims(x, 2), (ROWS, COLUMNS // TIMES, TIMES))
    return tl.reshape(spread, (ROWS, COLUMNS))


# --- memory ---------------------------------------------------------------------------------------


@triton.jit
def offsets(rows, columns, stride):
    """Offsets of a block of elements, in 64 bits."""
    return rows.to(tl.int64)[:, None] * stride + columns[None, :]


@triton.jit
def load(pointer, rows, columns, stride, mask):
    """A block of a stored matrix of real numbers, as float32."""
    return tl.load(pointer + offsets(rows, columns, stride), mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_part(pointer, rows, columns, stride, mask, row, column, BOX: tl.constexpr):
    """The same, by a descriptor from (row, column) on if BOX."""
    if BOX:
        return pointer.load([row, column]).to(tl.float32)
    else:
        return load(pointer, rows, columns, stride, mask)


@triton.jit
def store_part(pointer, rows, columns, stride, mask, value, row, column, BOX: tl.constexpr):
    """Rounds a block once, as `store` does, by a descriptor from (row, column) on if BOX."""
    if BOX:
        value = tl.broadcast_to(value, mask.shape).to(pointer.dtype)
        pointer.store([row, column], value)
    else:
        store(pointer, rows, columns, stride, mask, value)


@triton.jit
def load_whole(pointer, rows, columns, stride, mask):
    """A block of a stored matrix of whole numbers or conditions."""
    return tl.load(pointer + offsets(rows, columns, stride), mask=mask, other=0)


@triton.jit
def store(pointer, rows, columns, stride, mask, value):
    """Rounds a block once, to the dtype of what it is stored in."""
    value = tl.broadcast_to(value, mask.shape).to(pointer.dtype.element_ty)
    tl.store(pointer + offsets(rows, columns, stride), value, mask=mask)


@triton.jit
def load_vector(pointer, index, mask):
    """Some numbers of a vector, as float32."""
    return tl.load(pointer + index, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_whole_vector(pointer, index, mask):
    """Some whole numbers of a vector."""
    return tl.load(pointer + index, mask=mask, other=0)


@triton.jit
def store_vector(pointer, index, mask, value):
    """Rounds numbers of a vector once, to the dtype of what they are stored in."""
    value = tl.broadcast_to(value, index.shape).to(pointer.dtype.element_ty)
    tl.store(pointer + index, value, mask=mask)


# --- elementwise ----------------------------------------------------------------------------------


@triton.jit
def tanh(x):
    """The hyperbolic tangent: (1 - e) / (1 + e) with e = exp(-2|x|), its series near 0."""
    size = tl.abs(x)
    e = tl.exp(-2.0 * size)
    far = (1.0 - e) / (1.0 + e)
    y = size * size
    series = 0.021869488536155203 * y - 0.05396825396825397
    series = series * y + 0.13333333333333333
    series = series * y - 0.3333333333333333
    near = size + size * y * series
    return tl.where(x < 0.0, -1.0, 1.0) * tl.where(size < 0.25, near, far)


@triton.jit
def maximum(a, b):
    """The larger of two; NaN if one is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def minimum(a, b):
    """The smaller of two; NaN if one is."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _multiply(word, multiplier):
    product = word.to(tl.uint64) * multiplier
    return (product >> 32).to(tl.uint32), product.to(tl.uint32)


@triton.jit
def uniform(seed, rows, columns):
    """Philox 4x32-10 of counters (column, row, row >> 32, 0): numbers in [0, 1)."""
    row = rows.to(tl.uint64)[:, None] + (columns * 0).to(tl.uint64)[None, :]
    c0 = (row * 0).to(tl.uint32) + columns.to(tl.uint32)[None, :]
    c1 = row.to(tl.uint32)
    c2 = (row >> 32).to(tl.uint32)
    c3 = c0 * 0
    k0 = seed.to(tl.uint64).to(tl.uint32)
    k1 = (seed.to(tl.uint64) >> 32).to(tl.uint32)
    for _ in tl.static_range(10):
        high0, low0 = _multiply(c0, 0xD2511F53)
        high1, low1 = _multiply(c2, 0xCD9E8D57)
        c0 = high1 ^ c1 ^ k0
        c1 = low1
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0 = (k0.to(tl.uint64) + 0x9E3779B9).to(tl.uint32)
        k1 = (k1.to(tl.uint64) + 0xBB67AE85).to(tl.uint32)
    return (c0 >> 8).to(tl.float32) * 5.9604644775390625e-08


# --- reductions -----------------------------------------------------------------------------------


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest(x, AXIS: tl.constexpr):
    """The largest along an axis; NaN if any is."""
    return tl.reduce(x, AXIS, _larger)


@triton.jit
def moments(x, mask, count):
    """The mean of the columns under a mask, and the sum of squared distances from it."""
    mean = tl.sum(tl.where(mask, x, 0.0), 1) / tl.maximum(count, 1.0)
    apart = tl.where(mask, x - mean[:, None], 0.0)
    return mean, tl.sum(apart * apart, 1)


@triton.jit
def merged_moments(mean, squares, count, mean_b, squares_b, count_b):
    """Moments of two sets of columns as those of both (Chan et al., 1979)."""
    step = mean_b - mean
    share = count_b / tl.maximum(count + count_b, 1.0)
    return mean + step * share, squares + squares_b + step * step * (count * share)


@triton.jit
def _below(x, top):
    """exp(x - top), and exp(x) where top is infinite."""
    return tl.exp(x - tl.where(tl.abs(top) == float("inf"), 0.0, top))


@triton.jit
def online(x, mask):
    """The largest of the columns under a mask, and the sum of exponentials relative to it."""
    x = tl.where(mask, x, float("-inf"))
    top = largest(x, 1)
    return top, tl.sum(_below(x, top[:, None]), 1)


@triton.jit
def merged_online(top, total, top_b, total_b):
    """The same of two sets of columns together."""
    both = maximum(top, top_b)
    return both, total * _below(top, both) + total_b * _below(top_b, both)


# --- indices --------------------------------------------------------------------------------------


@triton.jit
def wrapped(start, SHIFT: tl.constexpr, WIDTH: tl.constexpr, COUNT: tl.constexpr):
    """Columns from start + SHIFT on modulo COUNT, a run where it stays one; WIDTH divides start."""
    if COUNT % WIDTH == 0 and SHIFT % WIDTH == 0:
        first = start + SHIFT
        return (first - first // COUNT * COUNT) + tl.arange(0, WIDTH)  # % would hide the run
    else:
        return (start + SHIFT + tl.arange(0, WIDTH)) % COUNT


@triton.jit
def lane(start, WIDTH: tl.constexpr, INNER: tl.constexpr, PART: tl.constexpr, WHOLE: tl.constexpr):
    """The columns of a part of pairs at INNER, from column `start` of the half on."""
    if WHOLE:
        return start + PART * INNER + tl.arange(0, WIDTH)
    elif INNER % WIDTH == 0:
        first = start + (start // INNER) * INNER + PART * INNER
        return first + tl.arange(0, WIDTH)
    else:
        half = start + tl.arange(0, WIDTH)
        return (half // INNER) * (2 * INNER) + PART * INNER + half % INNER


# --- finishes -------------------------------------------------------------------------------------
# Partials are stored [tiles, length]. `finish_` takes all tiles of a row at once, `merge_` goes
# through them.


@triton.jit
def _partials(pointer, first, rows, row_ok, ROWS, tiles, SIZE: tl.constexpr, other):
    number = first + tl.arange(0, SIZE)
    mask = row_ok[:, None] & (number < tiles)[None, :]
    pointers = pointer + number.to(tl.int64)[None, :] * ROWS + rows[:, None]
    return tl.load(pointers, mask=mask, other=other)


@triton.jit
def finish_row_sum(pointer, rows, row_ok, ROWS, tiles, SIZE: tl.constexpr):
    """The sum of at most SIZE partials of each row."""
    total = tl.load(pointer + rows, mask=row_ok, other=0.0)
    end = tl.cast(tiles, tl.int64) * ROWS
    for t in tl.static_range(1, SIZE):
        at = tl.cast(t, tl.int64) * ROWS + rows
        total += tl.load(pointer + at, mask=row_ok & (at < end), other=0.0)
    return total


@triton.jit
def finish_row_max(pointer, rows, row_ok, ROWS, tiles, SIZE: tl.constexpr):
    """The largest of at most SIZE partials of each row."""
    top = tl.load(pointer + rows, mask=row_ok, other=0.0)
    end = tl.cast(tiles, tl.int64) * ROWS
    for t in tl.static_range(1, SIZE):
        at = tl.cast(t, tl.int64) * ROWS + rows
        top = maximum(top, tl.load(pointer + at, mask=row_ok & (at < end), other=float("-inf")))
    return top


@triton.jit
def merge_row_sum(pointer, rows, row_ok, ROWS, tiles, BM: tl.constexpr):
    """The sum of all partials of each row."""
    # Reduced after the loop: Triton fails on a sum in a loop that is used twice after it.
    total = tl.zeros((BM, 16), tl.float32)
    for first in range(0, tiles, 16):
        total += _partials(pointer, first, rows, row_ok, ROWS, tiles, 16, 0.0)
    return tl.sum(total, 1)


@triton.jit
def merge_row_max(pointer, rows, row_ok, ROWS, tiles, BM: tl.constexpr):
    """The largest of all partials of each row."""
    top = tl.full((BM, 16), float("-inf"), tl.float32)
    for first in range(0, tiles, 16):
        block = _partials(pointer, first, rows, row_ok, ROWS, tiles, 16, float("-inf"))
        top = maximum(top, block)
    return largest(top, 1)


@triton.jit
def merge_row_variance(
    means, squares, rows, row_ok, ROWS, tiles, BM: tl.constexpr, COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """The variance of rows of COLUMNS columns, of which each tile but the last has TILE."""
    mean = tl.zeros((BM,), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    count = 0.0
    for t in range(tiles):
        at = tl.cast(t, tl.int64) * ROWS + rows
        more = tl.maximum(tl.minimum(TILE, COLUMNS - t * TILE), 0).to(tl.float32)
        other_mean = tl.load(means + at, mask=row_ok, other=0.0)
        other_total = tl.load(squares + at, mask=row_ok, other=0.0)
        mean, total = merged_moments(mean, total, count, other_mean, other_total, more)
        count += more
    return total / COLUMNS


@triton.jit
def merge_logsumexp(tops, totals, rows, row_ok, ROWS, tiles, BM: tl.constexpr, shift):
    """The log-sum-exp of rows less a shift, from each tile's largest and sum of exponentials."""
    # In one loop: Triton fails on a loop whose largest is used again after it.
    top = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    for first in range(0, tiles, 16):
        block = _partials(tops, first, rows, row_ok, ROWS, tiles, 16, float("-inf"))
        sums = _partials(totals, first, rows, row_ok, ROWS, tiles, 16, 0.0)
        most = largest(block, 1)
        scaled = tl.where(sums == 0.0, 0.0, sums * _below(block, most[:, None]))
        top, total = merged_online(top, total, most, tl.sum(scaled, 1))
    return (top - shift) + tl.log(total)  # the large numbers first: what is left of them is exact


# --- products -------------------------------------------------------------------------------------


@triton.jit
def _left(
    a, stride, i, k, ROWS, K,
    BM: tl.constexpr, BK: tl.constexpr, TMA: tl.constexpr, TA: tl.constexpr,
):  # fmt: skip
    """[BM, BK] of the left operand, which is stored [K, rows] if TA."""
    if TMA:
        if TA:
            return a.load([k, i * BM]).T
        else:
            return a.load([i * BM, k])
    else:
        rows = i * BM + tl.arange(0, BM)
        depth = k + tl.arange(0, BK)
        if TA:
            mask = (depth < K)[:, None] & (rows < ROWS)[None, :]
            return tl.load(a + offsets(depth, rows, stride), mask=mask, other=0.0).T
        else:
            mask = (rows < ROWS)[:, None] & (depth < K)[None, :]
            return tl.load(a + offsets(rows, depth, stride), mask=mask, other=0.0)


@triton.jit
def _columns(
    j, N: tl.constexpr, BN: tl.constexpr, PAIRS: tl.constexpr, NATURAL: tl.constexpr
):  # fmt: skip
    """Which columns a tile's are, and which of them exist: a run, or the two lanes of pairs."""
    if PAIRS == 0 or NATURAL:
        columns = j * BN + tl.arange(0, BN)
        return columns, columns < N
    else:
        half = j * (BN // 2) + tl.arange(0, BN) % (BN // 2)
        part = tl.arange(0, BN) // (BN // 2)
        columns = (half // PAIRS) * (2 * PAIRS) + part * PAIRS + half % PAIRS
        return columns, half < N // 2


@triton.jit
def _right(
    b, stride, j, k, N: tl.constexpr, K, BN: tl.constexpr, BK: tl.constexpr,
    TMA: tl.constexpr, TB: tl.constexpr, PAIRS: tl.constexpr, NATURAL: tl.constexpr,
):  # fmt: skip
    """[BK, BN] of the right operand, stored [N, K] if TB; its columns may be two lanes of pairs."""
    if TMA:
        if PAIRS == 0 or NATURAL:
            if TB:
                return b.load([j * BN, k]).T
            else:
                return b.load([k, j * BN])
        else:
            half = j * (BN // 2)
            if TB:
                return tl.reshape(b.load([2 * (half // PAIRS), half % PAIRS, k]), (BN, BK)).T
            else:
                return tl.reshape(b.load([k, 2 * (half // PAIRS), half % PAIRS]), (BK, BN))
    else:
        depth = k + tl.arange(0, BK)
        # Made here of j alone: blocks that a flattened loop carries are no longer known to be runs,
        # and are then loaded number by number.
        columns, columns_ok = _columns(j, N, BN, PAIRS, NATURAL)
        if TB:
            mask = columns_ok[:, None] & (depth < K)[None, :]
            return tl.load(b + offsets(columns, depth, stride), mask=mask, other=0.0).T
        else:
            mask = (depth < K)[:, None] & columns_ok[None, :]
            return tl.load(b + offsets(depth, columns, stride), mask=mask, other=0.0)


@triton.jit
def product(
    a, b, a_stride, b_stride, i, j, ROWS, N: tl.constexpr, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    A_TMA: tl.constexpr, B_TMA: tl.constexpr, TA: tl.constexpr, TB: tl.constexpr,
    PAIRS: tl.constexpr, NATURAL: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Tile (i, j) of a product, [BM, BN] in float32.

    Its columns are a run, or with PAIRS and not NATURAL the two lanes of a run of pairs.
    """
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        x = _left(a, a_stride, i, k, ROWS, K, BM, BK, A_TMA, TA)
        y = _right(b, b_stride, j, k, N, K, BN, BK, B_TMA, TB, PAIRS, NATURAL)
        x, y = factor(x, WIDE, PRECISION), factor(y, WIDE, PRECISION)
        acc = tl.dot(x, y, acc, input_precision=PRECISION)
    return acc
