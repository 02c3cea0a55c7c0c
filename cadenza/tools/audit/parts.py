"""A model's step in parts: one layer of each kind, with how often it runs, and the rest of it.

The layers are the modules of the ModuleList or Sequential with the most parameters. The model runs
once on fake tensors, and each layer's arguments are kept; the rest is the model with layers that
hand their stream through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_map

from cadenza.tools.audit.attention import pairs
from cadenza.tools.blame import is_ours
from cadenza.tools.fault import Fault

Tensor = torch.Tensor
REST = "embedding, head and loss"
WHOLE = "the whole model"


class Call(NamedTuple):
    """One call of a module, and what it returned."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any


@dataclass(frozen=True, eq=False)
class Part:
    """A module with the arguments that it is called with, `count` times a step.

    `weights` are the parameters that it uses and no other part does. `visible` is the share of a
    causal kernel's pairs that attention sees here: less than one in a window.
    """

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    count: int
    weights: dict[str, nn.Parameter]
    visible: float = 1.0
    context: Callable[[], AbstractContextManager[None]] = nullcontext

    @property
    def trained(self) -> list[nn.Parameter]:
        """The weights that get a gradient."""
        return [weight for weight in self.weights.values() if weight.requires_grad]

    @property
    def is_layer(self) -> bool:
        """Whether this is a layer, and not what is around them."""
        return self.name not in (REST, WHOLE)


class Model:
    """A module on fake tensors, and a batch: the arguments of one call."""

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.module, self.args, self.kwargs = module, args, kwargs

    def parts(self) -> list[Part]:
        """One layer of each kind, then the rest. Raises Fault where the model fails."""
        calls = self.calls()
        kinds: dict[Any, list[nn.Module]] = {}
        for layer, (first, *_) in calls.items():
            kinds.setdefault(_kind(layer, first), []).append(layer)
        names = _names(kinds.values())
        found = [
            _layer_part(name, layers[0], calls[layers[0]][0], sum(len(calls[n]) for n in layers))
            for name, layers in names.items()
        ]
        return [*found, self._rest({layer: own[0].result for layer, own in calls.items()})]

    def calls(self) -> dict[nn.Module, list[Call]]:
        """The calls of each layer that runs. Raises Fault where the model fails."""
        calls: dict[nn.Module, list[Call]] = {layer: [] for layer in layers_of(self.module)}
        with _watched(calls):
            try:
                self.module(*self.args, **self.kwargs)
            except Exception as error:  # whatever an author's model does
                if is_ours(error):
                    raise
                name, kind = type(self.module).__name__, type(error).__name__
                raise Fault(f"{name} fails on its batch: {kind}: {error}") from None
        return {layer: found for layer, found in calls.items() if found}

    def _rest(self, results: dict[nn.Module, Any]) -> Part:
        inside = {id(p) for layer in results for p in layer.parameters()}
        own = {n: p for n, p in self.module.named_parameters() if id(p) not in inside}
        return Part(
            REST if results else WHOLE, self.module, self.args, self.kwargs, 1, own,
            context=lambda: _without(results),
        )  # fmt: skip


def layers_of(module: nn.Module) -> list[nn.Module]:
    """The layers of a model; none where no list holds modules that are alike."""
    lists = [m for m in module.modules() if isinstance(m, nn.ModuleList | nn.Sequential)]
    lists = [m for m in lists if _repeats(m)]
    if not lists:
        return []
    return list(max(lists, key=lambda m: sum(p.numel() for p in m.parameters())))


def _repeats(modules: nn.ModuleList | nn.Sequential) -> bool:
    """Whether modules are of one class, with parameters: layers, and not branches."""
    classes = {type(child) for child in modules}
    alone = len(modules) > 1 or isinstance(modules, nn.ModuleList)
    return alone and len(classes) == 1 and any(True for _ in modules.parameters())


@contextmanager
def _watched(calls: dict[nn.Module, list[Call]]) -> Iterator[None]:
    """While inside, each call of a module is kept."""

    def keep(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        calls[module].append(Call(args, kwargs, result))

    hooks = [module.register_forward_hook(keep, with_kwargs=True) for module in calls]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _kind(layer: nn.Module, call: Call) -> Any:
    """What layers of one kind have in common."""
    shapes = tuple((n, tuple(p.shape), p.dtype) for n, p in layer.named_parameters())
    given = tree_map(lambda v: tuple(v.shape) if isinstance(v, Tensor) else v, call[:2])
    return type(layer), shapes, str(given), getattr(layer, "attention_window", None)


def _names(kinds: Any) -> dict[str, list[nn.Module]]:
    """Layers of one kind by a name for it."""
    names: dict[str, list[nn.Module]] = {}
    for layers in kinds:
        window = getattr(layers[0], "attention_window", None)
        name = f"layer with a window of {window}" if window else "layer"
        taken = sum(other.startswith(name) for other in names)
        names[f"{name} ({taken + 1})" if name in names else name] = layers
    return names


def _layer_part(name: str, layer: nn.Module, call: Call, count: int) -> Part:
    args, kwargs = tree_map(_leaf, (tuple(call.args), dict(call.kwargs)))
    window, visible = getattr(layer, "attention_window", None), 1.0
    if window:
        length = args[0].shape[1]
        visible = pairs(length, length, True, window) / pairs(length, length, True)
    weights = dict(layer.named_parameters())
    return Part(name, layer, args, kwargs, count, weights, visible)


def _leaf(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().requires_grad_(value.requires_grad)


@contextmanager
def _without(results: dict[nn.Module, Any]) -> Iterator[None]:
    """While inside, layers hand through what they are given."""
    own = {layer: vars(layer).get("forward") for layer in results}
    for layer, result in results.items():
        vars(layer)["forward"] = _through(result)
    try:
        yield
    finally:
        for layer, forward in own.items():
            del vars(layer)["forward"]
            if forward is not None:
                vars(layer)["forward"] = forward


def _through(result: Any) -> Callable[..., Any]:
    """A layer that returns its stream where it returned one, and bare memory elsewhere."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        stream = next(t for t in (*args, *kwargs.values()) if isinstance(t, Tensor))

        def handed(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            same = value.shape == stream.shape and value.dtype == stream.dtype
            return stream if same else torch.empty_like(value)

        return tree_map(handed, result)

    return forward
