"""What deferral must not lose to rounding: what is to cancel sees the operands that are stored."""

from __future__ import annotations

from collections.abc import Container, Iterable

from cadenza.core.algebra import Monomial, build, factors, kind
from cadenza.core.ir import Node, topological
from cadenza.core.ops import Op
from cadenza.core.primitives import stored
from cadenza.core.readiness import is_product
from cadenza.core.rewrite import rebuild


def rounded_sums(roots: list[Node], ready: Container[Node]) -> list[Node]:
    """colsum(c·X) beside X.T @ Y, from which it takes a mean's part, sums X as it is stored."""
    operands = _adjoint_operands(roots, ready)
    done: dict[Node, Node] = {}
    for old in topological([*operands, *roots]):
        node = done[old] = rebuild(old, [done[i] for i in old.inputs])
        if node.op is not Op.COLUMN_SUM or old in ready:
            continue
        for operand in operands:
            weight = factors(old.inputs[0]).times(factors(operand).to_the(-1))
            if _weighs(weight):
                rounded = Monomial(1.0, {stored(done.get(operand, operand)): 1})
                inside = build(weight.times(rounded), node.builder)
                done[old] = node.builder.make(Op.COLUMN_SUM, (inside,), {})
                break
    return [done[root] for root in roots]


def _adjoint_operands(roots: Iterable[Node], ready: Container[Node]) -> list[Node]:
    """The operands that backward makes and that a product contracts over the rows."""
    found: dict[Node, None] = {}
    for node in topological(roots):
        if is_product(node) and node not in ready:
            left, right = node.inputs
            summed = [left] * node.attributes["transpose_a"]
            summed += [right] * (not node.attributes["transpose_b"])
            found |= dict.fromkeys(o for o in summed if o.inputs and o not in ready)
    return list(found)


def _weighs(weight: Monomial) -> bool:
    """Whether it is columns alone, none of them divided by, and at least one."""
    columns = (kind(v) == "column" and power > 0 for v, power in weight.powers.items())
    return bool(weight.powers) and all(columns)
