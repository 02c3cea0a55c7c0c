"""The operations that authors write, one function each: arithmetic, columns, reductions, products.

They work on values of a program while it is traced, and on tensors when the same function runs as
plain tensor code; core/dispatch decides. core/lang offers all of them to authors.
"""

from __future__ import annotations

from keyword import iskeyword
from typing import Any

from cadenza.core.arguments import Matrix, Shaped, Value, checked
from cadenza.core.dispatch import apply, composite
from cadenza.core.errors import ProgramError
from cadenza.core.ir import Node
from cadenza.core.ops import Op
from cadenza.core.storage import storage_dtype

# --- elementwise ---------------------------------------------------------------------------------


def abs(x: Value) -> Value:
    """|x|; its derivative at 0 is 0."""
    return apply(Op.ABS, x)


def maximum(a: Value, b: Value) -> Value:
    """The larger of two; at a tie each gets half of the gradient."""
    return apply(Op.MAXIMUM, a, b)


def minimum(a: Value, b: Value) -> Value:
    """The smaller of two; at a tie each gets half of the gradient."""
    return apply(Op.MINIMUM, a, b)


def exp(x: Value) -> Value:
    """e**x."""
    return apply(Op.EXP, x)


def log(x: Value) -> Value:
    """The natural logarithm."""
    return apply(Op.LOG, x)


def sqrt(x: Value) -> Value:
    """The square root."""
    return apply(Op.SQRT, x)


def rsqrt(x: Value) -> Value:
    """1 / sqrt(x)."""
    return apply(Op.RSQRT, x)


def sigmoid(x: Value) -> Value:
    """1 / (1 + exp(-x))."""
    return apply(Op.SIGMOID, x)


def tanh(x: Value) -> Value:
    """The hyperbolic tangent."""
    return apply(Op.TANH, x)


def erf(x: Value) -> Value:
    """The error function."""
    return apply(Op.ERF, x)


def where(condition: Value, a: Value, b: Value) -> Value:
    """a where the condition (a comparison) holds, else b."""
    return apply(Op.WHERE, condition, a, b)


def cast(x: Value, dtype: Any) -> Value:
    """x rounded to `dtype` ("bfloat16", torch.bfloat16, …); an output keeps that dtype."""
    return apply(Op.CAST, x, dtype=str(dtype).removeprefix("torch."))


def stored(x: Value) -> Value:
    """x as it is where it is stored: rounded here to the dtype of its operands.

    What follows sees the rounded value, as after torch's own F.linear.
    """
    return x.builder.apply(Op.CAST, x, dtype=storage_dtype(x)) if isinstance(x, Node) else x


# --- columns -------------------------------------------------------------------------------------


@checked
def split(x: Matrix, inner: int | None = None) -> tuple[Value, Value]:
    """The two parts of the columns seen as (outer, 2, inner), each [M, N/2].

    inner = N/2 (the default) gives halves, 1 interleaved pairs, head_dim/2 the halves of heads.
    """
    inner = x.shape[1] // 2 if inner is None and isinstance(x.shape[1], int) else inner
    first = apply(Op.SPLIT, x, part=0, inner=inner)
    return first, apply(Op.SPLIT, x, part=1, inner=inner)


@checked
def join(a: Matrix, b: Matrix, inner: int | None = None) -> Value:
    """The inverse of `split`: [M, N/2] twice to [M, N]; by default a's columns, then b's."""
    return apply(Op.JOIN, a, b, inner=a.shape[1] if inner is None else inner)


@checked
def columns(x: Value, start: int, stop: int) -> Value:
    """The columns start:stop, [M, stop - start]."""
    return apply(Op.COLUMNS, x, start=start, stop=stop)


def concat(*values: Value) -> Value:
    """The columns of all values, side by side."""
    return apply(Op.CONCAT, *values)


@checked
def repeat(x: Value, times: int) -> Value:
    """Each column `times` times in a row: one number a group, spread over the group."""
    return apply(Op.REPEAT, x, times=times)


@checked
def tile(x: Value, times: int) -> Value:
    """All columns, `times` times over: a pattern repeated over groups."""
    return apply(Op.TILE, x, times=times)


def column_index(x: Value) -> Value:
    """The index of each column of x, [1, N], whole numbers from 0."""
    if isinstance(x, Node):
        return x.builder.make(Op.COLUMN_INDEX, (), {"rows": 1, "columns": x.type.columns})
    return apply(Op.COLUMN_INDEX, x)


def row_index(x: Value) -> Value:
    """The index of each row of x, [M, 1], whole numbers from 0."""
    if isinstance(x, Node):
        return x.builder.make(Op.ROW_INDEX, (), {"rows": x.type.rows, "columns": 1})
    return apply(Op.ROW_INDEX, x)


@checked
def random(x: Matrix, seed: Value) -> Value:
    """Uniform numbers in [0, 1), one for each element of x: a function of seed, row and column.

    24 bits of Philox 4x32-10 (Salmon et al., 2011). `seed` is a whole number or an int64 tensor
    of one element; a tensor can change from call to call without a new compilation.
    """
    if isinstance(x, Node):
        return x.builder.apply(Op.RANDOM, seed, rows=x.type.rows, columns=x.type.columns)
    return apply(Op.RANDOM, x, seed)


# --- reductions ----------------------------------------------------------------------------------


def row_sum(x: Value) -> Value:
    """The sum of each row, [M, 1]."""
    return apply(Op.ROW_SUM, x)


@composite
def row_mean(x: Matrix) -> Value:
    """The mean of each row, [M, 1]."""
    return row_sum(x) / x.shape[1]


def row_variance(x: Value) -> Value:
    """The variance of each row, without correction, [M, 1]; never E[x²] − E[x]²."""
    return apply(Op.ROW_VARIANCE, x)


def row_max(x: Value) -> Value:
    """The largest of each row, [M, 1]; its first position gets the gradient."""
    return apply(Op.ROW_MAX, x)


def logsumexp(x: Value, shift: Value = 0.0) -> Value:
    """log(row_sum(exp(x - shift))), [M, 1], with the largest value taken out; shift [M, 1].

    As a cross-entropy, logsumexp(z, pick(z, index)) is exact under a common offset of z. Raises
    ProgramError for a whole number, which a dimension is and a shift is not.
    """
    if type(shift) is int:
        raise ProgramError(
            "logsumexp over a dimension",
            found=f"{shift}",
            expected="a shift [M, 1], or a float; the sum is over the columns of each row",
            write="L.logsumexp(x)",
        )
    return apply(Op.LOGSUMEXP, x, shift)


def column_sum(x: Value) -> Value:
    """The sum of each column over all rows, [1, N]."""
    return apply(Op.COLUMN_SUM, x)


def column_max(x: Value) -> Value:
    """The largest of each column, [1, N]; its first position gets the gradient."""
    return apply(Op.COLUMN_MAX, x)


@checked
def group_sum(x: Value, size: int) -> Value:
    """The sum over each group of `size` columns, [M, N/size]."""
    return apply(Op.GROUP_SUM, x, size=size)


@checked
def group_max(x: Value, size: int) -> Value:
    """The largest of each group of `size` columns, [M, N/size]."""
    return apply(Op.GROUP_MAX, x, size=size)


@composite
def pick(x: Value, index: Value) -> Value:
    """The element of each row at column `index` [M, 1], as [M, 1]; 0 where it is out of range."""
    if isinstance(index, Node) and index.type.columns != 1:
        raise ProgramError(
            "pick at an index that is not one number a row",
            found=f"an index {index.type}",
            expected="whole numbers of the leading dimensions of x, [...] or [..., 1]",
            write="L.pick(x, index) with as many indices as x has rows",
        )
    return row_sum(where(column_index(x) == index, x, 0.0))


# --- products ------------------------------------------------------------------------------------


@checked
def matmul(a: Value, b: Value, transpose_a: bool = False, transpose_b: bool = False) -> Value:
    """The matrix product of a and b, either transposed."""
    if isinstance(a, Node) or isinstance(b, Node):
        builder = (a if isinstance(a, Node) else b).builder
        return builder.matmul(a, b, transpose_a, transpose_b)
    return apply(Op.MATMUL, a, b, transpose_a=transpose_a, transpose_b=transpose_b)


@composite
def linear(x: Value, w: Value, bias: Shaped | float | None = None) -> Value:
    """x [M, K] @ w[N, K].T + bias [1, N]: [M, N], as torch.nn.functional.linear."""
    y = matmul(x, w, transpose_b=True)
    return y if bias is None else y + bias


@checked
def name(value: Value, label: str) -> Value:
    """The value itself, called `label` in printed programs; the last name given to it holds."""
    if isinstance(value, Node):
        if not label.isidentifier() or iskeyword(label):
            raise ProgramError(
                "a value's name that is not a name in Python",
                found=repr(label),
                expected="letters, digits and underscores, no keyword",
                write="L.name(x, 'x1')",
            )
        value.builder.names[value] = label
    return value
