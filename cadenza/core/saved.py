"""What forward keeps for backward: the cut of fewest bytes, and the two programs on its sides."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

from cadenza.core.cost import bytes_of
from cadenza.core.ir import Graph, Node, topological
from cadenza.core.ops import BOOLEAN, Op
from cadenza.core.partition import minimum_cut
from cadenza.core.readiness import reduces_matrix
from cadenza.core.storage import dtypes_of, is_found_rounded

LEAVES = (Op.INPUT, Op.CONSTANT, Op.COLUMN_INDEX, Op.ROW_INDEX)
LARGEST = (Op.ROW_MAX, Op.COLUMN_MAX, Op.GROUP_MAX)
EXACT = (Op.ABS, Op.NEG, Op.SPLIT, Op.COLUMNS, Op.REPEAT, Op.TILE)  # before or after rounding


def new_input(like: Node, name: str, dtype: str) -> Node:
    """An input of the shape of a value, as it is stored."""
    dtype = "bool" if like.type.kind == BOOLEAN else dtype
    attributes = {"name": name, "dtype": dtype, "kind": like.type.kind}
    shape = {"rows": like.type.rows, "columns": like.type.columns}
    return like.builder.make(Op.INPUT, (), attributes | shape)


def free_name(name: str, taken: set[str]) -> str:
    """The name, with underscores until it is an identifier that is not taken; then it is."""
    while name in taken or not name.isidentifier():
        name = f"{name}_" if name.isidentifier() else "d_output"
    taken.add(name)
    return name


def parts(outputs: Iterable[Node]) -> dict[Node, tuple[Node, int]]:
    """The values that outputs are concatenated of: the output, and the column where each starts.

    Such a value can be read from the output, so it need not be kept.
    """
    found: dict[Node, tuple[Node, int]] = {}
    for output in outputs:
        start = 0
        for part in output.inputs if output.op is Op.CONCAT else ():
            if part.type.rows == output.type.rows and part.type.is_matrix:
                found.setdefault(part, (output, start))
            start += int(part.type.columns)
    return found


def save(graph: Graph, joint: Graph, adjoints: set[Node]) -> list[Node]:
    """What forward keeps for backward: the cut of fewest bytes; inputs and outputs are free.

    Products and reductions that the outputs need are never computed again, nor is a rounded matrix
    among which its largest is to be found. Among equals, what the author rounded is kept, not what
    is made of it.
    """
    forward, outputs = set(graph.nodes()), {*graph.outputs, *parts(graph.outputs)}
    stored = dtypes_of(graph)
    searched = {_unmoved(n.inputs[0]) for n in forward if n.op in LARGEST}
    searched = {node for node in searched if is_found_rounded(node)}

    def weight(node: Node) -> float:
        if node.op in LEAVES or node in outputs:
            return 0
        if node not in forward:
            return float("inf")
        price = bytes_of(node.type, "bool" if node.type.kind == BOOLEAN else stored[node])
        price = max(1, price)  # of no rows, too: only what is at hand is free
        return price - 0.5 if node.op is Op.CAST else price  # rounded already: keeping it is exact

    def sources(node: Node) -> tuple[Node, ...] | None:
        final = reduces_matrix(node) or node.op is Op.MATMUL or node in searched
        return None if final and node in forward else node.inputs

    roots = _forward_roots(joint, adjoints)
    return minimum_cut(roots, weight, sources)


def _unmoved(node: Node) -> Node:
    """What a value is made of by operations that rounding does not see."""
    while node.op in EXACT:
        node = node.inputs[0]
    return node


def _forward_roots(joint: Graph, adjoints: set[Node]) -> list[Node]:
    """Values without an adjoint in them that backward work, or a gradient, is made of."""
    backward: set[Node] = set(adjoints)
    roots: dict[Node, None] = {}
    for node in joint.nodes():
        if node in backward or any(i in backward for i in node.inputs):
            backward.add(node)
            roots |= dict.fromkeys(i for i in node.inputs if i not in backward)
    return [*roots, *(o for o in joint.outputs if o not in backward)]


def also_return(graph: Graph, saved: list[Node]) -> Graph:
    """Forward as a program that returns what is saved after its outputs."""
    taken = {str(i.attributes["name"]) for i in graph.inputs} | set(graph.labels)
    labels = tuple(free_name(graph.names.get(n, f"saved{k}"), taken) for k, n in enumerate(saved))
    outputs, structure = (*graph.outputs, *saved), "dict" if saved else graph.structure
    return Graph(
        graph.name, graph.inputs, outputs, (*graph.labels, *labels), structure, graph.names
    )


def from_saved(joint: Graph, forward: Graph, graph: Graph) -> tuple[Graph, tuple[str | int, ...]]:
    """Backward as a program of its own, and where its values come from.

    Saved values and outputs become inputs, so no other work of forward is left in it.
    """
    stored = dtypes_of(forward)
    taken = {str(i.attributes["name"]) for i in joint.inputs}
    fresh: dict[Node, Node] = {}
    position: dict[Node, str | int] = {i: str(i.attributes["name"]) for i in graph.inputs}
    for place, (label, node) in enumerate(zip(forward.labels, forward.outputs, strict=True)):
        if node.op is not Op.INPUT and node not in fresh:
            name = free_name(f"y_{label}" if place < len(graph.outputs) else label, taken)
            fresh[node] = new_input(node, name, stored[node])
            position[fresh[node]] = place
    for part, (output, start) in parts(graph.outputs).items():
        if part not in fresh and part.op is not Op.INPUT:
            fresh[part] = _columns(fresh[output], start, int(part.type.columns))
    outputs = _substitute(joint.outputs, fresh)
    used = set(topological(outputs))
    values = [v for v in position if v in used]
    inputs = (*values, *(i for i in joint.inputs if i in used and i not in position))
    program = Graph(joint.name, inputs, tuple(outputs), joint.labels, "dict")
    return program, tuple(position[v] for v in values)


def added_to_sums(graph: Graph, names: Container[str]) -> Graph:
    """Backward that adds the matrices of these labels to sums, inputs after all others."""
    stored = dtypes_of(graph)
    taken = {str(i.attributes["name"]) for i in graph.inputs}
    sums: list[Node] = []
    outputs = list(graph.outputs)
    for place, (label, gradient) in enumerate(zip(graph.labels, graph.outputs, strict=True)):
        if label in names:
            sums.append(new_input(gradient, free_name(f"sum_{label}", taken), stored[gradient]))
            outputs[place] = gradient.builder.make(Op.ADD, (sums[-1], gradient), {})
    return Graph(graph.name, (*graph.inputs, *sums), tuple(outputs), graph.labels, "dict")


def _columns(x: Node, start: int, width: int) -> Node:
    return x.builder.make(Op.COLUMNS, (x,), {"start": start, "stop": start + width})


def _substitute(roots: Iterable[Node], fresh: Mapping[Node, Node]) -> list[Node]:
    done: dict[Node, Node] = dict(fresh)
    roots = list(roots)
    for node in topological(roots):
        if node not in done:
            inputs = tuple(done[i] for i in node.inputs)
            done[node] = node.builder.make(node.op, inputs, node.attributes)
    return [done[root] for root in roots]
