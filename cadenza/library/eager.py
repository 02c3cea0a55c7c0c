"""Calls of a program in eager mode, without torch's dispatcher in between.

A call is made ready once for each kind of arguments (shapes, dtypes, devices, constants, what
needs a gradient); then it is a lookup and one autograd.Function. Where torch looks at operations
(tracing, modes, transforms, a profiler, subclasses of tensors) the operation cadenza::run is called
instead, which does the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from cadenza.core.ops import M
from cadenza.library.autocast import autocast_dtype, without_autocast
from cadenza.library.operands import Operands
from cadenza.library.operator import output_shapes
from cadenza.library.specialize import Specialization
from cadenza.library.weights import parted, rejoined

Tensor = torch.Tensor
PLAIN = (torch.Tensor, torch.nn.Parameter)
Ready = tuple["Prepared", list[int]]  # with the places of its tensors among the arguments
KEPT = 4096  # kinds of arguments of one program
_reshape = torch.ops.aten._unsafe_view.default  # autograd lets nobody write into a view


def watched() -> bool:
    """Whether torch looks at operations, or transforms what is called."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or forward_ad._current_level >= 0
        or torch._C._len_torch_function_stack() > 0
        or torch._C._autograd._profiler_enabled()
        or torch._C._get_tracing_state() is not None
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def kind_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """All of a call's arguments that a compiled program depends on; None if some are special."""
    first, found = None, []
    for value in (*args, *kwargs.values()):
        if type(value) in PLAIN:
            first = value if first is None else first
            found.append(
                (value.shape, value.dtype, value.device, value.layout, value.requires_grad)
            )
        elif isinstance(value, Tensor):
            return None
        elif isinstance(value, float) and not abs(value) > 0:
            found.append((float, repr(value)))  # 0.0 equals -0.0, and NaN not even itself
        else:
            found.append((type(value), value))
    if first is None or first.is_meta:
        return None
    mode = torch.is_grad_enabled(), autocast_dtype(first), os.environ.get("CADENZA_BACKEND")
    return (*found, len(args), *kwargs, *mode)


class Calls:
    """The calls of one program that were made ready, by kind."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], Ready] = {}

    def find(self, kind: tuple[Any, ...], prepare: Callable[[], Ready]) -> Ready | None:
        """The call of a kind, made ready now if it is new; None if it can't be kept."""
        try:
            found = self._known.get(kind)
        except TypeError:  # an argument that is no constant: the usual path says so
            return None
        if found is None:
            found = prepare()
            if len(self._known) >= KEPT:
                self._known.clear()
            self._known[kind] = found
        return found


class Prepared:
    """One kind of call: the compiled program, and how tensors are made its matrices and back.

    `order` are the positions of the operands among the call's tensors.
    """

    def __init__(
        self, specialization: Specialization, operands: Operands, tensors: Sequence[Tensor],
        needed: int,
    ) -> None:  # fmt: skip
        self.specialization, self.rows, self.needed = specialization, operands.rows, needed
        self.device, pair = tensors[0].device, specialization.pair
        places = {o.name: p for p, o in enumerate(operands.operands)}
        self.inputs = []
        for node in pair.forward.inputs:
            place = places[node.attributes["name"]]
            rows = operands.rows if node.type.rows == M else node.type.rows
            shape = (rows, int(node.type.columns))
            self.inputs.append((place, None if tensors[place].shape == shape else shape))
        shapes = output_shapes(specialization, operands)[: pair.outputs]
        self.shapes = [shape if len(shape) != 2 else None for shape, _ in shapes]
        self.structure, self.labels = specialization.structure
        self.saved = [v if isinstance(v, int) else places[v] for v in pair.values]
        self.of_results = [isinstance(v, int) for v in pair.values]
        self.fixed = [p for p in range(pair.outputs) if p not in pair.differentiable]
        self.gradients = [(places[n], tensors[places[n]].shape) for n in pair.gradients]
        self.like = {p: (shapes[p][0], shapes[p][1]) for p in pair.adjoints}
        made = dict(enumerate(shape for shape, _ in shapes))
        own = [
            tensors[place].shape if not result else made.get(place)
            for place, result in zip(self.saved, self.of_results, strict=True)
        ]
        own += [made[p] for p in pair.adjoints]
        self.matrices = _reshaped(own, specialization, self.rows) if self.needed else []

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        """What the author's function returns."""
        run: Any = _Run.apply if self.needed else _plain
        outputs = run(self, *tensors)
        if self.structure == "value":
            return outputs[0]
        if self.structure == "tuple":
            return tuple(outputs)
        return dict(zip(self.labels, outputs, strict=True))

    def run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The outputs as matrices, then what is saved."""
        matrices = [
            tensors[place] if shape is None else tensors[place].reshape(shape)
            for place, shape in self.inputs
        ]
        return self.without_autocast(self.specialization.forward, matrices)

    def without_autocast(self, plan: Any, matrices: Sequence[Tensor]) -> list[Tensor]:
        """What a plan gives. Nothing is recorded: no gradient is needed, or autograd calls it."""
        if torch.is_autocast_enabled(self.device.type):
            with without_autocast(matrices[0]):
                found: list[Tensor] = plan(matrices, self.rows)
                return found
        found = plan(matrices, self.rows)
        return found

    def run_backward(self, given: Sequence[Tensor]) -> list[Tensor]:
        """The gradients of saved values and adjoints."""
        matrices = [
            t if shape is None else t.reshape(shape)
            for t, shape in zip(given, self.matrices, strict=True)
        ]
        return self.without_autocast(self.specialization.backward, matrices)

    def outputs(self, results: Sequence[Tensor]) -> list[Tensor]:
        """The author's outputs, with the leading dimensions of the operands."""
        return [
            result if shape is None else _reshape(result, shape)
            for result, shape in zip(results, self.shapes, strict=False)
        ]

    def adjoint(self, position: int, given: Tensor | None) -> Tensor:
        """The gradient of an output, zeros where nothing depends on it."""
        if given is not None:
            return given
        shape, dtype = self.like[position]
        return torch.zeros(shape, dtype=dtype, device=self.device)


def _reshaped(
    own: Sequence[Any], specialization: Specialization, rows: int
) -> list[tuple[int, int] | None]:
    """For each of backward's inputs, of shapes `own`, the matrix it is; None where it is one."""
    if specialization.pair.backward is None:
        return []
    sizes = [(rows if r is None else r, columns) for r, columns in specialization.backward_sizes]
    return [
        None if shape is None or tuple(shape) == size else size
        for shape, size in zip(own, sizes, strict=True)
    ]


def _plain(prepared: Prepared, *tensors: Tensor) -> list[Tensor]:
    """A program without gradients."""
    return prepared.outputs(prepared.run(tensors))


class _Run(torch.autograd.Function):
    """A program with gradients: its forward plan, and later its backward plan."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, ...]:
        prepared: Prepared = given[0]
        tensors: tuple[Tensor, ...] = given[1:]
        results = prepared.run(tensors)
        outputs = prepared.outputs(results)
        results[: len(outputs)] = outputs
        kept, ctx.counts = parted(
            results[v] if result else tensors[v]
            for v, result in zip(prepared.saved, prepared.of_results, strict=True)
        )
        ctx.prepared, ctx.count = prepared, len(tensors)
        ctx.set_materialize_grads(False)  # else autograd makes zeros as large as the outputs
        ctx.save_for_backward(*kept)
        if prepared.fixed:
            ctx.mark_non_differentiable(*(outputs[p] for p in prepared.fixed))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        prepared: Prepared = ctx.prepared
        values = rejoined(ctx.saved_tensors, ctx.counts)
        adjoints = [prepared.adjoint(p, gradients[p]) for p in prepared.like]
        specialization = prepared.specialization
        if torch.is_grad_enabled():  # using a gradient further must meet the error
            adjoints = [a if a.requires_grad else a.detach().requires_grad_() for a in adjoints]
        if torch.is_grad_enabled() or watched():
            results = torch.ops.cadenza.run_backward(
                specialization.digest, values, adjoints, prepared.rows
            )
        else:
            results = prepared.run_backward([*values, *adjoints])
        found: list[Tensor | None] = [None] * ctx.count
        for (place, shape), result in zip(prepared.gradients, results, strict=True):
            found[place] = result if result.shape == shape else result.reshape(shape)
        return (None, *found)
