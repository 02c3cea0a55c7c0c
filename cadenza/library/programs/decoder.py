"""Programs of a decoder layer between its attention call and its end."""

from __future__ import annotations

from typing import Any

from cadenza.core import lang as L
from cadenza.core.errors import ProgramError
from cadenza.library.function import block
from cadenza.library.programs.parts import Norm, activated, check_flag, check_offset, dropped

Value = Any
FEED_FORWARD = {
    "w_up": "U D", "b_up": "1 U", "w_down": "D F", "b_down": "1 D", "norm_weight": "1 D",
    "norm_bias": "1 D",
}  # fmt: skip


@block(shapes={"x": "M D", **FEED_FORWARD, "output_norm": "1 D", "seed": "1 1"})
def feed_forward(x, w_up, w_down, b_up=None, b_down=None, *, norm_weight=None, norm_bias=None,
                 output_norm=None, seed=None, activation="swiglu", norm=None, norm_offset=0.0,
                 eps=1e-5, dropout=0.0, skip=False):  # fmt: skip
    """A feed-forward block, x `[..., D]` to the same shape and dtype.

        u = activation(norm(x) · w_upᵀ + b_up)
        y = dropout(output_norm(u · w_downᵀ + b_down)), and x + y if `skip`

    w_down is `[D, F]`, w_up `[F, D]`, or `[2F, D]` for a gated activation: the gate's rows, then
    up's; biases are `[F]` or `[2F]`, and `[D]`. norm with norm_weight, norm_bias, norm_offset and
    eps, output_norm, activations, and dropout with seed are those of `linear`. Arithmetic is
    float32 (float64 for float64).

    Between the products nothing but their operands is stored: of a gated activation backward keeps
    the raw product alone. Raises ProgramError for shapes, dtypes and options that don't fit.
    """
    check_flag(skip, "skip")
    check_offset(norm_offset, norm_weight, output_norm)
    stem = Norm(norm, norm_weight, norm_bias, norm_offset, eps)
    u = activated(L.linear(stem(x), w_up, b_up), activation)
    y = stem.of_output(L.linear(u, w_down, b_down), output_norm)
    y = dropped(y, dropout, seed)
    return x + y if skip else y


@block(shapes={"x": "M D", "y": "M A", "w_output": "D A", "b_output": "1 D", **FEED_FORWARD,
               "squares": "M 1", "attention_norm": "1 D", "feed_forward_norm": "1 D",
               "seed": "1 1", "feed_forward_seed": "1 1"})  # fmt: skip
def decoder_block(x, y, w_output, w_up, w_down, *, b_output=None, b_up=None, b_down=None,
                  norm_weight=None, norm_bias=None, squares=None, attention_norm=None,
                  feed_forward_norm=None, seed=None, feed_forward_seed=None, activation="swiglu",
                  norm=None, norm_offset=0.0, eps=1e-5, scale=1.0, dropout=0.0,
                  parallel=False):  # fmt: skip
    """A decoder layer from its attention's output to its end: the next x `[..., D]`, and squares.

        a = attention_norm(y · w_outputᵀ + b_output)
        f(h) = feed_forward_norm(activation(norm(h) · w_upᵀ + b_up) · w_downᵀ + b_down)
        in sequence: x1 = x + scale · dropout(a); x2 = x1 + scale · dropout(f(x1))
        parallel:    x2 = x + scale · dropout(a) + scale · dropout(f(x))

    x is the residual stream `[..., D]`, y the attention's output `[..., A]`, w_output `[D, A]`; the
    feed-forward's w_up, w_down and biases as in `feed_forward`. Which norms are given makes the
    layer:

    - before the branch (Llama, GPT-2): norm="rms" or "layer", norm_weight, norm_bias; eps of all;
    - after it (OLMo 2): attention_norm and feed_forward_norm, `[D]`;
    - both (Gemma 2): all of them, with norm_offset=1;
    - `parallel` (GPT-J, Cohere): norm of the layer's input, which its QKV projection uses, too.

    Operands are of one floating dtype, which x2 has as well; autocast casts those of products.
    Returns (x2, Σ x2² of each row `[..., 1]`, in float32, float64 for float64): what the next
    layer's `qkv_projection` and the last `norm` take as squares. `squares` are those of x, for a
    parallel layer. The two branches drop by seeds of their own, seed and feed_forward_seed. Raises
    ProgramError for shapes, dtypes and options that don't fit.
    """
    check_flag(parallel, "parallel")
    _check_squares(squares, parallel)
    check_offset(norm_offset, norm_weight, attention_norm, feed_forward_norm)
    stem = Norm(norm, norm_weight, norm_bias, norm_offset, eps, squares)
    a = stem.of_output(L.linear(y, w_output, b_output), attention_norm)
    x1 = x + _scaled(dropped(a, dropout, seed), scale)
    x1 = x1 if parallel else L.name(x1, "x1")
    u = activated(L.linear(stem(x if parallel else x1), w_up, b_up), activation)
    f = stem.of_output(L.linear(u, w_down, b_down), feed_forward_norm)
    f = dropped(f, dropout, feed_forward_seed, "feed_forward_seed")
    x2 = L.name(x1 + _scaled(f, scale), "x2")
    return x2, L.row_sum(x2**2)


def _scaled(x: Value, scale: float) -> Value:
    return x if scale == 1.0 else x * scale


def _check_squares(squares: Value, parallel: bool) -> None:
    if squares is not None and not parallel:
        raise ProgramError(
            "squares that nothing uses",
            found="squares of x with parallel=False",
            expected="none: the feed-forward norms what attention adds to x",
            write="decoder_block(...) without squares; qkv_projection takes them",
        )
