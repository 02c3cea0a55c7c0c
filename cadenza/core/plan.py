"""Kernels and plans: what runs, in which order, and what crosses from one kernel to the next.

A kernel computes its body tile by tile from its product's accumulator, the matrices that it loads
and finished vectors; it stores matrices and leaves partials of reductions. Only what is stored,
and finished vectors, cross kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

from cadenza.core.errors import VerificationError
from cadenza.core.ir import Graph, Node
from cadenza.core.locality import Ties
from cadenza.core.ops import Op
from cadenza.core.readiness import is_vector, reduces_matrix


@dataclass(frozen=True, eq=False)
class Kernel:
    """One launch: a product with its epilogue, or a pointwise kernel when `product` is None.

    `body` are the values computed inside, in order; `loads` and `vectors` the matrices and the
    finished columns, rows and scalars that it reads; `stores` the matrices that it writes and
    `reductions` those of which it leaves partials.
    """

    product: Node | None
    body: tuple[Node, ...]
    loads: tuple[Node, ...]
    vectors: tuple[Node, ...]
    stores: tuple[Node, ...]
    reductions: tuple[Node, ...]

    @property
    def kind(self) -> str:
        """product or pointwise."""
        return "pointwise" if self.product is None else "product"


@dataclass(frozen=True, eq=False)
class Plan:
    """A program as kernels in order. Vectors between kernels are finished where they are needed.

    `vector_products` are matrix-vector products, each a small kernel of its own.
    """

    graph: Graph
    kernels: tuple[Kernel, ...]
    vector_products: tuple[Node, ...]

    @property
    def products(self) -> int:
        """How many product kernels."""
        return sum(kernel.kind == "product" for kernel in self.kernels)

    @property
    def pointwise(self) -> int:
        """How many pointwise kernels."""
        return sum(kernel.kind == "pointwise" for kernel in self.kernels)


def verify_plan(plan: Plan) -> Plan:
    """The plan itself, or VerificationError: nothing is used before it exists."""
    stored = {i for i in plan.graph.inputs if i.type.is_matrix}
    reduced: set[Node] = set()
    for position, kernel in enumerate(plan.kernels):
        _verify_kernel(kernel, stored, reduced, f"{plan.graph.name}, kernel {position + 1}")
        stored.update(kernel.stores)
        reduced.update(kernel.reductions)
    for output in plan.graph.outputs:
        if output.type.is_matrix and output not in stored and output.inputs:
            raise VerificationError(f"{plan.graph.name}: output {output!r} is never stored")
    return plan


def _verify_kernel(kernel: Kernel, stored: set[Node], reduced: set[Node], place: str) -> None:
    inside: set[Node] = set()
    if kernel.product is not None:
        for operand in kernel.product.inputs:
            _hold(operand in stored or is_vector(operand), f"{place}: {operand!r} is not stored")
        inside.add(kernel.product)
        ties = Ties(kernel.product)
        for node in kernel.body:
            _hold(not node.type.is_matrix or ties.admit(node), f"{place}: no tile holds {node!r}")
    for load in kernel.loads:
        _hold(load in stored, f"{place}: loads {load!r}, which is not stored")
    known = inside | set(kernel.loads) | set(kernel.vectors)
    for vector in kernel.vectors:
        _verify_vector(vector, reduced, place)
    for node in kernel.body:
        _hold(node.op is not Op.MATMUL, f"{place}: a foreign product {node!r}")
        _hold(all(i in known for i in node.inputs), f"{place}: {node!r} lacks an input")
        known.add(node)
    for node in (*kernel.stores, *(r.inputs[0] for r in kernel.reductions)):
        _hold(node in known, f"{place}: {node!r} is not computed")


def _verify_vector(vector: Node, reduced: set[Node], place: str) -> None:
    """A vector that crosses is finished: each reduction in it was made by an earlier kernel."""
    if reduces_matrix(vector):
        _hold(vector in reduced, f"{place}: {vector!r} is not finished")
    elif vector.op is not Op.MATMUL:
        for source in vector.inputs:
            _verify_vector(source, reduced, place)


def _hold(condition: bool, problem: str) -> None:
    if not condition:
        raise VerificationError(problem)
