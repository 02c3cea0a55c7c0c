"""From a function and a signature to a forward and a backward program: one straight function."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cadenza.core.cost import bytes_of
from cadenza.core.ir import Graph, Node, topological, verify
from cadenza.core.ops import BOOLEAN, REAL, Op
from cadenza.core.partition import minimum_cut
from cadenza.core.readiness import reduces_matrix
from cadenza.core.rules import simplify
from cadenza.core.storage import compute_dtype, storage_dtypes
from cadenza.core.trace import Signature, trace
from cadenza.core.vjp import differentiate

LEAVES = (Op.INPUT, Op.CONSTANT, Op.COLUMN_INDEX, Op.ROW_INDEX)


@dataclass(frozen=True, eq=False)
class Pair:
    """A program ready for a back end.

    `program` is what the author wrote; `forward` returns its outputs, then what it saves.
    `backward` takes `values`, each an input by name or an output of forward by position, then the
    adjoints of the outputs at the positions `adjoints`; it returns the gradients of the inputs
    called `gradients`. Gradients come through the outputs at the positions `differentiable`.
    """

    program: Graph
    forward: Graph
    backward: Graph | None = None
    differentiable: tuple[int, ...] = ()
    values: tuple[str | int, ...] = ()
    adjoints: tuple[int, ...] = ()
    gradients: tuple[str, ...] = ()

    @property
    def outputs(self) -> int:
        """How many outputs the author's function has."""
        return len(self.program.outputs)


def compile_program(
    function: Callable[..., Any],
    signature: Signature,
    sizes: Mapping[str, int] | None = None,
    needed: Iterable[str] = (),
    name: str = "program",
    wide: Iterable[str] = (),
) -> Pair:
    """The program of a function, with the gradients of the inputs named in `needed`.

    Forward is the same whatever is needed; backward decides only what it also returns. The
    gradients of inputs named in `wide` stay in the compute type, for a caller that adds them up.
    """
    graph = verify(simplify(verify(trace(function, signature, sizes, name))))
    return differentiate_program(graph, needed, wide)


def differentiate_program(
    graph: Graph, needed: Iterable[str] = (), wide: Iterable[str] = ()
) -> Pair:
    """The pair of a program: its gradients, cut where the fewest bytes are kept."""
    names = set(needed)
    wanted = [i for i in graph.inputs if i.attributes["name"] in names and i.type.kind == REAL]
    differentiable = _dependent(graph, wanted)
    if not differentiable:
        return Pair(graph, graph)
    adjoints = _adjoints(graph, differentiable)
    joint = verify(simplify(verify(_gradients(graph, wanted, adjoints, set(wide)))))
    saved = save(graph, joint, set(adjoints.values()))
    forward = verify(_also_return(graph, saved))
    backward, values = _from_saved(joint, forward, graph)
    used = [p for p, adjoint in adjoints.items() if adjoint in set(backward.inputs)]
    return Pair(
        graph, forward, verify(backward), differentiable, values, tuple(used),
        tuple(joint.labels),
    )  # fmt: skip


def _dependent(graph: Graph, wanted: list[Node]) -> tuple[int, ...]:
    """Positions of the outputs that a gradient of `wanted` can come through."""
    depends = set(wanted)
    for node in graph.nodes():
        if node.type.kind == REAL and any(i in depends for i in node.inputs):
            depends.add(node)
    return tuple(p for p, output in enumerate(graph.outputs) if output in depends)


def _adjoints(graph: Graph, differentiable: Iterable[int]) -> dict[int, Node]:
    """A new input for the adjoint of each differentiable output, by position."""
    stored = storage_dtypes(graph.nodes(), compute_dtype(graph))
    taken = {str(i.attributes["name"]) for i in graph.inputs}
    return {
        p: _new_input(output, _free_name(f"d_{graph.labels[p]}", taken), stored[output])
        for p, output in enumerate(graph.outputs)
        if p in differentiable
    }


def _gradients(
    graph: Graph, wanted: list[Node], adjoints: Mapping[int, Node], wide: set[str]
) -> Graph:
    """The program of all gradients, over the inputs and the outputs' adjoints."""
    gradients = differentiate([(graph.outputs[p], a) for p, a in adjoints.items()], wanted)
    inputs = (*graph.inputs, *adjoints.values())
    compute = compute_dtype(graph)
    stored = storage_dtypes(topological([*inputs, *gradients.values()]), compute)
    outputs = {}
    for value, gradient in gradients.items():
        name = str(value.attributes["name"])
        outputs[name] = _stored_as(gradient, compute if name in wide else stored[value], stored)
    name = f"{graph.name}_backward"
    return Graph(name, inputs, tuple(outputs.values()), tuple(outputs), "dict", graph.names)


def _new_input(like: Node, name: str, dtype: str) -> Node:
    dtype = "bool" if like.type.kind == BOOLEAN else dtype
    attributes = {"name": name, "dtype": dtype, "kind": like.type.kind}
    shape = {"rows": like.type.rows, "columns": like.type.columns}
    return like.builder.make(Op.INPUT, (), attributes | shape)


def _stored_as(gradient: Node, dtype: str, stored: Mapping[Node, str]) -> Node:
    """A gradient takes its input's dtype: rounded once, from the compute type."""
    if stored[gradient] == dtype:
        return gradient
    return gradient.builder.make(Op.CAST, (gradient,), {"dtype": dtype})


def _free_name(name: str, taken: set[str]) -> str:
    while name in taken or not name.isidentifier():
        name = f"{name}_" if name.isidentifier() else "d_output"
    taken.add(name)
    return name


def save(graph: Graph, joint: Graph, adjoints: set[Node]) -> list[Node]:
    """What forward keeps for backward: the cut of fewest bytes; inputs and outputs are free.

    Products and reductions that the outputs need are never computed again.
    """
    forward, outputs = set(graph.nodes()), set(graph.outputs)
    stored = storage_dtypes(topological(graph.outputs), compute_dtype(graph))

    def weight(node: Node) -> float:
        if node.op in LEAVES or node in outputs:
            return 0
        if node not in forward:
            return float("inf")
        return bytes_of(node.type, "bool" if node.type.kind == BOOLEAN else stored[node])

    def sources(node: Node) -> tuple[Node, ...] | None:
        if node.op in LEAVES or node in outputs:
            return ()
        final = reduces_matrix(node) or node.op is Op.MATMUL
        return None if final and node in forward else node.inputs

    roots = _forward_roots(joint, adjoints)
    return [node for node in minimum_cut(roots, weight, sources) if weight(node) > 0]


def _forward_roots(joint: Graph, adjoints: set[Node]) -> list[Node]:
    """Values without an adjoint in them that backward work, or a gradient, is made of."""
    backward: set[Node] = set(adjoints)
    roots: dict[Node, None] = {}
    for node in joint.nodes():
        if node in backward or any(i in backward for i in node.inputs):
            backward.add(node)
            roots |= dict.fromkeys(i for i in node.inputs if i not in backward)
    return [*roots, *(o for o in joint.outputs if o not in backward)]


def _also_return(graph: Graph, saved: list[Node]) -> Graph:
    taken = {str(i.attributes["name"]) for i in graph.inputs} | set(graph.labels)
    labels = tuple(_free_name(graph.names.get(n, f"saved{k}"), taken) for k, n in enumerate(saved))
    outputs, structure = (*graph.outputs, *saved), "dict" if saved else graph.structure
    return Graph(
        graph.name, graph.inputs, outputs, (*graph.labels, *labels), structure, graph.names
    )


def _from_saved(joint: Graph, forward: Graph, graph: Graph) -> tuple[Graph, tuple[str | int, ...]]:
    """Backward as a program of its own, and where its values come from.

    Saved values and outputs become inputs, so no other work of forward is left in it.
    """
    stored = storage_dtypes(forward.nodes(), compute_dtype(graph))
    taken = {str(i.attributes["name"]) for i in joint.inputs}
    fresh: dict[Node, Node] = {}
    position: dict[Node, str | int] = {i: str(i.attributes["name"]) for i in graph.inputs}
    for place, (label, node) in enumerate(zip(forward.labels, forward.outputs, strict=True)):
        if node.op is not Op.INPUT and node not in fresh:
            name = _free_name(f"y_{label}" if place < len(graph.outputs) else label, taken)
            fresh[node] = _new_input(node, name, stored[node])
            position[fresh[node]] = place
    outputs = _substitute(joint.outputs, fresh)
    used = set(topological(outputs))
    values = [v for v in position if v in used]
    inputs = (*values, *(i for i in joint.inputs if i in used and i not in position))
    program = Graph(joint.name, inputs, tuple(outputs), joint.labels, "dict")
    return program, tuple(position[v] for v in values)


def _substitute(roots: Iterable[Node], fresh: Mapping[Node, Node]) -> list[Node]:
    done: dict[Node, Node] = dict(fresh)
    roots = list(roots)
    for node in topological(roots):
        if node not in done:
            inputs = tuple(done[i] for i in node.inputs)
            done[node] = node.builder.make(node.op, inputs, node.attributes)
    return [done[root] for root in roots]
