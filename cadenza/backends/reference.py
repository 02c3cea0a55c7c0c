"""The reference back end: plans, run kernel by kernel in torch's eager mode.

Only what a plan stores, partials and finished vectors cross kernels; a kernel sees its own product
in the compute type and everything else as it was stored, rounded once. At float64 this is the
oracle of every test.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from cadenza.backends.meaning import MEANING
from cadenza.backends.partials import COLUMNS, ROWS
from cadenza.backends.reuse import Reuse
from cadenza.backends.steps import Owner, Step, Steps, Values, torch_dtype
from cadenza.core.ir import Node
from cadenza.core.ops import REAL, Op
from cadenza.core.plan import Kernel, Plan
from cadenza.core.readiness import is_vector, reduces_matrix
from cadenza.core.storage import compute_dtype, dtypes_of

Tensor = torch.Tensor
# Rows and columns of a tile; none, the default, takes all at once. Results differ by rounding.
TILE = int(os.environ.get("CADENZA_REFERENCE_TILE", "0")) or None


class Executable:
    """A plan made ready to run. `tile` is how many rows and columns a tile has, TILE by default."""

    def __init__(self, plan: Plan, tile: int | None = None) -> None:
        self.plan, self.tile = plan, TILE if tile is None else tile
        graph = plan.graph
        self.compute = getattr(torch, compute_dtype(graph))
        nodes = graph.nodes()
        names = dtypes_of(graph)
        self.dtypes = {n: torch_dtype(n, names[n]) for n in nodes}
        reduced = [r for k in plan.kernels for r in k.reductions]
        stored = [s for k in plan.kernels for s in k.stores]
        kept = [*graph.outputs, *stored, *(i for r in reduced for i in r.inputs)]
        self.steps = Steps(nodes, self.compute, kept)
        self.kernels = [_KernelRun(self, kernel) for kernel in plan.kernels]
        self.finishes = {n: self.steps.step(n) for n in nodes if is_vector(n) and n.inputs}
        self.leaves = {
            n: self.steps.step(n) for n in nodes if not n.inputs and n.op is not Op.INPUT
        }
        self.spent = self._last_uses()

    def _last_uses(self) -> list[list[Node]]:
        """By kernel, the stored matrices that nothing needs after it."""
        last: dict[Node, int] = {}
        for position, kernel in enumerate(self.plan.kernels):
            operands = kernel.product.inputs if kernel.product is not None else ()
            last |= dict.fromkeys([*kernel.stores, *kernel.loads, *operands], position)
        kept = set(self.plan.graph.outputs)
        for product in self.plan.vector_products:
            kept |= set(product.inputs)
        spent: list[list[Node]] = [[] for _ in self.plan.kernels]
        for node, position in last.items():
            if node not in kept and node.op is not Op.INPUT:
                spent[position].append(node)
        return spent

    def __call__(self, tensors: Sequence[Tensor], rows: int) -> list[Tensor]:
        """The outputs, new contiguous tensors, of inputs in the graph's order, each 2-D."""
        inputs = zip(self.plan.graph.inputs, tensors, strict=True)
        memory = Memory(self, dict(inputs), rows, tensors[0].device)
        for kernel, spent in zip(self.kernels, self.spent, strict=True):
            kernel.run(memory)
            for node in spent:
                del memory.stored[node]
        owner = Owner(tensors)
        return [owner.own(memory.output(o), self.dtypes[o]) for o in self.plan.graph.outputs]


class Memory:
    """What exists between kernels: stored matrices, finished reductions and vectors."""

    def __init__(
        self, executable: Executable, stored: dict[Node, Tensor], rows: int, device: torch.device
    ) -> None:
        self.executable, self.rows, self.stored = executable, rows, stored
        like = torch.empty(0, dtype=executable.compute, device=device)
        self.vectors: Values = {"like": like}

    def load(self, node: Node) -> Tensor:
        """A stored value in the compute type. KeyError when it was never stored."""
        tensor = self.stored[node]
        return tensor.to(self.executable.compute) if node.type.kind == REAL else tensor

    def store(self, node: Node, value: Tensor) -> None:
        """Rounds once."""
        self.stored[node] = stored_as(value, self.executable.dtypes[node])

    def vector(self, node: Node) -> Any:
        """A finished vector, made of finished ones where it is first needed."""
        if node not in self.vectors:
            self.vectors[node] = self._finished(node)
        return self.vectors[node]

    def _finished(self, node: Node) -> Any:
        executable = self.executable
        if node in self.stored:
            return self.load(node)
        if node in executable.leaves:
            return executable.leaves[node](self.vectors, self.rows)
        if reduces_matrix(node):
            raise KeyError(f"{node!r} is not finished")
        if node.op is Op.MATMUL:
            values = {i: self.vector(i) if is_vector(i) else self.load(i) for i in node.inputs}
        else:
            values = {i: self.vector(i) for i in node.inputs}
        return executable.finishes[node]({**values, "like": self.vectors["like"]}, self.rows)

    def output(self, node: Node) -> Tensor:
        """An output of the program."""
        if node in self.stored:
            return self.stored[node]
        return torch.as_tensor(self.vector(node))


class _KernelRun:
    """One kernel: its product, its body step by step, stores and partials."""

    def __init__(self, executable: Executable, kernel: Kernel) -> None:
        self.kernel, self.tile = kernel, executable.tile
        kept = [*kernel.stores, *kernel.reductions, *(r.inputs[0] for r in kernel.reductions)]
        self.reuse = Reuse(kernel.product, kernel.body, kept)
        self.body = [(n, self._step(executable.steps, n), self.reuse.spent(n)) for n in kernel.body]
        self.reductions = [(r, _spread_over(r)) for r in kernel.reductions]

    def _step(self, steps: Steps, node: Node) -> Step:
        in_place = self.reuse.in_place(node)
        return steps.step(node) if in_place is None else lambda values, rows: in_place(values)

    def run(self, memory: Memory) -> None:
        """Computes, stores and reduces."""
        kernel, product = self.kernel, self.kernel.product
        values: Values = {"like": memory.vectors["like"]}
        if product is not None:
            operands = [memory.load(i) for i in product.inputs]
            values[product] = MEANING[Op.MATMUL](*operands, **product.attributes)
            del operands
        values |= {node: memory.load(node) for node in kernel.loads}
        values |= {node: memory.vector(node) for node in kernel.vectors}
        for node, step, spent in self.body:
            values[node] = step(values, memory.rows)
            for value in spent:
                del values[value]
        for node in kernel.stores:
            memory.store(node, values[node])
        for node, shape in self.reductions:
            if node in values:  # this kernel holds rows and has finished it
                memory.vectors[node] = values[node]
            else:
                memory.vectors[node] = self._reduce(node, shape(values, memory.rows), memory)

    def _reduce(self, node: Node, x: Tensor, memory: Memory) -> Tensor:
        others = [memory.vector(i) for i in node.inputs[1:]]
        axis = 1 if node.op in ROWS else 0
        if self.tile is None or x.shape[axis] <= self.tile:
            result: Tensor = MEANING[node.op](x, *others)
            return result
        return (ROWS | COLUMNS)[node.op](x.split(self.tile, axis), *others)


def stored_as(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The one rounding of a value, where it is stored."""
    return value.to(dtype)


def _spread_over(reduction: Node) -> Callable[[Values, int], Tensor]:
    """The argument of a reduction in the full shape of its type."""
    argument = reduction.inputs[0]

    def spread(values: Values, rows: int) -> Tensor:
        shape = tuple(rows if d == "M" else int(d) for d in argument.type[:2])
        return torch.as_tensor(values[argument]).expand(shape)

    return spread


def compile_plan(plan: Plan, tile: int | None = None) -> Executable:
    """A plan made ready to run."""
    return Executable(plan, tile)
