"""When a value exists: the one notion that deferral, sharing and placement ask.

A stage is (i, d): (i, 0) is tile by tile inside product kernel i, (i, d) is d passes after it, and
(0, 0) is at hand from the start. A reduction of a matrix is finished one pass after its argument,
and a value that no tile can hold is made one pass after its product.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import NamedTuple

from cadenza.core.ir import Node, topological
from cadenza.core.locality import Ties
from cadenza.core.ops import Op


class Stage(NamedTuple):
    """Inside product kernel `kernel` when `passes` is 0, else that many passes after it."""

    kernel: int
    passes: int

    @property
    def in_product(self) -> bool:
        """Whether a value of this stage exists in a product kernel, tile by tile."""
        return self.kernel > 0 and self.passes == 0

    @property
    def later(self) -> Stage:
        """One pass later."""
        return Stage(self.kernel, self.passes + 1)


AT_HAND = Stage(0, 0)
ACROSS = {op for op in Op if op.group == "reduction"} - {Op.GROUP_SUM, Op.GROUP_MAX}
Later = Callable[[Node, Stage], Stage]


def always_later(node: Node, stage: Stage) -> Stage:
    """For deferral a reduction counts as later than its argument wherever that is made."""
    return stage.later


def is_vector(node: Node) -> bool:
    """Whether a value is a column, a row or a scalar."""
    return not node.type.is_matrix


def is_product(node: Node) -> bool:
    """Whether a value is made by a product kernel: a matrix product that is a matrix."""
    return node.op is Op.MATMUL and node.type.is_matrix


def reduces_matrix(node: Node) -> bool:
    """Whether a value is a reduction over all rows or columns of a matrix."""
    return node.op in ACROSS and node.inputs[0].type.is_matrix


class Readiness:
    """The stage of each value; product kernels are numbered in the order they are asked for.

    `ready` holds values that exist from the start. `later` gives the stage of a finished
    reduction from that of its argument.
    """

    def __init__(self, ready: Container[Node] = (), later: Later = always_later) -> None:
        self.ready, self.later = ready, later
        self.products: list[Node] = []
        self._known: dict[Node, Stage] = {}
        self._tied: dict[int, Ties] = {}

    def stage(self, node: Node) -> Stage:
        """When the value exists."""
        if node not in self._known:
            self._known[node] = self._find(node)
        return self._known[node]

    def _find(self, node: Node) -> Stage:
        if node in self.ready or not node.inputs:
            return AT_HAND
        latest = max(self.stage(i) for i in node.inputs)
        if is_product(node):
            self.products.append(node)
            return Stage(len(self.products), 0)
        if node.op is Op.MATMUL:
            made = topological(i for i in node.inputs if i not in self.ready)
            waits = any(n.inputs and (n.type.is_matrix or reduces_matrix(n)) for n in made)
            return latest.later if waits else latest
        if reduces_matrix(node):
            others = [self.stage(i) for i in node.inputs[1:]]
            return max([self.later(node, self.stage(node.inputs[0])), *others])
        if latest.in_product and not self._ties(latest.kernel).admit(node):
            return latest.later
        return latest

    def _ties(self, kernel: int) -> Ties:
        if kernel not in self._tied:
            self._tied[kernel] = Ties(self.products[kernel - 1])
        return self._tied[kernel]
