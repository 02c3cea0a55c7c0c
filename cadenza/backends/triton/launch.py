"""Calls a Triton function: by its public interface once, then by the compiled launcher directly.

The public call costs tens of microseconds: it binds and specialises every argument, and it encodes
every tensor map again. A compiled launcher takes pointers as numbers and tensor maps as they are,
so both are kept here. What a compiled kernel depends on is in the key: which pointers and whole
numbers divide by 16 or are 1, and the constants. Each Triton version that packs its launcher in
another way has a branch in `_raw`; where none fits, the public interface goes on being used.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Sequence
from typing import Any

import torch

from cadenza.backends.triton.settings import as_loaded
from cadenza.core.errors import BackEndError

log = logging.getLogger("cadenza")
Tensor = torch.Tensor
TOLD = 0.5  # seconds: one that Triton's cache holds takes less
KEPT_MAPS = 4096
KNOWN = ("3.6.",)  # releases of Triton whose launcher is called directly
WIDE = 2**31  # whole numbers from here on are passed in 64 bits


class Descriptor:
    """A tensor read in boxes: `shape` and `strides` in elements, the last stride 1."""

    __slots__ = ("box", "layout", "pointer", "shape", "strides", "tensor")

    def __init__(
        self, tensor: Tensor, shape: Sequence[int], strides: Sequence[int], box: Sequence[int]
    ) -> None:
        self.tensor, self.pointer = tensor, tensor.data_ptr()
        self.shape, self.strides, self.box = list(shape), list(strides), list(box)
        self.layout = (*shape, *strides)

    def public(self) -> Any:
        """Triton's own descriptor."""
        from triton.tools.tensor_descriptor import TensorDescriptor

        return TensorDescriptor(self.tensor, self.shape, self.strides, self.box)


NOT_CAPTURED = (
    "a program is called for the first time, with these sizes, while a CUDA graph is captured; "
    "kernels can't be compiled then: call it once before"
)
Argument = Tensor | int | Descriptor


def _key(value: Argument) -> int:
    """What Triton specialises an argument by: whether it divides by 16, whether it is 1."""
    if isinstance(value, int):
        return 2 if value == 1 else int(value % 16 == 0) + 4 * (value >= WIDE)
    return 3 if isinstance(value, Descriptor) else int(value.data_ptr() % 16 == 0)


class Launcher:
    """One Triton function with its constants and options, on whatever device its arguments are.

    The function's parameters are the arguments in order, then the constants.
    """

    def __init__(self, function: Any, constants: dict[str, Any], options: dict[str, Any]) -> None:
        self.function, self.constants, self.options = function, constants, options
        self._known: dict[tuple[int, ...], Direct | None] = {}
        self.compiled: list[Any] = []

    def __call__(
        self, grid: tuple[int, int], arguments: Sequence[Argument], device: torch.device
    ) -> None:
        """Runs the function on the current stream of the device."""
        if device.type != "cuda":
            self._public(grid, arguments)
            return
        key = (device.index, *map(_key, arguments))
        direct = self._known.get(key)
        if direct is not None:
            direct(grid, arguments)
            return
        if key in self._known:
            with torch.cuda.device(device):
                self._public(grid, arguments)
            return
        if torch.cuda.is_current_stream_capturing():
            raise BackEndError(NOT_CAPTURED)
        start = time.perf_counter()
        with torch.cuda.device(device), as_loaded():
            kernel = self._public(grid, arguments)
        taken = time.perf_counter() - start
        if taken > TOLD:
            log.debug("a first launch took %.1f s: %s", taken, self.function.__module__)
        self.compiled.append(kernel)
        self._known[key] = _direct(kernel, len(self.constants), device.index)

    def direct(self, arguments: Sequence[Argument], device: torch.device) -> Direct | None:
        """The compiled launcher for such arguments, None where it can't be called directly."""
        return self._known.get((device.index, *map(_key, arguments)))

    def _public(self, grid: tuple[int, int], arguments: Sequence[Argument]) -> Any:
        given = [a.public() if isinstance(a, Descriptor) else a for a in arguments]
        return self.function[grid](*given, **self.constants, **self.options)


class Direct:
    """A compiled kernel's own launcher, loaded on one device."""

    def __init__(self, raw: Any, kernel: Any, maps: Sequence[Any], blanks: int, index: int) -> None:
        metadata = kernel.metadata
        self.raw, self.kernel, self.meta, self.index = raw, kernel, list(maps), index
        self.head = (
            kernel.function, bool(metadata.launch_cooperative_grid), bool(metadata.launch_pdl),
            None, None, kernel.packed_metadata, None, None, None,
        )  # fmt: skip
        self.blanks = (None,) * blanks
        self.maps: dict[Any, Any] = {}

    def __call__(self, grid: tuple[int, int], arguments: Sequence[Argument]) -> None:
        given: list[Any] = []
        position = 0
        for argument in arguments:
            if isinstance(argument, int):
                given.append(argument)
            elif isinstance(argument, Descriptor):
                given += self._map(argument, position)
                position += 1
            else:
                given.append(argument.data_ptr())
        stream = torch._C._cuda_getCurrentRawStream(self.index)
        if torch._C._cuda_getDevice() == self.index:
            self.raw(*grid, 1, stream, *self.head, *given, *self.blanks)
            return
        with torch.cuda.device(self.index):
            self.raw(*grid, 1, stream, *self.head, *given, *self.blanks)

    def _map(self, descriptor: Descriptor, position: int) -> list[Any]:
        """The tensor map of a descriptor, and its shape and strides, as the launcher takes them."""
        found = self.map_at(descriptor.pointer, position, descriptor)
        return [found, *descriptor.shape, *descriptor.strides]

    def map_at(self, pointer: int, position: int, like: Descriptor) -> Any:
        """The tensor map of what lies at an address and is else like a descriptor."""
        key = (pointer, position, like.layout)
        found = self.maps.get(key)
        if found is None:
            if len(self.maps) >= KEPT_MAPS:
                self.maps.clear()
            found = self.maps[key] = _encoded(pointer, like, self.meta[position])
        return found


def _encoded(pointer: int, like: Descriptor, meta: dict[str, Any]) -> Any:
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST
    from triton.runtime.driver import driver

    return driver.active.utils.fill_tma_descriptor(
        pointer, meta["swizzle"], meta["elem_size"], TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]],
        meta["block_size"], like.shape, like.strides, 0,
    )  # fmt: skip


def _direct(kernel: Any, blanks: int, index: int) -> Direct | None:
    """The kernel's launcher where it can be called directly, None where it can't."""
    metadata = kernel.metadata
    scratch = metadata.global_scratch_size or metadata.profile_scratch_size
    raw, maps = _raw(kernel)
    if raw is None or scratch or _hooked():
        return None
    return Direct(raw, kernel, maps, blanks, index)


def _hooked() -> bool:
    """Whether something, a profiler, wants to see each launch."""
    from triton import knobs

    hooks = (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook)
    return any(getattr(hook, "calls", hook) for hook in hooks)


def version() -> str:
    """Triton's version."""
    import triton  # loaded where kernels are launched

    return str(triton.__version__)


def _raw(kernel: Any) -> tuple[Any, Sequence[Any]]:
    """The C function that launches, and the metadata of its tensor maps; None if it is unknown.

    Triton 3.6: `run` is a CudaLauncher whose `launch` is the C function, or wraps it where there
    are descriptors.
    """
    if not version().startswith(KNOWN):  # another release passes arguments in another order
        return None, ()
    launch = getattr(kernel.run, "launch", None)
    maps = getattr(kernel.metadata, "tensordesc_meta", None) or ()
    if launch is None or type(kernel.run).__name__ != "CudaLauncher":
        return None, ()
    if inspect.isbuiltin(launch):
        return launch, ()
    inner = inspect.getclosurevars(launch).nonlocals.get("launcher")
    usable = inspect.isbuiltin(inner) and all(meta and not meta["fp4_padded"] for meta in maps)
    return (inner, maps) if usable else (None, ())
