"""Replacing a module's forward on one instance, and putting it back.

An instance gets a class of its own, derived from its class and of the same name, so checkpointing,
sharding and saving, which ask for a class or its name, find what they know. Nothing is written into
a class that others use, and a copied or unpickled module is whole: a copy stays accelerated, a
pickle holds the stock module.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from cadenza.library.weights import kept_together, put_together, show_apart

# Attributes of an accelerated module: what is known of it, and what was last warned of.
PLAN, TOLD = OWN = "_cadenza", "_cadenza_told"
Forward = Callable[..., Any]
Groups = Callable[[Any], list[Sequence[Tensor]]]
_CLASSES: dict[tuple[type, Any], type] = {}


def _nothing(module: Any) -> list[Sequence[Tensor]]:
    return []


def accelerate_module(
    module: nn.Module, plan: Any, make: Callable[[Any], Forward], groups: Groups = _nothing
) -> None:
    """Gives a module the forward that `make` makes for its class, and what it needs to know.

    `groups` are the weights of the module that stay in one storage when it is moved or copied.
    """
    stock = getattr(type(module), "accelerates", type(module))
    if (stock, make) not in _CLASSES:
        _CLASSES[stock, make] = _derived(stock, make(stock), groups)
    module.__dict__[PLAN] = plan
    module.__class__ = _CLASSES[stock, make]


def _derived(stock: Any, forward: Forward, groups: Groups) -> type:
    names = {
        "__module__": stock.__module__,
        "__qualname__": stock.__qualname__,
        "__doc__": stock.__doc__,
        "__reduce_ex__": _reduce,
        "__deepcopy__": _copy,
        "_apply": _apply,
        "state_dict": _state_dict,
        "groups_together": groups,
        "accelerates": stock,
        "forward": forward,
    }
    return type(stock.__name__, (stock,), names)


def within_base(stock: Any) -> tuple[Forward, Forward]:
    """A class's forward, and the one in it around which its base puts what ours gets again.

    A base class may wrap the forward of every class that is derived from it, in checkpointing for
    example. Within ours, which it has wrapped, the stock one needs no wrapper of its own.
    """
    whole = stock.forward
    again = type(stock.__name__, (stock,), {}).__dict__.get("forward")
    code = getattr(again, "__code__", None)
    if code is None or code is not getattr(whole, "__code__", None):
        return whole, whole
    return whole, getattr(whole, "__wrapped__", whole)


def _reduce(module: Any, protocol: int) -> Any:
    """As the stock module is pickled."""
    stock = module.accelerates
    plain = object.__new__(stock)
    plain.__dict__.update({name: v for name, v in module.__dict__.items() if name not in OWN})
    return plain.__reduce_ex__(1)  # the later protocols insist on the object's own class


def _copy(module: Any, memo: dict[int, Any]) -> Any:
    copied = object.__new__(type(module))
    memo[id(module)] = copied
    copied.__dict__.update(copy.deepcopy(module.__getstate__(), memo))  # not what is compiled
    for weights in copied.groups_together():
        put_together(weights)
    return copied


def _apply(module: Any, *args: Any, **kwargs: Any) -> Any:
    with kept_together(module.groups_together):
        return module.accelerates._apply(module, *args, **kwargs)


def _state_dict(module: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    found: dict[str, Any] = module.accelerates.state_dict(module, *args, **kwargs)
    show_apart(found, module.groups_together())
    return found


def is_accelerated(module: nn.Module) -> bool:
    """Whether a module has a forward of ours."""
    return hasattr(type(module), "accelerates") and PLAN in module.__dict__


def restore_module(module: nn.Module) -> None:
    """Puts a module's class back. Where its class was derived from since, its forward only."""
    for name in OWN:
        module.__dict__.pop(name, None)
    if "accelerates" in type(module).__dict__:
        module.__class__ = type(module).accelerates
