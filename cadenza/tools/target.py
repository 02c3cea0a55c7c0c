"""What `explain` is asked about: a built-in block, or an author's own program with its sizes.

Sizes have names, M for the rows; a declared shape is written in them.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from cadenza.core.errors import ProgramError
from cadenza.core.ops import Dim, M
from cadenza.core.trace import Operand, Signature, location
from cadenza.library.blocks import BUILT_IN
from cadenza.library.function import Epilogue, Program
from cadenza.library.operands import size_of
from cadenza.library.variants import LOSSES, VARIANTS, Variant
from cadenza.tools.blame import is_ours
from cadenza.tools.fault import Fault

DEFAULTS = {"M": 16384, "D": 4096, "F": 14336, "H": 32, "KV": 8, "HD": 128, "V": 128256}
OWN = {"K": 4096, "N": 4096}  # beside those, for programs of one's own
DTYPES = ("bfloat16", "float16", "float32")
LARGEST = 2**31 - 1  # of a size
# Operands of built-in blocks that are no floating numbers, and those that no model trains.
WHOLE_NUMBERS = ("target", "seed", "feed_forward_seed")
UNTRAINED = ("cos", "sin", *WHOLE_NUMBERS)
COMMANDS = str(Path(__file__).parent)
LIBRARY = {**VARIANTS, **LOSSES}
OURS = {*BUILT_IN.values(), *(variant.program for variant in LIBRARY.values())}


@dataclass(frozen=True)
class Target:
    """A program with a signature, the names of inputs that need gradients, and M."""

    program: Program
    signature: Signature
    needed: tuple[str, ...]
    rows: int


def find_target(
    text: str, sizes: Sequence[str] = (), dtype: str = "bfloat16", frozen: Sequence[str] = ()
) -> Target:
    """The target that a command names. Raises Fault when there is none, or a size is missing."""
    given, subject = parse_sizes(sizes), subject_of(text)
    if is_built_in(text):
        return target_of(subject, built_in_sizes(text, given), dtype, frozen)
    if subject.shapes:
        _check_given(text, subject, given)
    usual = {n: v for n, v in {**DEFAULTS, **OWN}.items() if n not in subject.program.defaults}
    return target_of(subject, {**usual, **given}, dtype, frozen)


def target_of(
    subject: Variant, sizes: Mapping[str, Any], dtype: str, frozen: Sequence[str] = ()
) -> Target:
    """A program at sizes by name, floating operands in a dtype.

    Raises Fault where a size is missing, for a dtype that no target has, an operand that is none.
    """
    if dtype not in DTYPES:
        raise Fault(f"unknown --dtype {dtype!r}: one of {', '.join(DTYPES)}")
    program, own = subject.program, subject.program not in OURS
    known = {**program.defaults, **subject.constants, **sizes}
    whole = program.dtypes if own else dict.fromkeys(WHOLE_NUMBERS, "int64")
    fixed = {**whole, **dict.fromkeys(subject.exact, "float32")}
    operands = tuple(
        _operand(subject, name, known, fixed.get(name, dtype)) for name in _operands(subject)
    )
    names = [operand.name for operand in operands]
    still = _frozen(frozen, names) | set(fixed if own else UNTRAINED) | set(subject.exact)
    constants = tuple((n, _constant(n, known)) for n in program.parameters if n not in names)
    needed = tuple(name for name in names if name not in still and subject.derived)
    return Target(program, Signature(operands, constants), needed, int(known["M"]))


def place_of(error: ProgramError, program: Program) -> str:
    """`file:line` of an error: the author's, or that of the function where a command made the call.

    So it is where the product of an epilogue does not fit, which no line of the author's makes.
    """
    place, found, _ = str(error).partition(f": {error.parts[0]}")
    return location(program.function) if place.startswith(COMMANDS) else place if found else ""


def is_built_in(text: str) -> bool:
    """Whether a target's name is that of a built-in block or of a variant of the library."""
    return text in BUILT_IN or text in LIBRARY


def subject_of(text: str) -> Variant:
    """The program that a command names, with the shapes of its operands; Fault if there is none."""
    if text in LIBRARY:
        return LIBRARY[text]
    program = BUILT_IN[text] if text in BUILT_IN else _load(text)
    return Variant(program, program.shapes or {}, {})


def parse_sizes(texts: Sequence[str]) -> dict[str, int]:
    """`D=4096,F=14336` as a dict; several texts add up."""
    sizes = {}
    for part in (part.strip() for text in texts for part in text.split(",")):
        name, equals, number = (piece.strip() for piece in part.partition("="))
        known = equals and name.isidentifier() and number.isdecimal() and len(number) <= 10
        if not known or not 1 <= int(number) <= LARGEST:
            raise Fault(
                f"--size {part[:40]!r} is no size: write a name and a number up to {LARGEST}, "
                "as D=4096"
            )
        sizes[name] = int(number)
    return sizes


def _check_given(text: str, subject: Variant, given: Mapping[str, int]) -> None:
    named = dict.fromkeys(re.findall(r"[A-Za-z_]\w*", " ".join([M, *subject.shapes.values()])))
    for name in given.keys() - named.keys() - set(subject.program.parameters):
        has = ", ".join(named)
        raise Fault(f"--size {name}={given[name]}: {text} has no such size; it has {has}")


def _frozen(texts: Sequence[str], names: Sequence[str]) -> set[str]:
    frozen = {part.strip() for text in texts for part in text.split(",")}
    for name in sorted(frozen - set(names)):
        raise Fault(f"--frozen {name!r} is no operand: the operands are {', '.join(names)}")
    return frozen


def built_in_sizes(name: str, given: Mapping[str, int]) -> dict[str, Any]:
    """The sizes of a built-in block: those given, defaults, and those that follow."""
    for size in given:
        if size not in DEFAULTS:
            raise Fault(f"{name} has no size {size!r}: it has {', '.join(DEFAULTS)}")
    sizes = {**DEFAULTS, **given}
    if name == "gpt2":
        sizes = {**sizes, "F": 4 * sizes["D"], "KV": sizes["H"], **given}
    heads, key_value_heads, width = sizes["H"], sizes["KV"], sizes["HD"]
    return sizes | {
        "A": heads * width,
        "N": (heads + 2 * key_value_heads) * width,
        "R": width // 2,
        "head_dim": width,
        "heads": heads if name == "qwen3" or name in VARIANTS else heads + key_value_heads,
        "key_value_heads": key_value_heads,
    }


def _constant(name: str, known: Mapping[str, Any]) -> Any:
    if name not in known:
        raise Fault(
            f"parameter {name} has no shape and no default: add --size {name}=NUMBER, or for a "
            f"tensor {name!r} to shapes="
        )
    return known[name]


def _operands(subject: Variant) -> list[str]:
    """The parameters with a declared shape; the others must have defaults or sizes."""
    if not subject.shapes:
        raise Fault(
            f"{subject.program.__name__} declares no shapes: {declaration(subject.program)}"
        )
    return [name for name in subject.program.parameters if name in subject.shapes]


def declaration(program: Program) -> str:
    """What to write above an author's function that declares no shapes."""
    kind, known = ("epilogue", 2) if isinstance(program, Epilogue) else ("block", 1)
    usual = dict(zip(program.parameters[:known], ("'M D'", "'N D'"), strict=False))
    names = [name for name in program.parameters if name not in program.defaults]
    shapes = ", ".join(f"{name!r}: {usual.get(name, '...')}" for name in names)
    return f"write @cz.{kind}(shapes={{{shapes}}}), each 'M N', 'M 1', '1 N' or the like"


def _operand(subject: Variant, name: str, known: Mapping[str, Any], dtype: str) -> Operand:
    rows, columns = (_size(token, name, known) for token in subject.shapes[name].split())
    if not isinstance(columns, int):
        called = subject.program.__name__
        raise Fault(f"operand {name} of {called} has M columns: M counts rows alone")
    return Operand(name, rows, columns, dtype)


def _size(token: str, operand: str, known: Mapping[str, Any]) -> Dim:
    if token == M:
        return M
    try:
        return size_of(token, known)
    except KeyError as missing:
        name = missing.args[0]
    raise Fault(f"size {name} of operand {operand} is not known: add --size {name}=NUMBER")


def _load(text: str) -> Program:
    """The program `FILE.py:function` or `module:function`."""
    place, _, name = text.rpartition(":")
    if text.endswith(".py"):
        programs = programs_of(load_module(text))
        there = " or ".join(f"{text}:{n}" for n in programs) or "@cz.epilogue above a function"
        raise Fault(f"{text} is a file, and one program is wanted: write {there}")
    if not place or not name:
        built_in = ", ".join((*BUILT_IN, *LIBRARY))
        raise Fault(
            f"unknown target {text!r}: one of {built_in}, FILE.py:function, module:function"
        )
    return program_of(load_module(place), place, name)


def program_of(module: ModuleType, place: str, name: str) -> Program:
    """The program of this name in a module. Raises Fault, naming those there are, for another."""
    found = getattr(module, name, None)
    if isinstance(found, Program):
        return found
    programs = programs_of(module)
    there = f"it has {', '.join(programs)}" if programs else "write @cz.block above a function"
    raise Fault(f"{place} has no block or epilogue {name!r}: {there}")


def programs_of(module: ModuleType) -> list[str]:
    """The names of the programs in a module."""
    return [name for name, value in vars(module).items() if isinstance(value, Program)]


def load_module(place: str) -> ModuleType:
    """The module of this name, or a file run anew. Raises Fault where it cannot be imported."""
    try:
        if not place.endswith(".py"):
            sys.path.insert(0, str(Path.cwd()))
            return importlib.import_module(place)
        if not Path(place).is_file():
            raise Fault(f"there is no file {place}")
        # Under a name of its own, so that a module called alike is found as ever.
        spec = importlib.util.spec_from_file_location(f"{Path(place).stem}__file", place)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module.__name__] = module
        # Not by the loader: its cache takes a file saved twice within a second for unchanged.
        code = compile(Path(place).read_bytes(), place, "exec", dont_inherit=True)
        exec(code, module.__dict__)
    except ProgramError as error:
        raise Fault(str(error)) from None
    except Fault:
        raise
    except Exception as error:  # whatever an author's file does when it is run
        if is_ours(error):
            raise
        raise Fault(f"{place} cannot be imported: {type(error).__name__}: {error}") from None
    return module
