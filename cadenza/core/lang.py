"""What authors import as `L`: the functions of the language, each over the closed set.

Every function works on values of a program while it is traced, and on tensors when the same
function runs as plain tensor code; back ends register their tensor types (core/dispatch). Shapes
are [M, N] matrices, [M, 1] columns, [1, N] rows and [1, 1] scalars, and broadcast as in NumPy.
"""

from __future__ import annotations

import math
from keyword import iskeyword
from typing import Any

from cadenza.core.dispatch import Value, apply
from cadenza.core.errors import ProgramError
from cadenza.core.ir import Node
from cadenza.core.ops import Op
from cadenza.core.storage import storage_dtype
from cadenza.core.refusals import unknown_operation

__all__ = [
    "abs", "cast", "column_index", "column_max", "column_sum", "columns", "concat", "dropout",
    "erf", "exp", "geglu", "gelu", "group_max", "group_sum", "join", "layer_norm", "linear", "log",
    "logsumexp", "matmul", "maximum", "minimum", "name", "pick", "qk_norm", "random", "reglu",
    "relu", "relu2", "repeat", "rms_norm", "rope", "row_index", "row_max", "row_mean", "row_sum",
    "row_variance", "rsqrt", "sigmoid", "silu", "softcap", "split", "sqrt", "stored", "swiglu",
    "tanh", "tile", "where",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    raise unknown_operation(f"L.{name}", name)


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


def split(x: Value, inner: int | None = None) -> tuple[Value, Value]:
    """The two parts of the columns seen as (outer, 2, inner), each [M, N/2].

    inner = N/2 (the default) gives halves, 1 interleaved pairs, head_dim/2 the halves of heads.
    """
    inner = x.shape[1] // 2 if inner is None and isinstance(x.shape[1], int) else inner
    first = apply(Op.SPLIT, x, part=0, inner=inner)
    return first, apply(Op.SPLIT, x, part=1, inner=inner)


def join(a: Value, b: Value, inner: int | None = None) -> Value:
    """The inverse of `split`: [M, N/2] twice to [M, N]; by default a's columns, then b's."""
    return apply(Op.JOIN, a, b, inner=a.shape[1] if inner is None else inner)


def columns(x: Value, start: int, stop: int) -> Value:
    """The columns start:stop, [M, stop - start]."""
    return apply(Op.COLUMNS, x, start=start, stop=stop)


def concat(*values: Value) -> Value:
    """The columns of all values, side by side."""
    return apply(Op.CONCAT, *values)


def repeat(x: Value, times: int) -> Value:
    """Each column `times` times in a row: one number a group, spread over the group."""
    return apply(Op.REPEAT, x, times=times)


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


def random(x: Value, seed: Value) -> Value:
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


def row_mean(x: Value) -> Value:
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

    As a cross-entropy, logsumexp(z, pick(z, index)) is exact under a common offset of z.
    """
    return apply(Op.LOGSUMEXP, x, shift)


def column_sum(x: Value) -> Value:
    """The sum of each column over all rows, [1, N]."""
    return apply(Op.COLUMN_SUM, x)


def column_max(x: Value) -> Value:
    """The largest of each column, [1, N]; its first position gets the gradient."""
    return apply(Op.COLUMN_MAX, x)


def group_sum(x: Value, size: int) -> Value:
    """The sum over each group of `size` columns, [M, N/size]."""
    return apply(Op.GROUP_SUM, x, size=size)


def group_max(x: Value, size: int) -> Value:
    """The largest of each group of `size` columns, [M, N/size]."""
    return apply(Op.GROUP_MAX, x, size=size)


def pick(x: Value, index: Value) -> Value:
    """The element of each row at column `index` [M, 1], as [M, 1]; 0 where it is out of range."""
    return row_sum(where(column_index(x) == index, x, 0.0))


# --- products ------------------------------------------------------------------------------------


def matmul(a: Value, b: Value, transpose_a: bool = False, transpose_b: bool = False) -> Value:
    """The matrix product of a and b, either transposed."""
    if isinstance(a, Node) or isinstance(b, Node):
        builder = (a if isinstance(a, Node) else b).builder
        return builder.matmul(a, b, transpose_a, transpose_b)
    return apply(Op.MATMUL, a, b, transpose_a=transpose_a, transpose_b=transpose_b)


def linear(x: Value, w: Value, bias: Value = None) -> Value:
    """x [M, K] @ w[N, K].T + bias [1, N]: [M, N], as torch.nn.functional.linear."""
    y = matmul(x, w, transpose_b=True)
    return y if bias is None else y + bias


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


# --- activations ---------------------------------------------------------------------------------


def relu(x: Value) -> Value:
    """max(x, 0); its derivative at 0 is 0."""
    return where(x > 0.0, x, 0.0)


def relu2(x: Value) -> Value:
    """relu(x)²."""
    return relu(x) ** 2


def silu(x: Value) -> Value:
    """x · sigmoid(x)."""
    return x * sigmoid(x)


def gelu(x: Value, approximate: str = "none") -> Value:
    """x · Φ(x), by erf ("none") or by tanh ("tanh"), as torch.nn.functional.gelu."""
    if approximate == "none":
        return 0.5 * x * (1.0 + erf(x * math.sqrt(0.5)))
    if approximate == "tanh":
        return 0.5 * x * (1.0 + tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    raise ProgramError(
        "gelu", found=f"approximate={approximate!r}", expected="'none' or 'tanh'", write="L.gelu(x)"
    )


def softcap(x: Value, cap: float) -> Value:
    """cap · tanh(x / cap), as in Gemma 2."""
    return cap * tanh(x / cap)


def swiglu(x: Value) -> Value:
    """silu(gate) · up of x = [gate; up]: [M, 2F] to [M, F]."""
    gate, up = split(x)
    return silu(gate) * up


def geglu(x: Value, approximate: str = "none") -> Value:
    """gelu(gate) · up of x = [gate; up]: [M, 2F] to [M, F]."""
    gate, up = split(x)
    return gelu(gate, approximate) * up


def reglu(x: Value) -> Value:
    """relu(gate) · up of x = [gate; up]: [M, 2F] to [M, F]."""
    gate, up = split(x)
    return relu(gate) * up


def dropout(x: Value, p: float, seed: Value) -> Value:
    """x / (1 - p) where a random number reaches p, else 0; the same in forward and backward."""
    if not 0.0 <= p < 1.0:
        raise ProgramError(
            "dropout of all or less than nothing",
            found=f"p={p}",
            expected="0 <= p < 1",
            write="L.dropout(x, 0.1, seed)",
        )
    return x if p == 0.0 else where(random(x, seed) >= p, x * (1.0 / (1.0 - p)), 0.0)


# --- norms and rotary embedding ------------------------------------------------------------------


def rms_norm(x: Value, w: Value, eps: float = 1e-6, offset: float = 0.0) -> Value:
    """x · rsqrt(mean(x²) + eps) · (w + offset); w [1, N] or None; offset 1 as in Gemma."""
    y = x * rsqrt(row_mean(x**2) + eps)
    return y if w is None else y * (w + offset if offset else w)


def layer_norm(x: Value, w: Value, b: Value = None, eps: float = 1e-5) -> Value:
    """(x - mean) · rsqrt(variance + eps) · w + b; w and b [1, N] or None."""
    y = (x - row_mean(x)) * rsqrt(row_variance(x) + eps)
    y = y if w is None else y * w
    return y if b is None else y + b


def qk_norm(x: Value, w: Value, head_dim: int, heads: int | None = None, eps: float = 1e-6) -> Value:
    """RMSNorm of each of the first `heads` heads (all by default) of x [M, heads · head_dim …].

    w is [1, head_dim], shared by the heads, or [1, heads · head_dim].
    """
    heads = _heads(x, head_dim, heads)
    width = heads * head_dim
    y = x if width == x.shape[1] else columns(x, 0, width)
    r = rsqrt(group_sum(y**2, head_dim) / head_dim + eps)
    y = y * repeat(r, head_dim) * (w if w.shape[-1] == width else tile(w, heads))
    return y if width == x.shape[1] else concat(y, columns(x, width, x.shape[1]))


def rope(
    x: Value,
    cos: Value,
    sin: Value,
    head_dim: int,
    *,
    heads: int | None = None,
    rotary_dim: int | None = None,
    interleaved: bool = False,
) -> Value:
    """Rotary position embedding (Su et al., 2021) of the first `heads` heads of x [M, N].

    cos and sin are [M, rotary_dim / 2]; the first `rotary_dim` columns of a head rotate (all by
    default), in pairs (i, i + rotary_dim/2) as Hugging Face, or (2i, 2i + 1) when interleaved.
    """
    heads = _heads(x, head_dim, heads)
    rotary_dim = head_dim if rotary_dim is None else rotary_dim
    _check_tables(cos, sin, head_dim, rotary_dim)
    inner = 1 if interleaved else rotary_dim // 2
    if rotary_dim == head_dim:
        width = heads * head_dim
        y = x if width == x.shape[1] else columns(x, 0, width)
        parts = [_rotate(y, tile(cos, heads), tile(sin, heads), inner)]
    else:
        width, parts = 0, []
        for head in range(heads):
            start, width = width, width + head_dim
            parts.append(_rotate(columns(x, start, start + rotary_dim), cos, sin, inner))
            parts.append(columns(x, start + rotary_dim, width))
    parts += [columns(x, width, x.shape[1])] if width < x.shape[1] else []
    return parts[0] if len(parts) == 1 else concat(*parts)


def _rotate(x: Value, cos: Value, sin: Value, inner: int) -> Value:
    a, b = split(x, inner)
    return join(a * cos - b * sin, a * sin + b * cos, inner)


def _check_tables(cos: Value, sin: Value, head_dim: int, rotary_dim: int) -> None:
    half = rotary_dim // 2
    if not (0 < 2 * half == rotary_dim <= head_dim and cos.shape[1] == sin.shape[1] == half):
        raise ProgramError(
            "rope with cos and sin that don't fit the heads",
            found=f"{cos.shape[1]} and {sin.shape[1]} columns, {head_dim=}, {rotary_dim=}",
            expected="rotary_dim / 2 columns each; rotary_dim even and at most head_dim",
            write="L.rope(x, cos, sin, head_dim, rotary_dim=2 * cos.shape[1])",
        )


def _heads(x: Value, head_dim: int, heads: int | None) -> int:
    total = x.shape[1]
    heads = total // max(head_dim, 1) if heads is None else heads
    if min(head_dim, heads) < 1 or heads * head_dim > total or total % head_dim:
        raise ProgramError(
            "heads that don't fit the columns",
            found=f"{total} columns, heads={heads}, head_dim={head_dim}",
            expected="columns that divide by head_dim, and heads * head_dim of them at most",
            write="head_dim=columns // heads",
        )
    return heads
