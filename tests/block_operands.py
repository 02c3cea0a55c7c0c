"""Small operands for every built-in block: odd sizes, so that no two dimensions agree by chance.

`operands(name, rows)` gives the arguments of one call; `FROZEN` names what no model trains.
"""

from collections.abc import Callable
from typing import Any

import torch

WIDTH, FEED_FORWARD, VOCABULARY = 12, 15, 21
HEAD_DIM, HEADS, KEY_VALUE_HEADS = 6, 2, 1
ROTATED = HEADS + KEY_VALUE_HEADS
QKV = (HEADS + 2 * KEY_VALUE_HEADS) * HEAD_DIM
EMBEDDED = HEADS * HEAD_DIM
FROZEN = ("cos", "sin", "target")
Operands = dict[str, Any]


def weight(*shape: int) -> torch.Tensor:
    """Random weights that keep the size of what they multiply."""
    return torch.randn(*shape) * shape[-1] ** -0.5


def gain(columns: int) -> torch.Tensor:
    """A norm's weights, near one."""
    return 1.0 + 0.3 * torch.randn(columns)


def residual(rows: int) -> Operands:
    """The residual stream, the attention's output and its projection."""
    shape = {"x": torch.randn(rows, WIDTH), "y": torch.randn(rows, EMBEDDED)}
    return shape | {"wo": weight(WIDTH, EMBEDDED)}


def rotary(rows: int, head_dim: int = HEAD_DIM) -> Operands:
    """Rotary tables and the sizes of heads."""
    angles = torch.randn(rows, head_dim // 2)
    sizes = {"head_dim": head_dim, "heads": ROTATED}
    return {"cos": angles.cos(), "sin": angles.sin()} | sizes


def gated() -> Operands:
    """Weights of a gated feed-forward."""
    return {
        "w_gate_up": weight(2 * FEED_FORWARD, WIDTH),
        "w_down": weight(WIDTH, FEED_FORWARD),
    }


def projection() -> Operands:
    """The next norm and the projections of queries, keys and values."""
    return {"next_norm": gain(WIDTH), "w_qkv": weight(QKV, WIDTH)}


def llama(rows: int) -> Operands:
    """Operands of llama and parallel."""
    return residual(rows) | {"norm": gain(WIDTH)} | gated() | projection() | rotary(rows)


def gpt2(rows: int) -> Operands:
    """Operands of gpt2."""
    vectors = {
        "bo": torch.randn(WIDTH), "norm": gain(WIDTH), "norm_bias": torch.randn(WIDTH),
        "b_up": torch.randn(FEED_FORWARD), "b_down": torch.randn(WIDTH),
        "next_norm_bias": torch.randn(WIDTH), "b_qkv": torch.randn(QKV),
    }  # fmt: skip
    matrices = {"w_up": weight(FEED_FORWARD, WIDTH), "w_down": weight(WIDTH, FEED_FORWARD)}
    return residual(rows) | vectors | matrices | projection()


def qwen3(rows: int) -> Operands:
    """Operands of qwen3."""
    norms = {"q_norm": gain(HEAD_DIM), "k_norm": gain(HEAD_DIM)}
    sizes = {"heads": HEADS, "key_value_heads": KEY_VALUE_HEADS}
    return llama(rows) | norms | sizes


def gemma2(rows: int) -> Operands:
    """Operands of gemma2; its norms store their weights minus one."""
    norms = ("attention_norm", "norm", "feed_forward_norm", "next_norm")
    return llama(rows) | {name: gain(WIDTH) - 1.0 for name in norms}


def norm_qkv(rows: int) -> Operands:
    """Operands of norm-qkv."""
    return {
        "x": torch.randn(rows, WIDTH), "norm": gain(WIDTH), "w_qkv": weight(QKV, WIDTH),
    } | rotary(rows)  # fmt: skip


def lm_head(rows: int) -> Operands:
    """Operands of lm-head: every third target is ignored."""
    target = torch.randint(0, VOCABULARY, (rows,))
    target[::3] = -100
    head = {"norm": gain(WIDTH), "w": 2 * weight(VOCABULARY, WIDTH)}
    return {"x": torch.randn(rows, WIDTH)} | head | {"target": target}


def llama_mlp(rows: int) -> Operands:
    """Operands of llama-mlp."""
    return {"x": torch.randn(rows, WIDTH)} | gated()


OPERANDS: dict[str, Callable[[int], Operands]] = {
    "llama": llama,
    "llama-mlp": llama_mlp,
    "gpt2": gpt2,
    "qwen3": qwen3,
    "gemma2": gemma2,
    "parallel": llama,
    "norm-qkv": norm_qkv,
    "lm-head": lm_head,
}


def operands(name: str, rows: int) -> Operands:
    """The arguments of one call of a built-in block over `rows` rows, in float32."""
    return OPERANDS[name](rows)


def cast(arguments: Operands, dtype: torch.dtype) -> Operands:
    """The same arguments with floating tensors in another dtype."""
    return {
        name: value.to(dtype)
        if isinstance(value, torch.Tensor) and value.is_floating_point()
        else value
        for name, value in arguments.items()
    }
