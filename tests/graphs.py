"""Programs for tests of the compiler: a function over operands written as "x M 8 float64".

`values` makes a tensor for each input of a graph and `run` executes the graph on the reference
back end; nothing here goes through autograd.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from cadenza.backends.whole import run_graph
from cadenza.core import lang as L
from cadenza.core.ir import Graph, Node
from cadenza.core.ops import INTEGER, M, Op
from cadenza.core.pipeline import Pair, compile_program
from cadenza.core.trace import Operand, Signature, trace

Tensor = torch.Tensor
ROWS = 5


def operand(text: str, dtype: str = "float32") -> Operand:
    """The operand that "name rows columns [dtype]" describes."""
    name, rows, columns, *own = text.split()
    return Operand(name, M if rows == M else int(rows), int(columns), *(own or [dtype]))


def signature(*operands: str, **constants: Any) -> Signature:
    """The signature of some operands and constants."""
    return Signature(tuple(map(operand, operands)), tuple(constants.items()))


def program(function: Callable[..., Any], *operands: str, **constants: Any) -> Graph:
    """The program of a function, as traced: not simplified."""
    name = function.__name__.strip("<>").replace("lambda", "program")
    return trace(function, signature(*operands, **constants), name=name)


def pair(function: Callable[..., Any], *operands: str, needed: Sequence[str] = ()) -> Pair:
    """The forward and backward programs of a function, for the gradients of `needed`."""
    return compile_program(function, signature(*operands), needed=needed)


def llama_block(x, y, wo, norm, w_gate_up, w_down, next_norm, w_qkv, cos, sin, *,
                head_dim, heads, eps=1e-5):  # fmt: skip
    """One Llama block, as its author writes it."""
    x = x + L.linear(y, wo)
    x = x + L.linear(L.swiglu(L.linear(L.rms_norm(x, norm, eps), w_gate_up)), w_down)
    qkv = L.linear(L.rms_norm(x, next_norm, eps), w_qkv)
    return x, L.rope(qkv, cos, sin, head_dim, heads=heads)


LLAMA = (
    "x M 16", "y M 16", "wo 16 16", "norm 1 16", "w_gate_up 48 16", "w_down 16 24",
    "next_norm 1 16", "w_qkv 32 16", "cos M 2", "sin M 2",
)  # fmt: skip
LLAMA_CONSTANTS = {"head_dim": 4, "heads": 6}


def count(graph: Graph | None, op: Op) -> int:
    """How many nodes of an operation a graph has."""
    return sum(node.op is op for node in graph.nodes()) if graph else 0


def values(graph: Graph) -> list[Tensor]:
    """Random tensors for the inputs of a graph; whole numbers stay below 4."""
    return [_value(node) for node in graph.inputs]


def _value(node: Node) -> Tensor:
    shape = [ROWS if size == M else size for size in node.shape]
    dtype = getattr(torch, node.attributes["dtype"])
    if node.type.kind == INTEGER:
        return torch.randint(4, shape, dtype=dtype)
    return torch.randn(shape, dtype=torch.float64).to(dtype)


def run(graph: Graph, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The outputs of a graph on the reference back end."""
    return run_graph(graph, tensors, ROWS)
