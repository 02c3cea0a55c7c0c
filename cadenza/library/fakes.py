"""Operations without numbers, as torch.compile traces them; what Inductor is told of them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import torch

Fake = TypeVar("Fake", bound=Callable[..., Any])


def fake(name: str) -> Callable[[Fake], Fake]:
    """Registers what an operation of this package gives for tensors without numbers."""

    def register(function: Fake) -> Fake:
        @functools.wraps(function)
        def traced(*args: Any, **kwargs: Any) -> Any:
            _tell_inductor(name)
            return function(*args, **kwargs)

        torch.library.register_fake(f"cadenza::{name}")(traced)
        return function

    return register


def _tell_inductor(name: str) -> None:
    """Has Inductor, torch.compile's usual back end, call an operation as it is.

    It does so by itself with an operation that it does not know. But in some releases (torch 2.11)
    it first writes down all that the operation's operands are computed from, for a log: that takes
    time exponential in the number of layers before it.
    """
    lowering: Any = sys.modules.get("torch._inductor.lowering")
    if lowering is None:  # another back end, or none yet: operations are traced again for Inductor
        return
    operation = getattr(torch.ops.cadenza, name).default
    with suppress(AttributeError, TypeError, AssertionError):  # a release of another make
        if operation in lowering.lowerings:
            return
        tag = torch._library.utils.get_layout_constraint_tag(operation, with_default=True)
        lowering.make_fallback(operation, lowering.tag_to_layout_constraint(tag))
