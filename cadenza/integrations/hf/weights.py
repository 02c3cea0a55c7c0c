"""The weights that programs take of a layer's modules, joined where one product has several.

How they are joined, and when they move into one storage, is that of `cadenza.library.weights`.
"""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from cadenza.integrations.hf.plan import Plan, module_at
from cadenza.integrations.hf.replace import PLAN
from cadenza.library.weights import (
    is_one_stretch,
    joined,
    joined_present,
    put_together,
    sizes_of,
    take_apart,
)

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
        biases = joined_present(module.bias for module in modules)
        return joined([module.weight for module in modules]), biases

    def norm(self, path: str) -> tuple[Tensor, Tensor | None]:
        """As in `Weights`."""
        module = module_at(self.layer, path)
        return module.weight, getattr(module, "bias", None)


def _weight(module: Any) -> Tensor:
    """A projection's weight as `[N, K]`; that of a Conv1D is stored the other way around."""
    return module.weight if isinstance(module, nn.Linear) else module.weight.t()


def groups(layer: nn.Module, plan: Plan) -> list[list[nn.Parameter]]:
    """The weights of a layer that its products take as one, and the biases."""
    several = [paths for paths in (plan.form.projections, plan.form.up) if len(paths) > 1]
    known, found = dict(plan.types), []
    for paths in several:
        modules: list[Any] = [module_at(layer, path) for path in paths]
        if all(type(m) is known.get(path) for m, path in zip(modules, paths, strict=True)):
            found.append([m.weight for m in modules])
            found.append([m.bias for m in modules if m.bias is not None])
    return [group for group in found if len(group) > 1]


def layer_groups(layer: nn.Module) -> list[Sequence[Tensor]]:
    """The weights of an accelerated layer that its products take as one."""
    plan = layer.__dict__.get(PLAN)
    return [] if plan is None else [*groups(layer, plan)]


def share_storage(layers: Iterable[nn.Module]) -> None:
    """Puts weights that one product takes into one storage; they stay parameters of their own."""
    for weights in itertools.chain.from_iterable(map(layer_groups, layers)):
        put_together(weights)


def with_storages(layer: nn.Module, plan: Plan) -> Plan:
    """The plan, with what the storages are of that the layer's weights are put into."""
    return dataclasses.replace(plan, storages=tuple(map(sizes_of, groups(layer, plan))))


def part_storage(model: nn.Module, plans: Iterable[Plan], layers: Iterable[nn.Module]) -> None:
    """Gives weights that plans had put into one storage storages of their own.

    Wherever they are in the model by now, but those that one product of these layers takes.
    """
    together = [group for layer in layers for group in layer_groups(layer)]
    kept = {id(weight) for group in together if is_one_stretch(group) for weight in group}
    storages = {sizes for plan in plans for sizes in plan.storages}
    take_apart([weight for weight in model.parameters() if id(weight) not in kept], storages)


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
