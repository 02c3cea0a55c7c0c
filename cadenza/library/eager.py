"""Calls of a program in eager mode, without torch's dispatcher in between.

A call is made ready once for each kind of arguments (kinds.py); then it is a look at them and one
autograd.Function. Where torch looks at operations (tracing, modes, transforms, a profiler,
subclasses of tensors) the operation cadenza::run is called instead, which does the same.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch.utils import checkpoint

from cadenza.backends import Rest
from cadenza.core.errors import CadenzaError
from cadenza.core.ops import M
from cadenza.library.autocast import without_autocast
from cadenza.library.kinds import is_lazy, picker, watched
from cadenza.library.operands import Operands
from cadenza.library.operator import output_shapes, tied
from cadenza.library.specialize import Specialization
from cadenza.library.weights import any_joined, parted, rejoined

Tensor = torch.Tensor
Tensors = tuple[Tensor, ...]
Shape = tuple[int, ...]
WRITTEN_OVER = (
    "what its backward needs was written over, by one that went through the same graph before, or "
    "through another that shares its saved values\n"
    "  write:    retain_graph=True in that earlier backward"
)
SPENT = "_cadenza_spent"  # of the memory of a value that a backward may have written over
Made = Sequence[tuple[Shape, torch.dtype]]  # shapes and dtypes of outputs


class Prepared:
    """One kind of call: the compiled program, and how tensors are made its matrices and back."""

    def __init__(
        self, specialization: Specialization, operands: Operands, tensors: Sequence[Tensor],
        needed: int,
    ) -> None:  # fmt: skip
        pair, device = specialization.pair, tensors[0].device
        self.plan, self.rows, self.needed = specialization.forward, operands.rows, needed
        self.autocast = torch.is_autocast_enabled(device.type)
        self.structure, self.labels = specialization.structure
        places = {o.name: p for p, o in enumerate(operands.operands)}
        order = [places[i.attributes["name"]] for i in pair.forward.inputs]
        sizes = [
            (self.rows if i.type.rows == M else int(i.type.rows), int(i.type.columns))
            for i in pair.forward.inputs
        ]
        self.inputs = picker(order)
        self.flattened = _unlike([tensors[p].shape for p in order], sizes)
        made = output_shapes(specialization, operands)[: pair.outputs]
        self.unflattened = [(p, shape) for p, (shape, _) in enumerate(made) if len(shape) != 2]
        self.outputs = pair.outputs
        self.saved = [v for v in pair.values if isinstance(v, int)]
        followed, results = {*pair.differentiable, *self.saved}, specialization.outputs
        self.fixed = [
            p for p, (_, _, dtype) in enumerate(results)
            if p not in followed or not dtype.is_floating_point
        ]  # fmt: skip
        self.kept = picker([len(places) + v if isinstance(v, int) else places[v]
                            for v in pair.values])  # fmt: skip
        self.backward = _Backward(specialization, self.rows, places, tensors, made)

    def __call__(self, tensors: Tensors) -> Any:
        """What the author's function returns, of the operands in order."""
        if not self.needed:
            outputs = self.run(tensors)
        elif _hooks(True) is None:
            outputs = _apply(self, None, *tensors)[: self.outputs]
        else:
            outputs = self._saved_first(tensors)[: self.outputs]
        if self.structure == "value":
            return outputs[0]
        if self.structure == "tuple":
            return tuple(outputs)
        return dict(zip(self.labels, outputs, strict=True))

    def _saved_first(self, tensors: Tensors) -> tuple[Tensor, ...]:
        """What `_Run` gives for a call whose saved values torch hands to hooks.

        A checkpointed layer that runs again ends, by an exception, where it has handed over the
        last of them: what only its outputs need is not computed a second time.
        """
        later: list[Rest] = []
        outputs: tuple[Tensor, ...] = _apply(self, later, *tensors)
        with torch.no_grad(), without_autocast(tensors[0]) if self.autocast else nullcontext():
            for rest in later:
                rest()
        return outputs

    def run(self, tensors: Tensors, later: list[Rest] | None = None) -> list[Tensor]:
        """The outputs, then what is saved. Nothing is recorded.

        Into `later` goes what makes those that are not saved.
        """
        matrices: Sequence[Tensor] = self.inputs(tensors)
        if self.flattened:
            matrices = _reshaped(matrices, self.flattened)
        plan = self.plan if later is None else partial(self._begun, later)
        results = _without_autocast(plan, matrices, self.rows, self.autocast)
        for position, shape in self.unflattened:
            results[position].resize_(*shape)  # not a view, into which autograd lets nobody write
        return results

    def _begun(self, later: list[Rest], matrices: Sequence[Tensor], rows: int) -> list[Tensor]:
        results: list[Tensor]
        results, rest = self.plan.begun(matrices, rows, self.saved)
        later.append(partial(_with, rest, matrices))
        return results


def _with(rest: Rest, matrices: Sequence[Tensor]) -> None:
    """Does what is left of a call, whose inputs live until then."""
    rest()


class _Backward:
    """Gradients of one kind of call: its backward program, and the shapes around it."""

    def __init__(
        self, specialization: Specialization, rows: int, places: Mapping[str, int],
        tensors: Sequence[Tensor], made: Made,
    ) -> None:  # fmt: skip
        pair = specialization.pair
        self.specialization, self.rows, self.device = specialization, rows, tensors[0].device
        self.kind = self.device.type
        self.adjoints = [(p, *made[p]) for p in pair.adjoints]
        shapes: dict[Any, Shape] = dict(enumerate(shape for shape, _ in made))
        shapes |= {name: tuple(tensors[place].shape) for name, place in places.items()}
        sizes = specialization.backward_sizes if pair.backward else []
        self.flattened = _unlike(
            [shapes.get(v) for v in (*pair.values, *pair.adjoints)],
            [(rows if r is None else r, columns) for r, columns in sizes],
        )
        found = [(rows if r == M else r, columns) for r, columns, _ in specialization.gradients]
        self.unflattened = _unlike(found, [shapes[name] for name in pair.gradients])
        order = dict(zip(pair.gradients, range(len(found)), strict=True))
        self.ordered = picker([order.get(name, len(found)) for name in places])
        self.own = specialization.own

    def __call__(
        self, values: Sequence[Tensor], given: Sequence[Tensor | None], alone: bool
    ) -> tuple[Any, ...]:
        """The operands' gradients, of what was saved and the gradients of the outputs.

        What forward made for this alone is written over if nobody else has it: `alone`. Raises
        CadenzaError where that was done to it before.
        """
        adjoints = [
            torch.zeros(shape, dtype=dtype, device=self.device) if given[p] is None else given[p]
            for p, shape, dtype in self.adjoints
        ]
        if torch.is_grad_enabled():  # using a gradient further must meet the error
            adjoints = tied(adjoints)
        results = self.run(values, adjoints, alone)
        for position, shape in self.unflattened:
            results[position] = torch.reshape(results[position], shape)
        return self.ordered((*results, None))

    def run(self, values: Sequence[Tensor], adjoints: list[Any], alone: bool) -> list[Tensor]:
        """The gradients as matrices."""
        if self.is_followed(adjoints):
            found: list[Tensor] = torch.ops.cadenza.run_backward(
                self.specialization.digest, values, adjoints, self.rows
            )
            return found
        if any(hasattr(values[position].untyped_storage(), SPENT) for position in self.own):
            raise CadenzaError(f"{self.specialization.pair.program.name}: {WRITTEN_OVER}")
        matrices = _reshaped((*values, *adjoints), self.flattened)
        plan, autocast = self.specialization.backward, torch.is_autocast_enabled(self.kind)
        if self.own and alone and _is_last(self.kind) and plan.by_triton(matrices[0]):
            for position in self.own:
                setattr(values[position].untyped_storage(), SPENT, True)
            plan = partial(plan, spent=self.own)
        return _without_autocast(plan, matrices, self.rows, autocast)

    def is_followed(self, adjoints: Sequence[Tensor]) -> bool:
        """Whether torch has to see an operation here; in compiled autograd Dynamo looks."""
        return (
            torch.is_grad_enabled()
            or torch.compiler.is_dynamo_compiling()
            or watched()
            or True in [is_lazy(adjoint) for adjoint in adjoints]
        )


class _Run(torch.autograd.Function):
    """A program with gradients: its forward plan, and later its backward plan."""

    @staticmethod
    def forward(
        ctx: Any, prepared: Prepared, later: list[Rest] | None, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        results = prepared.run(tensors, later)
        kept: Sequence[Tensor] = prepared.kept((*tensors, *results))
        ctx.prepared, ctx.counts = prepared, None
        ctx.alone = later is None or _are_checkpoints(_hooks(True))
        if any_joined(tensors):
            kept, ctx.counts = parted(kept)
        ctx.set_materialize_grads(False)  # else autograd makes zeros as large as the outputs
        ctx.save_for_backward(*kept)
        if prepared.fixed:
            ctx.mark_non_differentiable(*[results[p] for p in prepared.fixed])
        # All of them: an output, saved, leads autograd back to the operands; nothing else does.
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        values, counts = ctx.saved_tensors, ctx.counts
        whole = values if counts is None else rejoined(values, counts)
        return None, None, *ctx.prepared.backward(whole, gradients, ctx.alone)


# Without autograd.Function's own look for what `watched` and the kinds of calls have ruled out.
_apply: Any = super(torch.autograd.Function, _Run).apply
# The hooks that torch hands saved values to, None without any; an older torch has always some.
_hooks: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: ())


def _are_checkpoints(hooks: Any) -> bool:
    """Whether the hooks that saved values are handed to drop them, to have them made again once.

    So have those of a checkpointed call, not those of its second run, which share what they hand on
    with whoever keeps that run's graph.
    """
    hook = hooks[0] if hooks else None
    named = getattr(hook, "__module__", None), getattr(hook, "__qualname__", "").partition(".")[0]
    return named == (checkpoint.__name__, "_checkpoint_hook")


def _is_last(kind: str) -> bool:
    """Whether the backward that runs now, on a kind of device, is the last one through its graph.

    Not where launches are captured: they may be repeated without those of forward. On a GPU, where
    it has not been tried yet, only if CADENZA_OVERWRITE=1 asks for it.
    """
    if torch._C._autograd._get_current_graph_task_keep_graph():
        return False
    if kind != "cuda":
        return True
    asked = os.environ.get("CADENZA_OVERWRITE") == "1"
    return asked and not torch.cuda.is_current_stream_capturing()


def _unlike(
    own: Sequence[Sequence[int] | None], wanted: Sequence[Shape]
) -> list[tuple[int, Shape]]:
    """Of tensors of shapes `own`, the positions and wanted shapes of those that have another.

    One without a shape has it: it is a matrix that a program made.
    """
    return [
        (position, shape)
        for position, (given, shape) in enumerate(zip(own, wanted, strict=True))
        if given is not None and tuple(given) != shape
    ]


def _reshaped(tensors: Sequence[Tensor], shapes: Sequence[tuple[int, Shape]]) -> list[Tensor]:
    """The tensors, those at some positions in other shapes."""
    found = [*tensors]
    for position, shape in shapes:
        found[position] = found[position].reshape(*shape)
    return found


def _without_autocast(
    plan: Any, matrices: Sequence[Tensor], rows: int, autocast: bool
) -> list[Tensor]:
    """What a plan gives, autocast off."""
    if autocast:
        with without_autocast(matrices[0]):
            found: list[Tensor] = plan(matrices, rows)
            return found
    found = plan(matrices, rows)
    return found
