"""Fake tensors: shapes, strides and dtypes without numbers, so that any model fits anywhere.

An author's function runs on the device `meta`; what it returns becomes fake tensors of a CPU, as
the mode that is entered makes them. Where no mode is entered, tensors stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_map

from cadenza.tools.audit.parts import Model

Tensor = torch.Tensor
NO_DATA = "Cannot copy out of meta tensor"


def fake() -> FakeTensorMode:
    """The mode under which tensors are fake; a real one that meets them becomes so, too."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def is_faking() -> bool:
    """Whether such a mode is entered."""
    return any(isinstance(m, FakeTensorMode) for m in _get_current_dispatch_mode_stack())


def made(function: Callable[[], Any]) -> Any:
    """What a function returns: without numbers if they are not asked for, and it needs none."""
    if not is_faking():
        return function()
    with torch.utils._python_dispatch._disable_current_modes():
        try:
            with torch.device("meta"):
                return function()
        except NotImplementedError as error:
            if NO_DATA not in str(error):
                raise
        return function()


def faked(model: Model) -> Model:
    """The model with fake tensors for all of its own and of its batch, under a mode that fakes."""
    if not is_faking():
        return model
    known: dict[int, Tensor] = {}

    def one(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) not in known:
            known[id(value)] = _fake(value)
        return known[id(value)]

    for module in model.module.modules():
        for store in (module._parameters, module._buffers, vars(module)):
            store.update({name: one(v) for name, v in store.items() if isinstance(v, Tensor)})
    args, kwargs = tree_map(one, (model.args, model.kwargs))
    return Model(model.module, args, kwargs)


def _fake(value: Tensor) -> Tensor:
    """A fake tensor, or parameter, like a real one."""
    bare = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
    if isinstance(value, nn.Parameter):
        return nn.Parameter(bare, requires_grad=value.requires_grad)
    return bare.requires_grad_(value.requires_grad)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """While inside, modules are made in this dtype."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(usual)
