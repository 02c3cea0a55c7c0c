"""Deferral: scalings on a free index leave a product, so that what is late need not be waited for.

(c · A) @ B = c · (A @ B) for a column c, A @ (B · r) = (A @ B) · r for a row r. A factor leaves
only if it is not finished when the rest of its operand is made; products never get more. The rules
look at values through `factors` and `expand` and at time through Readiness.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from itertools import product as pairs
from typing import Any, NamedTuple

from cadenza.core.algebra import Monomial, build, expand, factors, kind, total
from cadenza.core.euler import is_positive_column
from cadenza.core.ir import Graph, Node, topological
from cadenza.core.ops import REAL, Op
from cadenza.core.readiness import Readiness, Stage, is_product, is_vector
from cadenza.core.rewrite import rebuild
from cadenza.core.rounding import rounded_sums

DEFER, ABSORB, RANK_ONE, COLUMN_SUM, PULL, MERGE, ROUNDED = RULES = (
    "a late factor on a free index leaves a product",
    "a factor of a stored value leaves a product",
    "(A + c·r) @ B = A @ B + c·(r @ B)",
    "colsum(c·X) @ B = colsum(c·(X @ B))",
    "rowsum(c·X) = c·rowsum(X), colsum(X·r) = colsum(X)·r",
    "rowsum(X) + rowsum(Y) = rowsum(X + Y) in one kernel",
    "colsum(c·X) beside X.T @ Y sums X as it is stored",
)


class Term(NamedTuple):
    """A part of an operand: factors that leave the product, times what stays."""

    outer: Monomial
    inner: Node


class Deferral:
    """Rewrites products and reductions of one program, in the order in which kernels run.

    `ready` are the values that exist from the start (in backward, all of forward's), `stored`
    those that forward stores anyway, `fixed` those that stay as they are (in backward, what
    forward computes: it would be computed again in another form).
    """

    def __init__(
        self,
        ready: Container[Node] = (),
        stored: Container[Node] = (),
        rules: Iterable[str] = RULES,
        backward: bool = False,
        fixed: Container[Node] = (),
    ) -> None:
        self.fixed = fixed
        self.ready, self.stored, self.rules = ready, stored, set(rules)
        self.backward = backward
        self.readiness = Readiness(ready)

    def run(self, roots: Iterable[Node]) -> list[Node]:
        """The roots, rewritten."""
        roots = list(roots)
        done: dict[Node, Node] = {}
        for node in topological(roots):
            current = rebuild(node, [done[i] for i in node.inputs])
            made = None if current in self.fixed else self._rewrite(current)
            done[node] = current if made is None else made
            self.readiness.stage(done[node])
        results = [done[root] for root in roots]
        results = self._column_sums(results) if COLUMN_SUM in self.rules else results
        rounds = self.backward and ROUNDED in self.rules
        return rounded_sums(results, self.ready) if rounds else results

    def _rewrite(self, node: Node) -> Node | None:
        if node.op is Op.MATMUL:
            return self._product(node)
        if node.op in (Op.ROW_SUM, Op.COLUMN_SUM) and PULL in self.rules:
            return self._reduction(node)
        if node.op is Op.ADD and MERGE in self.rules and self.backward:
            return self._merged(node)
        return None

    # --- products ---------------------------------------------------------------------------------

    def _product(self, node: Node) -> Node | None:
        sides = [
            self._peel(operand, "row" if (position == 0) == transposed else "column")
            for position, operand, transposed in _operands(node)
        ]
        if sides == [None, None]:
            return None
        left, right = (
            side or [Term(Monomial(), operand)]
            for side, operand in zip(sides, node.inputs, strict=True)
        )
        return total(self._outer_times(node, a, b) for a, b in pairs(left, right))

    def _outer_times(self, node: Node, a: Term, b: Term) -> Node:
        """One term of the left operand times one of the right, factors outside."""
        outer = _oriented(a.outer, node.attributes["transpose_a"]).times(
            _oriented(b.outer, node.attributes["transpose_b"])
        )
        inner = _raw_product(a.inner, b.inner, node)
        if outer.powers:
            return build(outer.times(factors(inner)), node.builder)
        return inner if outer.coefficient == 1.0 else inner * outer.coefficient

    def _peel(self, operand: Node, free: str) -> list[Term] | None:
        """The operand as terms whose factors on the free index leave; None if none does."""
        if operand.op is Op.INPUT or is_vector(operand):
            return None
        return self._peel_ready(operand, free) if self.backward else self._peel_late(operand, free)

    def _peel_late(self, operand: Node, free: str) -> list[Term] | None:
        if DEFER not in self.rules:
            return None
        terms = expand(operand, self._opens)
        core = max(self._core(term) for term in terms)
        if self.readiness.stage(operand) <= core:
            return None
        made = [term for term in terms if term.matrices]
        vectors = [term for term in terms if not term.matrices]
        if not made:
            return None
        outers = [self._late(term, core, free) for term in made]
        if any(outer != outers[0] for outer in outers) or (vectors and RANK_ONE not in self.rules):
            return None
        inner = total(build(term.without(outers[0]), operand.builder) for term in made)
        if self.readiness.stage(inner) > core or inner.type.kind != REAL:
            return None
        return [
            Term(Monomial(1.0, outers[0]), inner),
            *(_rank_one(t, free, operand) for t in vectors),
        ]

    def _opens(self, node: Node) -> bool:
        """Whether a sum may be taken apart: never one that a kernel makes whole."""
        if node.op not in (Op.ADD, Op.SUB) or is_vector(node):
            return False
        late = self.readiness.stage(node).passes > 0
        return late and any(is_vector(i) or self._opens(i) for i in node.inputs)

    def _core(self, term: Monomial) -> Stage:
        return max((self.readiness.stage(m) for m in term.matrices), default=Stage(0, 0))

    def _late(self, term: Monomial, core: Stage, free: str) -> dict[Node, int]:
        return {
            vector: power
            for vector, power in term.vectors.items()
            if kind(vector) in (free, "scalar") and self.readiness.stage(vector) > core
        }

    def _peel_ready(self, operand: Node, free: str) -> list[Term] | None:
        """In backward forward's values are ready: only what is stored anyway drops its factors."""
        term = factors(operand, self._shares)
        outer = {v: p for v, p in term.vectors.items() if kind(v) == "scalar"}
        loose = {v: p for v, p in term.vectors.items() if kind(v) == free}
        rest = build(term.without([*outer, *loose]), operand.builder)
        if rest in self.stored and ABSORB in self.rules:
            outer |= loose
        elif operand not in self.ready and DEFER in self.rules:
            outer |= self._late(term, self._core(term), free)
        if not outer:
            return None
        inner = build(Monomial(1.0, term.without(outer).powers), operand.builder)
        return [Term(Monomial(term.coefficient, outer), inner)] if inner.type.kind == REAL else None

    def _shares(self, node: Node) -> bool:
        return self.backward and node not in self.ready and not is_vector(node)

    # --- reductions -------------------------------------------------------------------------------

    def _reduction(self, node: Node) -> Node | None:
        free = "column" if node.op is Op.ROW_SUM else "row"
        kept = self.ready if self.backward else ()  # forward's values as forward keeps them
        term = factors(node.inputs[0], self._shares, kept)
        outer = {v: p for v, p in term.vectors.items() if kind(v) in (free, "scalar")}
        inner = Monomial(1.0, term.without(outer).powers)
        if (not outer and term.coefficient == 1.0) or not inner.matrices:
            return None
        reduced = node.builder.make(node.op, (build(inner, node.builder),), {})
        whole = Monomial(term.coefficient, outer).times(Monomial(1.0, {reduced: 1}))
        return build(whole, node.builder)

    def _merged(self, node: Node) -> Node | None:
        a, b = node.inputs
        sums = a.op is b.op and a.op in (Op.ROW_SUM, Op.COLUMN_SUM)
        if not sums or a.inputs[0].type != b.inputs[0].type or a in self.ready or b in self.ready:
            return None
        if self.readiness.stage(a) != self.readiness.stage(b):
            return None
        both = node.builder.make(Op.ADD, (a.inputs[0], b.inputs[0]), {})
        return node.builder.make(a.op, (both,), {})

    def _column_sums(self, roots: list[Node]) -> list[Node]:
        made = [n for n in topological(roots) if is_product(n) and n not in self.ready]
        done: dict[Node, Node] = {}
        for node in topological(roots):
            current = rebuild(node, [done[i] for i in node.inputs])
            partial = None if current in self.fixed else _partial_of(current, made, done)
            current = current if partial is None else partial
            adds = current.op is Op.ADD and current not in self.fixed
            merged = self._rewrite(current) if adds else None
            done[node] = current if merged is None else merged
            self.readiness.stage(done[node])
        return [done[root] for root in roots]


def _operands(node: Node) -> list[tuple[int, Node, bool]]:
    transposed = (node.attributes["transpose_a"], node.attributes["transpose_b"])
    return [(p, i, t) for p, (i, t) in enumerate(zip(node.inputs, transposed, strict=True))]


def _oriented(outer: Monomial, transposed: bool) -> Monomial:
    """Factors of an operand as factors of the product."""
    turned = {
        (_transpose(v) if transposed and kind(v) != "scalar" else v): p
        for v, p in outer.powers.items()
    }
    return Monomial(outer.coefficient, turned)


def _transpose(vector: Node) -> Node:
    if vector.op is Op.TRANSPOSE:
        return vector.inputs[0]
    return vector.builder.make(Op.TRANSPOSE, (vector,), {})


def _raw_product(a: Node, b: Node, like: Node) -> Node:
    """a @ b as `like` has it; a contraction over one column is an outer product."""
    transpose_a, transpose_b = like.attributes["transpose_a"], like.attributes["transpose_b"]
    if (a.type.rows if transpose_a else a.type.columns) == 1:
        return (_transpose(a) if transpose_a else a) * (_transpose(b) if transpose_b else b)
    return like.builder.make(Op.MATMUL, (a, b), like.attributes)


def _rank_one(term: Monomial, free: str, operand: Node) -> Term:
    """c · r as a term: c leaves on the free index, r stays as the operand of a vector product."""
    inside = {v: p for v, p in term.vectors.items() if kind(v) not in (free, "scalar")}
    if inside:
        return Term(term.without(inside), build(Monomial(1.0, inside), operand.builder))
    shape = operand.type._replace(rows=1) if free == "column" else operand.type._replace(columns=1)
    return Term(term, operand.builder.constant(1.0, shape.rows, shape.columns))


def _partial_of(node: Node, made: list[Node], done: dict[Node, Node]) -> Node | None:
    """colsum(c·X) @ B as a column partial of the product X @ B, where that is made anyway."""
    if node.op is not Op.MATMUL or not is_vector(node):
        return None
    term = factors(node.inputs[0])
    sums = [v for v in term.powers if v.op is Op.COLUMN_SUM]
    if len(term.powers) != 1 or len(sums) != 1 or term.powers[sums[0]] != 1:
        return None
    summed = factors(sums[0].inputs[0])
    for big in made:
        if big.inputs[1] is node.inputs[1] and big.attributes == node.attributes:
            whole = factors(big.inputs[0])
            ratio = Monomial(summed.coefficient, summed.powers).times(whole.to_the(-1))
            if all(_scales(vector, power) for vector, power in ratio.powers.items()):
                product: dict[Node, int] = {done.get(big, big): 1}
                inside = build(ratio.times(Monomial(term.coefficient, product)), node.builder)
                return node.builder.make(Op.COLUMN_SUM, (inside,), {})
    return None


def _scales(vector: Node, power: int) -> bool:
    """Whether it may stand in a column sum: a column, and if divided by, one that is never 0."""
    return kind(vector) in ("column", "scalar") and (power > 0 or is_positive_column(vector))


def defer(graph: Graph, **options: Any) -> Graph:
    """The same program with deferral done; options are those of Deferral."""
    named = [n for n in graph.nodes() if n in graph.names]
    results = Deferral(**options).run([*graph.outputs, *named])
    count = len(graph.outputs)
    names = {new: graph.names[old] for old, new in zip(named, results[count:], strict=True)}
    return Graph(
        graph.name, graph.inputs, tuple(results[:count]), graph.labels, graph.structure, names
    )
