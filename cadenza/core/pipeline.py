"""From a function and a signature to a forward and a backward plan: one straight function.

    program  = simplify(trace(function, signature))      the function is run, never read
    deferred = simplify(lower(defer(lower(program))))
    first    = schedule(deferred)                        for the outputs alone
    joint    = simplify(defer(lower(simplify(differentiate(deferred)))))
    saved    = the cut of fewest bytes: it adds stores to forward and changes none
    forward  = schedule(deferred and saved)
    backward = schedule(joint from what is saved)

This is done for the program with and without deferral, and the cheaper form is kept (`choice`).
After each arrow the graph or plan is verified.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from cadenza.core.choice import keeps_deferred
from cadenza.core.defer import defer
from cadenza.core.ir import Graph, Node, topological, verify
from cadenza.core.ops import REAL, Op
from cadenza.core.plan import Plan
from cadenza.core.rules import lower, simplify
from cadenza.core.saved import added_to_sums, also_return, free_name, from_saved, new_input, save
from cadenza.core.schedule import schedule
from cadenza.core.storage import compute_dtype, dtypes_of, storage_dtypes
from cadenza.core.trace import Signature, trace
from cadenza.core.vjp import differentiate


@dataclass(frozen=True, eq=False)
class Pair:
    """A program ready for a back end.

    `program` is what the author wrote; `forward_plan` returns its outputs, then what it saves.
    `backward_plan` takes `values`, each an input by name or an output of forward by position,
    then the adjoints of the outputs at the positions `adjoints`, then the sums that the gradients
    of the inputs called `added` are added to; it returns the gradients of the inputs called
    `gradients`, which come through the outputs at the positions `differentiable`.
    """

    program: Graph
    forward_plan: Plan
    backward_plan: Plan | None = None
    differentiable: tuple[int, ...] = ()
    values: tuple[str | int, ...] = ()
    adjoints: tuple[int, ...] = ()
    gradients: tuple[str, ...] = ()
    added: tuple[str, ...] = ()

    @property
    def forward(self) -> Graph:
        """The program that the forward plan computes."""
        return self.forward_plan.graph

    @property
    def backward(self) -> Graph | None:
        """The program that the backward plan computes."""
        return self.backward_plan.graph if self.backward_plan else None

    @property
    def outputs(self) -> int:
        """How many outputs the author's function has."""
        return len(self.program.outputs)


class Sums(NamedTuple):
    """Inputs whose gradients a caller adds up: they stay in the compute type.

    Those of `wide` are returned so; those of `added` (matrices) are added to a sum that backward is
    given.
    """

    wide: frozenset[str] = frozenset()
    added: frozenset[str] = frozenset()


NO_SUMS = Sums()


def compile_program(
    function: Callable[..., Any],
    signature: Signature,
    sizes: Mapping[str, int] | None = None,
    needed: Iterable[str] = (),
    name: str = "program",
    sums: Sums = NO_SUMS,
) -> Pair:
    """The program of a function, with the gradients of the inputs named in `needed`.

    Forward is the same whatever is needed; backward decides only what it also returns, and how
    gradients that a caller adds up are handed out (`sums`).
    """
    program = verify(simplify(verify(trace(function, signature, sizes, name))))
    return differentiate_program(program, needed, sums)


def differentiate_program(
    program: Graph,
    needed: Iterable[str] = (),
    sums: Sums = NO_SUMS,
    deferral: bool | None = None,
) -> Pair:
    """The plans of a program and of the gradients of the inputs named in `needed`.

    Without `deferral` they are those of the textbook: no factor leaves a product, no Euler's rule.
    With None the cheaper form is taken (`choice`).
    """
    names = frozenset(needed)
    if deferral is not None:
        return _Form(program, deferral).pair(names, sums)
    forms = {chosen: _Form(program, chosen) for chosen in (True, False)}
    trained = frozenset(str(i.attributes["name"]) for i in _trained(program))

    def plans(chosen: bool) -> list[Plan]:
        pair = forms[chosen].pair(trained)
        return [plan for plan in (pair.forward_plan, pair.backward_plan) if plan]

    kept = keeps_deferred(forms[True].graph, forms[False].graph, plans)
    return forms[kept].pair(names, sums)


def _trained(program: Graph) -> list[Node]:
    """The inputs whose gradients training takes: what products depend on, biases and weights.

    Others, such as tables of angles, are matrices whose gradients are alike, deferred or not.
    """
    products = [n for n in program.nodes() if n.op is Op.MATMUL]
    reached = set(topological(products))
    real = [i for i in program.inputs if i.type.kind == REAL]
    return [i for i in real if i in reached or i.type.rows == 1]


@dataclass(frozen=True, eq=False)
class _Form:
    """A program deferred or not."""

    program: Graph
    deferral: bool

    @property
    def options(self) -> dict[str, Any]:
        """Those of `defer`."""
        return {} if self.deferral else {"rules": ()}

    @cached_property
    def graph(self) -> Graph:
        """Forward."""
        graph = verify(defer(verify(lower(self.program)), **self.options))
        return verify(simplify(verify(lower(graph))))

    @cached_property
    def first(self) -> Plan:
        """Forward's plan for the outputs alone."""
        return schedule(self.graph)

    @cached_property
    def _pairs(self) -> dict[Any, Pair]:
        return {}

    def pair(self, needed: frozenset[str], sums: Sums = NO_SUMS) -> Pair:
        """The plans, with the gradients of the inputs named in `needed`."""
        key = needed, sums
        if key not in self._pairs:
            self._pairs[key] = _pair(self, needed, sums)
        return self._pairs[key]


def _pair(form: _Form, names: frozenset[str], sums: Sums) -> Pair:
    program, graph, first = form.program, form.graph, form.first
    wanted = [i for i in graph.inputs if i.attributes["name"] in names and i.type.kind == REAL]
    differentiable = dependent(graph, wanted)
    if not differentiable:
        return Pair(program, first)
    adjoints = new_adjoints(graph, differentiable)
    wide = sums.wide | sums.added
    joint = verify(gradients(graph, wanted, adjoints, wide, euler=form.deferral))
    joint = verify(lower(verify(simplify(joint))))
    joint = verify(simplify(verify(_deferred(joint, adjoints.values(), first, form.options))))
    saved = save(graph, joint, set(adjoints.values()))
    forward = verify(also_return(graph, saved))
    backward, values = from_saved(joint, forward, graph)
    used = [p for p, adjoint in adjoints.items() if adjoint in set(backward.inputs)]
    backward = added_to_sums(backward, sums.added)
    return Pair(
        program, schedule(forward, own=len(graph.outputs)), schedule(verify(backward)),
        differentiable, values, tuple(used), tuple(joint.labels),
        tuple(name for name in joint.labels if name in sums.added),
    )  # fmt: skip


def _deferred(
    joint: Graph, adjoints: Iterable[Node], first: Plan, options: Mapping[str, Any]
) -> Graph:
    """Gradients with deferral: all of forward is ready, and what it stores is known."""
    stored = {node for kernel in first.kernels for node in kernel.stores} | set(joint.inputs)
    own: dict[str, Any] = {"ready": _Forward(adjoints), "stored": stored, "backward": True}
    return defer(joint, **own, fixed=set(first.graph.nodes()), **options)


class _Forward:
    """The values that no adjoint is part of."""

    def __init__(self, adjoints: Iterable[Node]) -> None:
        self._known = dict.fromkeys(adjoints, False)

    def __contains__(self, node: object) -> bool:
        assert isinstance(node, Node)
        pending = [node]
        while pending:
            part = pending[-1]
            unknown = [i for i in part.inputs if i not in self._known]
            if part in self._known or not unknown:
                self._known.setdefault(part, all(self._known[i] for i in part.inputs))
                pending.pop()
            pending.extend(unknown)
        return self._known[node]


def dependent(graph: Graph, wanted: list[Node]) -> tuple[int, ...]:
    """Positions of the outputs that a gradient of `wanted` can come through."""
    depends = set(wanted)
    for node in graph.nodes():
        if node.type.kind == REAL and any(i in depends for i in node.inputs):
            depends.add(node)
    return tuple(p for p, output in enumerate(graph.outputs) if output in depends)


def new_adjoints(graph: Graph, differentiable: Iterable[int]) -> dict[int, Node]:
    """A new input for the adjoint of each differentiable output, by position."""
    stored = dtypes_of(graph)
    taken = {str(i.attributes["name"]) for i in graph.inputs}
    return {
        p: new_input(output, free_name(f"d_{graph.labels[p]}", taken), stored[output])
        for p, output in enumerate(graph.outputs)
        if p in differentiable
    }


def gradients(
    graph: Graph,
    wanted: list[Node],
    adjoints: Mapping[int, Node],
    wide: Container[str],
    euler: bool = True,
) -> Graph:
    """The program of all gradients, over the inputs and the outputs' adjoints."""
    found = differentiate([(graph.outputs[p], a) for p, a in adjoints.items()], wanted, euler)
    inputs = (*graph.inputs, *adjoints.values())
    compute = compute_dtype(graph)
    stored = storage_dtypes(topological([*inputs, *found.values()]), compute)
    outputs = {}
    for value, gradient in found.items():
        name = str(value.attributes["name"])
        outputs[name] = _stored_as(gradient, compute if name in wide else stored[value], stored)
    name = f"{graph.name}_backward"
    return Graph(name, inputs, tuple(outputs.values()), tuple(outputs), "dict", graph.names)


def _stored_as(gradient: Node, dtype: str, stored: Mapping[Node, str]) -> Node:
    """A gradient takes its input's dtype: rounded once, from the compute type."""
    if stored[gradient] == dtype:
        return gradient
    return gradient.builder.make(Op.CAST, (gradient,), {"dtype": dtype})
