"""One operation on whatever it is given: values of a program while it is traced, else tensors.

So the same function is a program and plain tensor code. Back ends register their tensor types.
What an argument must be is in its annotation: `checked` holds it to that.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any, TypeVar, cast

from cadenza.core.errors import ProgramError
from cadenza.core.ir import Node
from cadenza.core.ops import Op

Value = Any  # a Node while tracing, a tensor of a registered type otherwise; or a number
Shaped = Any  # the same, and no number
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


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


# By annotation: whether a value fits, and how that is said. `Value` is left to the operations.
_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "Shaped": (lambda v: hasattr(v, "shape") and len(v.shape) > 0, "a value of the program"),
    "int": (lambda v: isinstance(v, Integral) and not isinstance(v, bool), "a whole number"),
    "float": (_is_number, "a number"),
    "bool": (lambda v: isinstance(v, bool), "True or False"),
    "str": (lambda v: isinstance(v, str), "a text"),
}


def checked(function: Function) -> Function:
    """A function of the language that raises ProgramError for an argument of a wrong kind."""
    signature = inspect.signature(function)
    kinds = {n: str(p.annotation).split(" | ") for n, p in signature.parameters.items()}
    held = {n: names for n, names in kinds.items() if names[0] in _KINDS}
    places = tuple(kinds)

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        for name, value in (*zip(places, args, strict=False), *kwargs.items()):
            if name in held and not (value is None and "None" in held[name]):
                fits, expected = _KINDS[held[name][0]]
                if not fits(value):
                    raise _misfit(function, name, value, expected)
        return function(*args, **kwargs)

    return cast(Function, called)


def _misfit(function: Callable[..., Any], name: str, value: object, expected: str) -> ProgramError:
    parameters = inspect.signature(function).parameters.values()
    listed = ", ".join(str(p.replace(annotation=p.empty)) for p in parameters)
    return ProgramError(
        f"argument {name} of L.{function.__name__}",
        found=f"{name}={value!r:.40}",
        expected=expected,
        write=f"L.{function.__name__}({listed})",
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
