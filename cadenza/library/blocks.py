"""The built-in blocks: the parts of today's decoders between two attention calls, as programs.

Each starts at the attention's output y and the residual stream x, and ends at the projections that
the next attention needs, so everything between two attention calls is one program. Weights have
nn.Linear's layout; w_gate_up holds the gate's rows, then up's; w_qkv the rows of queries, keys and
values.
"""

from __future__ import annotations

from typing import Any

from cadenza.core import lang as L
from cadenza.library.function import block
from cadenza.library.loss_blocks import token_loss

Value = Any
ROTARY = {"cos": "M R", "sin": "M R"}
RESIDUAL = {"x": "M D", "y": "M A", "wo": "D A"}
GATED = {"w_gate_up": "2*F D", "w_down": "D F"}
NEXT = {"next_norm": "1 D", "w_qkv": "N D"}
LLAMA = {**RESIDUAL, "norm": "1 D", **GATED, **NEXT, **ROTARY}


@block(shapes=LLAMA)
def llama(x, y, wo, norm, w_gate_up, w_down, next_norm, w_qkv, cos, sin, *, head_dim, heads,
          eps=1e-5):  # fmt: skip
    """Attention output, SwiGLU and the next layer's QKV: x [M, D] and rotated qkv [M, N].

    `heads` counts the heads that rotate: queries and keys.
    """
    x = L.name(x + L.linear(y, wo), "x1")
    h = L.rms_norm(x, norm, eps)
    x = L.name(x + L.linear(L.swiglu(L.linear(h, w_gate_up)), w_down), "x2")
    qkv = L.linear(L.rms_norm(x, next_norm, eps), w_qkv)
    return x, L.rope(qkv, cos, sin, head_dim, heads=heads)


@block(shapes={"x": "M D", **GATED})
def llama_mlp(x, w_gate_up, w_down):
    """SwiGLU alone: down(silu(gate(x)) · up(x)), [M, D]."""
    return L.linear(L.swiglu(L.linear(x, w_gate_up)), w_down)


@block(shapes={**RESIDUAL, "bo": "1 D", "norm": "1 D", "norm_bias": "1 D", "w_up": "F D",
               "b_up": "1 F", "w_down": "D F", "b_down": "1 D", **NEXT, "next_norm_bias": "1 D",
               "b_qkv": "1 N"})  # fmt: skip
def gpt2(x, y, wo, bo, norm, norm_bias, w_up, b_up, w_down, b_down, next_norm, next_norm_bias,
         w_qkv, b_qkv, *, eps=1e-5):  # fmt: skip
    """GPT-2: LayerNorm, GELU by tanh, biases everywhere: x [M, D] and qkv [M, N]."""
    x = L.name(x + L.linear(y, wo, bo), "x1")
    h = L.layer_norm(x, norm, norm_bias, eps)
    u = L.gelu(L.linear(h, w_up, b_up), approximate="tanh")
    x = L.name(x + L.linear(u, w_down, b_down), "x2")
    return x, L.linear(L.layer_norm(x, next_norm, next_norm_bias, eps), w_qkv, b_qkv)


@block(shapes={**LLAMA, "q_norm": "1 head_dim", "k_norm": "1 head_dim"})
def qwen3(x, y, wo, norm, w_gate_up, w_down, next_norm, w_qkv, q_norm, k_norm, cos, sin, *,
          head_dim, heads, key_value_heads, eps=1e-6):  # fmt: skip
    """As Llama, with RMSNorm of each query and key head: x [M, D] and rotated qkv [M, N]."""
    x = L.name(x + L.linear(y, wo), "x1")
    h = L.rms_norm(x, norm, eps)
    x = L.name(x + L.linear(L.swiglu(L.linear(h, w_gate_up)), w_down), "x2")
    qkv = L.linear(L.rms_norm(x, next_norm, eps), w_qkv)
    q_end, k_end = heads * head_dim, (heads + key_value_heads) * head_dim
    q = L.qk_norm(L.columns(qkv, 0, q_end), q_norm, head_dim, eps=eps)
    k = L.qk_norm(L.columns(qkv, q_end, k_end), k_norm, head_dim, eps=eps)
    rotated = L.rope(L.concat(q, k), cos, sin, head_dim)
    return x, L.concat(rotated, L.columns(qkv, k_end, qkv.shape[1]))


@block(shapes={**LLAMA, "attention_norm": "1 D", "feed_forward_norm": "1 D"})
def gemma2(x, y, wo, attention_norm, norm, w_gate_up, w_down, feed_forward_norm, next_norm, w_qkv,
           cos, sin, *, head_dim, heads, eps=1e-6):  # fmt: skip
    """Gemma 2: norms before and after, weights stored as w - 1, GeGLU by tanh."""
    x = L.name(x + L.rms_norm(L.linear(y, wo), attention_norm, eps, offset=1.0), "x1")
    h = L.rms_norm(x, norm, eps, offset=1.0)
    u = L.geglu(L.linear(h, w_gate_up), approximate="tanh")
    x = L.name(x + L.rms_norm(L.linear(u, w_down), feed_forward_norm, eps, offset=1.0), "x2")
    qkv = L.linear(L.rms_norm(x, next_norm, eps, offset=1.0), w_qkv)
    return x, L.rope(qkv, cos, sin, head_dim, heads=heads)


@block(shapes=LLAMA)
def parallel(x, y, wo, norm, w_gate_up, w_down, next_norm, w_qkv, cos, sin, *, head_dim, heads,
             eps=1e-5):  # fmt: skip
    """Attention and SwiGLU side by side on one norm of x, then the next QKV."""
    u = L.swiglu(L.linear(L.rms_norm(x, norm, eps), w_gate_up))
    x = L.name(x + L.linear(y, wo) + L.linear(u, w_down), "x1")
    qkv = L.linear(L.rms_norm(x, next_norm, eps), w_qkv)
    return x, L.rope(qkv, cos, sin, head_dim, heads=heads)


@block(shapes={"x": "M D", "norm": "1 D", "w_qkv": "N D", **ROTARY})
def norm_qkv(x, norm, w_qkv, cos, sin, *, head_dim, heads, eps=1e-5):
    """RMSNorm, QKV and rotary embedding alone: [M, N]."""
    return L.rope(L.linear(L.rms_norm(x, norm, eps), w_qkv), cos, sin, head_dim, heads=heads)


@block(shapes={"x": "M D", "norm": "1 D", "w": "V D", "target": "M 1"})
def lm_head(x, norm, w, target, *, eps=1e-5, ignore_index=-100):
    """The last norm, the logits and each row's cross-entropy against its target: [M, 1]."""
    return token_loss(L.linear(L.rms_norm(x, norm, eps), w), target, ignore_index)


# --- a decoder layer as a unit -------------------------------------------------------------------


@block(shapes={"x": "M D"})
def square_sum(x):
    """Σ x² of each row, x `[..., D]` to `[..., 1]`: what a layer hands to the next beside x.

    It is float32, float64 for float64. Raises ProgramError for what is no tensor.
    """
    return L.row_sum(x**2)


def _norm_from_sum(x: Value, squares: Value, norm: Value, eps: float) -> Value:
    """RMSNorm of x whose rows' sums of squares are known."""
    return x * L.rsqrt(squares / x.shape[1] + eps) * norm


@block(shapes={"x": "M D", "squares": "M 1", "norm": "1 D"})
def final_norm(x, squares, norm, *, eps):
    """RMSNorm of the last layer's stream, [M, D]."""
    return _norm_from_sum(x, squares, norm, eps)


BUILT_IN = {
    "llama": llama,
    "llama-mlp": llama_mlp,
    "gpt2": gpt2,
    "qwen3": qwen3,
    "gemma2": gemma2,
    "parallel": parallel,
    "norm-qkv": norm_qkv,
    "lm-head": lm_head,
}
