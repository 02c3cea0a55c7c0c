"""What a program is called for torch: a name that tells its code and what it closes over."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from types import CodeType
from typing import Any

from cadenza.core.arguments import is_number
from cadenza.core.trace import location
from cadenza.library.operator import PROGRAMS
from cadenza.library.specialize import Specializations

Function = Callable[..., Any]
CONSTANTS = (bool, int, float, str, type(None))


def as_constant(value: Any) -> Any:
    """The constant that an argument is: Python's own number of another library's, as NumPy's.

    What is no constant is returned as it is.
    """
    if isinstance(value, CONSTANTS):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real) and is_number(value):
        return float(value)
    return bool(value) if type(value).__name__ in ("bool", "bool_") else value


def register(
    function: Function, shapes: Mapping[str, str] | None, specializations: Specializations
) -> str:
    """The program's name for torch: its function's name and a digest of its code and closure.

    Two functions share a name only if they are the same code over the same constants in the same
    module; anything else gets a number behind it.
    """
    closure = dict(inspect.getclosurevars(function).nonlocals)
    content = (
        _code_text(function.__code__),
        repr(closure),
        repr(shapes),
        location(function),
    )
    identity = hashlib.sha256(repr(content).encode()).hexdigest()[:12]
    key, number = f"{function.__qualname__}.{identity}", 1
    while key in PROGRAMS and not _interchangeable(PROGRAMS[key].function, function, closure):
        number += 1
        key = f"{function.__qualname__}.{identity}.{number}"
    PROGRAMS[key] = specializations
    return key


def _code_text(code: CodeType) -> str:
    constants = [_code_text(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts]
    return repr((code.co_code.hex(), constants, code.co_names, code.co_varnames))


def _interchangeable(known: Function, function: Function, closure: Mapping[str, Any]) -> bool:
    known = inspect.unwrap(known)
    simple = all(isinstance(v, CONSTANTS) for v in closure.values())
    return simple and known.__globals__ is function.__globals__
