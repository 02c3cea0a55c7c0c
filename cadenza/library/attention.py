"""The attention between two programs: PyTorch's own, causal, by sequence where several are packed.

Cadenza has no attention kernel. A plain causal batch is asked for by `is_causal`, never by a mask,
so PyTorch takes its fastest kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from cadenza.core.errors import ProgramError
from cadenza.library.rotary import packed_sequences


def causal_attention(
    qkv: Tensor,
    *,
    heads: int,
    key_value_heads: int | None = None,
    cumulative_lengths: Tensor | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Causal attention of grouped heads: qkv `[B, S, N]` to `[B, S, heads · head_dim]`.

        y = softmax(scale · q · kᵀ + mask) · v, of each head; dropout on the softmax

    qkv is what `qkv_projection` returns: `heads` query heads, then `key_value_heads` (default:
    `heads`) key heads, then as many value heads. scale is 1 / √head_dim by default.

    `cumulative_lengths` `[sequences + 1]`, whole numbers from 0 up to B · S, say where sequences
    start that are packed into all B · S tokens in order; a token then sees those before it in its
    own sequence. This takes a mask `[B · S, B · S]`; without it there is none.

    Raises ProgramError for shapes that don't fit, and on a CPU for lengths that don't.
    """
    key_value_heads = heads if key_value_heads is None else key_value_heads
    head_dim = _head_dim(qkv, heads, key_value_heads)
    batch, length = qkv.shape[:2]
    mask = None
    if cumulative_lengths is not None:
        mask = _mask(cumulative_lengths, batch * length)
        qkv = qkv.reshape(1, batch * length, qkv.shape[2])
    apart = qkv.unflatten(-1, (-1, head_dim)).transpose(1, 2)
    query, key, value = apart.split((heads, key_value_heads, key_value_heads), dim=1)
    mixed = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=mask is None,
        scale=scale, enable_gqa=heads != key_value_heads,
    )  # fmt: skip
    return mixed.transpose(1, 2).reshape(batch, length, heads * head_dim)


def _head_dim(qkv: Tensor, heads: int, key_value_heads: int) -> int:
    """Columns of one head."""
    parts = heads + 2 * key_value_heads
    fits = min(heads, key_value_heads) > 0 and heads % max(key_value_heads, 1) == 0
    if qkv.dim() != 3 or not fits or qkv.shape[2] % parts:
        raise ProgramError(
            "causal_attention of heads that don't fit",
            found=f"qkv {list(qkv.shape)}, {heads=}, {key_value_heads=}",
            expected="[B, S, (heads + 2 * key_value_heads) * head_dim], and heads a multiple of "
            "key_value_heads",
            write="qkv as qkv_projection returns it, of x [B, S, D]",
        )
    return qkv.shape[2] // parts


def _mask(cumulative_lengths: Tensor, total: int) -> Tensor:
    """Which tokens each token sees: those of its sequence up to itself, `[total, total]`."""
    _check_lengths(cumulative_lengths, total)
    sequence = packed_sequences(cumulative_lengths, total)
    return (sequence[:, None] == sequence[None, :]).tril()


def _check_lengths(lengths: Tensor, total: int) -> None:
    """Raises ProgramError; what the lengths are is asked on a CPU only, where it costs no wait."""
    known = lengths.dim() == 1 and not (lengths.is_floating_point() or lengths.is_complex())
    if known and lengths.device.type == "cpu" and not torch.compiler.is_compiling():
        ends = lengths.tolist()
        known = len(ends) > 1 and ends[0] == 0 and ends[-1] == total and ends == sorted(ends)
    if not known:
        shown = lengths.tolist() if lengths.numel() < 20 else list(lengths.shape)
        raise ProgramError(
            "cumulative lengths that don't cut the tokens into sequences",
            found=f"{shown} of {lengths.dtype}, for {total} tokens",
            expected=f"whole numbers [sequences + 1], ascending from 0 to {total}",
            write="F.pad(lengths.cumsum(0), (1, 0)) of the sequences' lengths",
        )
