"""Modules some of whose projections one product takes; their weights lie one behind another."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Self

from torch import Tensor, nn

from cadenza.library.weights import kept_together, put_together, show_apart


class Joint(nn.Module):
    """A module whose `joint` projections are parameters of their own, in one storage.

    A subclass calls `put_together` once it has made them. They are put together anew where they get
    other memory: by `.to()` and its like, and in a deep copy.
    """

    joint: tuple[str, ...] = ()

    def put_together(self) -> None:
        """Puts the weights of the joint projections into one storage, and their biases."""
        for weights in self.groups():
            put_together(weights)

    def groups(self) -> list[list[Tensor]]:
        """The weights of the joint projections and their biases, where each has one."""
        found = []
        for name in ("weight", "bias"):
            given = [_parameter(self._modules.get(projection), name) for projection in self.joint]
            found.append([parameter for parameter in given if parameter is not None])
        return [group for group in found if len(group) == len(self.joint)]

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As `nn.Module`'s; the joint projections' tensors have storages of their own there."""
        found: dict[str, Any] = super().state_dict(*args, **kwargs)
        show_apart(found, self.groups())
        return found

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        with kept_together(self.groups):
            return super()._apply(fn, recurse)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = object.__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__getstate__(), memo))  # not what is compiled
        copied.put_together()
        return copied


def _parameter(module: nn.Module | None, name: str) -> Tensor | None:
    # Not the attribute, which a parametrisation computes anew.
    return None if module is None else module._parameters.get(name)


def put_together_all(model: nn.Module) -> None:
    """Puts the weights of all joint projections of a model together, module by module."""
    for module in model.modules():
        if isinstance(module, Joint):
            module.put_together()
