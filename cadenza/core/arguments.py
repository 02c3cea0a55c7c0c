"""What an argument must be, by its parameter's annotation; any other is refused by its name.

Public functions and classes are `checked`, so that a wrong argument is an error of the author's
call and not one inside of Cadenza. An annotation that KINDS lacks is not looked at.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any, NamedTuple, TypeVar, cast

from cadenza.core.errors import ProgramError

Checked = TypeVar("Checked", bound=Callable[..., Any])
Value = Any  # a Node while tracing, a tensor of a registered type otherwise; or a number
Shaped = Any  # the same, and no number
Row = Any  # the same, with columns
Matrix = Any  # the same, with rows and columns, as every Node has
Size = int  # from 1 on
Sizes = tuple[int, ...]  # one, as torch has it of the columns that a norm is over
WIDEST = 2**63  # whole numbers are those of int64
HOMES = {"cadenza.core": "L", "cadenza.library.nn": "cz.nn", "cadenza.library": "cz.ops"}


class Kind(NamedTuple):
    """Whether a value is of a kind, and what that is called."""

    fits: Callable[[Any], bool]
    called: str


def dimensions(value: Any) -> int:
    """How many dimensions a value of a program or a tensor has; -1 for anything else."""
    shape = getattr(value, "shape", None)
    return len(shape) if isinstance(shape, tuple) and not isinstance(value, type) else -1


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number; torch.compile may have left open which."""
    if type(value) is int:
        return True
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    return whole or type(value).__name__ == "SymInt"


def is_number(value: Any) -> bool:
    """Whether a value is a number that floating ones reach."""
    if type(value) is float or type(value).__name__ in ("SymInt", "SymFloat"):
        return True
    if not isinstance(value, Real):
        return False
    try:
        float(value)
    except OverflowError:
        return False
    return True


def is_flag(value: Any) -> bool:
    """Whether a value says yes or no: True, False, or 1 and 0 for them."""
    return (
        isinstance(value, bool)
        or type(value).__name__ in ("bool", "bool_")
        or (isinstance(value, Integral) and value in (0, 1))
    )


def is_int64(value: Any) -> bool:
    """Whether a value is a whole number that torch has room for."""
    return is_whole(value) and -WIDEST <= value < WIDEST


def _is_size(value: Any) -> bool:
    return is_int64(value) and value >= 1


def _is_one_size(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and len(value) == 1 and _is_size(value[0])


KINDS = {
    "Shaped": Kind(lambda value: dimensions(value) >= 0, "a value of the program"),
    "Row": Kind(lambda value: dimensions(value) >= 1, "a value of the program, with columns"),
    "Matrix": Kind(lambda value: dimensions(value) == 2, "a value of the program, [M, N]"),
    "int": Kind(is_int64, "a whole number"),
    "Size": Kind(_is_size, "a whole number from 1 on"),
    "Sizes": Kind(_is_one_size, "that in a tuple"),
    "float": Kind(is_number, "a number"),
    "bool": Kind(is_flag, "True or False"),
    "str": Kind(lambda value: isinstance(value, str), "a text"),
    "None": Kind(lambda value: value is None, "None"),
}


def checked(function: Checked) -> Checked:
    """The function, or the class, which raises ProgramError for an argument of a wrong kind."""
    if isinstance(function, type):
        made: Any = function  # a class stays itself: what makes its instances is held
        made.__init__ = _held(made.__init__, function)
        return function
    return cast(Checked, _held(function, function))


def _held(function: Any, called: Any) -> Any:
    """A function whose arguments are held to their kinds; `called` is what its errors name."""
    parameters = inspect.signature(function).parameters
    kinds = {name: _kinds(p.annotation) for name, p in parameters.items()}
    named = {name: found for name, found in kinds.items() if found}
    by_place = [
        (place, name, kinds[name])
        for place, (name, p) in enumerate(parameters.items())
        if kinds[name] and p.kind is p.POSITIONAL_OR_KEYWORD
    ]

    @functools.wraps(function)
    def holding(*args: Any, **kwargs: Any) -> Any:
        for place, name, found in by_place:
            if place >= len(args):
                break
            if not _fits(args[place], found):
                raise _misfit(called, name, args[place], found)
        for name, value in kwargs.items():
            if name in named and not _fits(value, named[name]):
                raise _misfit(called, name, value, named[name])
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            mismatch = _mismatch(function, args, kwargs)
            if not mismatch or isinstance(error, ProgramError):
                raise
        raise ProgramError(
            f"arguments of {_place(called)}",
            found=mismatch,
            expected="those of the function",
            write=_call(called),
        )

    return holding


def _kinds(annotation: Any) -> list[Kind]:
    """The kinds that an annotation names; none where one of them is not known."""
    words = str(annotation).split(" | ")
    return [KINDS[word] for word in words] if KINDS.keys() >= {*words} and words != ["None"] else []


def _fits(value: Any, kinds: list[Kind]) -> bool:
    return any(kind.fits(value) for kind in kinds)


def _mismatch(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Why a function takes no such arguments; "" if it does."""
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    return ""


def _misfit(called: Any, name: str, value: object, kinds: list[Kind]) -> ProgramError:
    return ProgramError(
        f"argument {name} of {_place(called)}",
        found=f"{name}={value!r:.40}",
        expected=" or ".join(kind.called for kind in kinds),
        write=_call(called),
    )


def _place(called: Any) -> str:
    """What authors call a function or a class."""
    home = next((short for long, short in HOMES.items() if called.__module__.startswith(long)), "")
    return f"{home}.{called.__name__}" if home else str(called.__qualname__)


def _call(called: Any) -> str:
    """A call with all parameters, without their types."""
    parameters = inspect.signature(called).parameters.values()
    return f"{_place(called)}({', '.join(str(p.replace(annotation=p.empty)) for p in parameters)})"
