"""When a vector can be finished: rows or columns, reduced by kernels and read by later ones."""

from __future__ import annotations

from collections.abc import Container, Sequence

from cadenza.core.ir import Node
from cadenza.core.ops import Op
from cadenza.core.readiness import is_vector, reduces_matrix

LEAVES = (Op.CONSTANT, Op.COLUMN_INDEX, Op.ROW_INDEX)  # made where they are read


def is_ready(node: Node, there: Sequence[Container[Node]], known: dict[Node, bool]) -> bool:
    """Whether all that a vector is made of is `there`; `known` is what was found of others."""
    if node.op in LEAVES or any(node in each for each in there):
        return True
    if node not in known:
        of_vectors = is_vector(node) and node.op is not Op.MATMUL and not reduces_matrix(node)
        made = of_vectors and bool(node.inputs)
        known[node] = made and all(is_ready(i, there, known) for i in node.inputs)
    return known[node]
