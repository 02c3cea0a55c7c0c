"""Attention of sequences behind one another, without a mask, where PyTorch has a kernel for it.

That is `torch.nn.attention.varlen`, which looks back without end or through a window. What it takes
is asked of its signature, and whether its kernel serves a device, of PyTorch.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.backends import cuda
from torch.utils.weak import WeakIdKeyDictionary

from cadenza.core.errors import ProgramError
from cadenza.library.attention_heads import Heads

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # a release without it
    varlen_attn = None

log = logging.getLogger("cadenza")
Found = tuple[torch.device, torch.dtype, Heads]
_failed: set[Found] = set()


def takes(function: Callable[..., Any] | None) -> frozenset[str]:
    """The names of a function's parameters; none if there is no function."""
    return frozenset() if function is None else frozenset(inspect.signature(function).parameters)


TAKES = takes(varlen_attn)
DTYPES = (torch.float16, torch.bfloat16)
WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class Sequences(NamedTuple):
    """Where sequences start and end, int32 `[sequences + 1]` on the device; tokens of the longest.

    The number may be too large, which costs the kernel programs that have nothing to do.
    """

    ends: Tensor
    longest: int


def serves(qkv: Tensor, heads: Heads) -> bool:
    """Whether PyTorch's kernel serves such queries, keys and values."""
    if qkv.device.type != "cuda" or qkv.dtype not in DTYPES or not qkv.numel():
        return False
    return _serves(qkv.device, qkv.dtype, *heads)


@torch.compiler.assume_constant_result
def _serves(
    device: torch.device, dtype: torch.dtype, queries: int, keys: int, columns: int
) -> bool:
    heads = Heads(queries, keys, columns)
    if not {"scale", "window_size"} <= TAKES or columns % 8 or torch.version.hip is not None:
        return False
    if (device, dtype, heads) in _failed:
        return False
    return cuda.can_use_flash_attention(_asked(device, dtype, heads))


@cache
def _asked(device: torch.device, dtype: torch.dtype, heads: Heads) -> Any:
    """What PyTorch is asked of: a call of a few numbers."""

    def part(count: int) -> Tensor:
        shape = 1, count, 8, heads.columns
        return torch.empty(shape, dtype=dtype, device=device).requires_grad_()

    with torch.inference_mode(False):
        query, key = part(heads.queries), part(heads.keys)
    return cuda.SDPAParams(query, key, key, None, 0.0, True, heads.grouped)


def attend(
    qkv: Tensor, heads: Heads, sequences: Sequences, window: int | None, scale: float | None
) -> Tensor | None:
    """Causal attention in each sequence of qkv `[B, S, N]`: `[B, S, heads · columns]`.

    None where the kernel refuses, which it is then not asked for again.
    """
    rows = _readable(qkv.reshape(-1, qkv.shape[2]))
    width = heads.queries * heads.columns
    if torch.compiler.is_compiling():
        return _attend(rows, heads, sequences, window, scale).reshape(*qkv.shape[:2], width)
    try:
        mixed = _attend(rows, heads, sequences, window, scale)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, ValueError) as error:
        log.warning("attention of packed sequences takes a mask: PyTorch's kernel says %s", error)
        _failed.add((qkv.device, qkv.dtype, heads))
        return None
    return mixed.reshape(*qkv.shape[:2], width)


def _attend(
    rows: Tensor, heads: Heads, sequences: Sequences, window: int | None, scale: float | None
) -> Tensor:
    ends, longest = sequences
    options: dict[str, Any] = {"enable_gqa": heads.grouped} if "enable_gqa" in TAKES else {}
    found: Tensor = varlen_attn(
        *heads.apart(rows), ends, ends, longest, longest, scale=scale,
        window_size=(-1 if window is None else window - 1, 0), **options,
    )  # fmt: skip
    return found


def _readable(rows: Tensor) -> Tensor:
    """The rows, copied unless each head begins at a multiple of 16 bytes, as the kernel reads."""
    if torch.compiler.is_compiling():  # which can't be asked where a tensor begins
        return rows.contiguous()
    wide = 16 // rows.element_size()
    if rows.stride(1) == 1 and not rows.stride(0) % wide and not rows.storage_offset() % wide:
        return rows
    return rows.clone(memory_format=torch.contiguous_format)


# --- sequences ------------------------------------------------------------------------------------


def equal_sequences(batch: int, length: int, device: torch.device) -> Sequences:
    """Those of a batch that is not packed."""
    ends = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=device)
    return Sequences(ends, length)


def sequences_of(lengths: Tensor, total: int, device: torch.device) -> Sequences:
    """Those of cumulative lengths. Raises ProgramError for lengths that don't cut `total` tokens.

    On a GPU they are read once for each tensor, as long as its version is the same, which waits for
    the GPU; not while a graph is captured or compiled: then whatever they are stays within the
    tokens. On a CPU they are read at each call, since NumPy may write them as well.
    """
    if torch.compiler.is_compiling() or type(lengths) is not Tensor or _captures(device):
        check_form(lengths, total)
        return Sequences(_bounded(lengths.to(device), total), total)
    numbers = check_lengths(lengths, total) if _is_at_hand(lengths) else None
    version = None if lengths.is_inference() else lengths._version
    state = total, device, _stream(device), version if numbers is None else numbers
    found: Any = _READ.get(lengths)
    if found is None or found[0] != state or state[3] is None:
        found = state, _made(numbers or check_lengths(lengths, total), device)
        _READ[lengths] = found
    sequences: Sequences = found[1]
    return sequences


def _is_at_hand(lengths: Tensor) -> bool:
    return lengths.device.type == "cpu"


def _stream(device: torch.device) -> int:
    """Where `ends` are made and used: memory is handed on in the order of one stream alone."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def _captures(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


# What tensors of lengths say, as long as they live: all layers of a step share one.
_READ: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _bounded(lengths: Tensor, total: int) -> Tensor:
    """Ascending ends from 0 to `total`: what lies outside of all lengths is a sequence as well."""
    inner = lengths.clamp(0, total).cummax(0).values
    return torch.cat((inner.new_zeros(1), inner, inner.new_full((1,), total))).to(torch.int32)


def _made(ends: list[int], device: torch.device) -> Sequences:
    longest = max(end - start for start, end in pairwise(ends))
    # Of numbers, so the host waits until they are there; and a tensor that backward may keep,
    # whoever reads the lengths first.
    with torch.inference_mode(False):
        return Sequences(torch.tensor(ends, dtype=torch.int32, device=device), longest)


def check_lengths(lengths: Tensor, total: int) -> list[int]:
    """The lengths as numbers. Raises ProgramError for those that don't cut the tokens."""
    check_form(lengths, total)
    ends: list[int] = lengths.tolist()
    if len(ends) < 2 or ends[0] != 0 or ends[-1] != total or ends != sorted(ends):
        raise _refused(lengths, total)
    return ends


def check_form(lengths: Tensor, total: int) -> None:
    """Raises ProgramError for what are no lengths, whatever numbers they have."""
    if not isinstance(lengths, Tensor) or lengths.dim() != 1 or lengths.dtype not in WHOLE:
        raise _refused(lengths, total)


def _refused(lengths: Any, total: int) -> ProgramError:
    shown = lengths
    if isinstance(lengths, Tensor):
        shown = lengths.tolist() if lengths.numel() < 20 else list(lengths.shape)
        shown = f"{shown} of {lengths.dtype}"
    return ProgramError(
        "cumulative lengths that don't cut the tokens into sequences",
        found=f"{shown}, for {total} tokens",
        expected=f"whole numbers [sequences + 1], a tensor, ascending from 0 to {total}",
        write="F.pad(lengths.cumsum(0), (1, 0)) of the sequences' lengths",
    )
