"""What is judged: the programs of a file, or one program, each with sizes for every name.

A size left out is small where values are computed and that of a large model where kernels are
planned and compiled. A function `NAME_reference` beside the program `NAME` says what it should be.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

from cadenza.core.ops import M
from cadenza.core.trace import location
from cadenza.library.function import Program
from cadenza.library.variants import Variant
from cadenza.tools.fault import Fault
from cadenza.tools.target import (
    DEFAULTS,
    Target,
    built_in_sizes,
    is_built_in,
    load_module,
    program_of,
    subject_of,
    target_of,
)

ROWS = 16
SMALL = {"D": 64, "F": 96, "K": 64, "N": 96, "V": 80, "H": 4, "KV": 2, "HD": 32}
LARGE = {**DEFAULTS, "R": 64}
OTHER, OTHER_LARGE = 32, 4096  # of names that neither table has
HEADS = ("H", "KV", "HD")  # of which built-in blocks' other sizes are made
ODD = (37, 29, 53, 41, 43, 31, 47, 59)
REFERENCE = "_reference"
Sizes = Mapping[str, Any]


@dataclass(frozen=True)
class Subject:
    """A program, the sizes that were given, and the function that says what it should compute."""

    name: str
    variant: Variant
    given: Mapping[str, int]
    dtype: str
    reference: Callable[..., Any] | None = None

    @property
    def program(self) -> Program:
        """The program."""
        return self.variant.program

    @property
    def place(self) -> str:
        """`file:line` of the author's function."""
        return location(self.program.function)

    @property
    def target(self) -> str:
        """What other commands call it."""
        file = self.place.rpartition(":")[0]
        return self.name if is_built_in(self.name) else f"{file}:{self.name}"

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names in declared shapes that are sizes to choose, in order of appearance."""
        words = set(re.findall(r"[A-Za-z_]\w*", " ".join(self.variant.shapes.values())))
        if is_built_in(self.name):
            heads = HEADS if words & {"A", "N", "R", "head_dim"} else ()
            return tuple(n for n in DEFAULTS if n != M and (n in words or n in heads))
        fixed = {M, *self.program.parameters}
        return tuple(n for n in self._in_order() if n in words - fixed)

    def _in_order(self) -> list[str]:
        text = " ".join(self.variant.shapes.values())
        return list(dict.fromkeys(re.findall(r"[A-Za-z_]\w*", text)))

    def small(self, **changed: int) -> Target:
        """At small sizes, some of them changed. Raises Fault where a size is missing."""
        chosen = {**self._columns(), **changed}
        if is_built_in(self.name):
            usual = {name: size for name, size in SMALL.items() if name in DEFAULTS}
            return self._at({**built_in_sizes(self.name, {**usual, **chosen}), M: ROWS})
        return self._at({**{n: SMALL.get(n, OTHER) for n in self.names}, **chosen, M: ROWS})

    def large(self) -> Target:
        """At the sizes of a large model. Raises Fault where a size is missing."""
        if is_built_in(self.name):
            return self._at(built_in_sizes(self.name, self.given))
        usual = {name: LARGE.get(name, OTHER_LARGE) for name in (M, *self.names)}
        return self._at({**usual, **self.given})

    def odd(self) -> dict[str, int]:
        """An odd size for each name that may be chosen."""
        return dict(zip(self.names, ODD * len(self.names), strict=False))

    def _columns(self) -> dict[str, int]:
        """The sizes that were given, without the rows."""
        return {name: size for name, size in self.given.items() if name != M}

    def _at(self, sizes: Sizes) -> Target:
        return target_of(self.variant, sizes, self.dtype)


def find_subjects(
    text: str, given: Mapping[str, int], dtype: str
) -> tuple[list[Subject], Path | None]:
    """The programs that a command names, of a file, a module or our own; the file to watch.

    Raises Fault where there is none, and for a size that none of them has.
    """
    if is_built_in(text):
        built_in_sizes(text, given)
        return [Subject(text, subject_of(text), given, dtype)], None
    module, names = _named(text)
    found = [_subject(module, name, given, dtype) for name in names]
    known = {M, *(name for s in found for name in (*s.names, *s.program.parameters))}
    for name, size in given.items():
        if name not in known:
            sizes = ", ".join(dict.fromkeys(n for s in found for n in (M, *s.names)))
            raise Fault(f"--size {name}={size}: {text} has no such size; it has {sizes}")
    return found, Path(str(module.__file__))


def _named(text: str) -> tuple[ModuleType, list[str]]:
    """The module of a target, run anew, and the names of the programs in it that are meant."""
    place, _, name = text.rpartition(":")
    if place and not name.endswith(".py"):
        module = load_module(place)
        program_of(module, place, name)
        return module, [name]
    if not text.endswith(".py"):
        raise Fault(
            f"unknown target {text!r}: a built-in block, FILE.py, FILE.py:function or "
            "module:function"
        )
    module = load_module(text)
    names = [n for n, v in vars(module).items() if isinstance(v, Program) and _is_of(v, module)]
    if not names:
        raise Fault(f"{text} has no program: write @cz.epilogue or @cz.block above a function")
    return module, names


def _is_of(program: Program, module: ModuleType) -> bool:
    """Whether a program is written in a module, not imported into it."""
    code = inspect.unwrap(program.function).__code__
    return Path(code.co_filename).resolve() == Path(str(module.__file__)).resolve()


def _subject(module: ModuleType, name: str, given: Mapping[str, int], dtype: str) -> Subject:
    program = getattr(module, name)
    reference = getattr(module, f"{name}{REFERENCE}", None)
    variant = Variant(program, program.shapes or {}, {})
    return Subject(name, variant, given, dtype, reference if callable(reference) else None)
