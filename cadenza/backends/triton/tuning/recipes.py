"""Launches as plain data: what another process needs to compile them and to launch them.

A sketch is a memory in which steps run without a device: tensors have sizes and strides and no
numbers, and a launch is noted instead of made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from cadenza.backends.triton.fallbacks import LibraryProduct, ReferenceKernel, ReferenceVector
from cadenza.backends.triton.gluon_launch import SwizzledDescriptor
from cadenza.backends.triton.launch import Argument, Descriptor, Launcher
from cadenza.backends.triton.launches import Launch
from cadenza.backends.triton.memory import Memory, Step
from cadenza.backends.triton.replay import Grid
from cadenza.backends.triton.vector_product import VectorProduct

Tensor = torch.Tensor
NOWHERE = torch.device("meta")


class View(NamedTuple):
    """A tensor: which memory it lies in, and how."""

    base: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Box(NamedTuple):
    """A tensor that is read or written in boxes; `swizzled` as Hopper's products read them."""

    view: View
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzled: bool


class KernelCall(NamedTuple):
    """One launch of an emitted kernel."""

    text: str
    constants: dict[str, Any]
    options: dict[str, Any]
    grid: Grid
    arguments: tuple[int | View | Box, ...]


class ProductCall(NamedTuple):
    """torch's product of two tensors, in a dtype."""

    left: View
    right: View
    dtype: str


Call = KernelCall | ProductCall


@dataclass
class Sketch(Memory):
    """A memory without numbers; `calls` are what the steps would have done."""

    calls: list[Call] = field(default_factory=list)
    bases: dict[int, int] = field(default_factory=dict)
    alive: list[Tensor] = field(default_factory=list)
    text: str = ""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(tuple(shape), dtype=dtype, device=NOWHERE)
        self.alive.append(tensor)
        return tensor

    def launch(self, launcher: Launcher, grid: Grid, given: Sequence[Argument]) -> None:
        arguments = tuple(self._argument(a) for a in given)
        self.calls.append(
            KernelCall(self.text, launcher.constants, launcher.options, grid, arguments)
        )

    def run(self, step: Step) -> None:
        """What a step would do."""
        if isinstance(step, LibraryProduct):
            self._product(step)
        elif isinstance(step, Launch):
            assert step.source is not None
            self.text = step.source.text
            step.run(self)
        elif isinstance(step, VectorProduct):
            self.text = ""
            step.run(self)
        else:
            assert isinstance(step, ReferenceKernel | ReferenceVector), step
            for node in step.made():
                dtype = step.plan.dtypes[node]
                shape = [self.size(d) for d in node.type[:2]]
                vector = not node.type.is_matrix
                self.values[node] = self.empty([shape[0] * shape[1]] if vector else shape, dtype)

    def trial(self, steps: Sequence[Step]) -> list[Call]:
        """What these steps would do next; nothing of it is left behind but memory's numbers."""
        other = Sketch(
            self.rows, self.device, dict(self.values), dict(self.partials),
            bases=self.bases, alive=self.alive,
        )  # fmt: skip
        for step in steps:
            other.run(step)
        return other.calls

    def _product(self, step: LibraryProduct) -> None:
        a, b = (
            self.values[i].T if t else self.values[i]
            for i, t in zip(step.product.inputs, step.turned, strict=True)
        )
        self.values[step.product] = self.empty((a.shape[0], b.shape[1]), step.dtype)
        self.calls.append(ProductCall(self._view(a), self._view(b), _name(step.dtype)))

    def _argument(self, given: Argument) -> int | View | Box:
        if isinstance(given, int):
            return given
        if isinstance(given, Descriptor):
            swizzled = isinstance(given, SwizzledDescriptor)
            view, sizes = self._view(given.tensor), (given.shape, given.strides, given.box)
            return Box(view, *(tuple(s) for s in sizes), swizzled)
        return self._view(given)

    def _view(self, tensor: Tensor) -> View:
        self.alive.append(tensor)
        storage = tensor.untyped_storage()._cdata
        base = self.bases.setdefault(storage, len(self.bases))
        return View(base, _name(tensor.dtype), tuple(tensor.shape), tensor.stride())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# --- in the process that launches ---------------------------------------------------------------


class Room:
    """The memory of one contest on a device, filled with random numbers where it is first seen."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.bases: dict[int, Tensor] = {}

    def prepare(self, calls: Sequence[Call]) -> None:
        """Allocates what these calls read and write: each memory as large as its largest view."""
        for view in (v for call in calls for v in views(call)):
            base = self.bases.get(view.base)
            if base is None or base.numel() < _extent(view):
                self.bases[view.base] = _filled(_extent(view), view.dtype, self.device)

    def tensor(self, view: View) -> Tensor:
        """The tensor of a view."""
        base = self.bases[view.base].view(getattr(torch, view.dtype))
        return base.as_strided(view.shape, view.strides)

    def argument(self, given: int | View | Box) -> Argument:
        """An argument of a launch."""
        if isinstance(given, int):
            return given
        if isinstance(given, View):
            return self.tensor(given)
        kind = SwizzledDescriptor if given.swizzled else Descriptor
        return kind(self.tensor(given.view), given.shape, given.strides, given.box)


def views(call: Call) -> list[View]:
    """The tensors of a call."""
    if isinstance(call, ProductCall):
        return [call.left, call.right]
    return [a.view if isinstance(a, Box) else a for a in call.arguments if not isinstance(a, int)]


def _extent(view: View) -> int:
    """Elements from a view's first to its last."""
    if 0 in view.shape:
        return 1
    return 1 + sum((n - 1) * s for n, s in zip(view.shape, view.strides, strict=True))


def _filled(count: int, name: str, device: torch.device) -> Tensor:
    dtype = getattr(torch, name)
    if dtype.is_floating_point:
        return torch.empty(count, dtype=dtype, device=device).normal_()
    return torch.randint(0, 2, (count,), device=device).to(dtype)
