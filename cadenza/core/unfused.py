"""The textbook program, for comparison: one kernel a product and one a function of the language.

Each kernel reads each input once and writes each output once. Splits, column ranges, spread values
and transposes are views and cost nothing. Backward, a product gives one product for each operand
that needs a gradient; a function gives one kernel that reads the adjoints of its outputs and those
of its inputs that its derivative needs, and nothing where the derivative is the adjoint itself.
Where a value is used twice its adjoints are added by a kernel. A loss's targets need no gradient.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from cadenza.core.cost import ROWS, Work, moved, product_flops
from cadenza.core.ir import Graph, Node, topological
from cadenza.core.ops import REAL, Op
from cadenza.core.rewrite import rebuild
from cadenza.core.rules import simplify
from cadenza.core.saved import new_input
from cadenza.core.storage import dtypes_of
from cadenza.core.vjp import differentiate

VIEWS = (Op.SPLIT, Op.COLUMNS, Op.REPEAT, Op.TILE, Op.TRANSPOSE)
NOWHERE = (Op.INPUT, Op.CONSTANT, Op.COLUMN_INDEX, Op.ROW_INDEX)


@dataclass(frozen=True, eq=False)
class Step:
    """One kernel: the values it computes, those it reads and those it writes."""

    nodes: tuple[Node, ...]
    reads: tuple[Node, ...]
    writes: tuple[Node, ...]


class Unfused:
    """A traced program as its kernels, one a product and one a function of the language."""

    def __init__(self, graph: Graph, rows: int = ROWS) -> None:
        self.graph, self.rows = graph, rows
        self.order = graph.nodes()
        self.dtypes = dtypes_of(graph)
        self.steps = [self._step(nodes) for nodes in self._groups()]

    def forward(self) -> list[Work]:
        """What each kernel of forward does."""
        return [self._work(s.nodes, [*s.reads, *s.writes]) for s in self.steps]

    def backward(self, needed: Iterable[str]) -> list[Work]:
        """What each kernel of backward does, for the gradients of the inputs named."""
        names = set(needed)
        wanted = {i for i in self.graph.inputs if i.attributes["name"] in names}
        for node in self.order:
            if node.type.kind == REAL and any(i in wanted for i in node.inputs):
                wanted.add(node)
        arrived = {node: 1 for node in self.graph.outputs if node in wanted}
        found: list[Work] = []
        for step in reversed(self.steps):
            outputs = [node for node in step.writes if arrived.get(node)]
            found += [work for node in outputs for work in self._sums(node, arrived[node])]
            inputs = [node for node in step.reads if node in wanted]
            if outputs and inputs:
                found += self._derivative(step, outputs, inputs)
                for node in inputs:
                    arrived[node] = arrived.get(node, 0) + 1
        return [*found, *(w for i in self.graph.inputs for w in self._sums(i, arrived.get(i, 0)))]

    def _groups(self) -> list[list[Node]]:
        """The values of each kernel, in the order of their last values."""
        groups: dict[object, list[Node]] = defaultdict(list)
        for node in self.order:
            group = node.builder.functions.get(node)
            if node.op not in NOWHERE and (group is not None or not self._is_view(node)):
                groups[node if group is None else group].append(node)
        return sorted(groups.values(), key=lambda nodes: nodes[-1].id)

    def _is_view(self, node: Node) -> bool:
        same = node.op is Op.CAST and self.dtypes[node] == self.dtypes[node.inputs[0]]
        return node.op in VIEWS or same

    def _base(self, node: Node) -> Node:
        """What a view is a view of, outside of functions."""
        while node.builder.functions.get(node) is None and self._is_view(node):
            node = node.inputs[0]
        return node

    def _step(self, nodes: list[Node]) -> Step:
        inside = set(nodes)
        reads = dict.fromkeys(self._base(i) for n in nodes for i in n.inputs if i not in inside)
        used = {self._base(i) for n in self.order if n not in inside for i in n.inputs}
        used |= {self._base(output) for output in self.graph.outputs}
        kept = [node for node in reads if node.op not in NOWHERE[1:]]
        return Step(tuple(nodes), tuple(kept), tuple(n for n in nodes if n in used))

    def _work(self, nodes: Iterable[Node], values: Iterable[Node]) -> Work:
        flops = sum(product_flops(node, self.rows) for node in nodes)
        return Work(flops, moved(values, self.dtypes, self.rows))

    def _sums(self, node: Node, contributions: int) -> list[Work]:
        """Adding up the adjoints of a value: two read, one written, for each but the first."""
        if contributions < 2:
            return []
        size = moved([node], self.dtypes, self.rows)
        return [Work(0, 3 * size)] * (contributions - 1)

    def _derivative(self, step: Step, outputs: list[Node], inputs: list[Node]) -> list[Work]:
        """The backward kernels of one kernel: one a product, one for the rest together."""
        products = [n for n in step.nodes if n.op is Op.MATMUL]
        works = []
        for product in products:
            for operand in (i for i in product.inputs if self._base(i) in set(inputs)):
                other = next((i for i in product.inputs if i is not operand), operand)
                works.append(self._work([product], [outputs[-1], self._base(other), operand]))
        rest = [
            i for i in inputs if not any(self._base(o) is i for p in products for o in p.inputs)
        ]
        return works + (self._elementwise(step, outputs, rest) if rest else [])

    def _elementwise(self, step: Step, outputs: list[Node], inputs: list[Node]) -> list[Work]:
        """One kernel for the gradients of a function; none where each is an adjoint itself."""
        fresh, adjoints = self._leaves(step, outputs)
        pairs = [(fresh[o], adjoint) for o, adjoint in adjoints.items()]
        found = differentiate(pairs, [fresh[i] for i in inputs], euler=False)
        gradients = _simplified(list(found.values()))
        reached = [i for i in inputs if fresh[i] in found]
        made = [i for i, g in zip(reached, gradients, strict=True) if g.op is not Op.INPUT]
        if not made:
            return []
        original = {fresh[i]: i for i in step.reads} | {a: o for o, a in adjoints.items()}
        read = [original[n] for n in topological(gradients) if n in original]
        size = sum(moved([n], self.dtypes, self.rows) for n in [*read, *made])
        return [Work(0, size)]

    def _leaves(self, step: Step, outputs: list[Node]) -> tuple[dict[Node, Node], dict[Node, Node]]:
        """The step's values over inputs of its own, and an adjoint for each of its outputs."""
        fresh = {n: _leaf(n, f"x{k}", self.dtypes[n]) for k, n in enumerate(step.reads)}
        adjoints = {n: _leaf(n, f"d{k}", self.dtypes[n]) for k, n in enumerate(outputs)}
        for node in topological(step.nodes):
            if node not in fresh:
                fresh[node] = rebuild(node, [fresh[i] for i in node.inputs])
        return fresh, adjoints


def _simplified(gradients: list[Node]) -> tuple[Node, ...]:
    inputs = tuple(n for n in topological(gradients) if n.op is Op.INPUT)
    labels = tuple(str(k) for k in range(len(gradients)))
    return simplify(Graph("step", inputs, tuple(gradients), labels)).outputs


def _leaf(like: Node, name: str, dtype: str) -> Node:
    return new_input(like, f"unfused_{name}", dtype)
