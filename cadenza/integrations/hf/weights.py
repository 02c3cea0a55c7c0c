"""The weights that programs take of a layer's modules, joined where one product has several.

Parameters whose memory is one stretch are joined by looking at it as one tensor; others are copied
together. Which it is, is asked of the memory itself at each call, so whatever moves or replaces a
parameter (`.to()`, sharding, a copy) costs time and never correctness.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from cadenza.integrations.hf.plan import Plan, is_plain, module_at
from cadenza.integrations.hf.replace import PLAN

Projection = tuple[Tensor, Tensor | None]


class Weights(Protocol):
    """Where a layer's weights come from."""

    def projection(self, *paths: str) -> Projection:
        """Weight `[N, K]` and bias `[N]`, or None, of projections of one input, one after another.

        Their rows follow each other in the order of the paths.
        """

    def norm(self, path: str) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of a norm."""


class LayerWeights:
    """The weights of a layer's own modules."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer

    def projection(self, *paths: str) -> Projection:
        """As in `Weights`."""
        modules = [module_at(self.layer, path) for path in paths]
        if len(modules) == 1:
            return _weight(modules[0]), modules[0].bias
        biases = [module.bias for module in modules if module.bias is not None]
        return joined([module.weight for module in modules]), torch.cat(biases) if biases else None

    def norm(self, path: str) -> tuple[Tensor, Tensor | None]:
        """As in `Weights`."""
        module = module_at(self.layer, path)
        return module.weight, getattr(module, "bias", None)


def _weight(module: Any) -> Tensor:
    """A projection's weight as `[N, K]`; that of a Conv1D is stored the other way around."""
    return module.weight if isinstance(module, nn.Linear) else module.weight.t()


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Weights `[N, K]` as one, without a copy where their memory is one stretch already.

    torch.compile always copies: it can't know where a tensor lies, and may write where it believes
    nobody looks any more.
    """
    if torch.compiler.is_compiling() or not is_one_stretch(parts):
        return torch.cat([*parts])
    found: Tensor = _Joined.apply(*parts)
    return found


def is_one_stretch(parts: Sequence[Tensor]) -> bool:
    """Whether the parts lie one behind another in one storage."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    first = parts[0]
    if not all(is_plain(part) and part.is_contiguous() for part in parts):
        return False
    place, storage = first.data_ptr(), first.untyped_storage().data_ptr()
    for part in parts:
        if part.data_ptr() != place or part.untyped_storage().data_ptr() != storage:
            return False
        place += part.numel() * part.element_size()
    return all(part.dtype == first.dtype for part in parts)


class _Joined(torch.autograd.Function):
    """Several weights seen as one; their gradients are parts of its gradient."""

    @staticmethod
    def forward(ctx: Any, *parts: Tensor) -> Tensor:
        ctx.rows = [part.shape[0] for part in parts]
        first = parts[0].detach()
        return first.as_strided((sum(ctx.rows), first.shape[1]), first.stride())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        needs = zip(gradients[0].split(ctx.rows), ctx.needs_input_grad, strict=True)
        return tuple(part if needed else None for part, needed in needs)


def groups(layer: nn.Module, plan: Plan) -> list[list[nn.Parameter]]:
    """The weights of a layer that its products take as one."""
    several = [paths for paths in (plan.form.projections, plan.form.up) if len(paths) > 1]
    known = dict(plan.types)
    return [
        [layer.get_submodule(path).weight for path in paths]
        for paths in several
        if all(type(layer.get_submodule(path)) is known.get(path) for path in paths)
    ]


def share_storage(layer: nn.Module, plan: Plan) -> None:
    """Puts weights that one product takes into one storage; they stay parameters of their own.

    Left as they are: weights of several dtypes or devices, and those that don't own their memory,
    which belongs to whoever put them there.
    """
    for weights in groups(layer, plan):
        if not is_one_stretch(weights) and _may_move(weights):
            whole = torch.cat([weight.data for weight in weights])
            parts = whole.split([weight.shape[0] for weight in weights])
            for weight, part in zip(weights, parts, strict=True):
                weight.data = part


def _may_move(weights: Sequence[Tensor]) -> bool:
    first = weights[0]
    return all(
        is_plain(weight)
        and weight.is_contiguous()
        and (weight.dtype, weight.device) == (first.dtype, first.device)
        and weight.device.type != "meta"
        and weight.untyped_storage().nbytes() == weight.numel() * weight.element_size()
        for weight in weights
    )


def part_storage(layer: nn.Module, plan: Plan) -> None:
    """Gives weights that share one storage storages of their own, with the same numbers."""
    for weights in groups(layer, plan):
        if is_one_stretch(weights):
            for weight in weights:
                weight.data = weight.data.clone()


class Sharing:
    """How many layers' weights share storage, told as it is when it is asked for."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self.layers = [weakref.ref(layer) for layer in layers]

    def __str__(self) -> str:
        alive = [layer for reference in self.layers if (layer := reference()) is not None]
        found = [groups(layer, layer.__dict__[PLAN]) for layer in alive if PLAN in layer.__dict__]
        counts = [all(map(is_one_stretch, own)) for own in found if own]
        if not counts:
            return ""
        text = (
            f"{sum(counts)} of {len(counts)} layers have the weights of one product in one storage"
        )
        return text if all(counts) else f"{text}; the others' are copied together at each call"
