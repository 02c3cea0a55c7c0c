"""Derivatives: one row an operation, one line an argument, and one driver.

A row says what the adjoint g of the result y contributes to each argument; None where there is no
derivative. Rows may use NumPy's broadcasting freely: adjoints are kept in broadcast form, and the
driver alone reduces them to an argument's shape or spreads them to a full one.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import reduce
from typing import Any

from cadenza.core import lang as L
from cadenza.core.errors import CadenzaError
from cadenza.core.euler import euler_adjoint, is_positive_column
from cadenza.core.ir import Node, topological
from cadenza.core.ops import REAL, Op, Type
from cadenza.core.storage import is_found_rounded, storage_dtype

Value = Any  # a Node, in the language of values
Contributions = dict[Node, list[tuple[Node, Type]]]
Row = tuple[Callable[..., Value] | None, ...]


def _shared(g: Node, wins: Node, ties: Node) -> Value:
    """g where one argument wins, half of it at a tie, else 0, also of an infinite g."""
    return L.where(wins, g, L.where(ties, 0.5 * g, 0.0))


def _sign(x: Node) -> Value:
    return L.where(x > 0.0, 1.0, L.where(x < 0.0, -1.0, 0.0))


def _first(x: Node, top: Node, index: Node, least: Callable[[Node], Node]) -> Value:
    """1 at the first position of x that equals top, else 0."""
    here = L.where(x == top, index, math.inf)
    return L.where(index == least(here), 1.0, 0.0)


def _as_stored(x: Node, y: Node) -> tuple[Node, Node]:
    """x and its largest y as backward finds them again: rounded, where forward stores x so.

    Rounding is monotone: what was largest still is.
    """
    if not is_found_rounded(x):
        return x, y
    dtype = storage_dtype(x)
    return L.cast(x, dtype), L.cast(y, dtype)


def _first_in_row(x: Node, y: Node) -> Value:
    x, y = _as_stored(x, y)
    return _first(x, y, L.column_index(x), lambda v: -L.row_max(-v))


def _first_in_column(x: Node, y: Node) -> Value:
    x, y = _as_stored(x, y)
    return _first(x, y, L.row_index(x), lambda v: -L.column_max(-v))


def _first_in_group(x: Node, y: Node) -> Value:
    size = y.attributes["size"]
    x, y = _as_stored(x, y)

    def least(v: Value) -> Value:
        return L.repeat(-L.group_max(-v, size), size)

    return _first(x, L.repeat(y, size), L.column_index(x), least)


def _zeros(like: Node, columns: int) -> Value:
    return like.builder.constant(0.0, 1, columns)


def _power(g: Value, y: Node, x: Node) -> Value:
    n = y.attributes["exponent"]
    return g * (n * x ** (n - 1))


def _cast_back(g: Value, y: Node, x: Node) -> Value:
    """As torch's `to`: the adjoint has the dtype of what was cast."""
    dtype = storage_dtype(x)
    return g if dtype == y.attributes["dtype"] else L.cast(g, dtype)


def _join_with_zeros(g: Node, y: Node) -> Value:
    """The adjoint of a split: g at its part, zeros at the other; rules add the two up."""
    zeros, inner = _zeros(g, int(y.type.columns)), y.attributes["inner"]
    return L.join(zeros, g, inner) if y.attributes["part"] else L.join(g, zeros, inner)


def _surround_with_zeros(g: Node, y: Node, x: Node) -> Value:
    """The adjoint of a column range: g in its place, zeros elsewhere."""
    start, stop, width = y.attributes["start"], y.attributes["stop"], int(x.type.columns)
    before = [_zeros(g, start)] if start else []
    after = [_zeros(g, width - stop)] if stop < width else []
    return L.concat(*before, g, *after)


def _part_of_concat(position: int) -> Callable[..., Node]:
    def part(g: Node, y: Node, *xs: Node) -> Value:
        start = sum(int(x.type.columns) for x in xs[:position])
        return L.columns(g, start, start + int(xs[position].type.columns))

    return part


def _sum_of_tiles(g: Value, y: Node, x: Node) -> Value:
    """Halves are added while the number of tiles is even, then single tiles."""
    width, times = int(x.type.columns), int(y.attributes["times"])
    while times % 2 == 0:
        first, second = L.split(g)
        g, times = first + second, times // 2
    total = L.columns(g, 0, width)
    for start in range(width, width * times, width):
        total = total + L.columns(g, start, start + width)
    return total


def _matmul_a(g: Node, y: Node, a: Node, b: Node) -> Value:
    """y = a @ b: da = g @ b.T; y = a.T @ b: da = b @ g.T; b transposed: the other way round."""
    transpose_a, transpose_b = y.attributes["transpose_a"], y.attributes["transpose_b"]
    if transpose_a:
        return L.matmul(b, g, transpose_a=transpose_b, transpose_b=True)
    return L.matmul(g, b, transpose_b=not transpose_b)


def _matmul_b(g: Node, y: Node, a: Node, b: Node) -> Value:
    """y = a @ b: db = a.T @ g; y = a @ b.T: db = g.T @ a; a transposed: the other way round."""
    transpose_a, transpose_b = y.attributes["transpose_a"], y.attributes["transpose_b"]
    if transpose_b:
        return L.matmul(g, a, transpose_a=True, transpose_b=transpose_a)
    return L.matmul(a, g, transpose_a=not transpose_a)


DERIVATIVES: dict[Op, Row] = {
    Op.INPUT: (),
    Op.CONSTANT: (),
    Op.COLUMN_INDEX: (),
    Op.ROW_INDEX: (),
    Op.RANDOM: (None,),
    Op.ADD: (lambda g, y, a, b: g, lambda g, y, a, b: g),
    Op.SUB: (lambda g, y, a, b: g, lambda g, y, a, b: -g),
    Op.MUL: (lambda g, y, a, b: g * b, lambda g, y, a, b: g * a),
    Op.DIV: (lambda g, y, a, b: g / b, lambda g, y, a, b: -(g * y) / b),
    Op.NEG: (lambda g, y, x: -g,),
    Op.POWER: (_power,),
    Op.ABS: (lambda g, y, x: g * _sign(x),),
    Op.MAXIMUM: (
        lambda g, y, a, b: _shared(g, a > b, a == b),
        lambda g, y, a, b: _shared(g, b > a, a == b),
    ),
    Op.MINIMUM: (
        lambda g, y, a, b: _shared(g, a < b, a == b),
        lambda g, y, a, b: _shared(g, b < a, a == b),
    ),
    Op.EXP: (lambda g, y, x: g * y,),
    Op.LOG: (lambda g, y, x: g / x,),
    Op.SQRT: (lambda g, y, x: g / (2.0 * y),),
    Op.RSQRT: (lambda g, y, x: g * (-0.5 * y**3),),
    Op.SIGMOID: (lambda g, y, x: g * (y * (1.0 - y)),),
    Op.TANH: (lambda g, y, x: g * (1.0 - y * y),),
    Op.ERF: (lambda g, y, x: g * (2.0 / math.sqrt(math.pi) * L.exp(-(x * x))),),
    Op.COMPARE: (None, None),
    Op.WHERE: (
        None,
        lambda g, y, c, a, b: L.where(c, g, 0.0),
        lambda g, y, c, a, b: L.where(c, 0.0, g),
    ),
    Op.CAST: (_cast_back,),
    Op.SPLIT: (lambda g, y, x: _join_with_zeros(g, y),),
    Op.JOIN: (
        lambda g, y, a, b: L.split(g, y.attributes["inner"])[0],
        lambda g, y, a, b: L.split(g, y.attributes["inner"])[1],
    ),
    Op.COLUMNS: (_surround_with_zeros,),
    Op.CONCAT: (),  # one part an argument, however many there are: _row makes them
    Op.REPEAT: (lambda g, y, x: L.group_sum(g, y.attributes["times"]),),
    Op.TILE: (_sum_of_tiles,),
    Op.ROW_SUM: (lambda g, y, x: g,),
    Op.ROW_MAX: (lambda g, y, x: g * _first_in_row(x, y),),
    Op.ROW_VARIANCE: (lambda g, y, x: g * (2.0 / int(x.type.columns) * (x - L.row_mean(x))),),
    Op.LOGSUMEXP: (lambda g, y, x, s: g * L.exp((x - s) - y), lambda g, y, x, s: -g),
    Op.COLUMN_SUM: (lambda g, y, x: g,),
    Op.COLUMN_MAX: (lambda g, y, x: g * _first_in_column(x, y),),
    Op.GROUP_SUM: (lambda g, y, x: L.repeat(g, y.attributes["size"]),),
    Op.GROUP_MAX: (lambda g, y, x: L.repeat(g, y.attributes["size"]) * _first_in_group(x, y),),
    Op.TRANSPOSE: (lambda g, y, x: g.T,),
    Op.MATMUL: (_matmul_a, _matmul_b),
}  # fmt: skip

# These take an adjoint in broadcast form: [M, 1] may stand for [M, N].
BROADCAST_FORM = {op for op in Op if op.group == "elementwise"} | {
    Op.ROW_SUM, Op.ROW_MAX, Op.ROW_VARIANCE, Op.LOGSUMEXP, Op.COLUMN_SUM, Op.COLUMN_MAX,
}  # fmt: skip


def differentiate(
    outputs: Iterable[tuple[Node, Node]], inputs: Iterable[Node], euler: bool = True
) -> dict[Node, Node]:
    """The gradients of `inputs` given pairs (output, its adjoint).

    An input that no output depends on is absent. The work done is for these inputs alone. With
    `euler`, scalings get their adjoint from what they scale, so that this alone is kept.
    """
    pairs, wanted = list(outputs), list(inputs)
    order = topological(output for output, _ in pairs)
    needed = _needed(order, wanted)
    contributions: Contributions = defaultdict(list)
    for output, adjoint in pairs:
        contributions[output].append((adjoint, output.type))
    adjoints: dict[Node, Node] = {}
    exits, mixed = [output for output, _ in pairs], _is_mixed(order, pairs)
    for node in reversed(order):
        if node in contributions and node in needed:
            rule = euler_adjoint(node, order, exits, adjoints) if euler else None
            adjoints[node] = _adjoint(contributions[node], node.type) if rule is None else rule
            g = _multiplied(adjoints[node], node) if mixed else adjoints[node]
            _backpropagate(node, g, contributions, needed)
            if euler and node.op is Op.MUL and node.inputs[1] in needed:
                _from_result(node, adjoints[node], contributions)
    return {i: spread(adjoints[i], i.type) for i in wanted if i in adjoints}


def _is_mixed(order: list[Node], pairs: list[tuple[Node, Node]]) -> bool:
    """Whether an adjoint may have another dtype than its product; autocast sees to it itself."""
    if any(output.builder.autocast for output, _ in pairs):
        return False
    given = [*(n for n in order if n.op is Op.INPUT), *(adjoint for _, adjoint in pairs)]
    dtypes = {n.attributes.get("dtype") for n in given if n.type.is_matrix and n.type.kind == REAL}
    return len(dtypes) > 1 or any(n.op is Op.CAST for n in order)


def _multiplied(g: Node, node: Node) -> Node:
    """The adjoint of a product in the dtype of the product, as torch has it.

    It is wider where a sum over groups, or a residual of float32, is returned beside it.
    """
    if node.op is not Op.MATMUL or not node.type.is_matrix:
        return g
    g, dtype = spread(g, node.type), storage_dtype(node)
    return g if storage_dtype(g) == dtype else L.cast(g, dtype)


def _needed(order: list[Node], wanted: list[Node]) -> set[Node]:
    needed = set(wanted)
    for node in order:
        if any(i in needed for i in node.inputs):
            needed.add(node)
    return needed


def _adjoint(contributions: list[tuple[Node, Type]], shape: Type) -> Node:
    """The sum of contributions; those spread over the same shape are added before reducing."""
    by_shape: dict[Type, Node] = {}
    for value, full in contributions:
        by_shape[full] = by_shape[full] + value if full in by_shape else value
    reduced = [unbroadcast(value, full, shape) for full, value in by_shape.items()]
    return reduce(operator.add, reduced)


def _backpropagate(node: Node, g: Node, contributions: Contributions, needed: set[Node]) -> None:
    g = g if node.op in BROADCAST_FORM else spread(g, node.type)
    for argument, row in zip(node.inputs, _row(node), strict=True):
        if argument in needed and row is not None and argument.type.kind == REAL:
            full = _full_type(node, argument)
            contributions[argument].append((row(g, node, *node.inputs), full))


def _from_result(node: Node, g: Node, contributions: Contributions) -> None:
    """y = x · c: dc = rowsum(g · y) / c, so that y is kept and x need not be."""
    scaling = node.inputs[1]
    if is_positive_column(scaling):  # its newest contribution is that of this product
        contributions[scaling][-1] = (g * node / scaling, node.type)


def _row(node: Node) -> Row:
    if node.op is Op.CONCAT:
        return tuple(_part_of_concat(i) for i in range(len(node.inputs)))
    row = DERIVATIVES.get(node.op)
    if row is None:
        raise CadenzaError(f"{node.op.label} has no row in the table of derivatives")
    return row


def _full_type(node: Node, argument: Node) -> Type:
    """The shape over which an argument was broadcast by its operation."""
    if node.op.group == "elementwise":
        return node.type
    if node.op in (Op.JOIN, Op.CONCAT, Op.LOGSUMEXP):
        return argument.type._replace(rows=node.type.rows)
    return argument.type


def spread(g: Node, shape: Type) -> Node:
    """g in the full shape that it stands for."""
    rows = shape.rows if g.type.rows == 1 else 1
    columns = shape.columns if g.type.columns == 1 else 1
    if (rows, columns) == (1, 1):
        return g
    return g + g.builder.constant(0.0, rows, columns)


def unbroadcast(g: Node, full: Type, shape: Type) -> Node:
    """Sums g, which stands for a value of type `full`, over the axes that `shape` spread over."""
    if shape.columns == 1 and full.columns != 1:
        g = L.row_sum(g) if g.type.columns != 1 else g * float(int(full.columns))
    if shape.rows == 1 and full.rows != 1:
        g = L.column_sum(g if g.type.rows != 1 else spread(g, full._replace(columns=1)))
    return g
