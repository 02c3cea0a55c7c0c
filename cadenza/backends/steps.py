"""One node as a function of the values at hand: what both executors are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from cadenza.backends.meaning import LEAVES, MEANING, number_in, takes_numbers
from cadenza.core.ir import Node
from cadenza.core.ops import BOOLEAN, REAL, Op

Tensor = torch.Tensor
Values = dict[Any, Any]  # by node; "like" holds an empty tensor of the compute type and device
Step = Callable[[Values, int], Any]


class Steps:
    """Makes steps for the nodes of one program; scalar constants stay Python's numbers."""

    def __init__(self, nodes: Iterable[Node], compute: torch.dtype, kept: Iterable[Node]) -> None:
        nodes = list(nodes)
        tensors = {i for n in nodes for i in n.inputs if not takes_numbers(n)} | set(kept)
        scalars = {n for n in nodes if (n.op, n.type[:2]) == (Op.CONSTANT, (1, 1))}
        self.compute, self.numbers = compute, scalars - tensors

    def step(self, node: Node) -> Step:
        """The node's value, given those of its inputs and the number of rows."""
        attributes, inputs = node.attributes, node.inputs
        if node in self.numbers:
            number = number_in(attributes["value"], self.compute)
            return lambda values, rows: number
        if node.op in LEAVES:
            return _leaf(node)
        function = MEANING[node.op]
        widen = [self._widens(node, i) for i in inputs]

        def step(values: Values, rows: int) -> Any:
            given = [
                values[i].to(w) if w else values[i] for i, w in zip(inputs, widen, strict=True)
            ]
            return function(*given, **attributes)

        return step

    def _widens(self, node: Node, argument: Node) -> torch.dtype | None:
        """Whole numbers and conditions become numbers of the compute type in arithmetic.

        Beside a number that is not whole, so do whole numbers that are compared with it.
        """
        if argument.type.kind == REAL or node.op is Op.WHERE:
            return None
        if node.op is Op.COMPARE and all(i.type.kind != REAL or _is_whole(i) for i in node.inputs):
            return None
        return self.compute


def _is_whole(node: Node) -> bool:
    return node.op is Op.CONSTANT and float(node.attributes["value"]).is_integer()


def _leaf(node: Node) -> Step:
    meaning, attributes, inputs = LEAVES[node.op], node.attributes, node.inputs

    def step(values: Values, rows: int) -> Any:
        sizes = {k: rows if v == "M" else v for k, v in attributes.items()}
        return meaning(*(values[i] for i in inputs), like=values["like"], **sizes)

    return step


def torch_dtype(node: Node, name: str) -> torch.dtype:
    """The torch dtype in which a value of storage dtype `name` is stored."""
    dtype: torch.dtype = getattr(torch, "bool" if node.type.kind == BOOLEAN else name)
    return dtype


class Owner:
    """Hands out tensors that share memory with nothing else."""

    def __init__(self, given: Iterable[Tensor]) -> None:
        self.taken = {t.untyped_storage().data_ptr() for t in given}

    def own(self, value: Tensor, dtype: torch.dtype) -> Tensor:
        """The value as a contiguous tensor of its own."""
        result = value.to(dtype).contiguous()
        if result.untyped_storage().data_ptr() in self.taken:
            result = result.clone()
        self.taken.add(result.untyped_storage().data_ptr())
        return result
