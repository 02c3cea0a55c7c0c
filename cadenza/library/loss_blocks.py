"""The programs of linear + cross-entropy: a chunk of rows at a time, or a chunk of classes.

Logits are z = x · wᵀ + bias, softcapped if asked, as they are stored, so that forward and backward
see the same. A row costs, relative to z[target], so that a common offset of its logits changes
nothing,

    c · ((1 − ε) · (lse − z[target]) + λ · lse²) + ε · Σₖ cₖ · (lse − zₖ) / V

with lse = log Σ exp z, ε the label smoothing, λ the weight of the z-loss, cₖ the weight of class k
and c that of the row's own class. A target of `ignore_index` costs 0, one outside of [0, V) NaN.
"""

from __future__ import annotations

import math
from typing import Any

from cadenza.core import lang as L
from cadenza.library.function import block

Value = Any
LINEAR = {"x": "M D", "w": "V D", "target": "M 1", "bias": "1 V", "class_weight": "1 V"}
STATISTICS = {"top": "M 1", "total": "M 1", "scale": "M 1", "own": "M 1", "spread": "M 1"}


def counted(loss: Value, target: Value, classes: int, ignore_index: int) -> Value:
    """The loss of rows that count; 0 for `ignore_index`, NaN outside of [0, classes)."""
    inside = (target >= 0) & (target < classes)
    return L.where(target == ignore_index, 0.0, L.where(inside, loss, math.nan))


def token_loss(logits: Value, target: Value, ignore_index: int) -> Value:
    """The cross-entropy of each row of logits [M, V] against its target [M, 1], as [M, 1]."""
    logits = L.name(L.stored(logits), "logits")
    loss = L.logsumexp(logits, L.pick(logits, target))
    return counted(loss, target, logits.shape[1], ignore_index)


def _logits(x: Value, w: Value, bias: Value, softcap: float | None) -> Value:
    """z [M, V]."""
    stored = L.name(L.stored(L.linear(x, w, bias)), "logits")
    return stored if softcap is None else L.softcap(stored, softcap)


def _weighted(value: Value, weight: Value) -> Value:
    return value if weight is None else value * weight


@block(shapes={**LINEAR, "own_weight": "M 1", "mean_weight": "1 1", "shift": "M 1"})
def linear_loss(x, w, target, bias=None, own_weight=None, class_weight=None, mean_weight=None,
                shift=None, *, ignore_index=-100, label_smoothing=0.0, z_loss=0.0,
                softcap=None):  # fmt: skip
    """Each row's loss [M, 1] of one chunk of rows.

    `own_weight` is the weight of the row's own class; `class_weight` that of every class, and
    `mean_weight` their mean, are asked for by label smoothing. So is `shift`, any number near the
    row's logits: distances from it add up without what all logits have in common.
    """
    z = _logits(x, w, bias, softcap)
    picked = L.pick(z, target)
    below = L.logsumexp(z, picked)
    loss = (1.0 - label_smoothing) * below if label_smoothing else below
    if z_loss:
        loss = loss + z_loss * (below + picked) ** 2
    loss = _weighted(loss, own_weight)
    if label_smoothing:
        distance = _weighted(below + (picked - shift), mean_weight)
        distance = distance - L.row_mean(_weighted(z - shift, class_weight))
        loss = loss + label_smoothing * distance
    return counted(loss, target, z.shape[1], ignore_index)


@block(shapes={"gradient": "M N", "scale": "1 1"})
def scaled(gradient, scale, *, dtype):
    """gradient [M, N] times a number, in `dtype`."""
    return L.cast(gradient * scale, dtype)


@block(shapes={**LINEAR, "shift": "M 1"})
def vocabulary_part(x, w, target, bias=None, class_weight=None, shift=None, *, softcap=None):
    """Of one chunk of classes, each [M, 1]: the largest logit `top`, the log-sum-exp below it
    `total`, the target's logit `picked` (0 if it is elsewhere), and with `shift` the weighted sum
    of the logits above it, `apart`."""
    z = _logits(x, w, bias, softcap)
    top = L.row_max(z)
    parts = {"top": top, "total": L.logsumexp(z, top), "picked": L.pick(z, target)}
    if shift is not None:
        parts["apart"] = L.row_sum(_weighted(z - shift, class_weight))
    return parts


@block(shapes={**LINEAR, **STATISTICS, "sum_x": "M D"})
def vocabulary_gradient(x, w, target, top, total, scale, own, sum_x=None, bias=None,
                        class_weight=None, spread=None, *, softcap=None, needed):  # fmt: skip
    """Of one chunk of classes: dx [M, D] added to `sum_x`, dw [V, D] and dbias [1, V].

    dz = scale · p − own · [k = target] − spread · cₖ, where p = exp((z − top) − total) with `top`
    and `total` of all classes. The bits of `needed` ask for dx, dw and dbias.
    """
    z = _logits(x, w, bias, softcap)
    d = scale * L.exp((z - top) - total) - L.where(L.column_index(z) == target, own, 0.0)
    if spread is not None:
        d = d - _weighted(spread, class_weight)
    if softcap is not None:
        d = d * (1.0 - (z / softcap) ** 2)
    gradients = {}
    if needed & 1:
        gradients["x"] = sum_x + L.matmul(d, w)
    if needed & 2:
        gradients["w"] = L.matmul(d, x, transpose_a=True)
    if needed & 4:
        gradients["bias"] = L.column_sum(d)
    return gradients
