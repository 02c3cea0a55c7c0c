"""Euler's rule: the adjoint of a positive scaling from what it scales, not from what made that.

If all effect of a column c > 0 passes through one value y, and y is affine in c, then
c · dc = rowsum(dy · (y − y at c = 0)). So nothing between c and y has to be kept: of a rotation the
output, of a norm's factor the scaled product. It never goes through a nonlinearity.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from cadenza.core import lang as L
from cadenza.core.algebra import kind
from cadenza.core.ir import Node, topological
from cadenza.core.ops import Op
from cadenza.core.rewrite import rebuild

POSITIVE = (Op.RSQRT,)  # an exponential may underflow to 0
ADDITIVE = (Op.ADD, Op.SUB, Op.NEG, Op.SPLIT, Op.JOIN, Op.COLUMNS, Op.CONCAT)


def is_positive_column(node: Node) -> bool:
    """Whether a value is a column that is positive by its operation."""
    return kind(node) == "column" and node.op in POSITIVE


def euler_adjoint(
    column: Node, order: Sequence[Node], outputs: Sequence[Node], adjoints: Mapping[Node, Node]
) -> Node | None:
    """The adjoint of `column` by Euler's rule, None where the rule does not hold.

    `order` are the nodes of the program in topological order, `adjoints` those known so far.
    """
    if not is_positive_column(column):
        return None
    for value in reversed(_passages(column, order, outputs)):
        rest = _at_zero(value, column)
        if value in adjoints and (rest is None or _of_vectors(rest)):
            changing = value if rest is None else value - rest
            summed: Node = L.row_sum(adjoints[value] * changing)
            return summed / column
    return None


def _passages(column: Node, order: Sequence[Node], outputs: Sequence[Node]) -> list[Node]:
    """The values, affine in `column`, that all of its effect passes through, in order."""
    uses = Counter(i for node in order for i in node.inputs)
    uses.update(outputs)
    open_ends, affine, found = {column}, {column}, []
    for node in order:
        inside = [i for i in node.inputs if i in affine]
        if not inside:
            continue
        if not _affine(node, inside) or node.type.rows != column.type.rows:
            break
        affine.add(node)
        open_ends.add(node)
        uses.subtract(inside)
        open_ends.difference_update(i for i in inside if not uses[i])
        if open_ends == {node}:
            found.append(node)
    return found


def _affine(node: Node, inside: list[Node]) -> bool:
    if node.op in ADDITIVE:
        return True
    if node.op is Op.MUL:
        return len(inside) == 1 and node.inputs[0] is not node.inputs[1]
    return node.op is Op.DIV and len(inside) == 1 and inside[0] is node.inputs[0]


def _at_zero(output: Node, column: Node) -> Node | None:
    """The output where the column is 0; None stands for 0."""
    values: dict[Node, Node | None] = {column: None}
    for node in topological([output]):
        if node not in values:
            values[node] = _substituted(node, [values[i] for i in node.inputs])
    return values[output]


def _substituted(node: Node, inputs: list[Node | None]) -> Node | None:
    given = [i for i in inputs if i is not None]
    if len(given) == len(inputs):
        return rebuild(node, given)
    if not given or node.op not in ADDITIVE:
        return None
    if node.op in (Op.ADD, Op.SUB):
        left = given[0] if node.op is Op.ADD or inputs[0] is not None else -given[0]
        return left if left.type.columns == node.type.columns else left + _zeros(node)
    filled = [_zeros(i) if v is None else v for v, i in zip(inputs, node.inputs, strict=True)]
    return rebuild(node, filled)


def _zeros(like: Node) -> Node:
    return like.builder.constant(0.0, 1, like.type.columns)


def _of_vectors(node: Node) -> bool:
    """Whether a matrix is made of columns and rows alone, so that nothing has to be kept for it."""
    if not node.type.is_matrix:
        return True
    return bool(node.inputs) and node.op is not Op.MATMUL and all(map(_of_vectors, node.inputs))
