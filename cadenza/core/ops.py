"""The closed set of operations: one line an operation, with its group, attributes and type rule.

Every value is two-dimensional, `[rows, columns]`. Rows may be the symbol M, the number of tokens,
which no program knows; all other sizes are known. Everything an author can write is a composition
of these. Other tables give each operation its meaning (backends/reference), its derivative (vjp)
and its printed form (text); a test demands the rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

Dim = int | str
M: Dim = "M"
REAL, INTEGER, BOOLEAN = "real", "integer", "boolean"
FLOATS = ("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
MANY = -1
RELATIONS = ("<", "<=", "==", "!=")


class Type(NamedTuple):
    """`[rows, columns]` and the kind of number: real, integer or boolean."""

    rows: Dim
    columns: Dim
    kind: str = REAL

    def __str__(self) -> str:
        return f"[{self.rows}, {self.columns}]"

    @property
    def is_matrix(self) -> bool:
        """Whether both sizes differ from 1: stored in the operands' dtype, not in float32."""
        return self.rows != 1 and self.columns != 1


class TypeRuleError(Exception):
    """A type rule does not hold; `dims` are the two sizes that disagree, where two do."""

    def __init__(self, found: str, expected: str, dims: tuple[Dim, Dim] | None = None) -> None:
        super().__init__(f"found {found}, expected {expected}")
        self.found, self.expected, self.dims = found, expected, dims


Attributes = dict[str, Any]
TypeRule = Callable[..., Type]


def broadcast_dim(a: Dim, b: Dim, axis: str) -> Dim:
    """NumPy's rule for one axis, "rows" or "columns"."""
    if a == b or b == 1:
        return a
    if a == 1:
        return b
    raise TypeRuleError(f"{a} and {b} {axis}", f"as many {axis}, or 1", (a, b))


def broadcast(*types: Type) -> Type:
    """The common shape of values under NumPy's rule; the kind is real."""
    rows, columns = types[0].rows, types[0].columns
    for other in types[1:]:
        rows = broadcast_dim(rows, other.rows, "rows")
        columns = broadcast_dim(columns, other.columns, "columns")
    return Type(rows, columns)


def _require(condition: bool, found: str, expected: str) -> None:
    if not condition:
        raise TypeRuleError(found, expected)


def _known(dim: Dim, what: str) -> int:
    if isinstance(dim, int):
        return dim
    raise TypeRuleError(f"{what} of size {dim}", "a size known when tracing", (dim, 0))


def _elementwise(*types: Type, **_: Any) -> Type:
    return broadcast(*types)


def _power(x: Type, exponent: Any) -> Type:
    whole = isinstance(exponent, int) and not isinstance(exponent, bool)
    _require(whole, f"exponent {exponent!r}", "a whole number")
    return Type(x.rows, x.columns)


def _compare(a: Type, b: Type, relation: str) -> Type:
    _require(relation in RELATIONS, f"relation {relation!r}", f"one of {', '.join(RELATIONS)}")
    return broadcast(a, b)._replace(kind=BOOLEAN)


def _where(condition: Type, a: Type, b: Type) -> Type:
    _require(condition.kind == BOOLEAN, f"a {condition.kind} condition", "a comparison")
    return broadcast(condition, a, b)


def _cast(x: Type, dtype: str) -> Type:
    _require(dtype in FLOATS, f"dtype {dtype!r}", f"one of {', '.join(FLOATS)}")
    return Type(x.rows, x.columns)


def _leaf_shape(kind: str) -> TypeRule:
    return lambda rows, columns, **_: Type(rows, columns, kind)


def _constant(value: Any, rows: Dim, columns: Dim) -> Type:
    return Type(rows, columns, INTEGER if isinstance(value, int) else REAL)


def _random(seed: Type, rows: Dim, columns: Dim) -> Type:
    _require(seed == Type(1, 1, INTEGER), f"a {seed.kind} seed {seed}", "one whole number")
    return Type(rows, columns)


def _pairs(columns: int, inner: int) -> None:
    fits = isinstance(inner, int) and inner > 0 and columns % (2 * inner) == 0
    _require(fits, f"{columns} columns, inner={inner!r}", "columns that divide by 2 * inner")


def _split(x: Type, part: int, inner: int) -> Type:
    columns = _known(x.columns, "columns")
    _pairs(columns, inner)
    _require(part in (0, 1), f"part {part!r}", "0 or 1")
    return Type(x.rows, columns // 2)


def _join(a: Type, b: Type, inner: int) -> Type:
    _require(a.columns == b.columns, f"{a} and {b}", "two values with as many columns")
    columns = 2 * _known(a.columns, "columns")
    _pairs(columns, inner)
    return broadcast(a, b)._replace(columns=columns)


def _columns(x: Type, start: int, stop: int) -> Type:
    columns = _known(x.columns, "columns")
    whole = isinstance(start, int) and isinstance(stop, int)
    fits = whole and 0 <= start < stop <= columns
    _require(fits, f"range {start}:{stop}", f"a range within 0:{columns}")
    return Type(x.rows, stop - start)


def _concat(*types: Type) -> Type:
    rows = broadcast(*(t._replace(columns=1) for t in types)).rows
    return Type(rows, sum(_known(t.columns, "columns") for t in types))


def _times(x: Type, times: int) -> Type:
    _require(isinstance(times, int) and times > 0, f"times={times!r}", "a positive whole number")
    return Type(x.rows, _known(x.columns, "columns") * times)


def _row_reduction(x: Type) -> Type:
    return Type(x.rows, 1)


def _logsumexp(x: Type, shift: Type) -> Type:
    _require(shift.columns == 1, f"a shift {shift}", "one number a row, or one number")
    return broadcast(x, shift)._replace(columns=1)


def _column_reduction(x: Type) -> Type:
    return Type(1, x.columns)


def _group_reduction(x: Type, size: int) -> Type:
    columns = _known(x.columns, "columns")
    fits = isinstance(size, int) and size > 0 and columns % size == 0
    _require(fits, f"{columns} columns in groups of {size!r}", "columns that divide by the group")
    return Type(x.rows, columns // size)


def _transpose(x: Type) -> Type:
    _require(not x.is_matrix, f"a matrix {x}", "a column [n, 1] or a row [1, n]")
    return Type(x.columns, _known(x.rows, "columns of the transpose"))


def _matmul(a: Type, b: Type, transpose_a: bool, transpose_b: bool) -> Type:
    rows, inner_a = (a.columns, a.rows) if transpose_a else (a.rows, a.columns)
    inner_b, columns = (b.columns, b.rows) if transpose_b else (b.rows, b.columns)
    if inner_a != inner_b:
        shapes = f"{a}{'.T' if transpose_a else ''} @ {b}{'.T' if transpose_b else ''}"
        raise TypeRuleError(shapes, "equal contracted sizes", (inner_a, inner_b))
    return Type(rows, _known(columns, "columns of the product"))


@dataclass(frozen=True, eq=False)
class Rule:
    """What the language knows of an operation: its group, inputs, attributes and type rule."""

    group: str
    arity: int
    attributes: tuple[str, ...]
    infer: TypeRule


def _rule(group: str, arity: int, infer: TypeRule, attributes: str = "") -> Rule:
    return Rule(group, arity, tuple(attributes.split()), infer)


class Op(Enum):
    """The closed set. `op.value` is its rule."""

    INPUT = _rule("leaf", 0, lambda name, dtype, rows, columns, kind: Type(rows, columns, kind),
                  "name dtype rows columns kind")  # fmt: skip
    CONSTANT = _rule("leaf", 0, _constant, "value rows columns")
    COLUMN_INDEX = _rule("leaf", 0, _leaf_shape(INTEGER), "rows columns")
    ROW_INDEX = _rule("leaf", 0, _leaf_shape(INTEGER), "rows columns")
    RANDOM = _rule("leaf", 1, _random, "rows columns")

    ADD = _rule("elementwise", 2, _elementwise)
    SUB = _rule("elementwise", 2, _elementwise)
    MUL = _rule("elementwise", 2, _elementwise)
    DIV = _rule("elementwise", 2, _elementwise)
    NEG = _rule("elementwise", 1, _elementwise)
    POWER = _rule("elementwise", 1, _power, "exponent")
    ABS = _rule("elementwise", 1, _elementwise)
    MAXIMUM = _rule("elementwise", 2, _elementwise)
    MINIMUM = _rule("elementwise", 2, _elementwise)
    EXP = _rule("elementwise", 1, _elementwise)
    LOG = _rule("elementwise", 1, _elementwise)
    SQRT = _rule("elementwise", 1, _elementwise)
    RSQRT = _rule("elementwise", 1, _elementwise)
    SIGMOID = _rule("elementwise", 1, _elementwise)
    TANH = _rule("elementwise", 1, _elementwise)
    ERF = _rule("elementwise", 1, _elementwise)
    COMPARE = _rule("elementwise", 2, _compare, "relation")
    WHERE = _rule("elementwise", 3, _where)
    CAST = _rule("elementwise", 1, _cast, "dtype")

    SPLIT = _rule("columns", 1, _split, "part inner")
    JOIN = _rule("columns", 2, _join, "inner")
    COLUMNS = _rule("columns", 1, _columns, "start stop")
    CONCAT = _rule("columns", MANY, _concat)
    REPEAT = _rule("columns", 1, _times, "times")
    TILE = _rule("columns", 1, _times, "times")

    ROW_SUM = _rule("reduction", 1, _row_reduction)
    ROW_MAX = _rule("reduction", 1, _row_reduction)
    ROW_VARIANCE = _rule("reduction", 1, _row_reduction)
    LOGSUMEXP = _rule("reduction", 2, _logsumexp)
    COLUMN_SUM = _rule("reduction", 1, _column_reduction)
    COLUMN_MAX = _rule("reduction", 1, _column_reduction)
    GROUP_SUM = _rule("reduction", 1, _group_reduction, "size")
    GROUP_MAX = _rule("reduction", 1, _group_reduction, "size")

    TRANSPOSE = _rule("vector", 1, _transpose)
    MATMUL = _rule("product", 2, _matmul, "transpose_a transpose_b")

    __hash__ = object.__hash__  # Enum's is a function of Python: too slow for what asks most

    @property
    def group(self) -> str:
        """leaf, elementwise, columns, reduction, vector or product."""
        return self._value_.group

    @property
    def arity(self) -> int:
        """How many values it takes; MANY for one or more."""
        return self._value_.arity

    @property
    def attributes(self) -> tuple[str, ...]:
        """Names of the compile-time arguments, in order."""
        return self._value_.attributes

    @property
    def label(self) -> str:
        """The name in printed programs."""
        return self.name.lower()

    def infer(self, types: tuple[Type, ...], attributes: Attributes) -> Type:
        """The type of the result. Raises TypeRuleError when the rule does not hold."""
        expected = "at least one" if self.arity == MANY else str(self.arity)
        fits = len(types) >= 1 if self.arity == MANY else len(types) == self.arity
        _require(fits, f"{len(types)} values", expected)
        return self._value_.infer(*types, **attributes)
