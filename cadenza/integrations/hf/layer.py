"""The forward of an accelerated decoder layer: programs where they serve, else its own code."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cadenza.integrations.hf.plan import (
    PARTS,
    Plan,
    blocked,
    is_given,
    module_at,
    usable,
    warn_once,
)
from cadenza.integrations.hf.replace import PLAN, TOLD, Forward, within_base
from cadenza.integrations.hf.run import Run
from cadenza.integrations.hf.weights import LayerWeights
from cadenza.library.autocast import autocast_dtype

# Calls of fewer rows (tokens of all sequences together) take the model's own path: steps of
# decoding, of STEP tokens of a sequence at most, and longer ones. Of two layers of width 4096, an
# H200 took for a step of 64, 128 and 256 sequences 1.06, 1.00 and 0.85 of the time where Python
# launches, and 0.73, 0.74 and 0.78 on the device, which decides in a CUDA graph.
DECODED, ROWS = 128, 64
STEP = 16  # a token, or several that are guessed and verified together
# What makes a layer do what no program does, where it is given and true.
OTHERWISE = ("output_attentions", "encoder_hidden_states")


def layer_forward(stock: Any) -> Forward:
    """The forward of accelerated layers of a class."""
    whole, within = within_base(stock)

    @functools.wraps(stock.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        plan, x = self.__dict__.get(PLAN), args[0] if args else kwargs.get("hidden_states")
        if plan is None or x is None or is_few(x):  # as soon as can be: Python's time decides here
            own = stock.forward  # as it is now
            return (within if own is whole else own)(self, *args, **kwargs)
        parts = serving(self, plan, args, kwargs)
        if not parts:
            return stock.forward(self, *args, **kwargs)
        return Run(self, plan, parts, LayerWeights(self))(*args, **kwargs)

    return forward


def serving(
    layer: nn.Module, plan: Plan, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> frozenset[str]:
    """The parts of this call that programs do."""
    given = plan.given(args, kwargs)
    x = given["hidden_states"]  # of rows enough
    if is_traced() or any(is_given(given.get(name)) for name in OTHERWISE):
        return frozenset()
    if torch.nn.modules.module._has_any_global_hook():  # somebody watches every module
        return frozenset()
    config = getattr(module_at(layer, plan.form.attention), "config", None)
    if getattr(config, "output_attentions", False):
        return frozenset()
    parts = usable(layer, plan)
    if len(parts) < len(PARTS) and not torch.compiler.is_compiling():
        _tell(layer, plan, parts)
    return parts if parts and _fits(layer, plan, parts, x) else frozenset()


def _tell(layer: nn.Module, plan: Plan, parts: frozenset[str]) -> None:
    """Warns of what stands in the way, once for a layer as long as it is the same."""
    if layer.__dict__.get(TOLD) != parts:
        layer.__dict__[TOLD] = parts
        warn_once(f"{path} {reason}" for path, reason in blocked(layer, plan).items())


def is_few(x: Tensor) -> bool:
    """Whether an input `[..., S, D]` has so few rows that the model's own path is as fast."""
    shape = x.shape
    least = DECODED if len(shape) > 2 and shape[-2] <= STEP else ROWS
    return x.numel() < least * shape[-1]


def is_traced() -> bool:
    """Whether somebody is tracing for another use than running."""
    # Not `torch.compiler.is_exporting()`, which some releases take for true in all they compile.
    return getattr(torch.compiler, "_is_exporting_flag", False) or torch.jit.is_tracing()


def _fits(layer: nn.Module, plan: Plan, parts: frozenset[str], x: Tensor) -> bool:
    """Whether the stream and the weights have one dtype, or autocast makes it one."""
    if autocast_dtype(x) is not None:
        return True
    modules = (module_at(layer, path) for part in parts for path, _ in plan.wanted[part])
    weights = (module._parameters.get("weight") for module in modules)
    return all(weight is None or weight.dtype == x.dtype for weight in weights)
