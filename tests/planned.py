"""Plans executed kernel by kernel, and compiled built-in blocks: what tests of plans share.

`execute` runs a pair's plans on tensors by name, with tiles as small as a test likes; nothing here
goes through autograd or the caches of the library.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from block_operands import FROZEN, cast, operands

from cadenza.backends.reference import Executable
from cadenza.core.cost import kernel_work, moved
from cadenza.core.ir import Graph
from cadenza.core.ops import REAL, M
from cadenza.core.pipeline import Pair, compile_program
from cadenza.core.plan import Plan, verify_plan
from cadenza.core.readiness import is_product
from cadenza.core.storage import dtypes_of
from cadenza.core.trace import Operand, Signature, undecided
from cadenza.library.blocks import BUILT_IN
from cadenza.library.operands import Operands, as_matrix, describe

Tensor = torch.Tensor
Tensors = dict[str, Tensor]


class Results(NamedTuple):
    """What a pair's plans return: outputs by label, then gradients by input."""

    outputs: Tensors
    gradients: Tensors


def execute(
    pair: Pair,
    tensors: Mapping[str, Tensor],
    rows: int,
    upstream: Sequence[Tensor] = (),
    tile: int | None = None,
) -> Results:
    """Runs forward, then backward if there is one and adjoints of all outputs are given."""
    forward = Executable(pair.forward_plan, tile)
    results = forward([tensors[i.attributes["name"]] for i in pair.forward.inputs], rows)
    outputs = dict(zip(pair.program.labels, results, strict=False))
    if pair.backward_plan is None or not upstream:
        return Results(outputs, {})
    given = [results[v] if isinstance(v, int) else tensors[v] for v in pair.values]
    backward = Executable(pair.backward_plan, tile)
    found = backward([*given, *(upstream[p] for p in pair.adjoints)], rows)
    return Results(outputs, dict(zip(pair.gradients, found, strict=True)))


def verified(pair: Pair) -> Pair:
    """The pair itself, its plans verified."""
    verify_plan(pair.forward_plan)
    if pair.backward_plan is not None:
        verify_plan(pair.backward_plan)
    return pair


def products(*graphs: Graph) -> int:
    """How many matrix products several programs over the same values have."""
    return len({node for graph in graphs for node in graph.nodes() if is_product(node)})


# --- built-in blocks ------------------------------------------------------------------------------


class Call(NamedTuple):
    """A call of a built-in block: what compiling takes, and its operands as matrices."""

    function: Callable[..., Any]
    signature: Signature
    tensors: Tensors
    needed: tuple[str, ...]
    sizes: dict[str, int]

    def pair(self, needed: Sequence[str] | None = None) -> Pair:
        """The call compiled for some gradients, for all that a model trains by default."""
        wanted = self.needed if needed is None else needed
        return compile_program(self.function, self.signature, self.sizes, wanted)


def call(name: str, rows: int, dtype: torch.dtype = torch.float64) -> Call:
    """A call of a built-in block with the small operands of `block_operands`."""
    return call_of(name, cast(operands(name, rows), dtype))


def matrices_of(described: Operands, named: Tensors) -> tuple[Tensors, dict[str, int]]:
    """The operands of a call as matrices, and the rows of those that were undecided."""
    tensors, sizes = {}, {}
    for operand in described.operands:
        height = described.rows if isinstance(operand.rows, str) else operand.rows
        tensors[operand.name] = as_matrix(named[operand.name], height, operand.columns)
        if operand.rows == undecided(operand.name):
            sizes[operand.name] = described.rows
    return tensors, sizes


def call_of(name: str, arguments: Mapping[str, Any]) -> Call:
    """A call of a built-in block with these arguments."""
    block = BUILT_IN[name]
    named = {n: v for n, v in arguments.items() if isinstance(v, Tensor)}
    constants = {n: v for n, v in arguments.items() if n not in named}
    described = describe(list(named), list(named.values()), block.shapes, constants)
    defaults = {n: v for n, v in block.defaults.items() if n not in named}
    tensors, sizes = matrices_of(described, named)
    real = [n for n, t in named.items() if t.is_floating_point() and n not in FROZEN]
    signature = Signature(described.operands, tuple((defaults | constants).items()))
    return Call(block.function, signature, tensors, tuple(real), sizes)


def adjoints_of(graph: Graph, rows: int, compute: torch.dtype = torch.float64) -> list[Tensor]:
    """A random adjoint for every output of a program, in the dtype in which it is stored."""
    stored = dtypes_of(graph)
    shapes = [[rows if size == M else size for size in o.shape] for o in graph.outputs]
    return [
        torch.randn(shape, dtype=compute).to(getattr(torch, stored[o]))
        for o, shape in zip(graph.outputs, shapes, strict=True)
        if o.type.kind == REAL
    ]


def plain_results(pair: Pair, named: Call, upstream: Sequence[Tensor]) -> Results:
    """The same by the author's function on tensors and autograd."""
    leaves = {n: t.detach().clone() for n, t in named.tensors.items()}
    for name in pair.gradients:
        leaves[name].requires_grad_()
    returned = named.function(**leaves, **dict(named.signature.constants))
    values = returned if isinstance(returned, tuple) else (returned,)
    found = torch.autograd.grad(
        values, [leaves[n] for n in pair.gradients], list(upstream), materialize_grads=True
    )
    outputs = dict(zip(pair.program.labels, values, strict=True))
    return Results(outputs, dict(zip(pair.gradients, found, strict=True)))


# --- large blocks, compiled only ------------------------------------------------------------------

SIZES = {"D": 4096, "F": 14336, "A": 4096, "N": 6144, "R": 64, "V": 128256, "head_dim": 128}
HEADS = {"qwen3": {"head_dim": 128, "heads": 32, "key_value_heads": 8}}
ROTATED = {"head_dim": 128, "heads": 40}


def large_call(name: str, dtype: str = "bfloat16") -> Call:
    """A built-in block at the sizes of an 8 B model, without tensors."""
    block = BUILT_IN[name]
    found = []
    for operand, text in block.shapes.items():
        rows, columns = (part if part == M else eval(part, {}, SIZES) for part in text.split())
        found.append(Operand(operand, rows, columns, "int64" if operand == "target" else dtype))
    found.sort(key=lambda operand: block.parameters.index(operand.name))
    sizes = HEADS.get(name, ROTATED)
    given = {p: (block.defaults | sizes)[p] for p in block.parameters if p not in block.shapes}
    real = tuple(o.name for o in found if o.name not in FROZEN)
    return Call(block.function, Signature(tuple(found), tuple(given.items())), {}, real, {})


def bytes_moved(*plans: Plan | None) -> int:
    """Bytes that all kernels and vector products of some plans must move."""
    return sum(_bytes_of_plan(plan) for plan in plans if plan is not None)


def _bytes_of_plan(plan: Plan) -> int:
    stored = dtypes_of(plan.graph)
    vectors = sum(moved([*p.inputs, p], stored) for p in plan.vector_products)
    return vectors + sum(kernel_work(kernel, stored).bytes for kernel in plan.kernels)
