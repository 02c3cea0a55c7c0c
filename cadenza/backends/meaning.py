"""The meaning of the language: one torch expression an operation.

The same table gives traced programs their values and plain functions theirs.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from cadenza.backends.random import uniform
from cadenza.core.dispatch import register
from cadenza.core.errors import ProgramError
from cadenza.core.ir import Node
from cadenza.core.ops import FLOATS, Op

Tensor = torch.Tensor
# Not a quotient: beside a number torch multiplies by a reciprocal, which may be infinite.
NUMBERS = (Op.ADD, Op.SUB, Op.MUL, Op.MAXIMUM, Op.MINIMUM, Op.COMPARE, Op.WHERE, Op.LOGSUMEXP)
RELATIONS = {"<": operator.lt, "<=": operator.le, "==": operator.eq, "!=": operator.ne}


def _pairs(x: Tensor, inner: int) -> Tensor:
    """The columns seen as (outer, 2, inner)."""
    return x.reshape(x.shape[0], x.shape[1] // (2 * inner), 2, inner)


def _split(x: Tensor, part: int, inner: int) -> Tensor:
    if 2 * inner == x.shape[1]:
        return x[:, part * inner : (part + 1) * inner]
    return _pairs(x, inner)[:, :, part].reshape(x.shape[0], x.shape[1] // 2)


def _join(a: Tensor, b: Tensor, inner: int) -> Tensor:
    rows, columns = max(a.shape[0], b.shape[0]), a.shape[1]
    if 0 in (a.shape[0], b.shape[0]):
        rows = 0
    a, b = a.expand(rows, columns), b.expand(rows, columns)
    parts = [v.reshape(rows, columns // inner, inner) for v in (a, b)]
    return torch.stack(parts, 2).reshape(rows, 2 * columns)


def _concat(*values: Tensor) -> Tensor:
    rows = torch.broadcast_shapes(*((v.shape[0], 1) for v in values))[0]
    return torch.cat([v.expand(rows, v.shape[1]) for v in values], 1)


def _groups(x: Tensor, size: int) -> Tensor:
    return x.reshape(x.shape[0], x.shape[1] // size, size)


def _column_max(x: Tensor) -> Tensor:
    if x.shape[0] == 0:  # the largest of nothing
        return x.new_full((1, x.shape[1]), -torch.inf)
    return x.max(0, keepdim=True).values


def _row_variance(x: Tensor) -> Tensor:
    if x.shape[0] == 0:  # where torch would warn
        return x.sum(1, keepdim=True)
    return x.var(1, correction=0, keepdim=True)


def _extremum(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """torch.maximum and minimum take no numbers."""

    def extremum(a: Any, b: Any) -> Tensor:
        return function(*(v if isinstance(v, Tensor) else _like((a, b), v) for v in (a, b)))

    return extremum


def _beside(number: Any, other: Any) -> Any:
    """A number to compare whole numbers with: a whole one, where torch would round both."""
    if isinstance(number, float) and isinstance(other, Tensor) and not other.is_floating_point():
        return int(number) if number.is_integer() and abs(number) < 2.0**63 else number
    return number


def _matmul(a: Tensor, b: Tensor, transpose_a: bool, transpose_b: bool) -> Tensor:
    return torch.mm(a.T if transpose_a else a, b.T if transpose_b else b)


def takes_numbers(node: Node) -> bool:
    """Whether torch takes Python's numbers for the constants among the inputs of `node`.

    Numbers alone would give numbers, or tensors of torch's default dtype.
    """
    values = node.inputs[1:] if node.op is Op.WHERE else node.inputs
    mixed = any(i.op is not Op.CONSTANT for i in values)
    return node.op is Op.RANDOM or (node.op in NUMBERS and mixed)


def number_in(value: Any, dtype: torch.dtype) -> Any:
    """A number as a dtype has it: infinite beyond its range, where torch would refuse it."""
    if isinstance(value, float) and dtype.is_floating_point and abs(value) > torch.finfo(dtype).max:
        return math.copysign(math.inf, value)
    return value


def _round(x: Tensor, dtype: str) -> Tensor:
    return x.to(getattr(torch, dtype)).to(x.dtype)


MEANING: dict[Op, Callable[..., Any]] = {
    Op.ADD: operator.add,
    Op.SUB: operator.sub,
    Op.MUL: operator.mul,
    Op.DIV: operator.truediv,
    Op.NEG: operator.neg,
    Op.POWER: lambda x, exponent: x**exponent,
    Op.ABS: torch.abs,
    Op.MAXIMUM: _extremum(torch.maximum),
    Op.MINIMUM: _extremum(torch.minimum),
    Op.EXP: torch.exp,
    Op.LOG: torch.log,
    Op.SQRT: torch.sqrt,
    Op.RSQRT: torch.rsqrt,
    Op.SIGMOID: torch.sigmoid,
    Op.TANH: torch.tanh,
    Op.ERF: torch.erf,
    Op.COMPARE: lambda a, b, relation: RELATIONS[relation](_beside(a, b), _beside(b, a)),
    Op.WHERE: torch.where,
    Op.CAST: _round,
    Op.SPLIT: _split,
    Op.JOIN: _join,
    Op.COLUMNS: lambda x, start, stop: x[:, start:stop],
    Op.CONCAT: _concat,
    Op.REPEAT: lambda x, times: x.repeat_interleave(times, 1),
    Op.TILE: lambda x, times: x.repeat(1, times),
    Op.ROW_SUM: lambda x: x.sum(1, keepdim=True),
    Op.ROW_MAX: lambda x: x.max(1, keepdim=True).values,
    Op.ROW_VARIANCE: _row_variance,
    Op.LOGSUMEXP: lambda x, shift: (x - shift).logsumexp(1, keepdim=True),
    Op.COLUMN_SUM: lambda x: x.sum(0, keepdim=True),
    Op.COLUMN_MAX: _column_max,
    Op.GROUP_SUM: lambda x, size: _groups(x, size).sum(2),
    Op.GROUP_MAX: lambda x, size: _groups(x, size).max(2).values,
    Op.TRANSPOSE: lambda x: x.T,
    Op.MATMUL: _matmul,
}

# Leaves need to know the number of rows, the compute type and the device: `like` has the last two.
LEAVES: dict[Op, Callable[..., Tensor]] = {
    Op.CONSTANT: lambda like, value, rows, columns: like.new_full(
        (rows, columns), number_in(value, like.dtype)
    ),
    Op.COLUMN_INDEX: lambda like, rows, columns: torch.arange(columns, device=like.device)[None],
    Op.ROW_INDEX: lambda like, rows, columns: torch.arange(rows, device=like.device)[:, None],
    Op.RANDOM: lambda seed, like, rows, columns: uniform(seed, rows, columns, like),
}


def _cast(x: Tensor, dtype: str) -> Tensor:
    if dtype not in FLOATS:
        raise ProgramError(
            "cast of a tensor",
            found=f"dtype {dtype!r}",
            expected=f"one of {', '.join(FLOATS)}",
            write="L.cast(x, 'float32'), or another floating dtype by name",
        )
    return x.to(getattr(torch, dtype))


def _where(condition: Any, a: Any, b: Any) -> Tensor:
    if not isinstance(condition, Tensor) or condition.dtype != torch.bool:
        kind = condition.dtype if isinstance(condition, Tensor) else type(condition).__name__
        raise ProgramError(
            "where of tensors",
            found=f"a condition of {kind}",
            expected="a comparison",
            write="L.where(a < b, ...)",
        )
    return torch.where(condition, a, b)


# The same function run on tensors: dtypes are torch's, shapes those of the tensor at hand.
PLAIN: dict[Op, Callable[..., Any]] = MEANING | {
    Op.CAST: _cast,
    Op.WHERE: _where,
    Op.COLUMN_INDEX: lambda x: torch.arange(x.shape[1], device=x.device)[None],
    Op.ROW_INDEX: lambda x: torch.arange(x.shape[0], device=x.device)[:, None],
    Op.RANDOM: lambda x, seed: uniform(seed, *x.shape, like=x),
}


# By name, with whether Python's numbers are taken and whether rows and columns are told apart:
# torch.compile follows no hash but str's.
_OF_NAME = {
    op.name: (function, op in NUMBERS, op.group != "elementwise") for op, function in PLAIN.items()
}


def evaluate(op: Op, values: Sequence[Any], attributes: dict[str, Any]) -> Any:
    """One operation on tensors with torch's own dtypes: what `lang` does outside of a trace."""
    function, numbers, of_matrices = _OF_NAME[op.name]
    if of_matrices:
        for value in values[:1] if op is Op.RANDOM else values:  # its seed has no rows
            if isinstance(value, Tensor) and value.dim() != 2:
                raise _no_matrix(op, value)
    if not numbers:
        values = [
            v if isinstance(v, Tensor) or op is Op.RANDOM else _like(values, v) for v in values
        ]
    return function(*values, **attributes)


def _no_matrix(op: Op, value: Tensor) -> ProgramError:
    return ProgramError(
        f"{op.label} of a tensor {list(value.shape)}",
        found=f"{value.dim()} dimensions",
        expected="rows and columns: [M, N], [M, 1] or [1, N]",
        write="x.flatten(0, -2) before the function, w[None] of a vector; @cz.block does both",
    )


def _like(values: Sequence[Any], number: float) -> Tensor:
    """A number as [1, 1], of the dtype and on the device of the first tensor among `values`."""
    like = next(v for v in values if isinstance(v, Tensor))
    return like.new_full((1, 1), number_in(number, like.dtype))


register(torch.Tensor, evaluate)
