"""A value as a product of factors, or as a sum of such products, found on demand.

The author's expression is never rewritten into a normal form: `factors` and `expand` look through
products and sums when a rule asks, and `build` makes an ordinary expression of what is left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce

from cadenza.core.ir import Builder, Node
from cadenza.core.ops import Op
from cadenza.core.readiness import is_vector

Powers = Mapping[Node, int]


@dataclass(frozen=True, eq=False)
class Monomial:
    """A coefficient times values, each to a whole power."""

    coefficient: float = 1.0
    powers: Powers = field(default_factory=dict)

    @property
    def vectors(self) -> Powers:
        """The columns, rows and scalars among the factors."""
        return {node: power for node, power in self.powers.items() if is_vector(node)}

    @property
    def matrices(self) -> Powers:
        """The matrices among the factors."""
        return {node: power for node, power in self.powers.items() if not is_vector(node)}

    def times(self, other: Monomial) -> Monomial:
        """The product of two."""
        powers = dict(self.powers)
        for node, power in other.powers.items():
            powers[node] = powers.get(node, 0) + power
        kept = {node: power for node, power in powers.items() if power}
        return Monomial(self.coefficient * other.coefficient, kept)

    def to_the(self, exponent: int) -> Monomial:
        """A whole power of it."""
        powers = {node: power * exponent for node, power in self.powers.items()}
        return Monomial(_number_to_the(self.coefficient, exponent), powers)

    def without(self, nodes: Iterable[Node]) -> Monomial:
        """What is left when some factors are taken out."""
        gone = set(nodes)
        kept = {node: power for node, power in self.powers.items() if node not in gone}
        return Monomial(self.coefficient, kept)


def kind(node: Node) -> str:
    """matrix, column, row or scalar."""
    rows, columns = node.type.rows != 1, node.type.columns != 1
    return {(True, True): "matrix", (True, False): "column", (False, True): "row"}.get(
        (rows, columns), "scalar"
    )


def factors(
    node: Node, opens: Callable[[Node], bool] = lambda node: False, atoms: Container[Node] = ()
) -> Monomial:
    """The value as a product: through products, quotients, negation and whole powers.

    Of a sum for which `opens` holds, the vectors that all its terms share are factors too. A
    matrix among `atoms` is taken whole, and so is what a number makes zero or infinite.
    """
    if node in atoms and not is_vector(node):
        return Monomial(1.0, {node: 1})
    found = _factors(node, opens, atoms)
    usual = found.coefficient != 0 and math.isfinite(found.coefficient)
    return found if usual else Monomial(1.0, {node: 1})


def _factors(node: Node, opens: Callable[[Node], bool], atoms: Container[Node]) -> Monomial:
    match node.op:
        case Op.CONSTANT if kind(node) == "scalar":
            return Monomial(float(node.attributes["value"]))
        case Op.NEG:
            return Monomial(-1.0).times(factors(node.inputs[0], opens, atoms))
        case Op.MUL:
            left, right = (factors(i, opens, atoms) for i in node.inputs)
            return left.times(right)
        case Op.DIV if not _is_zero(node.inputs[1]):
            left, right = (factors(i, opens, atoms) for i in node.inputs)
            return left.times(right.to_the(-1))
        case Op.POWER:
            return factors(node.inputs[0], opens, atoms).to_the(node.attributes["exponent"])
        case Op.ADD | Op.SUB if opens(node):
            return _shared_factors(node, *(factors(i, opens, atoms) for i in node.inputs))
    return Monomial(1.0, {node: 1})


def _shared_factors(node: Node, left: Monomial, right: Monomial) -> Monomial:
    """A sum as its terms' common vectors times a smaller sum."""
    common = {
        vector: min(power, right.vectors[vector])
        for vector, power in left.vectors.items()
        if power > 0 and right.vectors.get(vector, 0) > 0
    }
    if not common:
        return Monomial(1.0, {node: 1})
    shared = Monomial(1.0, common)
    rest = [build(term.times(shared.to_the(-1)), node.builder) for term in (left, right)]
    smaller = node.builder.make(node.op, (rest[0], rest[1]), {})
    return shared.times(Monomial(1.0, {smaller: 1}))


def _number_to_the(base: float, exponent: int) -> float:
    try:
        return base**exponent
    except OverflowError:
        return math.inf


def _is_zero(node: Node) -> bool:
    return node.op is Op.CONSTANT and node.attributes["value"] == 0


def expand(node: Node, opens: Callable[[Node], bool]) -> list[Monomial]:
    """The value as a sum of products; only sums for which `opens` holds are taken apart."""
    if node.op in (Op.ADD, Op.SUB) and opens(node):
        left, right = (expand(i, opens) for i in node.inputs)
        sign = Monomial(-1.0 if node.op is Op.SUB else 1.0)
        return [*left, *(sign.times(term) for term in right)]
    if node.op is Op.NEG:
        return [Monomial(-1.0).times(term) for term in expand(node.inputs[0], opens)]
    if node.op is Op.MUL:
        left, right = (expand(i, opens) for i in node.inputs)
        return [a.times(b) for a in left for b in right]
    if node.op is Op.DIV and not _is_zero(node.inputs[1]):
        divisor = factors(node.inputs[1]).to_the(-1)
        return [term.times(divisor) for term in expand(node.inputs[0], opens)]
    return [factors(node)]


def build(monomial: Monomial, builder: Builder) -> Node:
    """The monomial as an ordinary expression: matrices, then rows, columns, scalars, number."""
    order = ("matrix", "row", "column", "scalar")
    ranked = sorted(
        monomial.powers.items(), key=lambda item: (order.index(kind(item[0])), item[0].id)
    )
    above = [(node, power) for node, power in ranked if power > 0]
    below = [(node, -power) for node, power in ranked if power < 0]
    if not above:
        result = builder.constant(monomial.coefficient)
        return reduce(lambda a, b: a / _power(*b), below, result)
    result = reduce(lambda a, b: a * _power(*b), above[1:], _power(*above[0]))
    result = reduce(lambda a, b: a / _power(*b), below, result)
    return _scaled(result, monomial.coefficient)


def _power(node: Node, exponent: int) -> Node:
    return node if exponent == 1 else node**exponent


def _scaled(node: Node, coefficient: float) -> Node:
    if coefficient == 1.0:
        return node
    return -node if coefficient == -1.0 else node * coefficient


def total(nodes: Iterable[Node]) -> Node:
    """The sum of values."""
    return reduce(lambda a, b: a + b, nodes)
