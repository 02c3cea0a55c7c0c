"""One operation on whatever it is given: values of a program while it is traced, else tensors.

So the same function is a program and plain tensor code. Back ends register their tensor types.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from cadenza.core.arguments import Value, checked
from cadenza.core.errors import ProgramError
from cadenza.core.ir import Node
from cadenza.core.ops import Op

Function = TypeVar("Function", bound=Callable[..., Any])
_EVALUATORS: dict[type, Callable[..., Any]] = {}


def register(tensor_type: type, evaluator: Callable[..., Any]) -> None:
    """Lets `evaluator(op, values, attributes)` run operations on tensors of `tensor_type`."""
    _EVALUATORS[tensor_type] = evaluator


def is_tensor(value: object) -> bool:
    """Whether `value` is a tensor of a registered type."""
    return isinstance(value, tuple(_EVALUATORS))


def apply(op: Op, *values: Value, **attributes: Any) -> Value:
    """One operation of the closed set, on traced values or on tensors."""
    for value in values:
        if isinstance(value, Node):
            return value.builder.apply(op, *values, **attributes)
    for value in values:
        for tensor_type in type(value).__mro__:
            if tensor_type in _EVALUATORS:
                return _EVALUATORS[tensor_type](op, values, attributes)
    raise ProgramError(
        f"{op.label} of {', '.join(f'a {type(value).__name__}' for value in values) or 'nothing'}",
        found=", ".join(repr(value)[:40] for value in values) or "no value",
        expected="a value of the program, or a tensor",
        write="one value an argument; for numbers alone Python's math",
    )


def composite(function: Function) -> Function:
    """A function of the language over several operations: values made in a call belong together."""
    function = checked(function)

    @functools.wraps(function)
    def traced(*args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()):
            if isinstance(value, Node):
                with value.builder.one_function():
                    return function(*args, **kwargs)
        return function(*args, **kwargs)

    return cast(Function, traced)
