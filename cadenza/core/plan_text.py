"""The printed form of a pair of plans: each kernel's product, what it reads, computes and leaves.

A line says what happens to one value: `load` and `read` bring in matrices and finished vectors,
`finish` makes a vector of partials, a bare line names a step, `store` writes a matrix, `partial`
leaves a reduction to be finished and `reduce` makes one whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from cadenza.core.cost import bytes_of
from cadenza.core.ir import Node
from cadenza.core.naming import LEAVES, Names
from cadenza.core.ops import BOOLEAN, Op
from cadenza.core.pipeline import Pair
from cadenza.core.plan import Kernel, Plan
from cadenza.core.readiness import is_vector, reduces_matrix
from cadenza.core.storage import dtypes_of
from cadenza.core.text import LINE, Text, expression


class Line(NamedTuple):
    """One line of a kernel: what is done, and to what."""

    role: str
    text: str


@dataclass(frozen=True, eq=False)
class KernelText:
    """A kernel as text; a vector product has no Kernel of its own."""

    name: str
    title: str
    lines: tuple[Line, ...]
    product: str = ""
    kernel: Kernel | None = None
    node: Node | None = None


@dataclass(frozen=True, eq=False)
class PlanText:
    """A plan as text: its kernels in order, vector products and what is finished at the end."""

    plan: Plan
    kernels: tuple[KernelText, ...]
    beside: tuple[KernelText, ...]
    ends: tuple[Line, ...]


class Held(NamedTuple):
    """A value kept for backward: its name, dtype and the value."""

    name: str
    dtype: str
    node: Node


class PairText:
    """A pair of plans as text, with one set of names."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        names = Names(pair)
        self.forward = _Printer(pair.forward_plan, names, "F").text()
        self.backward: PlanText | None = None
        if pair.backward_plan is not None:
            names.name_backward(pair)
            self.backward = _Printer(pair.backward_plan, names, "B").text()
        self.names = names.of

    def held(self) -> list[Held]:
        """What forward keeps for backward beside inputs, outputs and weights."""
        graph = self.pair.forward
        dtypes = dtypes_of(graph)
        return [
            Held(self.names[n], "bool" if n.type.kind == BOOLEAN else dtypes[n], n)
            for n in graph.outputs[self.pair.outputs :]
        ]

    def show(self) -> str:
        """All of it, in plain text."""
        lines = [*_plan_lines(f"{self.pair.program.name}, forward", self.forward), *self._held()]
        if self.backward is not None:
            lines += ["", *_plan_lines(f"{self.pair.program.name}, backward", self.backward)]
        return "\n".join([*lines, ""])

    def _held(self) -> Iterator[str]:
        sizes = {held: bytes_of(held.node.type, held.dtype) / 1e6 for held in self.held()}
        yield f"held for backward: {sum(sizes.values()):.1f} MB"
        for held, size in sizes.items():
            yield f"    {held.name}: {held.dtype}{held.node.type}  {size:.1f} MB"


def show_plans(pair: Pair) -> str:
    """A pair of plans as a person reads them; equal pairs print equally."""
    return PairText(pair).show()


def counts(plan: Plan) -> str:
    """How many kernels of each kind a plan has."""
    kinds = {
        "product": plan.products,
        "pointwise kernel": plan.pointwise,
        "vector product": len(plan.vector_products),
    }
    return ", ".join(f"{n} {kind}{'s' * (n != 1)}" for kind, n in kinds.items() if n) or "no kernel"


def _plan_lines(title: str, text: PlanText) -> Iterator[str]:
    yield f"{title}: {counts(text.plan)}"
    for kernel in (*text.kernels, *text.beside):
        yield ""
        yield f"{kernel.name:<4}{kernel.title}"
        yield from (f"    {line.role:<8}{line.text}" for line in kernel.lines)
    yield ""
    for line in text.ends:
        yield f"    {line.role:<8}{line.text}"


class _Printer:
    """Prints one plan; local steps get their names on the way."""

    def __init__(self, plan: Plan, names: Names, prefix: str) -> None:
        self.plan, self.names, self.prefix = plan, names, prefix
        self.dtypes = dtypes_of(plan.graph)
        self.uses = Counter(i for node in plan.graph.nodes() for i in node.inputs)
        self.finished: set[Node] = set()

    def text(self) -> PlanText:
        """All kernels."""
        kernels = tuple(
            self._kernel(f"{self.prefix}{n}", kernel)
            for n, kernel in enumerate(self.plan.kernels, 1)
        )
        beside = tuple(
            self._vector_product(f"{self.prefix}V{n}", node)
            for n, node in enumerate(self.plan.vector_products, 1)
        )
        return PlanText(self.plan, kernels, beside, tuple(self._ends()))

    def _kernel(self, name: str, kernel: Kernel) -> KernelText:
        lines = [*self._reads(kernel), *_Body(self, kernel).lines()]
        if kernel.product is None:
            return KernelText(name, "pointwise", tuple(lines), kernel=kernel)
        product, title = self._definition(kernel.product)
        return KernelText(name, title, tuple(lines), product, kernel)

    def _vector_product(self, name: str, node: Node) -> KernelText:
        lines = [line for i in node.inputs for line in self._finish(i)]
        product, title = self._definition(node)
        return KernelText(name, title, tuple(lines), product, node=node)

    def _definition(self, node: Node) -> tuple[str, str]:
        """A product, and the line that names it."""
        text = expression(node, [self.vector(i) for i in node.inputs]).text
        return text, f"{self.names.of[node]} = {text}  {node.type}"

    def _reads(self, kernel: Kernel) -> Iterator[Line]:
        for node in kernel.vectors:
            yield from self._finish(node)
        for role, values in (("load", kernel.loads), ("read", kernel.vectors)):
            if values:
                yield Line(role, ", ".join(self.names.of[v] for v in values))

    def _finish(self, node: Node) -> Iterator[Line]:
        """How a vector is made of partials and other vectors, at its first use."""
        whole = node.op in LEAVES or reduces_matrix(node) or node.op is Op.MATMUL
        if node in self.finished or whole or not is_vector(node):
            return
        self.finished.add(node)
        for source in node.inputs:
            yield from self._finish(source)
        if node in self.names.of or self.uses[node] > 1:
            text = expression(node, [self.vector(i) for i in node.inputs])
            self.names.fresh(node, "r")
            yield Line("finish", f"{self.names.of[node]} = {text.text}")

    def vector(self, node: Node) -> Text:
        """A vector, or another value that is known by name, as others are made of it."""
        if node in self.names.of:
            return Text(self.names.of[node])
        return expression(node, [self.vector(i) for i in node.inputs])

    def _ends(self) -> Iterator[Line]:
        for node in self.plan.graph.outputs:
            yield from self._finish(node)
        values = [self.names.of[node] for node in self.plan.graph.outputs]
        yield Line("return", ", ".join(values))

    def stored(self, node: Node) -> str:
        """A stored value with its dtype and shape, as a Python annotation."""
        return f"{self.names.of[node]}: {self.dtypes[node]}{node.type}"


class _Body:
    """The steps of one kernel, each on a line or within the line of its only use."""

    def __init__(self, printer: _Printer, kernel: Kernel) -> None:
        self.printer, self.kernel, self.names = printer, kernel, printer.names
        self.stores, self.reductions = set(kernel.stores), set(kernel.reductions)
        self.uses = Counter(i for node in kernel.body for i in node.inputs)
        self.uses.update(node for reduction in kernel.reductions for node in reduction.inputs[:1])
        known = (*kernel.loads, *kernel.vectors)
        self.texts = {node: Text(self.names.of[node]) for node in known}
        if kernel.product is not None:
            self.texts[kernel.product] = Text(self.names.of[kernel.product])

    def lines(self) -> Iterator[Line]:
        """All steps in order, then the partials."""
        if self.kernel.product in self.stores and self.kernel.product is not None:
            yield Line("store", self.printer.stored(self.kernel.product))
        for node in self.kernel.body:
            yield from self._step(node)
        whole = set(self.kernel.body)
        for node in self.kernel.reductions:
            if node not in whole:
                texts = [self.texts.get(i) or self.printer.vector(i) for i in node.inputs]
                yield Line("partial", f"{self.names.of[node]} = {expression(node, texts).text}")

    def _step(self, node: Node) -> Iterator[Line]:
        text = expression(node, [self.texts[i] for i in node.inputs])
        long = len(text.text) > LINE or self.uses[node] > 1
        if node not in self.names.of and (node.op in LEAVES or not long):
            self.texts[node] = text
            return
        self.names.fresh(node, "t")
        self.printer.finished.add(node)
        self.texts[node] = Text(self.names.of[node])
        if node in self.stores:
            yield Line("store", f"{self.printer.stored(node)} = {text.text}")
        else:
            role = "reduce" if node in self.reductions else ""
            yield Line(role, f"{self.names.of[node]} = {text.text}")
