"""Nodes, the builder that makes them, graphs, and the verifier run after every pass.

A node is immutable and made once: the builder interns by content, so equal expressions of one
program are one node, and equality is identity. Arithmetic on nodes makes nodes, which lets both
authors and the compiler's own rules write ordinary expressions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Integral, Real
from typing import Any

from cadenza.core.errors import ProgramError, VerificationError, author_line
from cadenza.core.ops import Attributes, Dim, Op, Type, TypeRuleError
from cadenza.core.refusals import Refusals, other_program, tensor_inside

Number = float | int


class Node(Refusals):
    """One value of a program: an operation over other values, with a type. Made by a Builder."""

    __slots__ = ("attributes", "builder", "id", "inputs", "op", "source", "type")

    def __init__(
        self, builder: Builder, op: Op, inputs: tuple[Node, ...], attributes: Attributes, type: Type
    ) -> None:
        self.builder, self.op, self.inputs = builder, op, inputs
        self.attributes, self.type = attributes, type
        self.id = builder.count()
        self.source = author_line() if builder.tracing else ""

    def __repr__(self) -> str:
        return f"<value {self.op.label} {self.type}>"

    @property
    def shape(self) -> tuple[Dim, Dim]:
        """(rows, columns); rows may be the symbol "M"."""
        return self.type.rows, self.type.columns

    @property
    def T(self) -> Node:
        """The transpose of a column or a row; a matrix transposes inside `L.matmul` only."""
        if self.type.is_matrix:
            raise ProgramError(
                f"a matrix {self.type} has no transpose of its own",
                found="value.T",
                expected="a column or a row",
                write="L.matmul(a, b, transpose_a=..., transpose_b=...), or L.linear(x, w)",
            )
        return self.builder.apply(Op.TRANSPOSE, self)

    def __add__(self, other: object) -> Node:
        return self.builder.apply(Op.ADD, self, other)

    def __radd__(self, other: object) -> Node:
        return self.builder.apply(Op.ADD, other, self)

    def __sub__(self, other: object) -> Node:
        return self.builder.apply(Op.SUB, self, other)

    def __rsub__(self, other: object) -> Node:
        return self.builder.apply(Op.SUB, other, self)

    def __mul__(self, other: object) -> Node:
        return self.builder.apply(Op.MUL, self, other)

    def __rmul__(self, other: object) -> Node:
        return self.builder.apply(Op.MUL, other, self)

    def __truediv__(self, other: object) -> Node:
        return self.builder.apply(Op.DIV, self, other)

    def __rtruediv__(self, other: object) -> Node:
        return self.builder.apply(Op.DIV, other, self)

    def __neg__(self) -> Node:
        return self.builder.apply(Op.NEG, self)

    def __pos__(self) -> Node:
        return self

    def __abs__(self) -> Node:
        return self.builder.apply(Op.ABS, self)

    def __pow__(self, exponent: object) -> Node:
        if isinstance(exponent, Real) and float(exponent).is_integer():
            exponent = int(float(exponent))
        return self.builder.apply(Op.POWER, self, exponent=exponent)

    def __matmul__(self, other: object) -> Node:
        return self.builder.matmul(self, other)

    def __rmatmul__(self, other: object) -> Node:
        return self.builder.matmul(other, self)

    def __lt__(self, other: object) -> Node:
        return self.builder.apply(Op.COMPARE, self, other, relation="<")

    def __le__(self, other: object) -> Node:
        return self.builder.apply(Op.COMPARE, self, other, relation="<=")

    def __gt__(self, other: object) -> Node:
        return self.builder.apply(Op.COMPARE, other, self, relation="<")

    def __ge__(self, other: object) -> Node:
        return self.builder.apply(Op.COMPARE, other, self, relation="<=")

    def __eq__(self, other: object) -> Node:  # type: ignore[override]  # a comparison, as in torch
        return self.builder.apply(Op.COMPARE, self, other, relation="==")

    def __ne__(self, other: object) -> Node:  # type: ignore[override]  # a comparison, as in torch
        return self.builder.apply(Op.COMPARE, self, other, relation="!=")

    def __and__(self, other: object) -> Node:
        return self * other != 0.0

    def __or__(self, other: object) -> Node:
        return self.builder.apply(Op.MAXIMUM, self, other) != 0.0

    __rand__, __ror__ = __and__, __or__

    def __invert__(self) -> Node:
        return self.builder.apply(Op.COMPARE, self, 0.0, relation="==")

    __hash__ = object.__hash__


class Builder:
    """Makes the nodes of one program; equal content gives the same node.

    `autocast` is the dtype that operands of products are cast to, or None.
    """

    def __init__(self, autocast: str | None = None) -> None:
        self.autocast = autocast
        self.tracing = False
        self.names: dict[Node, str] = {}
        self.functions: dict[Node, int] = {}
        self.verified: set[Node] = set()
        self._function: int | None = None
        self._interned: dict[Any, Node] = {}
        self._count = 0

    def count(self) -> int:
        """The next serial number: a node's inputs have smaller ones than it."""
        self._count += 1
        return self._count

    def constant(self, value: Number, rows: Dim = 1, columns: Dim = 1) -> Node:
        """A number as a value, of any shape."""
        return self.make(Op.CONSTANT, (), {"value": value, "rows": rows, "columns": columns})

    def make(self, op: Op, inputs: tuple[Node, ...], attributes: Attributes) -> Node:
        """The node of this content. Raises TypeRuleError when its type rule does not hold."""
        ordered = {name: attributes[name] for name in op.attributes}
        key = (op, tuple(i.id for i in inputs), repr(tuple(ordered.values())))
        node = self._interned.get(key)
        if node is None:
            kind = op.infer(tuple(i.type for i in inputs), ordered)
            node = self._interned[key] = Node(self, op, inputs, ordered, kind)
            if self._function is not None:
                self.functions[node] = self._function
        return node

    @contextmanager
    def one_function(self) -> Iterator[None]:
        """What is made inside is one function of the language: the outermost, a number of it."""
        outer = self._function
        self._function = self.count() if outer is None else outer
        try:
            yield
        finally:
            self._function = outer

    def apply(self, op: Op, *values: object, **attributes: Any) -> Node:
        """`make` for authors: numbers are lifted, and a wrong use is explained."""
        inputs = tuple(self.lift(value, op) for value in values)
        try:
            return self.make(op, inputs, attributes)
        except TypeRuleError as error:
            if error.dims and any(str(d).startswith("M?") for d in error.dims):
                raise Undecided(error.dims) from None
            raise ProgramError(
                f"{op.label} of {' and '.join(_shown(i) for i in inputs)}",
                found=error.found,
                expected=error.expected,
                write=_CURES.get(op, _SHAPES),
            ) from None

    def matmul(
        self, a: object, b: object, transpose_a: bool = False, transpose_b: bool = False
    ) -> Node:
        """The matrix product; under autocast, of operands cast to its dtype."""
        operands = [self.lift(a, Op.MATMUL), self.lift(b, Op.MATMUL)]
        if self.autocast:
            operands = [self.apply(Op.CAST, v, dtype=self.autocast) for v in operands]
        return self.apply(
            Op.MATMUL, *operands, transpose_a=bool(transpose_a), transpose_b=bool(transpose_b)
        )

    def lift(self, value: object, op: Op) -> Node:
        """`value` as a node of this program."""
        if isinstance(value, Node):
            if value.builder is not self:
                raise other_program(f"{op.label} of values that two calls traced")
            return value
        if op is Op.RANDOM and isinstance(value, Integral) and -(2**63) <= int(value) < 2**64:
            return self.constant(int(value))
        if isinstance(value, Real):
            return self.constant(_as_float(value))
        if hasattr(value, "shape"):
            raise tensor_inside(f"a {type(value).__name__} in {op.label}")
        raise ProgramError(
            f"{op.label} of a {type(value).__name__}",
            found=repr(value)[:60],
            expected="a value of the program or a number",
            write="the tensor as an operand, the number (of rows, too) as a constant argument",
        )


def _as_float(number: Any) -> float:
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0.0 else -math.inf  # beyond float64


def _shown(node: Node) -> str:
    return f"{node.attributes['name']} {node.type}" if node.op is Op.INPUT else str(node.type)


class Undecided(Exception):
    """Whether an operand has M rows must be decided; `dims` are the sizes that met."""

    def __init__(self, dims: tuple[Dim, Dim]) -> None:
        super().__init__(dims)
        self.dims = dims


_SHAPES = "sizes that broadcast; L.columns, L.split, L.repeat and L.tile change columns"
_CURES = {
    Op.MATMUL: "x [..., K] and w [N, K] (nn.Linear's layout) with the same K",
    Op.SPLIT: "L.split(x, inner) with columns = outer * 2 * inner",
    Op.JOIN: "L.join(a, b, inner) of two values with the same columns, a multiple of inner",
    Op.COLUMNS: "L.columns(x, start, stop) with 0 <= start < stop <= columns",
    Op.GROUP_SUM: "L.group_sum(x, size) with a size that divides the columns",
    Op.GROUP_MAX: "L.group_max(x, size) with a size that divides the columns",
    Op.REPEAT: "L.repeat(x, times) with a whole number from 1 on",
    Op.TILE: "L.tile(x, times) with a whole number from 1 on",
    Op.LOGSUMEXP: "L.logsumexp(x, shift) with a shift [M, 1]",
    Op.CAST: "L.cast(x, 'float32'), or another floating dtype by name",
    Op.POWER: "x ** 2; for other exponents L.exp(p * L.log(x)), L.sqrt or L.rsqrt",
    Op.WHERE: "L.where(a < b, ...)",
    Op.RANDOM: "L.dropout(x, p, seed) with a whole number, or an int64 tensor of one element",
    Op.TRANSPOSE: "v.T of a row [1, n], or of a column with a known number of rows",
}


def topological(roots: Iterable[Node]) -> list[Node]:
    """All nodes that the roots depend on, each after its inputs, in a fixed order."""
    order: dict[Node, None] = {}
    stack = list(roots)[::-1]
    while stack:
        node = stack[-1]
        missing = [i for i in node.inputs if i not in order]
        if missing:
            stack += missing[::-1]
        else:
            order[stack.pop()] = None
    return list(order)


@dataclass(frozen=True, eq=False)
class Graph:
    """A program: named inputs, labelled outputs, and how the function returned them.

    `structure` is "value", "tuple" or "dict"; labels are the keys of a dict, else positions.
    """

    name: str
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    labels: tuple[str, ...]
    structure: str = "tuple"
    names: dict[Node, str] = field(default_factory=dict)

    @cached_property
    def _order(self) -> tuple[Node, ...]:
        return tuple(topological(self.outputs))

    def nodes(self) -> tuple[Node, ...]:
        """Every node that an output depends on, inputs before uses."""
        return self._order


def equal(first: Graph, second: Graph) -> bool:
    """Whether two graphs are the same program, node by node; names of values don't count."""
    same: dict[Node, Node] = {}
    for a, b in zip(first.nodes(), second.nodes(), strict=False):
        inputs = [same[i] for i in a.inputs]
        alike = a.op is b.op and repr(a.attributes) == repr(b.attributes) and a.type == b.type
        if not alike or len(inputs) != len(b.inputs):
            return False
        if any(x is not y for x, y in zip(inputs, b.inputs, strict=True)):
            return False
        same[a] = b
    return (
        len(first.nodes()) == len(second.nodes())
        and len(first.outputs) == len(second.outputs)
        and all(same[a] is b for a, b in zip(first.outputs, second.outputs, strict=True))
        and [repr(i.attributes) for i in first.inputs]
        == [repr(i.attributes) for i in second.inputs]
        and (first.name, first.labels, first.structure)
        == (second.name, second.labels, second.structure)
    )


def verify(graph: Graph) -> Graph:
    """The graph itself, or VerificationError naming the first invariant that it breaks."""
    seen: set[Node] = set()
    for node in graph.nodes():
        _verify_node(node, seen, graph)
        seen.add(node)
    _hold(all(i.op is Op.INPUT for i in graph.inputs), "an input that is none")
    _hold(len({n.builder for n in (*seen, *graph.inputs)}) < 2, f"{graph.name} mixes programs")
    names = [i.attributes["name"] for i in graph.inputs]
    _hold(len(set(names)) == len(names), f"two inputs share a name: {names}")
    _hold(len(graph.labels) == len(graph.outputs), "labels and outputs differ in number")
    _hold(len(set(graph.labels)) == len(graph.labels), f"two outputs share a label: {graph.labels}")
    single = graph.structure == "value" and len(graph.outputs) == 1
    _hold(single or graph.structure in ("tuple", "dict"), f"structure {graph.structure!r}")
    return graph


def _verify_node(node: Node, seen: set[Node], graph: Graph) -> None:
    if node.op is Op.INPUT:
        _hold_for(node, any(node is i for i in graph.inputs), "is not among the inputs")
    _hold_for(node, seen.issuperset(node.inputs), "is used before it exists")
    if node in node.builder.verified:  # a value never changes
        return
    _hold_for(node, all(i.builder is node.builder for i in node.inputs), "mixes programs")
    _hold_for(node, tuple(node.attributes) == node.op.attributes, "has wrong attributes")
    try:
        inferred = node.op.infer(tuple(i.type for i in node.inputs), node.attributes)
    except TypeRuleError as error:
        raise VerificationError(f"{graph.name}: {node!r}: {error}") from None
    if inferred != node.type:
        raise VerificationError(f"{node!r} should have type {inferred}")
    node.builder.verified.add(node)


def _hold_for(node: Node, condition: bool, problem: str) -> None:
    if not condition:
        raise VerificationError(f"{node!r} {problem}")


def _hold(condition: bool, problem: str) -> None:
    if not condition:
        raise VerificationError(problem)
