"""Why a value of a plan is stored, computed again, deferred or none of these: read off the plans.

Values are asked for by their printed names; what is said names kernels and values as printed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from cadenza.core.cost import ROWS, bytes_of
from cadenza.core.ir import Node
from cadenza.core.ops import Op
from cadenza.core.plan_text import KernelText, PairText, PlanText
from cadenza.core.readiness import is_product, is_vector, reduces_matrix


def reasons(text: PairText, name: str) -> list[str]:
    """Sentences on the value of this printed name; none if there is no such value."""
    nodes = [node for node, known in text.names.items() if known == name]
    asked = _Asked(text, name, nodes)
    found = dict.fromkeys(asked.sentences())
    return [f"{name} {sentence}." for sentence in found] if nodes else []


class _Asked:
    """One value: in forward, and in backward if that is given it or computes it again."""

    def __init__(self, text: PairText, name: str, nodes: list[Node]) -> None:
        self.text, self.name, self.nodes = text, name, set(nodes)
        self.forward, self.pair = text.forward, text.pair
        self.plans = [plan for plan in (text.forward, text.backward) if plan is not None]
        self.saved = self.pair.forward.outputs[self.pair.outputs :]
        self.kernels = [kernel for plan in self.plans for kernel in plan.kernels]

    def sentences(self) -> Iterator[str]:
        """All that there is to say, in the order of a value's life."""
        yield from self._origin()
        yield from self._stored()
        yield from self._computed_again()
        yield from self._kept()
        yield from self._finished()
        yield from self._deferred()

    def _in(self, nodes: Iterable[Node]) -> bool:
        return any(node in self.nodes for node in nodes)

    def _where(self, field: str) -> list[KernelText]:
        return [k for k in self.kernels if self._in(getattr(k.kernel, field))]

    def _origin(self) -> Iterator[str]:
        if self._in(self.pair.forward.inputs):
            yield f"is an input of {self.pair.program.name}, at hand from the start"
        elif self._in(_adjoints(self.text.backward, self.pair.values)):
            yield "is the adjoint of an output, which backward is given"
        given = set(self.pair.forward.inputs) | set(_adjoints(self.text.backward, self.pair.values))
        if given & self.nodes:
            readers = [k.name for k in self.kernels if self._in([*_operands(k), *_loads(k)])]
            yield from ([f"is read as a matrix by {_listed(readers)}"] if readers else [])
        for kernel in self.kernels:
            if kernel.kernel and kernel.kernel.product in self.nodes:
                yield f"is the product of {kernel.name}; a product is never computed again"
        for plan in self.plans:
            for kernel in plan.beside:
                if kernel.node in self.nodes:
                    yield f"is a product with a vector, {kernel.name}, a small kernel of its own"

    def _stored(self) -> Iterator[str]:
        for plan in self.plans:
            for kernel in plan.kernels:
                assert kernel.kernel is not None
                if self._in(kernel.kernel.stores):
                    yield f"is stored by {kernel.name}: {'; '.join(self._uses(plan))}"

    def _uses(self, plan: PlanText) -> Iterator[str]:
        """What a stored value is stored for, within one pass."""
        own = plan.plan.graph.outputs
        if plan is self.forward:
            own = own[: self.pair.outputs]
        if self._in(own):
            yield "it is an output" if plan is self.forward else "it is a gradient"
        operands = [k.name for k in plan.kernels if self._in(_operands(k))]
        operands += [k.name for k in plan.beside if k.node is not None and self._in(k.node.inputs)]
        if operands:
            yield f"it is an operand of {_listed(operands)}, and products read operands from memory"
        loads = [k.name for k in plan.kernels if self._in(_loads(k))]
        if loads:
            yield f"{_listed(loads)} {_plural(loads, 'load')} it, for fewer bytes than its sources"
        if plan is self.forward and self._in(self.saved):
            yield "backward is given it"

    def _computed_again(self) -> Iterator[str]:
        stored = self._where("stores")
        inside = [k for k in self._where("body") if k not in stored]
        again = [k.name for k in (inside if stored else inside[1:])]
        again += [k.name for k in stored[1:]]
        if not stored and inside:
            yield f"is computed inside {inside[0].name}, tile by tile, and not stored"
        if again:
            sources = self._sources([*inside[-1:], *stored[-1:]])
            yield (
                f"is computed again in {_listed(again)} from {_listed(sources)}: arithmetic in an "
                "epilogue is cheaper than bytes held and loaded"
            )

    def _sources(self, kernels: list[KernelText]) -> list[str]:
        """The names that a value is made of where it is computed."""
        kernel = kernels[0].kernel
        assert kernel is not None
        given = {*kernel.loads, *kernel.vectors, kernel.product}
        found: dict[str, None] = {}
        pending = [node for node in kernel.body if node in self.nodes]
        while pending:
            node = pending.pop(0)
            if node in given:
                found[self.text.names[node]] = None
            else:
                pending.extend(node.inputs)
        return list(found)

    def _kept(self) -> Iterator[str]:
        in_backward = self.text.backward and self._in(self.text.backward.plan.graph.inputs)
        for held in self.text.held():
            if held.node in self.nodes:
                size = bytes_of(held.node.type, held.dtype) / 1e6
                yield (
                    f"is saved for backward, {size:.1f} MB at {ROWS} rows: it is in the cut of "
                    "fewest bytes below which no product or finished reduction is made again"
                )
        made = self._in(self.pair.forward.nodes()) and not in_backward
        leaf = self._in(self.pair.forward.inputs) or self._in(self.pair.forward.outputs)
        if self.text.backward and made and not leaf:
            yield "is not saved: backward does without it, or makes it again from what is"

    def _finished(self) -> Iterator[str]:
        for kernel in self._where("reductions"):
            assert kernel.kernel is not None
            whole = self._in(kernel.kernel.body)
            how = "holds whole rows and reduces it" if whole else "leaves partials of it"
            yield f"is a reduction: {kernel.name} {how}"
        for plan in self.plans:
            readers = [k.name for k in plan.kernels if k.kernel and self._in(k.kernel.vectors)]
            if readers:
                yield f"is read as a vector by {_listed(readers)}"
            yield from self._made_of(plan)

    def _made_of(self, plan: PlanText) -> Iterator[str]:
        """How a vector that is no reduction comes about, and where it goes if it is returned."""
        for node in (n for n in plan.plan.graph.nodes() if n in self.nodes and is_vector(n)):
            if not node.inputs or node.op is Op.MATMUL:
                continue
            partials = [r for r in _ancestors([node]) if reduces_matrix(r)]
            makers = _listed([k.name for k in plan.kernels if _reduces(k, partials)])
            if not partials:
                yield "is made of vectors that are at hand"
            elif not reduces_matrix(node):
                names = _listed([self.text.names[r] for r in partials])
                yield f"is finished from {names}, so it exists only after {makers}"
            if self._in(self.pair.program.outputs) and plan is self.forward:
                yield "is an output"
            elif plan is not self.forward and self._in(plan.plan.graph.outputs):
                yield "is a gradient"

    def _deferred(self) -> Iterator[str]:
        """Whether a factor left a product's operand, told from the program before deferral."""
        written = [n for n in self.pair.program.nodes() if is_product(n)]
        for kernel in self.forward.kernels:
            for before in (w for w in written if _same_product(w, kernel)):
                inside = self._in(_ancestors(_operands(kernel)))
                if self._is_vector() and self._in(_ancestors(before.inputs)):
                    yield from self._moved(kernel, inside)

    def _moved(self, kernel: KernelText, inside: bool) -> Iterator[str]:
        assert kernel.kernel is not None
        assert kernel.kernel.product is not None
        name = self.text.names[kernel.kernel.product]
        if not inside and self._in(kernel.kernel.vectors):
            yield (
                f"left the operand of {name} and scales the product in {kernel.name}, "
                "(c·A) @ B = c·(A @ B): it is late, not finished when the rest of the operand is "
                "made"
            )
        elif inside and self._in(self.pair.forward.inputs):
            yield f"stays in an operand of {name}: it is at hand, so the product need not wait"

    def _is_vector(self) -> bool:
        return all(is_vector(node) for node in self.nodes)


def _same_product(written: Node, kernel: KernelText) -> bool:
    """Whether a kernel's product is this one of the author's: an operand in common."""
    shared = any(a is b for a, b in zip(written.inputs, _operands(kernel), strict=False))
    product = kernel.kernel.product if kernel.kernel else None
    return shared and product is not None and product.attributes == written.attributes


def _operands(kernel: KernelText) -> tuple[Node, ...]:
    product = kernel.kernel.product if kernel.kernel else None
    return product.inputs if product is not None else ()


def _reduces(kernel: KernelText, partials: list[Node]) -> bool:
    return kernel.kernel is not None and any(r in set(partials) for r in kernel.kernel.reductions)


def _loads(kernel: KernelText) -> tuple[Node, ...]:
    return kernel.kernel.loads if kernel.kernel else ()


def _adjoints(backward: PlanText | None, values: tuple[str | int, ...]) -> tuple[Node, ...]:
    return backward.plan.graph.inputs[len(values) :] if backward else ()


def _ancestors(roots: Iterable[Node]) -> list[Node]:
    """What values are made of, the values too, no further than products and their reductions."""
    found: dict[Node, None] = {}
    pending = list(roots)
    while pending:
        node = pending.pop()
        if node not in found:
            found[node] = None
            stops = node.op is Op.MATMUL or reduces_matrix(node)
            pending.extend(() if stops else node.inputs)
    return list(found)


def _listed(names: list[str]) -> str:
    if len(names) < 2:
        return "".join(names) or "inputs"
    return f"{', '.join(names[:-1])} and {names[-1]}"


def _plural(names: list[str], verb: str) -> str:
    return verb if len(names) > 1 else f"{verb}s"
