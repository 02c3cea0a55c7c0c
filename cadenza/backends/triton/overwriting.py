"""Which inputs of a plan a kernel may write over, where nobody needs their numbers afterwards.

A kernel without a product reads a block of a matrix, and then writes the block at the same place.
So a value that is made element by element can take the memory of one that it is made of.
"""

from __future__ import annotations

from collections.abc import Iterable

from cadenza.core.ir import Node
from cadenza.core.ops import Op
from cadenza.core.plan import Kernel, Plan
from cadenza.core.storage import dtypes_of

ELSEWHERE = (Op.GROUP_SUM, Op.GROUP_MAX)  # reductions whose results are spread over columns again
IN_PLACE = ("leaf", "elementwise", "reduction")


def takers(plan: Plan, spent: Iterable[Node]) -> dict[Node, Node]:
    """The values that may lie where a `spent` input does, each with that input."""
    dtypes, outputs = dtypes_of(plan.graph), set(plan.graph.outputs)
    found: dict[Node, Node] = {}
    for given in spent:
        kernel = _only_reader(plan, given)
        if kernel is None or not _in_place(kernel):
            continue
        for value in kernel.stores:
            free = value not in found and value not in outputs
            if free and value.type[:2] == given.type[:2] and dtypes[value] == dtypes[given]:
                found[value] = given
                break
    return found


def _only_reader(plan: Plan, given: Node) -> Kernel | None:
    """The kernel that reads an input, if nothing else does."""
    readers = [k for k in plan.kernels if given in _read(k)]
    elsewhere = {*plan.graph.outputs, *(i for v in plan.vector_products for i in v.inputs)}
    return readers[0] if len(readers) == 1 and given not in elsewhere else None


def _read(kernel: Kernel) -> set[Node]:
    operands = () if kernel.product is None else kernel.product.inputs
    return {*kernel.loads, *kernel.vectors, *operands}


def _in_place(kernel: Kernel) -> bool:
    """Whether a kernel makes each element of what is at its own place."""
    return kernel.product is None and all(
        n.op.group in IN_PLACE and n.op not in ELSEWHERE for n in kernel.body
    )
