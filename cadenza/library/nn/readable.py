"""Which modules a program may stand for: those that do no more than their parameters say.

A layer's program reads the parameters of the modules in it and never calls these modules. One that
does more when it is called, an adapter, a quantised weight, a hook, would be left out in silence.
"""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from cadenza.core.errors import ProgramError

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
Module = TypeVar("Module", bound=nn.Module)


def readable(module: Module, *stock: type[nn.Module]) -> Module:
    """The module itself. Raises ProgramError unless its parameters are all there is to it.

    Its forward has to be that of one of the `stock` classes, and no hook may wait for its call.
    """
    if "forward" in module.__dict__ or type(module).forward not in [k.forward for k in stock]:
        raise _does_more(module, stock[0], "with a forward of its own")
    if any(getattr(module, name) for name in HOOKS):
        raise _does_more(module, stock[0], "with hooks, which nothing would call")
    return module


def _does_more(module: nn.Module, stock: type[nn.Module], found: str) -> ProgramError:
    owner = "torch" if stock.__module__.startswith("torch.") else "cz"
    return ProgramError(
        "a layer's program reads this module's parameters and never calls it",
        found=f"{type(module).__name__} {found}",
        expected=f"{owner}.nn.{stock.__name__} as it is: no adapter, no quantisation, no hook",
        write="fully_shard(layer) and hooks on the whole layer; adapters and masks merged into "
        "their weight first, as merge_and_unload() does",
    )
