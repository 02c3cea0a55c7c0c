"""Programs over one product: a projection with all that may stand before and after it."""

from __future__ import annotations

from typing import Any

from cadenza.core import lang as L
from cadenza.core.arguments import dimensions, is_whole
from cadenza.core.errors import ProgramError
from cadenza.library.function import block
from cadenza.library.programs.parts import (
    Norm,
    activated,
    added,
    capped,
    check_flag,
    check_offset,
    dropped,
    kept_as,
    operand,
    shifted,
)

Value = Any
NORM = {"norm_weight": "1 D", "norm_bias": "1 D"}


@block(shapes={"x": "M D", "weight": "1 D", "bias": "1 D", "squares": "M 1"})
def norm(x, weight=None, bias=None, *, squares=None, kind="rms", offset=0.0, eps=1e-5):
    """RMSNorm or LayerNorm of each row: x `[..., D]` to the same shape and dtype.

    Arithmetic is float32 (float64 for float64), with one rounding at the end.

    kind "rms": x · r · (weight + offset), r = 1 / √(mean(x²) + eps); offset 1 as in Gemma, whose
    weights are stored minus one. `squares` `[..., 1]`, the rows' sums of squares as `decoder_block`
    returns them, are taken instead of Σ x². kind "layer": (x − mean(x)) / √(variance(x) + eps) ·
    weight + bias. weight and bias are `[D]` or None.

    Raises ProgramError for an operand or option that this kind doesn't have, and for shapes that
    don't fit.
    """
    check_offset(offset, weight)
    return Norm(kind, weight, bias, offset, eps, squares)(x)


@block(shapes={"x": "M D", "w": "N D", "bias": "1 N", "residual": "M P", **NORM,
               "output_norm": "1 P", "seed": "1 1"})  # fmt: skip
def linear(x, w, bias=None, *, residual=None, norm_weight=None, norm_bias=None, output_norm=None,
           seed=None, activation=None, norm=None, norm_offset=0.0, eps=1e-5, scale=1.0,
           softcap=None, dropout=0.0):  # fmt: skip
    """A projection and all that may stand around it, x `[..., D]` to y `[..., P]`.

        a = activation(norm(x) · wᵀ + bias)
        y = residual + dropout(output_norm(softcap(scale · a)))

    Only what is given happens; the order is fixed. w is `[N, D]`, bias `[N]`; P is N, or N/2 for a
    gated activation, whose w holds the gate's rows, then up's.

    - activation: "relu", "relu2", "silu", "gelu" (by erf), "gelu_tanh"; gated "swiglu", "geglu",
      "geglu_tanh", "reglu".
    - norm: "rms" with norm_weight `[D]` + norm_offset (1 as in Gemma), or "layer" with norm_weight
      and norm_bias `[D]`; both with eps. The factor of a row is applied after the product.
    - scale: a number; softcap: c of c · tanh(z / c), as in Gemma 2.
    - output_norm: the weight `[P]` of a norm of the output, of the kind of `norm`, else RMSNorm.
    - dropout: the probability p, with seed, an int64 tensor of one element: 0 with probability p,
      else times 1/(1 − p); the same places in forward and backward.
    - residual: `[..., P]`.

    x, w share a dtype, which y takes; a wider residual widens y. Arithmetic is float32 (float64 for
    float64), with one rounding at the end. Raises ProgramError for shapes, dtypes and options that
    don't fit, or that nothing would use.
    """
    check_offset(norm_offset, norm_weight, output_norm)
    stem = Norm(norm, norm_weight, norm_bias, norm_offset, eps)
    y = activated(L.linear(stem(x), w, bias), activation)
    y = capped(y if scale == 1.0 else y * scale, softcap)
    return added(dropped(stem.of_output(y, output_norm), dropout, seed), residual)


@block(shapes={"x": "M D", "w": "N D", "bias": "1 N", **NORM, "squares": "M 1", "q_norm": "1 Q",
               "k_norm": "1 K", "cos": "M R", "sin": "M R"})  # fmt: skip
def qkv_projection(x, w, bias=None, *, norm_weight=None, norm_bias=None, squares=None, q_norm=None,
                   k_norm=None, cos=None, sin=None, head_dim, heads, key_value_heads=None,
                   norm=None, norm_offset=0.0, eps=1e-5, interleaved=False):  # fmt: skip
    """Queries, keys and values of grouped heads, normed and rotated: x `[..., D]` to `[..., N]`.

        [q; k; v] = norm(x) · wᵀ + bias
        y = [rope(q_norm(q)); rope(k_norm(k)); v]

    w is `[N, D]`: the rows of `heads` query heads of `head_dim` rows each, then those of
    `key_value_heads` (default: `heads`) key heads, then as many value heads; bias is `[N]`.

    - norm, norm_weight, norm_bias, norm_offset, eps: as in `linear`; squares `[..., 1]` as in
      `norm`.
    - q_norm, k_norm: weights of RMSNorm, `[head_dim]`: of each head by itself (Qwen3); or as long
      as all query and all key heads: over the whole row of q and of k (OLMo 2). norm_offset and
      eps are theirs, too.
    - cos, sin `[..., R]`: the tables of `rotary_tables`, one row a token. The first 2R columns of
      each query and key head rotate, in pairs (i, i + R) as in Hugging Face's models, or
      (2i, 2i + 1) if `interleaved`, as in torchtitan. Tables may be float32 whatever x is.

    x and w share a dtype, which y takes; arithmetic is float32 (float64 for float64). Raises
    ProgramError for shapes, dtypes and options that don't fit.
    """
    key_value_heads = heads if key_value_heads is None else key_value_heads
    check_flag(interleaved, "interleaved")
    _check_heads(w, head_dim, heads, key_value_heads)
    check_offset(norm_offset, norm_weight, q_norm, k_norm)
    acc = L.linear(Norm(norm, norm_weight, norm_bias, norm_offset, eps, squares)(x), w, bias)
    q_end, k_end = heads * head_dim, (heads + key_value_heads) * head_dim
    _check_tables(operand(cos, "cos"), operand(sin, "sin"), interleaved)
    if q_norm is None and k_norm is None and cos is None:
        return acc
    y = L.columns(acc, 0, k_end)
    if q_norm is not None or k_norm is not None:
        numbers = {"head_dim": head_dim, "offset": norm_offset, "eps": eps}
        q = _normed_heads(L.columns(acc, 0, q_end), q_norm, **numbers)
        y = L.concat(q, _normed_heads(L.columns(acc, q_end, k_end), k_norm, **numbers))
    if cos is not None:
        rotary_dim = 2 * cos.shape[1]
        y = L.rope(y, cos, sin, head_dim, rotary_dim=rotary_dim, interleaved=interleaved)
    return kept_as(L.concat(y, L.columns(acc, k_end, acc.shape[1])), acc)


def _normed_heads(x: Value, weight: Value, head_dim: int, offset: float, eps: float) -> Value:
    """RMSNorm of queries or keys: of each head, or of the whole row where the weight is so long."""
    if operand(weight, "q_norm, k_norm") is None:
        return x
    if weight.shape[1] == x.shape[1]:
        return L.rms_norm(x, weight, eps, offset)
    if weight.shape[1] == head_dim:
        return L.qk_norm(x, shifted(weight, offset), head_dim, eps=eps)
    raise ProgramError(
        "a norm of queries or keys with a weight that doesn't fit",
        found=f"a weight of {weight.shape[1]} beside {x.shape[1]} columns, {head_dim=}",
        expected=f"{head_dim} numbers, shared by the heads, or {x.shape[1]} for the whole row",
        write="q_norm [head_dim] as in Qwen3, or [heads * head_dim] as in OLMo 2",
    )


def _check_heads(w: Value, head_dim: int, heads: int, key_value_heads: int) -> None:
    whole = all(is_whole(n) and n >= 1 for n in (head_dim, heads, key_value_heads))
    rows = (heads + 2 * key_value_heads) * head_dim if whole else None
    shape = list(w.shape) if dimensions(w) == 2 else w
    if not whole or dimensions(w) != 2 or w.shape[0] != rows or heads % key_value_heads:
        product = "(heads + 2 * key_value_heads) * head_dim"
        raise ProgramError(
            "heads that don't fit the weight",
            found=f"w {shape!r:.40}, {head_dim=}, {heads=}, {key_value_heads=}",
            expected=f"{product} {f'= {rows} ' if whole else ''}rows, and heads a multiple of "
            "key_value_heads",
            write="w=torch.cat((w_q, w_k, w_v))",
        )


def _check_tables(cos: Value, sin: Value, interleaved: bool) -> None:
    if interleaved and cos is None and sin is None:
        raise ProgramError(
            "interleaved pairs that nothing rotates",
            found="interleaved=True without cos and sin",
            expected="cos and sin [..., rotary_dim / 2]",
            write="cos, sin = cz.ops.rotary_tables(config, positions)",
        )
    if (cos is None) != (sin is None):
        raise ProgramError(
            "one rotary table without the other",
            found="cos alone" if sin is None else "sin alone",
            expected="cos and sin [..., rotary_dim / 2], or neither",
            write="cos, sin = cz.ops.rotary_tables(config, positions)",
        )
