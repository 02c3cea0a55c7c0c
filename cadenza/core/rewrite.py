"""Patterns, and the engine that applies rules to a graph until none fires.

A rule is a function of one node that returns an equal node of the same type, or None. Most are
equations written as ordinary expressions: `equation(lambda x: (x + 0.0, x))`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import is_
from typing import Any

from cadenza.core.errors import VerificationError
from cadenza.core.ir import Graph, Node, topological
from cadenza.core.ops import Op

Rule = Callable[[Node], Node | None]
Bindings = dict[Any, Any]


class Pattern:
    """An expression to match: an operation over patterns, a variable (no op), or a number."""

    def __init__(self, op: Op | None, *inputs: Pattern | float, **attributes: Any) -> None:
        self.op, self.attributes = op, attributes
        self.inputs = tuple(i if isinstance(i, Pattern) else _number(i) for i in inputs)

    def __add__(self, other: Pattern | float) -> Pattern:
        return Pattern(Op.ADD, self, other)

    def __radd__(self, other: float) -> Pattern:
        return Pattern(Op.ADD, other, self)

    def __sub__(self, other: Pattern | float) -> Pattern:
        return Pattern(Op.SUB, self, other)

    def __rsub__(self, other: float) -> Pattern:
        return Pattern(Op.SUB, other, self)

    def __mul__(self, other: Pattern | float) -> Pattern:
        return Pattern(Op.MUL, self, other)

    def __rmul__(self, other: float) -> Pattern:
        return Pattern(Op.MUL, other, self)

    def __truediv__(self, other: Pattern | float) -> Pattern:
        return Pattern(Op.DIV, self, other)

    def __neg__(self) -> Pattern:
        return Pattern(Op.NEG, self)

    def __pow__(self, exponent: int) -> Pattern:
        return Pattern(Op.POWER, self, exponent=exponent)


def _number(value: float) -> Pattern:
    return Pattern(Op.CONSTANT, value=value)


def _match(pattern: Any, value: Any, found: Bindings) -> bool:
    """Whether `value`, a node or an attribute, has the form of `pattern`; binds variables."""
    if not isinstance(pattern, Pattern):
        return bool(pattern == value)
    if pattern.op is None:
        return _same(found.setdefault(pattern, value), value)
    if not isinstance(value, Node) or value.op is not pattern.op:
        return False
    attributes = all(_match(p, value.attributes[n], found) for n, p in pattern.attributes.items())
    return (
        attributes
        and len(pattern.inputs) == len(value.inputs)
        and all(_match(p, v, found) for p, v in zip(pattern.inputs, value.inputs, strict=True))
    )


def _same(a: Any, b: Any) -> bool:
    return a is b if isinstance(a, Node) or isinstance(b, Node) else bool(a == b)


def _build(pattern: Any, found: Bindings, like: Node) -> Any:
    if not isinstance(pattern, Pattern):
        return pattern
    if pattern.op is None:
        return found[pattern]
    if pattern.op is Op.CONSTANT:
        return like.builder.constant(pattern.attributes["value"])
    inputs = tuple(_build(p, found, like) for p in pattern.inputs)
    attributes = {n: _build(p, found, like) for n, p in pattern.attributes.items()}
    return like.builder.make(pattern.op, inputs, attributes)


def equation(sides: Callable[..., tuple[Any, Any]]) -> Rule:
    """The rule left = right; it fires where the left side matches and the type stays."""
    variables = [Pattern(None) for _ in inspect.signature(sides).parameters]
    left, right = sides(*variables)

    def rule(node: Node) -> Node | None:
        found: Bindings = {}
        if not _match(left, node, found):
            return None
        result: Node = _build(right, found, node)
        return result if result.type == node.type else None

    rule.head = left.op  # type: ignore[attr-defined]  # nothing else can match
    return rule


def rewrite(roots: Iterable[Node], rules: Sequence[Rule]) -> list[Node]:
    """The roots with every rule applied wherever it fires."""
    roots = list(roots)
    by_head = {op: [r for r in rules if getattr(r, "head", op) is op] for op in Op}
    done: dict[Node, Node] = {}
    for node in topological(roots):
        _settle(node, by_head, done)
    return [done[root] for root in roots]


def _settle(node: Node, rules: Mapping[Op, Sequence[Rule]], done: dict[Node, Node]) -> Node:
    if node in done:
        return done[node]
    settled = [done[i] if i in done else _settle(i, rules, done) for i in node.inputs]
    final = current = rebuild(node, settled)
    for rule in rules[current.op]:
        made = rule(current)
        if made is not None:
            if made.type != node.type:
                raise VerificationError(f"a rule turned {node!r} into {made!r}")
            final = _settle(made, rules, done)
            break
    done[node] = done[current] = done[final] = final
    return final


def rebuild(node: Node, inputs: Sequence[Node]) -> Node:
    """The same operation over other inputs."""
    if all(map(is_, inputs, node.inputs)):
        return node
    return node.builder.make(node.op, tuple(inputs), node.attributes)


def rewrite_graph(graph: Graph, rules: Sequence[Rule]) -> Graph:
    """The same program with rules applied; names move with the values that carry them."""
    live = set(graph.nodes())
    named = [node for node in graph.names if node in live]
    results = rewrite([*graph.outputs, *named], rules)
    count = len(graph.outputs)
    names = {new: graph.names[old] for old, new in zip(named, results[count:], strict=True)}
    return Graph(
        graph.name, graph.inputs, tuple(results[:count]), graph.labels, graph.structure, names
    )
