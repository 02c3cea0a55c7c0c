"""Which inputs of a plan a kernel may write over, where nobody needs their numbers afterwards.

A kernel reads a block of a matrix, and then writes the block at the same place; no other block of
its grid reads there. So a matrix that is made element by element can take the memory of one that it
is made of. A kernel sees columns as pairs in one way only, so that both lanes of a pair are its own
block's in what is read and in what is written.
"""

from __future__ import annotations

from collections.abc import Iterable

from cadenza.core.ir import Node
from cadenza.core.ops import Op
from cadenza.core.plan import Kernel, Plan
from cadenza.core.storage import dtypes_of

ELSEWHERE = (Op.GROUP_SUM, Op.GROUP_MAX)  # reductions whose results are spread over columns again
IN_PLACE = ("leaf", "elementwise", "reduction")
PAIRED = (Op.SPLIT, Op.JOIN)


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
            alike = value.type[:2] == given.type[:2] and dtypes[value] == dtypes[given]
            if free and alike and _is_made_of(value, given, kernel):
                found[value] = given
                break
    return found


def _only_reader(plan: Plan, given: Node) -> Kernel | None:
    """The kernel that reads a matrix beside its product, if nothing else reads it."""
    readers = [k for k in plan.kernels if given in set(k.loads)]
    products = {i for k in plan.kernels if k.product is not None for i in k.product.inputs}
    vectors = {i for v in plan.vector_products for i in v.inputs}
    elsewhere = {*plan.graph.outputs, *products, *vectors}
    return readers[0] if len(readers) == 1 and given not in elsewhere else None


def _in_place(kernel: Kernel) -> bool:
    """Whether a kernel makes each element of what is at its own place, or at its pair's."""
    pairs = {n.attributes["inner"] for n in kernel.body if n.op in PAIRED}
    return len(pairs) <= 1 and all(
        n.op in PAIRED or (n.op.group in IN_PLACE and n.op not in ELSEWHERE) for n in kernel.body
    )


def _is_made_of(value: Node, given: Node, kernel: Kernel) -> bool:
    """Whether a kernel has read `given` when it writes `value`. The product alone needs none."""
    body, seen, left = set(kernel.body), {value}, [value]
    while left:
        new = {i for i in left.pop().inputs if i is given or i in body} - seen
        seen |= new
        left += new
    return given in seen
