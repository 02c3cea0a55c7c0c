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
Size = int  # from 1 on
WIDEST = 2**63  # whole numbers are those of int64
HOMES = {"cadenza.core": "L", "cadenza.library.nn": "cz.nn", "cadenza.library": "cz.ops"}


class Kind(NamedTuple):
    """Whether a value is of a kind, and what that is called."""

    fits: Callable[[Any], bool]
    called: str


def is_shaped(value: Any) -> bool:
    """Whether a value has rows or columns: a tensor, or a value of a program."""
    return hasattr(value, "shape") and len(value.shape) > 0


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number; torch.compile may have left open which."""
    if type(value).__name__ == "SymInt":
        return True
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    return whole and -WIDEST <= value < WIDEST


def is_number(value: Any) -> bool:
    """Whether a value is a number that isn't True or False."""
    if isinstance(value, Integral):
        return is_whole(value)
    return isinstance(value, Real) or type(value).__name__ in ("SymInt", "SymFloat")


KINDS = {
    "Shaped": Kind(is_shaped, "a value of the program"),
    "int": Kind(is_whole, "a whole number"),
    "Size": Kind(lambda value: is_whole(value) and value >= 1, "a whole number from 1 on"),
    "float": Kind(is_number, "a number"),
    "bool": Kind(lambda value: isinstance(value, bool), "True or False"),
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
    kinds = {n: str(p.annotation).split(" | ") for n, p in parameters.items()}
    known = {n for n, found in kinds.items() if KINDS.keys() >= {*found} and found != ["None"]}
    held = {n: [KINDS[kind] for kind in kinds[n]] for n in known}
    places = tuple(kinds)

    @functools.wraps(function)
    def holding(*args: Any, **kwargs: Any) -> Any:
        for name, value in (*zip(places, args, strict=False), *kwargs.items()):
            if name in held and not any(kind.fits(value) for kind in held[name]):
                raise _misfit(called, name, value, held[name])
        return function(*args, **kwargs)

    return holding


def _misfit(called: Any, name: str, value: object, kinds: list[Kind]) -> ProgramError:
    place = f"{HOMES[next(h for h in HOMES if called.__module__.startswith(h))]}.{called.__name__}"
    listed = ", ".join(
        str(p.replace(annotation=p.empty)) for p in inspect.signature(called).parameters.values()
    )
    return ProgramError(
        f"argument {name} of {place}",
        found=f"{name}={value!r:.40}",
        expected=" or ".join(kind.called for kind in kinds),
        write=f"{place}({listed})",
    )
