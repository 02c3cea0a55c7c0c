"""Running a module's own code with other parts: a stand-in takes the module's place as `self`.

The forwards of Hugging Face's models differ from release to release in what they hand on (caches,
masks, windows), and hardly in what they compute. So their code is run as it stands, and only the
parts whose work a program does are replaced; nothing of it is read or written down again.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

from torch import nn

ROTARY = "apply_rotary_pos_emb"


class StandIn:
    """A module in the eyes of its own code, with some parts replaced; called as the module is."""

    forward = None  # code that asks whether it is its own class's forward finds that it is not

    def __init__(self, module: nn.Module, **parts: Any) -> None:
        self.stands_for = module
        for name, part in parts.items():  # torch.compile follows no update of __dict__
            setattr(self, name, part)

    def __getattr__(self, name: str) -> Any:
        if name == "stands_for":  # nothing is there yet: this is being copied
            raise AttributeError(name)
        return getattr(self.stands_for, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return stock_class(self.stands_for).forward(self, *args, **kwargs)


def stock_class(module: nn.Module) -> Any:
    """The module's class, as it was before its instance was accelerated."""
    return getattr(type(module), "accelerates", type(module))


def forward_without_rotary(attention: nn.Module) -> Callable[..., Any] | None:
    """The attention's own forward, of queries and keys that are rotated already.

    None where its code rotates by no function of the known name.
    """
    function = inspect.unwrap(stock_class(attention).forward)
    if not isinstance(function, FunctionType) or ROTARY not in function.__code__.co_names:
        return None
    return _without_rotary(function)


@functools.cache
def _without_rotary(function: FunctionType) -> FunctionType:
    """The function with another one in the place of the global that rotates; one a function."""
    names = {**function.__globals__, ROTARY: _rotated_already}
    names.pop("__name__")  # torch.compile would look names up in the module instead
    own = FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    own.__kwdefaults__ = function.__kwdefaults__
    return own


def forget_functions() -> None:
    """Makes forwards anew, with what stands in their modules now."""
    _without_rotary.cache_clear()


def _rotated_already(q: Any, k: Any, *tables: Any, **options: Any) -> tuple[Any, Any]:
    """Both as they are; the keys of a single token without gaps in memory, as rotated ones."""
    return q, k.contiguous() if k.shape[-2] == 1 else k
