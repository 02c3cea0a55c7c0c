"""Simplification: equations that hold for every value and never add work.

Derivatives are written plainly and leave ones, zeros and halves behind; these rules remove them.
Each is tested by value and by firing.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from itertools import pairwise

from cadenza.core import lang as L
from cadenza.core.ir import Graph, Node
from cadenza.core.ops import Op
from cadenza.core.rewrite import Pattern, Rule, equation, rewrite_graph

_FOLD: dict[Op, Callable[..., float]] = {
    Op.ADD: operator.add, Op.SUB: operator.sub, Op.MUL: operator.mul, Op.NEG: operator.neg,
}  # fmt: skip


def _join(a: Pattern, b: Pattern, inner: Pattern) -> Pattern:
    return Pattern(Op.JOIN, a, b, inner=inner)


def _split(x: Pattern, part: int, inner: Pattern) -> Pattern:
    return Pattern(Op.SPLIT, x, part=part, inner=inner)


def _cast(x: Pattern, dtype: Pattern) -> Pattern:
    return Pattern(Op.CAST, x, dtype=dtype)


def _transpose(x: Pattern) -> Pattern:
    return Pattern(Op.TRANSPOSE, x)


def fold_constants(node: Node) -> Node | None:
    """An operation on constants is a constant."""
    if node.op not in _FOLD or any(i.op is not Op.CONSTANT for i in node.inputs):
        return None
    value = _FOLD[node.op](*(i.attributes["value"] for i in node.inputs))
    return node.builder.constant(float(value), node.type.rows, node.type.columns)


def one_to_the_power(node: Node) -> Node | None:
    """x**0 = 1."""
    if node.op is Op.POWER and node.attributes["exponent"] == 0:
        return node.builder.constant(1.0, node.type.rows, node.type.columns)
    return None


def cast_of_input(node: Node) -> Node | None:
    """cast(input, its own dtype) = input."""
    if node.op is Op.CAST and node.inputs[0].op is Op.INPUT:
        same = node.inputs[0].attributes["dtype"] == node.attributes["dtype"]
        return node.inputs[0] if same else None
    return None


def trivial_columns(node: Node) -> Node | None:
    """All columns of x, one repetition, one tile, groups of one, one part: x itself."""
    single = node.op in (Op.COLUMNS, Op.REPEAT, Op.TILE, Op.GROUP_SUM, Op.GROUP_MAX, Op.ROW_SUM,
                         Op.ROW_MAX, Op.CONCAT)  # fmt: skip
    same = single and len(node.inputs) == 1 and node.inputs[0].type == node.type
    return node.inputs[0] if same else None


def group_of_all(node: Node) -> Node | None:
    """A reduction over one group of all columns is a reduction of the row."""
    whole = {Op.GROUP_SUM: Op.ROW_SUM, Op.GROUP_MAX: Op.ROW_MAX}.get(node.op)
    if whole is None or node.type.columns != 1:
        return None
    return node.builder.make(whole, node.inputs, {})


def one_column(node: Node) -> Node | None:
    """One column of a matrix is a sum of the row with all others 0: a finished reduction."""
    if node.op not in (Op.COLUMNS, Op.SPLIT) or node.type.columns != 1:
        return None
    x = node.inputs[0]
    if not x.type.is_matrix:
        return None
    position = node.attributes["start" if node.op is Op.COLUMNS else "part"]
    here = L.column_index(x) == float(position)
    single: Node = L.row_sum(L.where(here, x, 0.0))
    return single


def columns_of_scaled(node: Node) -> Node | None:
    """columns(x · c) = columns(x) · c for a column c: each range has a scaling of its own."""
    if node.op is not Op.COLUMNS or node.inputs[0].op is not Op.MUL:
        return None
    x, column = node.inputs[0].inputs
    if x.type.columns == 1 or column.type.columns != 1:
        return None
    narrow = node.builder.make(Op.COLUMNS, (x,), node.attributes)
    return node.builder.make(Op.MUL, (narrow, column), {})


def outer_product(node: Node) -> Node | None:
    """A product contracted over one column, a [M, 1] @ b [1, N], is a * b."""
    if node.op is not Op.MATMUL:
        return None
    sides = list(zip(node.inputs, node.attributes.values(), strict=True))
    (a, turn_a), (b, turn_b) = sides
    if (a.type.rows if turn_a else a.type.columns) != 1:
        return None
    column, row = (a.T if turn_a else a), (b.T if turn_b else b)
    return node.builder.make(Op.MUL, (column, row), {})


def columns_of_columns(node: Node) -> Node | None:
    """columns(columns(x, a, …), b, c) = columns(x, a + b, a + c)."""
    if node.op is not Op.COLUMNS or node.inputs[0].op is not Op.COLUMNS:
        return None
    start = node.inputs[0].attributes["start"]
    shifted = {name: start + value for name, value in node.attributes.items()}
    return node.builder.make(Op.COLUMNS, node.inputs[0].inputs, shifted)


def columns_of_concat(node: Node) -> Node | None:
    """A column range that is one part of a concatenation is that part."""
    if node.op is not Op.COLUMNS or node.inputs[0].op is not Op.CONCAT:
        return None
    start = 0
    for part in node.inputs[0].inputs:
        if start == node.attributes["start"] and part.type == node.type:
            return part
        start += int(part.type.columns)
    return None


def sum_of_concats(node: Node) -> Node | None:
    """concat(a, b) + concat(c, d) = concat(a + c, b + d), where cuts fall within zeros."""
    if node.op is not Op.ADD or any(i.op is not Op.CONCAT for i in node.inputs):
        return None
    if node.inputs[0].type.columns != node.inputs[1].type.columns:
        return None
    cuts = sorted({cut for i in node.inputs for cut in _cuts(i)})
    pieces = [_pieces(i, cuts) for i in node.inputs]
    if None in pieces:
        return None
    left, right = (p for p in pieces if p is not None)
    sums = [node.builder.make(Op.ADD, pair, {}) for pair in zip(left, right, strict=True)]
    return node.builder.make(Op.CONCAT, tuple(sums), {})


def _cuts(concat: Node) -> list[int]:
    cuts, stop = [], 0
    for part in concat.inputs:
        stop += int(part.type.columns)
        cuts.append(stop)
    return cuts


def _pieces(concat: Node, cuts: list[int]) -> list[Node] | None:
    """The parts of a concatenation cut further at `cuts`; None if that would cut a value."""
    pieces: list[Node] = []
    start = 0
    for part, stop in zip(concat.inputs, _cuts(concat), strict=True):
        inside = [start, *(c for c in cuts if start < c < stop), stop]
        if len(inside) > 2 and part.op is not Op.CONSTANT:
            return None
        widths = [b - a for a, b in pairwise(inside)]
        pieces += [part] if len(widths) == 1 else [_narrow(part, width) for width in widths]
        start = stop
    return pieces


def _narrow(constant: Node, columns: int) -> Node:
    return constant.builder.constant(constant.attributes["value"], constant.type.rows, columns)


SIMPLIFY: dict[str, Rule] = {
    "x + 0 = x": equation(lambda x: (x + 0.0, x)),
    "0 + x = x": equation(lambda x: (0.0 + x, x)),
    "x - 0 = x": equation(lambda x: (x - 0.0, x)),
    "0 - x = -x": equation(lambda x: (0.0 - x, -x)),
    "x * 1 = x": equation(lambda x: (x * 1.0, x)),
    "1 * x = x": equation(lambda x: (1.0 * x, x)),
    "x / 1 = x": equation(lambda x: (x / 1.0, x)),
    "x ** 1 = x": equation(lambda x: (x**1, x)),
    "x ** 0 = 1": one_to_the_power,
    "-(-x) = x": equation(lambda x: (Pattern(Op.NEG, -x), x)),
    "x + (-y) = x - y": equation(lambda x, y: (x + (-y), x - y)),
    "(-x) + y = y - x": equation(lambda x, y: ((-x) + y, y - x)),
    "x - (-y) = x + y": equation(lambda x, y: (x - (-y), x + y)),
    "x + (-y) * z = x - y * z": equation(lambda x, y, z: (x + (-y) * z, x - y * z)),
    "constants fold": fold_constants,
    "cast(cast(x, d), d) = cast(x, d)": equation(lambda x, d: (_cast(_cast(x, d), d), _cast(x, d))),
    "cast(input, its dtype) = input": cast_of_input,
    "x.T.T = x": equation(lambda x: (_transpose(_transpose(x)), x)),
    "split(join(a, b), 0) = a": equation(lambda a, b, n: (_split(_join(a, b, n), 0, n), a)),
    "split(join(a, b), 1) = b": equation(lambda a, b, n: (_split(_join(a, b, n), 1, n), b)),
    "join of both parts = x": equation(
        lambda x, n: (_join(_split(x, 0, n), _split(x, 1, n), n), x)
    ),
    "join + join = join of sums": equation(
        lambda a, b, c, d, n: (_join(a, b, n) + _join(c, d, n), _join(a + c, b + d, n))
    ),
    "column @ row = column * row": outer_product,
    "trivial columns": trivial_columns,
    "columns of columns": columns_of_columns,
    "columns of concat": columns_of_concat,
    "concat + concat = concat of sums": sum_of_concats,
}


# What kernels make in another way: a column that crosses kernels is a finished reduction.
LOWER: dict[str, Rule] = {
    "a group of all columns is the row": group_of_all,
    "one column is a reduction": one_column,
    "columns(x * c) = columns(x) * c": columns_of_scaled,
}


def lower(graph: Graph) -> Graph:
    """The same program in the operations that kernels make."""
    return rewrite_graph(graph, list(LOWER.values()))


def simplify(graph: Graph) -> Graph:
    """The same program without the work that the equations of SIMPLIFY remove."""
    return rewrite_graph(graph, list(SIMPLIFY.values()))
