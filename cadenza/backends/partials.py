"""Reductions as kernels make them: one partial a tile, then a finish over the tiles.

A partial of a sum is a sum, of a largest a largest; of a variance the mean and the sum of squared
distances from it, merged as Chan et al. (1979); of a log-sum-exp the largest and the sum of
exponentials below it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import NamedTuple

import torch

from cadenza.core.ops import Op

Tensor = torch.Tensor


class Moments(NamedTuple):
    """Number, mean and sum of squared distances from the mean, of part of a row."""

    count: int
    mean: Tensor
    squares: Tensor


class Online(NamedTuple):
    """The largest of part of a row, and the sum of exponentials relative to it."""

    top: Tensor
    total: Tensor


def _moments(x: Tensor) -> Moments:
    mean = x.mean(1, keepdim=True)
    return Moments(x.shape[1], mean, ((x - mean) ** 2).sum(1, keepdim=True))


def _merged_moments(a: Moments, b: Moments) -> Moments:
    count, step = a.count + b.count, b.mean - a.mean
    mean = a.mean + step * (b.count / count)
    return Moments(count, mean, a.squares + b.squares + step**2 * (a.count * b.count / count))


def _online(x: Tensor) -> Online:
    top = x.max(1, keepdim=True).values
    return Online(top, _relative(x, top).sum(1, keepdim=True))


def _relative(x: Tensor, top: Tensor) -> Tensor:
    """exp(x - top), and exp(x) where top is infinite: −∞ if all of x is, +∞ if any is."""
    return torch.exp(x - torch.where(top.isinf(), 0.0, top))


def _merged_online(a: Online, b: Online) -> Online:
    top = torch.maximum(a.top, b.top)
    total = a.total * _relative(a.top, top) + b.total * _relative(b.top, top)
    return Online(top, total)


def row_sum(tiles: Sequence[Tensor]) -> Tensor:
    """The sums of rows, from tiles of columns."""
    return reduce(torch.add, [x.sum(1, keepdim=True) for x in tiles])


def row_max(tiles: Sequence[Tensor]) -> Tensor:
    """The largest of rows, from tiles of columns."""
    return reduce(torch.maximum, [x.max(1, keepdim=True).values for x in tiles])


def row_variance(tiles: Sequence[Tensor]) -> Tensor:
    """The variances of rows, from tiles of columns."""
    merged = reduce(_merged_moments, map(_moments, tiles))
    return merged.squares / merged.count


def logsumexp(tiles: Sequence[Tensor], shift: Tensor | float) -> Tensor:
    """The log-sum-exp of rows relative to a shift, from tiles of columns."""
    merged = reduce(_merged_online, map(_online, tiles))
    return (merged.top - shift) + torch.log(merged.total)


def column_sum(tiles: Sequence[Tensor]) -> Tensor:
    """The sums of columns, from tiles of rows."""
    return reduce(torch.add, [x.sum(0, keepdim=True) for x in tiles])


def column_max(tiles: Sequence[Tensor]) -> Tensor:
    """The largest of columns, from tiles of rows; −∞ where there are none."""
    filled = [x.max(0, keepdim=True).values for x in tiles if x.shape[0]]
    empty = tiles[0].new_full((1, tiles[0].shape[1]), -math.inf)
    return reduce(torch.maximum, filled) if filled else empty


ROWS: dict[Op, Callable[..., Tensor]] = {
    Op.ROW_SUM: row_sum,
    Op.ROW_MAX: row_max,
    Op.ROW_VARIANCE: row_variance,
    Op.LOGSUMEXP: logsumexp,
}
COLUMNS: dict[Op, Callable[..., Tensor]] = {Op.COLUMN_SUM: column_sum, Op.COLUMN_MAX: column_max}
