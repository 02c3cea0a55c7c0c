"""What authors import as `L`: the functions of the language, each over the closed set.

Every function works on values of a program while it is traced, and on tensors when the same
function runs as plain tensor code; back ends register their tensor types (core/dispatch). Shapes
are [M, N] matrices, [M, 1] columns, [1, N] rows and [1, 1] scalars, and broadcast as in NumPy.
"""

from __future__ import annotations

import math
from typing import Any

from cadenza.core.arguments import Matrix, Row, Shaped, Value
from cadenza.core.dispatch import composite
from cadenza.core.errors import ProgramError
from cadenza.core.primitives import (
    abs,
    cast,
    column_index,
    column_max,
    column_sum,
    columns,
    concat,
    erf,
    exp,
    group_max,
    group_sum,
    join,
    linear,
    log,
    logsumexp,
    matmul,
    maximum,
    minimum,
    name,
    pick,
    random,
    repeat,
    row_index,
    row_max,
    row_mean,
    row_sum,
    row_variance,
    rsqrt,
    sigmoid,
    split,
    sqrt,
    stored,
    tanh,
    tile,
    where,
)  # fmt: skip
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


# --- activations ---------------------------------------------------------------------------------


@composite
def relu(x: Shaped) -> Value:
    """max(x, 0); its derivative at 0 is 0."""
    return where(x > 0.0, x, 0.0)


@composite
def relu2(x: Shaped) -> Value:
    """relu(x)²."""
    return relu(x) ** 2


@composite
def silu(x: Shaped) -> Value:
    """x · sigmoid(x)."""
    return x * sigmoid(x)


@composite
def gelu(x: Shaped, approximate: str = "none") -> Value:
    """x · Φ(x), by erf ("none") or by tanh ("tanh"), as torch.nn.functional.gelu."""
    if approximate == "none":
        return 0.5 * x * (1.0 + erf(x * math.sqrt(0.5)))
    if approximate == "tanh":
        return 0.5 * x * (1.0 + tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    raise ProgramError(
        "gelu", found=f"approximate={approximate!r}", expected="'none' or 'tanh'", write="L.gelu(x)"
    )


@composite
def softcap(x: Shaped, cap: Value) -> Value:
    """cap · tanh(x / cap), as in Gemma 2."""
    return cap * tanh(x / cap)


@composite
def swiglu(x: Matrix) -> Value:
    """silu(gate) · up of x = [gate; up]: [M, 2F] to [M, F]."""
    gate, up = split(x)
    return silu(gate) * up


@composite
def geglu(x: Matrix, approximate: str = "none") -> Value:
    """gelu(gate) · up of x = [gate; up]: [M, 2F] to [M, F]."""
    gate, up = split(x)
    return gelu(gate, approximate) * up


@composite
def reglu(x: Matrix) -> Value:
    """relu(gate) · up of x = [gate; up]: [M, 2F] to [M, F]."""
    gate, up = split(x)
    return relu(gate) * up


@composite
def dropout(x: Shaped, p: float, seed: Value) -> Value:
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


@composite
def rms_norm(x: Matrix, w: Shaped | float | None, eps: Value = 1e-6, offset: float = 0.0) -> Value:
    """x · rsqrt(mean(x²) + eps) · (w + offset); w [1, N] or None; offset 1 as in Gemma."""
    y = x * rsqrt(row_mean(x**2) + eps)
    return y if w is None else y * (w + offset if offset else w)


@composite
def layer_norm(
    x: Matrix, w: Shaped | float | None, b: Shaped | float | None = None, eps: Value = 1e-5
) -> Value:
    """(x - mean) · rsqrt(variance + eps) · w + b; w and b [1, N] or None."""
    y = (x - row_mean(x)) * rsqrt(row_variance(x) + eps)
    y = y if w is None else y * w
    return y if b is None else y + b


@composite
def qk_norm(x: Matrix, w: Row, head_dim: int, heads: int | None = None, eps: Value = 1e-6) -> Value:
    """RMSNorm of each of the first `heads` heads (all by default) of x [M, heads · head_dim …].

    w is [1, head_dim], shared by the heads, or [1, heads · head_dim].
    """
    heads = _heads(x, head_dim, heads)
    width = heads * head_dim
    if w.shape[-1] not in (head_dim, width):
        raise ProgramError(
            "qk_norm with a weight that doesn't fit the heads",
            found=f"{w.shape[-1]} columns, {heads=}, {head_dim=}",
            expected=f"{head_dim} columns, shared by the heads, or {width}",
            write="L.qk_norm(x, w, head_dim) with w [1, head_dim]",
        )
    y = x if width == x.shape[1] else columns(x, 0, width)
    r = rsqrt(group_sum(y**2, head_dim) / head_dim + eps)
    y = y * repeat(r, head_dim) * (w if w.shape[-1] == width else tile(w, heads))
    return y if width == x.shape[1] else concat(y, columns(x, width, x.shape[1]))


@composite
def rope(
    x: Matrix,
    cos: Matrix,
    sin: Matrix,
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
    inner, width = 1 if interleaved else rotary_dim // 2, heads * head_dim
    if head_dim % rotary_dim == 0:
        y = x if width == x.shape[1] else columns(x, 0, width)
        parts = [_rotate(y, *_spread(y, (cos, sin), head_dim, heads), inner)]
    else:
        parts = []
        for start in range(0, width, head_dim):
            parts.append(_rotate(columns(x, start, start + rotary_dim), cos, sin, inner))
            parts.append(columns(x, start + rotary_dim, start + head_dim))
    parts += [columns(x, width, x.shape[1])] if width < x.shape[1] else []
    return parts[0] if len(parts) == 1 else concat(*parts)


def _spread(
    x: Value, tables: tuple[Value, Value], head_dim: int, heads: int
) -> tuple[Value, Value]:
    """cos and sin of every pair of all heads; 1 and 0 for the pairs behind the rotary ones."""
    cos, sin = tables
    half, pairs = cos.shape[1], head_dim // 2
    spread = tile(cos, heads * pairs // half), tile(sin, heads * pairs // half)
    if half == pairs:
        return spread
    rotary = tile(column_index(columns(x, 0, pairs)), heads) < half
    return where(rotary, spread[0], 1.0), where(rotary, spread[1], 0.0)


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
