"""CODA's primitives, each as a step of an epilogue, alone and together over one product."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from cadenza.core import lang as L
from cadenza.library.function import block

Value = Any
Step = Callable[[Value, Any, dict[str, Value]], Value]  # value, operands, further outputs


def _second_store(value: Value, _: Any, stored: dict[str, Value]) -> Value:
    stored["second"] = 0.5 * value
    return value


def _square_sum(value: Value, _: Any, stored: dict[str, Value]) -> Value:
    stored["squares"] = L.row_sum(value**2)
    return value


def _column_sum(value: Value, _: Any, stored: dict[str, Value]) -> Value:
    stored["columns"] = L.column_sum(value)
    return value


def _log_sum_exp(value: Value, _: Any, stored: dict[str, Value]) -> Value:
    stored["logsumexp"] = L.logsumexp(value)
    return value


def _paired_columns(value: Value, *_: Any) -> Value:
    a, b = L.split(value)
    return a * b


# In the order in which they are applied: pairs of columns last, since they halve the width.
PRIMITIVES: dict[str, Step] = {
    "row-scale": lambda value, o, _: value * o.r,
    "column-scale": lambda value, o, _: value * o.g,
    "bias": lambda value, o, _: value + o.bias,
    "residual": lambda value, o, _: value + o.residual,
    "activation": lambda value, *_: L.silu(value),
    "second-store": _second_store,
    "square-sum": _square_sum,
    "column-sum": _column_sum,
    "log-sum-exp": _log_sum_exp,
    "paired-columns": _paired_columns,
}


@block(shapes={"x": "M K", "w": "N K", "r": "M 1", "g": "1 N", "bias": "1 N", "residual": "M N"})
def primitives(x, w, r, g, bias, residual, *, parts):
    """A product and the primitives that `parts` names, joined by +."""
    operands = SimpleNamespace(r=r, g=g, bias=bias, residual=residual)
    further: dict[str, Value] = {}
    value = L.linear(x, w)
    for part in parts.split("+"):
        value = PRIMITIVES[part](value, operands, further)
    return {"y": value, **further}
