"""Scheduling: a program as product and pointwise kernels.

Each product is a kernel; a value is computed in the epilogue of the last product that it depends
on. What a kernel needs from another is stored there or computed again: the cut of fewest bytes. An
operand that no product of this pass makes is stored by an earlier kernel that loads its sources
anyway, else by a pointwise kernel.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from cadenza.core.cost import bytes_of
from cadenza.core.ir import Graph, Node
from cadenza.core.ops import Op
from cadenza.core.partition import minimum_cut
from cadenza.core.plan import Kernel, Plan, verify_plan
from cadenza.core.readiness import Readiness, Stage, is_product, is_vector, reduces_matrix
from cadenza.core.storage import dtypes_of

ROW_LIMIT = 32768  # columns of a row that one program of a pointwise kernel can hold
INDICES = (Op.CONSTANT, Op.COLUMN_INDEX, Op.ROW_INDEX)
Key = tuple[int, int, bool]  # the product's number, passes after it, whether pointwise


def finished(node: Node, stage: Stage) -> Stage:
    """When a reduction is finished: inside a pointwise kernel that holds rows, else one later."""
    of_rows = node.op not in (Op.COLUMN_SUM, Op.COLUMN_MAX)
    held = of_rows and int(node.inputs[0].type.columns) <= ROW_LIMIT
    return stage if held and not stage.in_product else stage.later


class _Scheduler:
    def __init__(self, graph: Graph, own: Iterable[Node], besides: Iterable[Node]) -> None:
        self.graph, self.own, self.besides = graph, tuple(own), tuple(besides)
        self.order = graph.nodes()
        self.leaves = {n for n in self.order if n.op is Op.INPUT or n.op in INDICES}
        self.readiness = Readiness(later=finished)
        for node in self.order:
            self.readiness.stage(node)
        self.dtypes = dtypes_of(graph)
        self.stored = {n for n in self.order if n.op is Op.INPUT}
        self.stores: dict[Key, list[Node]] = defaultdict(list)
        self.reductions: dict[Key, list[Node]] = defaultdict(list)
        self.hosts: dict[Node, Key] = {}
        self.hitched: set[Node] = set()

    # --- where values live ------------------------------------------------------------------------

    def host(self, node: Node) -> Key:
        """The kernel in which a value is computed."""
        if node in self.hosts:
            return self.hosts[node]
        stage = self.readiness.stage(node)
        return (stage.kernel, stage.passes, not stage.in_product)

    def size(self, node: Node) -> int:
        """Bytes of the value where it is stored."""
        return bytes_of(node.type, self.dtypes[node])

    def store(self, node: Node) -> None:
        """Has the value's kernel write it."""
        if node not in self.stored and node.op not in INDICES:
            self.stored.add(node)
            self.stores[self.host(node)].append(node)

    # --- the steps --------------------------------------------------------------------------------

    def plan(self) -> Plan:
        """All steps in order."""
        for output in self.own:
            if not is_vector(output):
                self.store(output)
        late = self._store_operands()
        for node in self.order:
            if reduces_matrix(node):
                self.reductions[self.host(node.inputs[0])].append(node)
        for operand in late:
            self._place(operand)
        self._store_what_crosses()
        if self.besides:
            self._store_besides()
        keys = {(k + 1, 0, False) for k in range(len(self.readiness.products))}
        keys |= {key for key, made in [*self.stores.items(), *self.reductions.items()] if made}
        kernels = tuple(self._kernel(key) for key in sorted(keys))
        return verify_plan(Plan(self.graph, kernels, self._vector_products()))

    def _vector_products(self) -> tuple[Node, ...]:
        return tuple(n for n in self.order if n.op is Op.MATMUL and is_vector(n))

    def _store_operands(self) -> list[Node]:
        """Stores operands that products make; returns the others, in order of first use."""
        late: dict[Node, None] = {}
        for product in self.readiness.products:
            for operand in product.inputs:
                if is_vector(operand) or operand in self.leaves:
                    continue
                if self.readiness.stage(operand).in_product:
                    self.store(operand)
                else:
                    late[operand] = None
        for product in self._vector_products():
            for operand in product.inputs:
                if not is_vector(operand) and operand not in self.leaves:
                    self.store(operand)
        return [operand for operand in late if operand not in self.stored]

    def _place(self, operand: Node) -> None:
        """Gives an operand that no product makes to the kernel where it costs the fewest loads."""
        own = self.host(operand)
        users = [p for p in self.readiness.products if any(i is operand for i in p.inputs)]
        first = min(self.host(user) for user in users)
        needed = self._sources([operand], own)
        best, cost = own, float("inf")
        for key in [*sorted({*self.stores, *self.reductions}), own]:
            if not (key < first and self._exists(operand, key)):
                continue
            present = self._loaded(key)
            extra = sum(self.size(n) for n in needed if n not in present)
            shares = any(n in present for n in needed)
            if (not key[2] and not shares) or extra >= cost:
                continue
            best, cost = key, extra
        if not best[2]:
            self.hosts[operand] = best
            self.hitched.add(operand)
        self.store(operand)

    def _exists(self, operand: Node, key: Key) -> bool:
        """Whether all that the operand is made of exists in this kernel."""
        kernel, passes, pointwise = key
        stage = self.readiness.stage(operand)
        return stage <= Stage(kernel, passes) if pointwise else stage < Stage(kernel, passes)

    def _loaded(self, key: Key) -> set[Node]:
        roots = [*self.stores[key], *(r.inputs[0] for r in self.reductions[key])]
        return self._sources(roots, key)

    def _sources(self, roots: Iterable[Node], key: Key) -> set[Node]:
        """The matrices that these values are made of in this kernel and that are not made there."""
        found: set[Node] = set()
        pending = list(roots)
        seen: set[Node] = set()
        while pending:
            node = pending.pop()
            if node in seen or is_vector(node):
                continue
            seen.add(node)
            brought = node.op is Op.INPUT or self._from_earlier_product(node, key)
            if brought:
                found.add(node)
            else:
                pending.extend(node.inputs)
        return found

    def _from_earlier_product(self, node: Node, key: Key) -> bool:
        stage = self.readiness.stage(node)
        return stage.in_product and (stage.kernel, stage.passes, False) < key

    def _store_what_crosses(self) -> None:
        """Stores values that a kernel needs from another, where that is fewest bytes."""
        while True:
            foreign: dict[Node, None] = {}
            for key in {**self.stores, **self.reductions}:
                foreign |= dict.fromkeys(self._walk(key, again=False).foreign)
            if not foreign:
                return
            cut = minimum_cut(foreign, self._weight, self._made_from)
            if not cut:
                return
            for node in cut:
                self.store(node)

    def _store_besides(self) -> None:
        """Has kernels write what is saved too; other kernels go on as if it weren't there."""
        for node in self.besides:
            if not is_vector(node) and node not in self.stored:
                self.stores[self.host(node)].append(node)
        self._store_what_crosses()

    def _weight(self, node: Node) -> float:
        if node in self.hitched:
            return float("inf")
        if node in self.stored or is_vector(node) or node in self.leaves:
            return 0
        if not self.readiness.stage(node).in_product:
            return float("inf")
        return max(1, self.size(node))  # of no rows, too: only what is at hand is free

    def _made_from(self, node: Node) -> tuple[Node, ...] | None:
        return None if is_product(node) else node.inputs

    def _walk(self, key: Key, again: bool) -> _Walk:
        walk = _Walk(self, key, again)
        for node in [*self.stores[key], *(r.inputs[0] for r in self.reductions[key])]:
            walk.visit(node)
        return walk

    def _kernel(self, key: Key) -> Kernel:
        walk = self._walk(key, again=True)
        product = None if key[2] else self.readiness.products[key[0] - 1]
        return Kernel(
            product,
            tuple(walk.body),
            tuple(walk.loads),
            tuple(walk.vectors),
            tuple(self.stores[key]),
            tuple(self.reductions[key]),
        )


class _Walk:
    """What one kernel computes, loads and reads, found from what it must make.

    `foreign` are values of other kernels that are not stored (yet); they are computed again here
    when `again` is set.
    """

    def __init__(self, scheduler: _Scheduler, key: Key, again: bool) -> None:
        self.scheduler, self.key, self.again = scheduler, key, again
        self.seen: set[Node] = set()
        self.body: dict[Node, None] = {}
        self.loads: dict[Node, None] = {}
        self.vectors: dict[Node, None] = {}
        self.foreign: dict[Node, None] = {}

    def visit(self, node: Node) -> None:
        """Adds a value and all that it is made of here."""
        if node in self.seen:
            return
        self.seen.add(node)
        native = self.scheduler.host(node) == self.key
        if node.op in INDICES:
            self.body[node] = None
        elif is_product(node) and native:
            return
        elif is_vector(node) and not self._held(node):
            self.vectors[node] = None
        elif self._loads(node, native):
            self.loads[node] = None
        elif not native and not is_vector(node) and not self.again:
            self.foreign[node] = None
        else:
            for source in node.inputs:
                self.visit(source)
            self.body[node] = None

    def _loads(self, node: Node, native: bool) -> bool:
        """Whether a stored matrix is loaded: a kernel before the one that stores it can't."""
        if node in self.scheduler.hitched:
            return self.scheduler.host(node) < self.key
        return node in self.scheduler.stored and not (native and node.inputs)

    def _held(self, vector: Node) -> bool:
        """Whether a pointwise kernel, which holds whole rows, finishes this vector itself."""
        if not self.key[2] or not vector.inputs or vector.op is Op.MATMUL:
            return False
        if reduces_matrix(vector):
            own = self.scheduler.host(vector.inputs[0]) == self.key
            return own and self.scheduler.readiness.stage(vector)[:2] == self.key[:2]
        return any(is_vector(i) and self._held(i) for i in vector.inputs)


def schedule(graph: Graph, own: int | None = None) -> Plan:
    """The kernels that compute a program's outputs.

    The first `own` outputs (all by default) decide; the others are stored besides and change
    nothing else, so that results don't depend on what is saved.
    """
    return _Scheduler(graph, graph.outputs[:own], graph.outputs[own:] if own else ()).plan()
