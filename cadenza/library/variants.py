"""The library's programs as `cadenza explain` knows them: which operands, their sizes, options.

Sizes have the names of the built-in blocks: M rows, D width, F feed-forward, A = heads · head_dim,
N columns of queries, keys and values, R pairs of a head, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from cadenza.library import programs
from cadenza.library.accumulate import added_weight_gradient
from cadenza.library.blocks import square_sum
from cadenza.library.function import Program
from cadenza.library.loss_blocks import (
    LINEAR,
    STATISTICS,
    linear_loss,
    vocabulary_gradient,
    vocabulary_part,
)
from cadenza.library.programs.parts import GATED, PLAIN


class Variant(NamedTuple):
    """A program with the shapes of the operands that it is given, and constants.

    `exact` are operands that are float32 in every dtype and get no gradient. What is not `derived`
    is called as it stands, within an operation that has a backward of its own.
    """

    program: Program
    shapes: Mapping[str, str]
    constants: Mapping[str, Any]
    exact: tuple[str, ...] = ()
    derived: bool = True


def _variant(program: Program, shapes: Mapping[str, str], **constants: Any) -> Variant:
    return Variant(program, shapes, constants)


RESIDUAL = {"residual": "M D"}
RMS = {"norm_weight": "1 D"}
LAYER = {**RMS, "norm_bias": "1 D"}
UP = {"x": "M D", "w": "F D", "bias": "1 F"}
DOWN = {"x": "M F", "w": "D F", "bias": "1 D"}
QKV = {"x": "M D", "w": "N D", **RMS, "squares": "M 1", "cos": "M R", "sin": "M R"}
GATES = {"w_up": "2*F D", "w_down": "D F"}
MLP = {"w_up": "F D", "w_down": "D F", "b_up": "1 F", "b_down": "1 D"}
BLOCK = {"x": "M D", "y": "M A", "w_output": "D A"}
BRANCHES = {"attention_norm": "1 D", "feed_forward_norm": "1 D"}

linear, qkv, decoder = programs.linear, programs.qkv_projection, programs.decoder_block

VARIANTS: dict[str, Variant] = {
    "square-sum": _variant(square_sum, {"x": "M D"}),
    "linear": _variant(linear, UP),
    **{f"linear-{name.replace('_', '-')}": _variant(linear, UP, activation=name) for name in PLAIN},
    **{
        f"linear-{name.replace('_', '-')}":
        _variant(linear, {"x": "M D", "w": "2*F D"}, activation=name)
        for name in GATED
    },
    "linear-residual": _variant(linear, {**DOWN, **RESIDUAL}),
    "linear-dropout": _variant(linear, {**DOWN, **RESIDUAL, "seed": "1 1"}, dropout=0.1),
    "linear-scale": _variant(linear, {**DOWN, **RESIDUAL}, scale=0.22),
    "linear-softcap": _variant(linear, {"x": "M D", "w": "V D"}, softcap=30.0),
    "linear-rms-norm": _variant(linear, {**UP, **RMS}, norm="rms"),
    "linear-gemma-norm": _variant(linear, {**UP, **RMS}, norm="rms", norm_offset=1.0),
    "linear-layer-norm": _variant(linear, {**UP, **LAYER}, norm="layer"),
    "norm": _variant(programs.norm, {"x": "M D", "weight": "1 D", "squares": "M 1"}),
    "layer-norm": _variant(
        programs.norm, {"x": "M D", "weight": "1 D", "bias": "1 D"}, kind="layer"
    ),
    "qkv": _variant(qkv, QKV, norm="rms"),
    "qkv-bias": _variant(qkv, {**QKV, "bias": "1 N"}, norm="rms"),
    "qkv-interleaved": _variant(qkv, QKV, norm="rms", interleaved=True),
    "qkv-partial": _variant(qkv, {**QKV, "cos": "M 16", "sin": "M 16"}, norm="rms"),
    "qkv-head-norm": _variant(
        qkv, {**QKV, "q_norm": "1 head_dim", "k_norm": "1 head_dim"}, norm="rms"
    ),
    "qkv-row-norm": _variant(
        qkv, {"x": "M D", "w": "N D", "q_norm": "1 A", "k_norm": "1 KV*HD", "cos": "M R",
              "sin": "M R"},
    ),
    "feed-forward": _variant(
        programs.feed_forward, {"x": "M D", **GATES, **RMS}, norm="rms", skip=True
    ),
    "feed-forward-gelu": _variant(
        programs.feed_forward, {"x": "M D", **MLP, **LAYER}, norm="layer", activation="gelu",
        skip=True,
    ),
    "attention-output": _variant(linear, {"x": "M A", "w": "D A", **RESIDUAL}),
    "attention-output-norm": _variant(
        linear, {"x": "M A", "w": "D A", **RESIDUAL, "output_norm": "1 D"}
    ),
    "decoder-before": _variant(decoder, {**BLOCK, **GATES, **RMS}, norm="rms"),
    "decoder-after": _variant(decoder, {**BLOCK, **GATES, **BRANCHES}),
    "decoder-both": _variant(
        decoder, {**BLOCK, **GATES, **RMS, **BRANCHES}, norm="rms", norm_offset=1.0,
        activation="geglu_tanh",
    ),
    "decoder-parallel": _variant(
        decoder, {**BLOCK, **MLP, **LAYER}, norm="layer", activation="gelu_tanh", parallel=True
    ),
    "weight-gradient": _variant(
        added_weight_gradient, {"gradient": "F D", "dy": "M F", "x": "M D"}, dtype="float32"
    ),
}  # fmt: skip

# What `cz.ops.linear_cross_entropy` calls for each chunk: of rows, or if it is lean of classes,
# once for the loss and once for the gradients of x and w. V is then the classes of a chunk.
LOGITS = {name: LINEAR[name] for name in ("x", "w", "target")}
OF_TERMS = {"own_weight": "M 1", "mean_weight": "1 1", "shift": "M 1"}
GIVEN = {name: STATISTICS[name] for name in ("top", "total", "scale", "own")}
LOSSES: dict[str, Variant] = {
    "loss": _variant(linear_loss, LOGITS),
    "loss-terms": Variant(
        linear_loss, {**LINEAR, **OF_TERMS},
        {"label_smoothing": 0.1, "z_loss": 1e-4, "softcap": 30.0}, (*OF_TERMS, "class_weight"),
    ),
    "loss-lean": Variant(vocabulary_part, LOGITS, {}, derived=False),
    "loss-lean-gradient": Variant(
        vocabulary_gradient, {**LOGITS, **GIVEN, "sum_x": "M D"}, {"needed": 3},
        (*GIVEN, "sum_x"), derived=False,
    ),
}  # fmt: skip
