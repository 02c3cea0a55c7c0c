"""The attention between two programs: PyTorch's own, causal, by sequence where several are packed.

Cadenza has no attention kernel. A plain causal batch is asked for by `is_causal`, never by a mask,
and runs on the kernel that was measured to be fastest (attention_choice.py). Windows and packed
sequences need no mask either where PyTorch has a kernel for them (attention_packed.py).
"""

from __future__ import annotations

from numbers import Real
from operator import index
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from cadenza.core.errors import ProgramError
from cadenza.library import attention_packed as packed
from cadenza.library.attention_choice import chosen
from cadenza.library.attention_heads import Heads, is_whole
from cadenza.library.attention_kernels import attend, joined, scaled
from cadenza.library.autocast import autocast_dtype, without_autocast
from cadenza.library.rotary import packed_sequences


def causal_attention(
    qkv: Tensor,
    *,
    heads: int,
    key_value_heads: int | None = None,
    cumulative_lengths: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Causal attention of grouped heads: qkv `[B, S, N]` to `[B, S, heads · head_dim]`.

        y = softmax(capped(scale · q · kᵀ) + mask) · v, of each head; dropout on the softmax

    qkv is what `qkv_projection` returns: `heads` query heads, then `key_value_heads` (default:
    `heads`) key heads, then as many value heads. scale is 1 / √head_dim by default.

    `cumulative_lengths` `[sequences + 1]`, whole numbers from 0 up to B · S, say where sequences
    start that are packed into all B · S tokens in order; a token then sees those before it in its
    own sequence. With `window`, it sees itself and the window − 1 tokens before it. Where PyTorch
    has no kernel for these (in float32, with dropout, on a CPU) they take a mask: `[B · S, B · S]`
    for packed sequences, `[S, S]` for windows alone.

    `softcap` c makes scores s c · tanh(s / c), as in Gemma 2. PyTorch has no kernel for it: scores
    are held in float32, about 10 bytes for each pair of tokens of each head until backward.

    qkv is of any floating dtype, and the result of the same.
    Raises ProgramError for shapes and numbers that don't fit. Lengths are looked at on a CPU at
    each call, and on a GPU where that spares the mask: once for each tensor, in inference mode at
    each call, for which the GPU is waited.
    """
    shared = Heads.of(qkv, heads, heads if key_value_heads is None else key_value_heads)
    window, scale = _window(window), _scale(scale)
    options = _Options(scale, _softcap(softcap), _dropout(dropout))
    length = qkv.shape[1]
    if cumulative_lengths is not None:
        return _packed(qkv, shared, cumulative_lengths, window, options)
    if window is not None and window < length:
        return _windowed(qkv, shared, window, options)
    if softcap is not None:
        return _capped(qkv, shared, _seen(length, qkv.device), options)
    order = () if dropout else chosen(qkv, shared)
    if order:
        return joined(attend(*shared.by_head(qkv), order, scale))
    return scaled(qkv, shared, is_causal=True, **options.stock())


class _Options(NamedTuple):
    """What scores are multiplied by and capped at, and the probability of dropout."""

    scale: float | None
    softcap: float | None
    dropout: float

    def stock(self) -> dict[str, float | None]:
        """Those that PyTorch's function takes."""
        return {"scale": self.scale, "dropout_p": self.dropout}

    @property
    def plain(self) -> bool:
        """Whether there is neither softcap nor dropout."""
        return self.softcap is None and not self.dropout


def _packed(
    qkv: Tensor, heads: Heads, lengths: Tensor, window: int | None, options: _Options
) -> Tensor:
    """Of several sequences in all rows together."""
    total = qkv.shape[0] * qkv.shape[1]
    packed.check_form(lengths, total)
    if options.plain and packed.serves(qkv, heads):
        sequences = packed.sequences_of(lengths, total, qkv.device)
        mixed = packed.attend(qkv, heads, sequences, window, options.scale)
        if mixed is not None:
            return mixed
    if lengths.device.type == "cpu" and not torch.compiler.is_compiling():
        packed.check_lengths(lengths, total)
    sequence = packed_sequences(lengths.to(qkv.device), total)
    seen = _seen(total, qkv.device, window, sequence)
    mixed = _masked(qkv.reshape(1, total, qkv.shape[2]), heads, seen, options)
    return mixed.reshape(*qkv.shape[:2], mixed.shape[2])


def _windowed(qkv: Tensor, heads: Heads, window: int, options: _Options) -> Tensor:
    """Of one sequence a row, each token of which sees few before it."""
    batch, length = qkv.shape[:2]
    if options.plain and packed.serves(qkv, heads):
        sequences = packed.equal_sequences(batch, length, qkv.device)
        mixed = packed.attend(qkv, heads, sequences, window, options.scale)
        if mixed is not None:
            return mixed
    return _masked(qkv, heads, _seen(length, qkv.device, window), options)


# --- by a mask ------------------------------------------------------------------------------------


def _seen(
    length: int, device: torch.device, window: int | None = None, sequence: Tensor | None = None
) -> Tensor:
    """Which tokens each token sees, `[length, length]`; sequence `[length]` is that of each."""
    place = torch.arange(length, device=device)
    back = place[:, None] - place
    seen = back >= 0
    if window is not None:
        seen = seen & (back < window)
    return seen if sequence is None else seen & (sequence[:, None] == sequence)


def _masked(qkv: Tensor, heads: Heads, seen: Tensor, options: _Options) -> Tensor:
    if options.softcap is not None:
        return _capped(qkv, heads, seen, options)
    # With a mask, PyTorch's kernels on a GPU don't share heads: it would hold all scores instead.
    expanded = heads.grouped and qkv.device.type == "cuda"
    return scaled(qkv, heads, expanded, attn_mask=seen, **options.stock())


def _capped(qkv: Tensor, heads: Heads, seen: Tensor, options: _Options) -> Tensor:
    """The formula itself, scores in float32 at least."""
    assert options.softcap is not None
    name = autocast_dtype(qkv)
    qkv = qkv if name is None or qkv.dtype == torch.float64 else qkv.to(getattr(torch, name))
    query, key, value = heads.by_head(qkv)
    scale = heads.columns**-0.5 if options.scale is None else options.scale
    wide = torch.promote_types(qkv.dtype, torch.float32)
    with without_autocast(qkv):
        # The query heads of one key head are rows of one product: keys and values stay as they are.
        rows = query.unflatten(1, (heads.keys, heads.group)).flatten(2, 3).to(wide)
        scores = (rows @ key.to(wide).mT).unflatten(2, (heads.group, -1))
        scores = options.softcap * torch.tanh(scores * (scale / options.softcap))
        scores = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        weights = F.dropout(scores, options.dropout).to(qkv.dtype).flatten(2, 3)
        mixed = (weights @ value).unflatten(2, (heads.group, -1)).flatten(1, 2)
    return mixed.transpose(1, 2).flatten(2)


# --- mistakes -------------------------------------------------------------------------------------


def _window(window: int | None) -> int | None:
    """The window, a number also where sizes are symbols. Raises ProgramError for what is none."""
    if window is None:
        return None
    if not is_whole(window) or window < 1:
        raise ProgramError(
            "a window that is no number of tokens",
            found=f"window={window!r}",
            expected="a whole number from 1 on: a token sees itself, and window - 1 before it",
            write="window=4096, or None to see all",
        )
    return index(window)


# Far beyond what scores are, and as far from where float32 ends: products with them stay numbers.
LEAST, MOST = 1e-30, 1e30


def _softcap(softcap: float | None) -> float | None:
    """The softcap. Raises ProgramError for a number that scores can't stay below."""
    if softcap is not None and not _is_within(softcap, LEAST, MOST):
        raise ProgramError(
            "a softcap that scores can't stay below",
            found=f"softcap={softcap!r}",
            expected=f"a positive number, {LEAST} to {MOST}",
            write="softcap=50.0, or None for none",
        )
    return _number(softcap)


def _scale(scale: float | None) -> float | None:
    """The scale. Raises ProgramError for a number that makes no scores."""
    if scale is not None and not _is_within(scale, -MOST, MOST):
        raise ProgramError(
            "a scale that makes no scores",
            found=f"scale={scale!r}",
            expected=f"a number, {-MOST} to {MOST}",
            write="scale=0.125, or None for 1 / sqrt(head_dim)",
        )
    return _number(scale)


def _dropout(dropout: float) -> float:
    """The probability. Raises ProgramError for what is none."""
    if not _is_within(dropout, 0, 1):
        raise ProgramError(
            "a dropout that is no probability",
            found=f"dropout={dropout!r}",
            expected="a number from 0 to 1",
            write="dropout=0.1, or 0.0 for none",
        )
    return float(dropout)


def _is_within(value: object, least: float, most: float) -> bool:
    """Whether this is a number of Python's or NumPy's in these bounds, as NaN is in none."""
    return (
        isinstance(value, (int, float, Real))
        and not isinstance(value, bool)
        and (least <= value <= most)
    )


def _number(value: float | None) -> float | None:
    """A number as operators of PyTorch take it: none of NumPy's, and none beyond int64."""
    return None if value is None else float(value)
