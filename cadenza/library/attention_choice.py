"""Which of PyTorch's kernels a causal attention call prefers, by measurement on its device.

`CADENZA_TUNE=off` leaves it to PyTorch, `first` (the default) measures what has no entry yet before
the first call of about these sizes, `full` measures longer. A choice is kept beside those of
kernels, and fixed for the process once it is made. Nothing is measured while a CUDA graph is
captured, in backward, or where torch.compile traces: there what is known counts, and else PyTorch's
own choice, as with deterministic algorithms and within `sdpa_kernel` of the caller.
"""

from __future__ import annotations

import logging
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from torch.backends import cuda

from cadenza.backends import has_triton
from cadenza.library.attention_heads import Heads
from cadenza.library.attention_race import (
    BACK_ENDS,
    Call,
    Order,
    is_inside,
    prepare,
    ranking,
    times_of,
)
from cadenza.library.autocast import autocast_dtype

log = logging.getLogger("cadenza")
TABLE = "attention"
SIZES = 16  # that cuDNN makes plans for, each of which takes the host tens of milliseconds
_decided: dict[Call, Order] = {}
_planned: dict[Call, set[tuple[int, int]]] = {}
_entries: dict[str, dict[str, Any]] = {}
_lock = Lock()


def chosen(x: Tensor, heads: Heads) -> Order:
    """The kernels to prefer in a causal call without dropout, best first; none to leave it be.

    x `[B, S, …]` has the call's sequences, device and, but for autocast, dtype.
    """
    if x.device.type != "cuda":
        return ()
    dtype = _dtype(x)
    if torch.compiler.is_compiling():
        return known(x.device, dtype, *heads)
    if type(x) not in (Tensor, nn.Parameter) or dtype not in DTYPES or not x.numel():
        return ()
    # Without gradients, as a checkpointed layer first runs, the choice must be that of its second
    # run; in inference mode nothing will run again.
    backward = not torch.is_inference_mode_enabled()
    return order_of(Call(x.device, dtype, heads, x.shape[0], x.shape[1], backward))


DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def _dtype(x: Tensor) -> torch.dtype:
    name = autocast_dtype(x)
    return x.dtype if name is None or x.dtype not in DTYPES else getattr(torch, name)


def order_of(call: Call) -> Order:
    """The kernels that a call prefers; where it is new, and may be, they are measured."""
    if not _is_free():
        return ()
    order = _decided.get(call)
    return _settled(call) if order is None else order


def _is_free() -> bool:
    """Whether nobody has told PyTorch which kernels to take."""
    enabled = (
        cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.cudnn_sdp_enabled(),
        cuda.math_sdp_enabled(),
    )  # fmt: skip
    return all(enabled) and not torch.are_deterministic_algorithms_enabled()


def _settled(call: Call) -> Order:
    how = _mode()
    if how == "off" or torch.cuda.is_current_stream_capturing():
        return ()
    # What measures waits for backward's threads and for who prefers: they must not wait for it.
    is_awaited = is_inside() or torch._C._current_graph_task_id() != -1
    if not _lock.acquire(blocking=not is_awaited):
        return ()
    try:
        entry = _entry(call.rounded(), how, may_measure=not is_awaited)
        if entry is None:
            return ()
        _decided[call] = order = _admitted(call, tuple(entry["order"]))
    finally:
        _lock.release()
    if order:
        prepare(call.device)
    return order


def _mode() -> str:
    """What CADENZA_TUNE says; off without Triton, whose back end it belongs to."""
    if not has_triton():
        return "off"
    from cadenza.backends.triton.tuning.choices import mode

    return mode()


def _admitted(call: Call, order: Order) -> Order:
    """Without cuDNN from its last new size on."""
    if order[:1] != ("cudnn",):
        return order
    sizes = _planned.setdefault(call._replace(batch=0, length=0), set())
    if len(sizes) < SIZES:
        sizes.add((call.batch, call.length))
    return order if (call.batch, call.length) in sizes else order[1:]


@torch.compiler.assume_constant_result
def known(device: torch.device, dtype: torch.dtype, queries: int, keys: int, columns: int) -> Order:
    """What is known of calls of a kind when one is compiled, whose sizes may be symbols.

    That of the most and longest sequences counts, so no size is looked at, and none compiled anew.
    """
    how = _mode() if _is_free() and dtype in DTYPES else "off"
    if how == "off":
        return ()
    backward = not torch.is_inference_mode_enabled()
    kind = _kind(Call(device, dtype, Heads(queries, keys, columns), 0, 0, backward))
    with _lock:
        _recall(how)
        found = [entry for entry in _entries.values() if entry["kind"] == kind]
    if not found:
        return ()
    order = tuple(max(found, key=lambda entry: (entry["length"], entry["batch"]))["order"])
    if order:
        prepare(device)
    return order


# --- what was measured ----------------------------------------------------------------------------


def _entry(call: Call, how: str, may_measure: bool) -> dict[str, Any] | None:
    """What was measured of a rounded call, now or before."""
    key = _key(call)
    if key not in _entries:
        _recall(how)
    if key not in _entries and may_measure:
        _measure(call, key, how)
    return _entries.get(key)


def _measure(call: Call, key: str, how: str) -> None:
    from cadenza.backends.triton.tuning import records

    with records.alone():
        _recall(how)  # another process may have measured meanwhile
        if key in _entries:
            return
        times = times_of(call, how)
        _entries[key] = {
            "kind": _kind(call),
            "batch": call.batch,
            "length": call.length,
            "order": ranking(times),
            "microseconds": times,
            "full": how == "full",
        }
        log.info("attention, %s: %s", key, _entries[key]["order"] or "as PyTorch chooses")
        scarce = any("OutOfMemory" in str(time) for time in times.values())
        if times and not scarce:
            records.add({key: _entries[key]}, TABLE)


def _recall(how: str) -> None:
    """Takes entries of the file; with `full`, those that were measured so alone."""
    from cadenza.backends.triton.tuning import records

    for key, entry in records.read(TABLE).items():
        if key not in _entries and _is_entry(entry) and (how == "first" or entry.get("full")):
            _entries[key] = entry


def _is_entry(entry: Any) -> bool:
    try:
        sizes = isinstance(entry["batch"], int) and isinstance(entry["length"], int)
        return sizes and "kind" in entry and set(entry["order"]) <= set(BACK_ENDS)
    except (KeyError, TypeError):
        return False


def _kind(call: Call) -> str:
    """All that a time depends on, but the sizes."""
    heads, dtype = call.heads, str(call.dtype).removeprefix("torch.")
    versions = f"torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}"
    passes = "forward and backward" if call.backward else "forward"
    shared = f"{heads.queries} heads, {heads.keys} of keys, of {heads.columns} columns"
    return f"{torch.cuda.get_device_name(call.device)}, {versions}: {dtype}, {shared}, {passes}"


def _key(call: Call) -> str:
    return f"{_kind(call)}, {call.batch} x {call.length} tokens"
