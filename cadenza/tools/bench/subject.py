"""Functions with gradients that more than one suite looks at: a layer, and one small kernel."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from cadenza.library.blocks import llama
from cadenza.library.function import Program
from cadenza.tools.bench import programs, rivals, stock
from cadenza.tools.bench.case import Sizes
from cadenza.tools.bench.draw import Draw
from cadenza.tools.bench.measurement import Call

Tensor = torch.Tensor
Operands = Mapping[str, Any]
WEIGHTS = ("wo", "norm", "w_gate_up", "w_down", "next_norm", "w_qkv")


class Forward(NamedTuple):
    """A call that returns outputs, what comes back to each, and what gets a gradient."""

    call: Call
    upstream: Sequence[Tensor]
    leaves: Sequence[Tensor]

    def both(self) -> Sequence[Tensor]:
        """The gradients: forward and backward."""
        return torch.autograd.grad(self.call(), self.leaves, self.upstream)


class Subject(ABC):
    """A program on its operands, and torch's function `function` beside it.

    `leaves` names the operands that have gradients; `upstream` comes back to the outputs.
    """

    program: Program
    function: Callable[..., Any]
    leaves: tuple[str, ...]

    def __init__(self, operands: Operands, upstream: Sequence[Tensor]) -> None:
        self.operands, self.upstream = dict(operands), upstream
        for name in self.leaves:
            self.operands[name].requires_grad_()

    def ours(self) -> Forward:
        """The program."""
        return self._forward(partial(self.program, **self.operands), self.upstream)

    @abstractmethod
    def stock(self, function: Callable[..., Any]) -> Forward:
        """Torch's function, or what it was transformed to."""

    @abstractmethod
    def named(self, outputs: Sequence[Tensor]) -> dict[str, Tensor]:
        """Outputs of either by name, such that both give the same."""

    def _forward(self, call: Call, upstream: Sequence[Tensor]) -> Forward:
        return Forward(call, upstream, [self.operands[name] for name in self.leaves])

    def widened(self) -> Subject:
        """The same numbers in float64."""
        operands = {
            name: value.detach().double() if isinstance(value, Tensor) else value
            for name, value in self.operands.items()
        }
        return type(self)(operands, [one.double() for one in self.upstream])


class OneKernel(Subject):
    """The first half of GPT-2's MLP."""

    program, function = programs.bias_gelu, staticmethod(stock.bias_gelu)
    leaves = ("x", "w", "bias")

    @classmethod
    def drawn(cls, draw: Draw, sizes: Sizes) -> OneKernel:
        """Of random operands: M rows, K to N columns."""
        m, n, k = (sizes[name] for name in ("M", "N", "K"))
        operands = {"x": draw.normal(m, k), "w": draw.weight(n, k), "bias": draw.row(n)}
        return cls(operands, (draw.normal(m, n),))

    def stock(self, function: Callable[..., Any]) -> Forward:
        """By torch."""
        return self._forward(partial(function, **self.operands), self.upstream)

    def named(self, outputs: Sequence[Tensor]) -> dict[str, Tensor]:
        """y alone."""
        return {"y": outputs[0]}


class Layer(Subject):
    """Llama between two attentions."""

    program, function = llama, staticmethod(stock.layer)
    leaves = ("x", "y", *WEIGHTS)

    @classmethod
    def drawn(cls, draw: Draw, sizes: Sizes) -> Layer:
        """Of random operands: M tokens, D and F columns, H and KV heads of HD."""
        m, d, f, head = (sizes[name] for name in ("M", "D", "F", "HD"))
        a, n = sizes["H"] * head, (sizes["H"] + 2 * sizes["KV"]) * head
        weights = {
            "wo": draw.weight(d, a),
            "norm": draw.row(d),
            "w_gate_up": draw.weight(2 * f, d),
            "w_down": draw.weight(d, f),
            "next_norm": draw.row(d),
            "w_qkv": draw.weight(n, d),
        }
        tables = dict(zip(("cos", "sin"), draw.angles(m, head // 2), strict=True))
        streams = {"x": draw.normal(m, d), "y": draw.normal(m, a)}
        constants = {"head_dim": head, "heads": sizes["H"] + sizes["KV"]}
        upstream = draw.normal(m, d), draw.normal(m, n)
        return cls({**streams, **weights, **tables, **constants}, upstream)

    def stock(self, function: Callable[..., Any]) -> Forward:
        """By torch, rotated heads and values apart."""
        dx, dqkv = self.upstream
        return self._by(function, (dx, *(part.contiguous() for part in self._at(dqkv, 1))))

    def liger(self) -> Forward:
        """With Liger-Kernel's operations between torch's products."""
        rivals.need("liger_kernel")
        dx, dqkv = self.upstream
        dqk, dv = self._at(dqkv, 1)
        by_head = (part.unflatten(-1, (-1, self.operands["head_dim"])) for part in self._at(dqk, 2))
        # Its backward rotates these in place, call after call; a rotation keeps their size.
        dq, dk = (part.contiguous()[None].transpose(1, 2) for part in by_head)
        return self._by(liger_layer, (dx, dq, dk, dv.contiguous()))

    def _at(self, columns: Tensor, parts: int) -> Sequence[Tensor]:
        heads = self.operands["heads"] // parts
        return columns.tensor_split((heads * self.operands["head_dim"],), dim=-1)

    def _by(self, layer: Callable[..., Any], upstream: Sequence[Tensor]) -> Forward:
        o = self.operands
        tables = tuple(torch.cat((o[name], o[name]), dim=-1) for name in ("cos", "sin"))
        weights = {name: o[name] for name in WEIGHTS}
        return self._forward(partial(layer, o["x"], o["y"], weights, tables, o["heads"]), upstream)

    def named(self, outputs: Sequence[Tensor]) -> dict[str, Tensor]:
        """The stream, and queries, keys and values together."""
        x, *qkv = outputs
        return {"x": x, "qkv": torch.cat(tuple(qkv), dim=-1)}


def liger_layer(
    x: Tensor, y: Tensor, weights: Mapping[str, Tensor], tables: tuple[Tensor, Tensor], heads: int
) -> tuple[Tensor, ...]:
    """stock.layer with the operations that Liger-Kernel has."""
    h, x = rivals.liger_norm(F.linear(y, weights["wo"]), x, weights["norm"])
    u = rivals.liger_gated(F.linear(h, weights["w_gate_up"]))
    h, x = rivals.liger_norm(F.linear(u, weights["w_down"]), x, weights["next_norm"])
    return x, *rivals.liger_rope(F.linear(h, weights["w_qkv"]), *tables, heads)
