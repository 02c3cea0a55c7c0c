"""The two operations that torch sees: cadenza::run, one a program called, and its backward.

Both are functional and registered with torch.library: implementation, fake implementation and
autograd. `run` returns the program's outputs, then what backward needs besides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cadenza.core.errors import CadenzaError, ProgramError
from cadenza.core.ir import Graph
from cadenza.core.ops import M
from cadenza.library.autocast import without_autocast
from cadenza.library.fakes import fake
from cadenza.library.operands import Operands, as_matrix
from cadenza.library.specialize import BY_DIGEST, Call, Specialization, Specializations
from cadenza.library.weights import parted, rejoined

Tensor = torch.Tensor
PROGRAMS: dict[str, Specializations] = {}

torch.library.define(
    "cadenza::run",
    "(str program, Tensor[] tensors, str call, int needed, str content) -> Tensor[]",
)
torch.library.define(
    "cadenza::run_backward",
    "(str program, Tensor[] values, Tensor[] adjoints, SymInt rows) -> Tensor[]",
)


def check_devices(names: Sequence[str], tensors: Sequence[Tensor]) -> None:
    """Raises ProgramError for operands that are not all on one device."""
    for name, tensor in zip(names, tensors, strict=True):
        if tensor.device != tensors[0].device:
            raise ProgramError(
                "operands on two devices",
                found=f"{names[0]} on {tensors[0].device}, {name} on {tensor.device}",
                expected="one device",
                write=f"{name}.to({names[0]}.device)",
            )


def find(
    program: str, tensors: Sequence[Tensor], call: str, needed: int
) -> tuple[Specialization, Operands]:
    """What to run for a call, and its operands. Raises ProgramError where a tensor does not fit."""
    check_devices(Call.decode(call).names, tensors)
    return PROGRAMS[program].find(tensors, call, needed)


def _matrices(tensors: Sequence[Tensor], operands: Operands, graph: Graph) -> list[Tensor]:
    by_name = dict(zip((o.name for o in operands.operands), tensors, strict=True))
    columns = {o.name: o.columns for o in operands.operands}
    result = []
    for node in graph.inputs:
        name = node.attributes["name"]
        rows = operands.rows if node.type.rows == M else node.type.rows
        result.append(as_matrix(by_name[name], rows, columns[name]))
    return result


def output_shapes(
    specialization: Specialization, operands: Operands
) -> list[tuple[tuple[Any, ...], torch.dtype]]:
    """Shape and dtype of every tensor that `run` returns."""
    shapes = []
    for position, (rows, columns, dtype) in enumerate(specialization.outputs):
        leading = operands.leading if position < specialization.pair.outputs else (operands.rows,)
        shapes.append((((*leading, columns) if rows == M else (rows, columns)), dtype))
    return shapes


@torch.library.impl("cadenza::run", "CompositeExplicitAutograd")
def run(program: str, tensors: list[Tensor], call: str, needed: int, content: str) -> list[Tensor]:
    """The outputs of a program and what is saved for the gradients in the mask `needed`.

    `content` is read by nobody: it makes a captured graph differ when the program does.
    """
    specialization, operands = find(program, tensors, call, needed)
    with without_autocast(tensors[0]), torch.no_grad():
        matrices = _matrices(tensors, operands, specialization.pair.forward)
        results = specialization.forward(matrices, operands.rows)
    shapes = output_shapes(specialization, operands)
    # Not `view`: autograd lets nobody write into a view that came out of an operation.
    reshape = torch.ops.aten._unsafe_view.default
    return [reshape(r, shape) for r, (shape, _) in zip(results, shapes, strict=True)]


@fake("run")
def _(program: str, tensors: list[Tensor], call: str, needed: int, content: str) -> list[Tensor]:
    specialization, operands = find(program, tensors, call, needed)
    shapes = output_shapes(specialization, operands)
    return [tensors[0].new_empty(shape, dtype=dtype) for shape, dtype in shapes]


def _backward_graph(specialization: Specialization) -> Graph:
    graph = specialization.pair.backward
    assert graph is not None
    return graph


@torch.library.impl("cadenza::run_backward", "CompositeExplicitAutograd")
def run_backward(
    program: str, values: list[Tensor], adjoints: list[Tensor], rows: int
) -> list[Tensor]:
    """The gradients of the program with this digest, each [rows, columns] as its input."""
    return gradients_of(BY_DIGEST[program], values, adjoints, rows)


def gradients_of(
    specialization: Specialization, values: list[Tensor], adjoints: list[Tensor], rows: int
) -> list[Tensor]:
    """The gradients of a program, each [rows, columns] as its input."""
    given = [*values, *adjoints]
    with without_autocast(given[0]), torch.no_grad():
        matrices = [
            as_matrix(t, rows if own is None else own, columns)
            for t, (own, columns) in zip(given, specialization.backward_sizes, strict=True)
        ]
        results: list[Tensor] = specialization.backward(matrices, rows)
    return results


@fake("run_backward")
def _(program: str, values: list[Tensor], adjoints: list[Tensor], rows: Any) -> list[Tensor]:
    graph = _backward_graph(BY_DIGEST[program])
    like = (values + adjoints)[0]
    return [
        like.new_empty((rows if o.type.rows == M else o.type.rows, o.type.columns), dtype=dtype)
        for o, (_, _, dtype) in zip(graph.outputs, BY_DIGEST[program].gradients, strict=True)
    ]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    program, tensors, call, needed, _ = inputs
    specialization, operands = PROGRAMS[program].find(tensors, call, needed)
    pair = specialization.pair
    ctx.set_materialize_grads(False)  # else autograd makes zeros as large as all that is saved
    ctx.specialization, ctx.rows = specialization, operands.rows
    ctx.names = [o.name for o in operands.operands]
    ctx.shapes = {o.name: t.shape for o, t in zip(operands.operands, tensors, strict=True)}
    ctx.outputs = {p: (output[p].shape, output[p].dtype, output[p].device) for p in pair.adjoints}
    # What is saved leads autograd to the operands, also what forward makes for backward alone.
    followed = {*pair.differentiable, *(v for v in pair.values if isinstance(v, int))}
    fixed = [o for p, o in enumerate(output) if p not in followed or not o.is_floating_point()]
    ctx.mark_non_differentiable(*fixed)
    named = dict(zip(ctx.names, tensors, strict=True))
    kept, ctx.counts = parted(output[v] if isinstance(v, int) else named[v] for v in pair.values)
    ctx.save_for_backward(*kept)


def tied(adjoints: Sequence[Tensor], edge: Tensor | None = None) -> list[Tensor]:
    """The adjoints, as what autograd follows: to `edge` as well, of which no number is used."""
    found = [a if a.requires_grad else a.detach().requires_grad_() for a in adjoints]
    if edge is not None:
        found[0] = found[0] + edge.reshape(-1)[:0].sum().to(found[0].dtype)
    return found


def _backward(
    ctx: Any, gradients: Sequence[Tensor | None]
) -> tuple[None, list[Tensor | None], None, None, None]:
    """The gradients of a program's tensors: one call of its backward program."""
    pair = ctx.specialization.pair
    adjoints = []
    for position in pair.adjoints:
        given = gradients[position]
        shape, dtype, device = ctx.outputs[position]
        zeros = given is None
        adjoints.append(torch.zeros(shape, dtype=dtype, device=device) if zeros else given)
    if torch.is_grad_enabled():  # create_graph=True: using a gradient further must meet the error
        adjoints = tied(adjoints)
    values = rejoined(ctx.saved_tensors, ctx.counts)
    results = torch.ops.cadenza.run_backward(ctx.specialization.digest, values, adjoints, ctx.rows)
    named = dict(zip(pair.gradients, results, strict=True))
    by_operand = [named[n].reshape(ctx.shapes[n]) if n in named else None for n in ctx.names]
    return None, by_operand, None, None, None


def _setup_double_backward(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.name = BY_DIGEST[inputs[0]].pair.program.name


def _double_backward(ctx: Any, *gradients: Any) -> None:
    raise CadenzaError(
        f"{ctx.name} can be differentiated once: its backward has no derivative of its own\n"
        f"  write:    {ctx.name}.plain(...) where a second derivative is needed; "
        "for an accelerated model, cz.revert(model)"
    )


torch.library.register_autograd("cadenza::run", _backward, setup_context=_setup_context)
torch.library.register_autograd(
    "cadenza::run_backward", _double_backward, setup_context=_setup_double_backward
)
