"""What the values of a pair of plans are called where people read them.

One name a value, in forward and backward alike: a value of forward that backward loads, or
computes again, keeps its name. Inputs have their own, values and outputs the author's; products
are acc1, acc2, …, other stored values v1, …, partials s1, …, finished vectors r1, …, products with
a vector g1, …, and values that only help to write an epilogue down t1, …
"""

from __future__ import annotations

from collections import Counter

from cadenza.core.ir import Graph, Node
from cadenza.core.ops import Op
from cadenza.core.pipeline import Pair
from cadenza.core.plan import Plan
from cadenza.core.readiness import is_vector
from cadenza.core.rewrite import rebuild
from cadenza.core.saved import free_name

LEAVES = (Op.INPUT, Op.CONSTANT, Op.COLUMN_INDEX, Op.ROW_INDEX)


class Names:
    """The names of the values of a pair."""

    def __init__(self, pair: Pair) -> None:
        self.of: dict[Node, str] = {}
        self._taken: set[str] = set()
        self._serial: Counter[str] = Counter()
        self._name_forward(pair)

    def give(self, node: Node, name: str) -> None:
        """Calls a value so, unless it has a name already; a name that is taken gets an `_`."""
        if node not in self.of:
            self.of[node] = free_name(name, self._taken)

    def fresh(self, node: Node, stem: str) -> None:
        """The next free name of this stem, unless the value has a name already."""
        if node in self.of:
            return
        while (name := f"{stem}{self._serial[stem] + 1}") in self._taken:
            self._serial[stem] += 1
        self.give(node, name)
        self._serial[stem] += 1

    def _name_forward(self, pair: Pair) -> None:
        graph = pair.forward
        for value in graph.inputs:
            self.give(value, str(value.attributes["name"]))
        for node in graph.nodes():
            if node in graph.names and node.op not in LEAVES:
                self.give(node, graph.names[node])
        for node, label in zip(graph.outputs, pair.program.labels, strict=False):
            self.give(node, output_name(pair.program, label))
        self._name_plan(pair.forward_plan)

    def name_backward(self, pair: Pair) -> None:
        """Names the values of backward, once forward is printed and its values are named."""
        assert pair.backward_plan is not None
        graph = pair.backward_plan.graph
        for node, again in _images(pair).items():
            if node in self.of and node.op not in LEAVES:
                self.of.setdefault(again, self.of[node])
        for node, value in zip(graph.inputs, pair.values, strict=False):
            name = value if isinstance(value, str) else self.of[pair.forward.outputs[value]]
            self.of[node] = name
        for node, position in zip(graph.inputs[len(pair.values) :], pair.adjoints, strict=False):
            self.give(node, f"d_{self.of[pair.forward.outputs[position]]}")
        for node in graph.inputs:
            self.give(node, str(node.attributes["name"]))
        for node, label in zip(graph.outputs, graph.labels, strict=True):
            self.give(node, f"d_{label}")
        self._name_plan(pair.backward_plan)

    def _name_plan(self, plan: Plan) -> None:
        for kernel in plan.kernels:
            if kernel.product is not None:
                self.fresh(kernel.product, "acc")
        for node in plan.vector_products:
            self.fresh(node, "g")
        for kernel in plan.kernels:
            for node in kernel.reductions:
                self.fresh(node, "s")
            for node in kernel.vectors:
                if node.op not in LEAVES:
                    self.fresh(node, "r")
            for node in kernel.stores:
                self.fresh(node, "v")
        for node in plan.graph.outputs:
            self.fresh(node, "r" if is_vector(node) else "v")


def output_name(graph: Graph, label: str) -> str:
    """What an output is called that the author gave no name."""
    return {"value": "y", "tuple": f"y_{label}"}.get(graph.structure, label)


def _images(pair: Pair) -> dict[Node, Node]:
    """Values of forward as backward writes them: over what it is given."""
    assert pair.backward is not None
    given = zip(pair.backward.inputs, pair.values, strict=False)
    images = {pair.forward.outputs[v]: node for node, v in given if isinstance(v, int)}
    for node in pair.forward.nodes():
        if node not in images:
            images[node] = rebuild(node, [images[i] for i in node.inputs])
    return images
