"""Which values of a kernel's body may be overwritten by what is made of them.

Memory traffic is what a kernel's epilogue costs in eager mode, so a value that nothing needs any
more, and that shares memory with nothing, lends its memory to the next.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from cadenza.core.ir import Node
from cadenza.core.ops import REAL, Op

BINARY: dict[Op, Callable[[Any, Any], Any]] = {
    Op.ADD: operator.iadd,
    Op.SUB: operator.isub,
    Op.MUL: operator.imul,
    Op.DIV: operator.itruediv,
}
UNARY: dict[Op, Callable[[torch.Tensor], torch.Tensor]] = {
    Op.NEG: torch.neg_,
    Op.EXP: torch.exp_,
    Op.SIGMOID: torch.sigmoid_,
    Op.TANH: torch.tanh_,
    Op.RSQRT: torch.rsqrt_,
}
COMMUTE = (Op.ADD, Op.MUL)
FRESH = (*BINARY, *UNARY, Op.POWER, Op.ABS, Op.LOG, Op.SQRT, Op.ERF, Op.JOIN, Op.MATMUL)
ALIASES = (Op.SPLIT, Op.COLUMNS, Op.TRANSPOSE, Op.CAST, Op.CONCAT, Op.TILE, Op.REPEAT)


class Reuse:
    """For the body of one kernel: when a value is spent, and whether its memory can be taken."""

    def __init__(self, product: Node | None, body: Sequence[Node], kept: Iterable[Node]) -> None:
        own = set(body) | ({product} if product is not None else set())
        self.kept = set(kept)
        self.last = {i: n for n in body for i in n.inputs}
        shared = {i for n in body if n.op in ALIASES for i in n.inputs}
        self.free = {n for n in own - shared - self.kept if n.op in FRESH and n.type.is_matrix}

    def spent(self, node: Node) -> list[Node]:
        """The values that nothing needs once `node` is made."""
        return [i for i in dict.fromkeys(node.inputs) if self._ends(i, node)]

    def _ends(self, value: Node, node: Node) -> bool:
        return self.last[value] is node and value not in self.kept

    def in_place(self, node: Node) -> Callable[[dict[Any, Any]], Any] | None:
        """How to make `node` in the memory of one of its inputs, where that can be done."""
        if any(i.type.kind != REAL for i in node.inputs) or len(set(node.inputs)) < len(
            node.inputs
        ):
            return None
        taken = [i for i in node.inputs if self._lends(i, node)]
        if not taken:
            return None
        if node.op in UNARY:
            function, only = UNARY[node.op], taken[0]
            return lambda values: function(values[only])
        if node.op not in BINARY or (taken[0] is not node.inputs[0] and node.op not in COMMUTE):
            return None
        both, target = BINARY[node.op], taken[0]
        other = node.inputs[1] if target is node.inputs[0] else node.inputs[0]
        return lambda values: both(values[target], values[other])

    def _lends(self, value: Node, node: Node) -> bool:
        return value in self.free and self._ends(value, node) and value.type == node.type
