"""Kinds of calls of a program: those whose arguments are alike, but for the tensors' numbers.

A call is made ready once for each kind. A kind is told by a key of all that a compiled program
depends on. Making that takes longer than all else, so its outline says which kind a call probably
is, and torch's own guard of tensors, one function in C++, whether it is. Where torch looks at
operations, and of tensors that no kernel can read, no kind is told.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad

if TYPE_CHECKING:
    from cadenza.library.eager import Prepared

Tensor = torch.Tensor
Tensors = tuple[Tensor, ...]
Ready = tuple["Prepared", list[int]]  # with the places of the operands among the arguments
PLAIN = (torch.Tensor, torch.nn.Parameter)
KEPT = 4096  # kinds of one program
_facts = attrgetter("__class__", "shape", "dtype", "device", "layout", "requires_grad")


def watched() -> bool:
    """Whether torch looks at operations, or transforms what is called."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or forward_ad._current_level >= 0
        or torch._C._len_torch_function_stack() > 0
        or torch._C._autograd._profiler_enabled()
        or torch._C._get_tracing_state() is not None
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def picker(places: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """What gives the values at these places, in this order."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda values: tuple([values[place] for place in places])


class Calls:
    """The calls of one program that were made ready, by kind; `prepare` makes one ready."""

    def __init__(self, prepare: Callable[[Sequence[Any], Mapping[str, Any]], Ready]) -> None:
        self._prepare = prepare
        self._known: dict[tuple[Any, ...], _Known] = {}
        self._probable: dict[tuple[Any, ...], _Known] = {}

    def find(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Prepared, Tensors] | None:
        """The call made ready, now if it is new, and its operands; None if it has no kind."""
        if watched():
            return None
        given = (*args, *kwargs.values())
        sizes = [value.shape if type(value) in PLAIN else None for value in given[:2]]
        outline = (torch.is_grad_enabled(), len(args), *kwargs, *sizes)
        known = self._probable.get(outline)
        if known is not None:
            operands = known.operands_of(given)
            if operands is not None:
                return known.prepared, operands
        known = self._by_key(args, kwargs)
        if known is None:
            return None
        self._probable[outline] = known
        return known.prepared, known.operands(given)

    def _by_key(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Known | None:
        key = _key(args, kwargs)
        try:
            known = None if key is None else self._known.get(key)
        except TypeError:  # an argument that is no constant: the usual path says so
            return None
        if key is not None and known is None:
            known = _Known(args, kwargs, self._prepare(args, kwargs))
            if len(self._known) >= KEPT:
                self._known.clear()
                self._probable.clear()
            self._known[key] = known
        return known


class _Known:
    """A kind of call that was made ready: how it runs, and what tells another call of it."""

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any], ready: Ready) -> None:
        given = [*args, *kwargs.values()]
        self.prepared, places = ready
        self.operands = picker(places)
        self.constants = picker([p for p in range(len(given)) if p not in places])
        self.values = self.constants(given)
        self.types = (*map(type, self.values),)
        self.signs = _signs(self.values)
        operands = self.operands(given)
        self.device = operands[0].device.type
        self.mode = _mode(self.device)
        self.fits = _guard(operands)

    def operands_of(self, given: tuple[Any, ...]) -> Tensors | None:
        """The operands among as many arguments in the same places; None if the kind is another."""
        operands, values = self.operands(given), self.constants(given)
        alike = (
            self.fits(*operands)
            and self.mode == _mode(self.device)
            and self.types == (*map(type, values),)
            and self.values == values
            and (not self.signs or self.signs == _signs(values))
        )
        return operands if alike else None


def _guard(operands: Tensors) -> Callable[..., bool]:
    """What tells whether tensors are as these are, but for their numbers and strides.

    It is how torch.compile asks whether a graph serves. It says no where a tensor is given twice,
    and always of a torch whose guards are made otherwise; then the key is asked.
    """
    guards: Any = torch._C._dynamo.guards
    try:
        check: Callable[..., bool] = guards.TensorGuards(
            *operands,
            dynamic_dims_sizes=[[*tensor.shape] for tensor in operands],
            dynamic_dims_strides=[[None] * tensor.dim() for tensor in operands],
        ).check
    except (AttributeError, TypeError, SystemError):
        return lambda *given: False
    return check


def _mode(device: str) -> tuple[bool, torch.dtype | None, str | None]:
    """What a call depends on beside its arguments: gradients, autocast, the back end asked for."""
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return torch.is_grad_enabled(), autocast, os.environ.get("CADENZA_BACKEND")


def _signs(values: Sequence[Any]) -> list[float]:
    """The signs of zeros: 0.0 equals -0.0."""
    return [math.copysign(1.0, v) for v in values if isinstance(v, float) and v == 0.0]


def _key(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """All of a call's arguments that a compiled program depends on; None if some are special."""
    first, found = None, []
    for value in (*args, *kwargs.values()):
        if type(value) in PLAIN:
            if is_lazy(value):
                return None
            first = value if first is None else first
            found.append(_facts(value))
        elif isinstance(value, Tensor):
            return None
        elif isinstance(value, float) and not abs(value) > 0:
            found.append((float, repr(value)))  # 0.0 equals -0.0, and NaN not even itself
        else:
            found.append((type(value), value))
    if first is None or first.is_meta:
        return None
    mode = torch.is_inference_mode_enabled(), *_mode(first.device.type)
    return (*found, len(args), *kwargs, *mode)


def is_lazy(tensor: Tensor) -> bool:
    """Whether a tensor's numbers are not those in its memory; torch's dispatcher makes them."""
    return (
        tensor.is_neg()
        or tensor._is_zerotensor()
        or torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )
