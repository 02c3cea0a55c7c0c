"""Which of PyTorch's kernels a causal attention call prefers, by measurement on its device.

`CADENZA_TUNE=off` leaves it to PyTorch, `first` (the default) measures what has no entry yet before
the first call of about these sizes, `full` measures longer. A choice is kept beside those of
kernels, and fixed for the process once it is made. Nothing is measured while a CUDA graph is
captured, in backward, or where torch.compile traces: there what is known counts, of this process
and of others before it, and else PyTorch's own choice, as with deterministic algorithms and where
the caller has said which kernels to take.
"""

from __future__ import annotations

import logging
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from cadenza.backends import has_triton
from cadenza.library.attention_heads import Heads
from cadenza.library.attention_kernels import DTYPES, KERNELS, Order, call_dtype, is_free, is_plain
from cadenza.library.attention_race import METHOD, Call, prepare, ranking, times_of

log = logging.getLogger("cadenza")
TABLE = "attention"
# That cuDNN makes plans for in eager calls, each of which takes the host tens of milliseconds.
SIZES = 16
DECIDED = 4096  # calls whose order is found at once; that of another is found again
Known = tuple[Call, str]  # a call, and what PyTorch takes for flash
_decided: dict[Known, Order] = {}
_planned: dict[Call, set[tuple[int, int]]] = {}
_entries: dict[str, dict[str, Any]] = {}
_lock = Lock()


def chosen(x: Tensor, heads: Heads) -> Order:
    """The kernels to prefer in a causal call without dropout, best first; none to leave it be.

    x `[B, S, …]` has the call's sequences, device and, but for autocast, dtype.
    """
    if x.device.type != "cuda":
        return ()
    dtype = call_dtype(x)
    if torch.compiler.is_compiling():
        return known(x.device, dtype, *heads)
    if dtype not in DTYPES or not is_plain(x):
        return ()
    # Without gradients, as a checkpointed layer first runs, the choice must be that of its second
    # run; in inference mode nothing will run again.
    backward = not torch.is_inference_mode_enabled()
    return order_of(Call(x.device, dtype, heads, x.shape[0], x.shape[1], backward))


def order_of(call: Call) -> Order:
    """The kernels that a call prefers; where it is new, and may be, they are measured."""
    if not is_free():
        return ()
    order = _decided.get((call, _flash()))
    return _settled(call) if order is None else order


def _flash() -> str:
    """Whose kernel PyTorch takes for flash, where releases let it be another than its own."""
    current = getattr(torch.nn.attention, "current_flash_attention_impl", None)
    return (current() if current else None) or "own"


def _settled(call: Call) -> Order:
    how = _mode()
    if how == "off":
        return ()
    # What measures waits for backward's threads: they must not wait for it. A capture forbids it.
    in_backward = torch._C._current_graph_task_id() != -1
    captures = torch.cuda.is_current_stream_capturing()
    if not _lock.acquire(blocking=not (in_backward or captures)):
        return ()
    try:
        entry = _entry(call.rounded(), how, may_measure=not (in_backward or captures))
        if entry is None and not captures:
            return ()
        # What a capture has run without knowing, it runs again so in a checkpoint's second run,
        # whatever another thread has measured meanwhile.
        return _decide(call, () if entry is None else _admitted(call, tuple(entry["order"])))
    finally:
        _lock.release()


def _decide(call: Call, order: Order) -> Order:
    while len(_decided) >= DECIDED:
        del _decided[next(iter(_decided))]
    _decided[call, _flash()] = order
    return order


def _mode() -> str:
    """What CADENZA_TUNE says; off without Triton, whose back end it belongs to."""
    if not has_triton():
        return "off"
    from cadenza.backends.triton.tuning.choices import mode

    return mode()


def _admitted(call: Call, order: Order) -> Order:
    """Without cuDNN from its last new size on.

    In a compiled model cuDNN may make a plan of every size: it is not known there which ones come.
    """
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
    how = _mode() if is_free() and dtype in DTYPES else "off"
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
        if not is_free():  # another thread has told PyTorch what to take, whose own was timed
            return
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
        return sizes and "kind" in entry and set(entry["order"]) <= set(KERNELS)
    except (KeyError, TypeError):
        return False


def _kind(call: Call) -> str:
    """All that a time depends on, but the sizes."""
    heads, dtype = call.heads, str(call.dtype).removeprefix("torch.")
    versions = f"torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}"
    kernels = f"flash of {_flash()}, among {'/'.join(KERNELS)} by method {METHOD}"
    passes = "forward and backward" if call.backward else "forward"
    shared = f"{heads.queries} heads, {heads.keys} of keys, of {heads.columns} columns"
    place = f"{torch.cuda.get_device_name(call.device)}, {versions}, {kernels}"
    return f"{place}: {dtype}, {shared}, {passes}"


def _key(call: Call) -> str:
    return f"{_kind(call)}, {call.batch} x {call.length} tokens"
