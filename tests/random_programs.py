"""Random well-typed programs, written from numbers: the strategy behind test_random_programs.

An instruction is a few whole numbers, each picking among what is possible where it is read, so
that dropping or lowering any of them leaves a program; hypothesis shrinks to short ones. What comes
out is a recipe, whose repr is code that replays it. Values stay small: logarithms, roots and
divisors are kept away from zero, and whatever can exceed 4 is scaled down.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from cases import tensor
from hypothesis import strategies as st

import cadenza as cz
from cadenza import lang as L
from cadenza.library.function import Program

ROWS = (0, 1, 2, 3, 127, 129)
LARGEST = 4.0
EXACT = 2.0**20  # of whole numbers: far below what float32 holds
WIDEST = 24
LIMIT = 1000  # of the numbers in an instruction


class Recipe(NamedTuple):
    """A program as text, and a call of it: operands as in `cases.tensor`, M rows."""

    operands: dict[str, str]
    lines: list[str]
    returns: str
    rows: int
    declared: bool

    def program(self) -> Program:
        """A fresh program of the text."""
        text = "\n    ".join([f"def program({', '.join(self.operands)}):", *self.lines])
        scope: dict[str, Any] = {"L": L}
        exec(f"{text}\n    return {self.returns}", scope)
        shapes = {name: " ".join(text.split()[:2]) for name, text in self.operands.items()}
        return cz.block(scope["program"], shapes=shapes if self.declared else None)

    def tensors(self, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
        """Random operands of the call."""
        return {name: tensor(text, self.rows, dtype) for name, text in self.operands.items()}


class Value(NamedTuple):
    """A value while the program is written: its name, type and a bound of its size."""

    name: str
    rows: int | str
    columns: int
    bound: float
    kind: str = "real"


class Impossible(Exception):
    """Nothing at hand fits the instruction, which is left out."""


def fit(*values: Value) -> bool:
    """Whether values broadcast."""
    return all(len({v[axis] for v in values} - {1}) <= 1 for axis in (1, 2))


def spread(*values: Value) -> tuple[int | str, int]:
    """Rows and columns that values broadcast to."""
    rows = next((v.rows for v in values if v.rows != 1), 1)
    return rows, max(v.columns for v in values)


class Writer:
    """Writes lines; every instruction is a sequence of numbers that choose."""

    def __init__(self, columns: int, rows: int, whole: bool) -> None:
        self.rows, self.whole = rows, whole
        content, bound = ("whole", 3.0) if whole else ("unit", 1.0)
        real = {"x": ("M", columns), "y": ("M", columns), "c": ("M", 1), "r": (1, columns),
                "s": (1, 1), "w": (3, columns), "b": (1, 3)}  # fmt: skip
        self.values = [Value(name, *shape, bound) for name, shape in real.items()]
        self.operands = {v.name: f"{v.rows} {v.columns} {content}" for v in self.values}
        self.values.append(Value("m", "M", columns, 1.0, "boolean"))
        self.values.append(Value("i", "M", 1, columns + 1.0, "integer"))
        self.operands |= {"m": f"M {columns} mask", "i": f"M 1 index {columns + 2}"}
        self.lines: list[str] = []
        self.codes: Iterator[int] = iter(())

    def choose(self, options: Sequence[Any]) -> Any:
        """One of the options; the first when the numbers have run out."""
        if not options:
            raise Impossible
        return options[next(self.codes, 0) % len(options)]

    def value(self, fits: Callable[[Value], bool] = lambda v: True, kind: str = "real") -> Value:
        """Any value of a kind that fits."""
        return self.choose([v for v in reversed(self.values) if v.kind == kind and fits(v)])

    def newest(self, fits: Callable[[Value], bool] = lambda v: True, kind: str = "real") -> Value:
        """A value of a kind that fits, most often the newest, so that programs get deep."""
        options = [v for v in reversed(self.values) if v.kind == kind and fits(v)]
        if not options:
            raise Impossible
        return options[int(len(options) * (next(self.codes, 0) / LIMIT) ** 8)]

    def write(
        self, text: str, rows: int | str, columns: int, bound: float, kind: str = "real"
    ) -> None:
        """A line for a new value, scaled down where it may get large."""
        if columns > WIDEST or (self.whole and bound > EXACT):
            raise Impossible
        if kind == "real" and not self.whole and bound > LARGEST:
            power = math.ceil(math.log2(bound / LARGEST))
            text, bound = f"({text}) * {2.0**-power!r}", bound * 2.0**-power
        name = f"v{len(self.lines)}"
        self.lines.append(f"{name} = {text}")
        self.values.append(Value(name, rows, columns, bound, kind))

    def instruction(self, codes: Sequence[int]) -> None:
        """One line, or none where nothing fits."""
        self.codes = iter(codes)
        step = self.choose(WHOLE_STEPS if self.whole else STEPS)
        try:
            step(self)
        except Impossible:
            return

    def recipe(self, codes: Sequence[int], declared: bool) -> Recipe:
        """The program that returns the last value and up to two others."""
        self.codes = iter(codes)
        kinds = self.choose([["real"], ["real", "real"], ["real", "boolean", "real"]])
        kept = [self.newest(kind=kinds[0]).name, *(self.value(kind=k).name for k in kinds[1:])]
        pairs = ", ".join(f"'{chr(97 + k)}': {name}" for k, name in enumerate(kept))
        single = [kept[0]] if len(kept) == 1 else []
        returns = self.choose([*single, ", ".join(kept) + ",", f"{{{pairs}}}"])
        used, lines = set(re.findall(r"\w+", returns)), []
        for line in reversed(self.lines):
            if line.split(" = ")[0] in used:
                used |= set(re.findall(r"\w+", line))
                lines.insert(0, line)
        operands = {n: t for n, t in self.operands.items() if n in used or n == "x"}
        return Recipe(operands, lines, returns, self.rows, declared)


# --- instructions ---------------------------------------------------------------------------------

Bound = Callable[[float], float]
WHOLE_UNARY: list[tuple[str, Bound]] = [
    ("-{0}", lambda b: b), ("L.abs({0})", lambda b: b), ("{0}**2", lambda b: b * b),
    ("2.0 - {0}", lambda b: b + 2), ("{0} * -3.0", lambda b: 3 * b), ("{0} + {0}", lambda b: 2 * b),
    ("L.maximum({0}, 1.0)", lambda b: b + 1), ("L.relu({0})", lambda b: b),
    ("L.where({0} == 1.0, 2.0, {0})", lambda b: b + 2),
]  # fmt: skip
UNARY: list[tuple[str, Bound]] = [
    *WHOLE_UNARY,
    ("L.tanh({0})", lambda b: 1), ("L.sigmoid({0})", lambda b: 1), ("L.erf({0})", lambda b: 1),
    ("L.exp({0})", math.exp), ("L.log({0} * {0} + 0.5)", lambda b: b * b + 1),
    ("L.sqrt({0} * {0} + 0.5)", lambda b: b + 1), ("L.rsqrt({0} * {0} + 0.5)", lambda b: 1.5),
    ("({0} * {0} + 1.0)**-1", lambda b: 1), ("{0}**3", lambda b: b**3), ("{0}**1", lambda b: b),
    ("{0} / 4.0", lambda b: b / 4), ("1.0 / ({0} * {0} + 0.5)", lambda b: 2),
    ("L.cast({0}, 'float64')", lambda b: b), ("L.stored({0})", lambda b: b),
    ("L.minimum(0.5, {0})", lambda b: b + 0.5), ("L.where({0} < 0.25, {0}, 0.75)", lambda b: b + 1),
    ("L.silu({0})", lambda b: b), ("L.gelu({0})", lambda b: b), ("L.relu2({0})", lambda b: b * b),
    ("L.gelu({0}, 'tanh')", lambda b: b), ("L.softcap({0}, 2.0)", lambda b: 2),
    ("{0} + 0.25 * L.column_index({0})", lambda b: b + WIDEST / 4),
    ("{0} - L.row_index({0})", lambda b: b + 129), ("L.name({0} + 1.0, 'named')", lambda b: b + 1),
    ("L.random({0}, 3) * {0}", lambda b: b), ("L.dropout({0}, 0.25, 7)", lambda b: 2 * b),
    ("L.rms_norm({0}, None, 0.25)", lambda b: 5), ("L.layer_norm({0}, None)", lambda b: 5),
    ("L.exp({0} - L.logsumexp({0}))", lambda b: 1),
]  # fmt: skip
WHOLE_BINARY: list[tuple[str, Callable[[float, float], float]]] = [
    ("{0} + {1}", lambda a, b: a + b), ("{0} - {1}", lambda a, b: a + b),
    ("{0} * {1}", lambda a, b: a * b), ("L.maximum({0}, {1})", max), ("L.minimum({0}, {1})", max),
    ("L.where({0} < {1}, {0}, {1})", max), ("L.where({0} >= {1}, 2.0, {1})", lambda a, b: b + 2),
]  # fmt: skip
BINARY = [
    *WHOLE_BINARY,
    ("{0} / ({1} * {1} + 0.5)", lambda a, b: 2 * a),
    ("L.silu({0}) * {1}", lambda a, b: a * b),
    ("L.where({0} <= {1}, {1}, 0.5)", lambda a, b: b + 1),
]


def unary(writer: Writer) -> None:
    """A function of one value."""
    text, bound = writer.choose(WHOLE_UNARY if writer.whole else UNARY)
    v = writer.newest()
    writer.write(text.format(v.name), v.rows, v.columns, bound(v.bound))


def binary(writer: Writer) -> None:
    """A function of two values that broadcast."""
    text, bound = writer.choose(WHOLE_BINARY if writer.whole else BINARY)
    a = writer.newest()
    b = writer.value(lambda v: fit(a, v))
    writer.write(text.format(a.name, b.name), *spread(a, b), bound(a.bound, b.bound))


def compare(writer: Writer) -> None:
    """A condition."""
    a = writer.newest()
    b = writer.value(lambda v: fit(a, v))
    relation = writer.choose(["<", "<=", ">", ">=", "!="])
    writer.write(f"{a.name} {relation} {b.name}", *spread(a, b), 1.0, "boolean")


def combine(writer: Writer) -> None:
    """A condition made of two, or of an index."""
    a = writer.newest(kind="boolean")
    b = writer.value(lambda v: fit(a, v), kind="boolean")
    text = writer.choose(
        ["{0} & {1}", "{0} | {1}", "~{0} | {1}", "{0} & (L.column_index({1}) > 0)"]
    )
    writer.write(text.format(a.name, b.name), *spread(a, b), 1.0, "boolean")


def select(writer: Writer) -> None:
    """A choice by a condition."""
    condition = writer.newest(kind="boolean")
    a = writer.newest(lambda v: fit(condition, v))
    b = writer.value(lambda v: fit(condition, a, v))
    text = writer.choose(
        ["L.where({0}, {1}, {2})", "L.where({0}, {1}, 0.0) - {2}", "{0} * {1} + {2}"]
    )
    shape = spread(condition, a, b)
    writer.write(text.format(condition.name, a.name, b.name), *shape, a.bound + b.bound)


def pick(writer: Writer) -> None:
    """The element of each row at an index, which may be out of range."""
    index, v = writer.value(kind="integer"), writer.newest(lambda v: v.rows in ("M", 1))
    writer.write(f"L.pick({v.name}, {index.name})", "M", 1, v.bound)


def reduce_rows(writer: Writer) -> None:
    """One number a row."""
    v = writer.newest()
    whole = [("row_sum", v.columns * v.bound), ("row_max", v.bound)]
    more = [("row_mean", v.bound), ("row_variance", v.bound**2), ("logsumexp", v.bound + 4)]
    name, bound = writer.choose(whole if writer.whole else whole + more)
    if name == "logsumexp" and writer.choose([False, True]):
        shift = writer.value(lambda u: u.columns == 1 and u.rows in (1, v.rows))
        writer.write(f"L.logsumexp({v.name}, {shift.name})", v.rows, 1, bound + shift.bound)
    else:
        writer.write(f"L.{name}({v.name})", v.rows, 1, bound)


def reduce_columns(writer: Writer) -> None:
    """One number a column; no row has no largest."""
    v = writer.newest()
    rows = writer.rows if v.rows == "M" else int(v.rows)
    options = [("column_sum", rows * v.bound)] + [("column_max", v.bound)] * (rows > 0)
    name, bound = writer.choose(options)
    writer.write(f"L.{name}({v.name})", 1, v.columns, bound)


def reduce_groups(writer: Writer) -> None:
    """One number a group of columns."""
    v = writer.newest()
    size = writer.choose([n for n in range(1, v.columns + 1) if v.columns % n == 0])
    name, bound = writer.choose([("group_sum", size * v.bound), ("group_max", v.bound)])
    writer.write(f"L.{name}({v.name}, {size})", v.rows, v.columns // size, bound)


def halve(writer: Writer) -> None:
    """A part of the columns, or a gated unit of both."""
    v = writer.newest(lambda v: v.columns % 2 == 0)
    half = v.columns // 2
    inner = writer.choose([n for n in range(1, half + 1) if half % n == 0])
    parts = [(f"L.split({v.name}, {inner})[{part}]", v.bound) for part in (0, 1)]
    gated = [(f"L.{name}({v.name})", v.bound**2) for name in ("swiglu", "geglu", "reglu")]
    text, bound = writer.choose(parts if writer.whole else parts + gated)
    writer.write(text, v.rows, half, bound)


def narrow(writer: Writer) -> None:
    """A range of columns."""
    v = writer.newest()
    start = writer.choose(range(v.columns))
    stop = writer.choose(range(start + 1, v.columns + 1))
    writer.write(f"L.columns({v.name}, {start}, {stop})", v.rows, stop - start, v.bound)


def widen(writer: Writer) -> None:
    """Columns several times over, or of two values."""
    a = writer.newest()
    b = writer.value(lambda v: 1 in (a.rows, v.rows) or a.rows == v.rows)
    times, bound = writer.choose([2, 3]), max(a.bound, b.bound)
    rows = spread(a._replace(columns=1), b._replace(columns=1))[0]
    options = [
        (f"L.repeat({a.name}, {times})", a.rows, times * a.columns),
        (f"L.tile({a.name}, {times})", a.rows, times * a.columns),
        (f"L.concat({a.name}, {b.name})", rows, a.columns + b.columns),
    ]
    if a.columns == b.columns:
        inner = writer.choose([n for n in range(1, a.columns + 1) if a.columns % n == 0])
        options.append((f"L.join({a.name}, {b.name}, {inner})", rows, 2 * a.columns))
    writer.write(*writer.choose(options), bound)


def multiply(writer: Writer) -> None:
    """A product of two values, either transposed."""
    a = writer.newest(lambda v: v.rows != 1)
    across = writer.choose([False, True])
    rows, inner = (a.columns, a.rows) if across else (a.rows, a.columns)
    straight = lambda v: v.rows == inner and inner != 1  # noqa: E731 (a choice, named)
    turned = lambda v: v.columns == inner and v.rows not in ("M", 1)  # noqa: E731 (a choice, named)
    b = writer.value(lambda v: straight(v) or turned(v))
    back = not straight(b)
    length = writer.rows if inner == "M" else int(inner)
    text = f"L.matmul({a.name}, {b.name}, {across}, {back})"
    writer.write(text, rows, int(b.rows) if back else b.columns, length * a.bound * b.bound)


def turn(writer: Writer) -> None:
    """A row as a column or a column of known size as a row."""
    v = writer.newest(lambda v: 1 in v[1:3] and v.rows != "M" and v[1:3] != (1, 1))
    writer.write(f"{v.name}.T", v.columns, int(v.rows), v.bound)


def linear(writer: Writer) -> None:
    """F.linear, with and without a bias."""
    x = writer.newest(lambda v: v.rows != 1)
    w = writer.value(lambda v: v.columns == x.columns and v.rows not in ("M", 1))
    bias = ", b" if w.rows == 3 and writer.choose([False, True]) else ""
    bound = x.columns * x.bound * w.bound + 3
    writer.write(f"L.linear({x.name}, {w.name}{bias})", x.rows, int(w.rows), bound)


def norm(writer: Writer) -> None:
    """A norm with a weight, of rows or of heads."""
    v = writer.newest()
    w = writer.value(lambda u: u.rows == 1 and u.columns == v.columns)
    heads = writer.choose([n for n in range(1, v.columns + 1) if v.columns % n == 0])
    text = writer.choose([
        f"L.rms_norm({v.name}, {w.name}, 0.25, offset=1.0)",
        f"L.layer_norm({v.name}, {w.name}, {w.name}, 0.25)",
        f"L.qk_norm({v.name}, {w.name}, {v.columns // heads}, eps=0.25)",
    ])  # fmt: skip
    writer.write(text, v.rows, v.columns, 5 * (w.bound + 1))


def rotate(writer: Writer) -> None:
    """Rotary embedding of some heads by the first columns of a value."""
    v = writer.newest(lambda v: v.columns % 2 == 0)
    sizes = [n for n in range(2, v.columns + 1, 2) if v.columns % n == 0]
    head_dim = writer.choose(sizes)
    heads = writer.choose(range(1, v.columns // head_dim + 1))
    rotary_dim = writer.choose(range(2, head_dim + 1, 2))
    half = rotary_dim // 2
    u = writer.value(lambda u: u.rows in (1, v.rows) and u.columns >= half)
    angle = f"L.columns({u.name}, 0, {half})"
    options = f"heads={heads}, rotary_dim={rotary_dim}, interleaved={writer.choose([False, True])}"
    text = f"L.rope({v.name}, {angle}, L.tanh({angle}), {head_dim}, {options})"
    writer.write(text, v.rows, v.columns, v.bound * (u.bound + 1))


def nothing(writer: Writer) -> None:
    """No line: what an instruction of zeros is, so that hypothesis shrinks to few lines."""


WHOLE_STEPS = [
    nothing, compare, select, pick, reduce_rows, reduce_columns, reduce_groups, halve, narrow,
    widen, multiply, turn, linear, *[unary, binary] * 3,
]  # fmt: skip
STEPS = [*WHOLE_STEPS, combine, norm, rotate, reduce_rows, widen, *[unary] * 10, binary]

CODES = st.lists(st.integers(0, LIMIT - 1), min_size=7, max_size=7)


def written(
    instructions: Sequence[Sequence[int]], columns: int, rows: int, whole: bool = False
) -> Recipe:
    """The recipe of some instructions; the last one chooses what is returned."""
    writer = Writer(columns, rows, whole)
    *lines, last = instructions
    for codes in lines:
        writer.instruction(codes)
    return writer.recipe(last, declared=rows == 1 or last[0] % 2 == 0)


@st.composite
def recipes(draw: st.DrawFn, whole: bool = False) -> Recipe:
    """Random programs and calls; of whole numbers and exact operations if `whole`."""
    instructions = draw(st.lists(CODES, min_size=6, max_size=14))
    return written(instructions, draw(st.integers(1, 7)), draw(st.sampled_from(ROWS)), whole)
