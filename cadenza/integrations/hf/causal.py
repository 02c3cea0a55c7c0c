"""Sparing a plain causal batch the masked attention path.

Without padding, positions of its own or a filled cache, a mask says no more than `is_causal` does,
which is what PyTorch's fastest kernels need. Models drop such a mask themselves in eager mode, not
where they are compiled, and some of them never. It is dropped before a layer is called, so what
checkpointing calls again gets the same. A call without a mask then prefers the kernel of PyTorch
that was measured to be fastest, inside the layer, for the same reason.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from cadenza.integrations.hf.plan import Plan, module_at, named
from cadenza.integrations.hf.replace import PLAN, Forward
from cadenza.integrations.hf.standin import StandIn
from cadenza.library.attention_choice import chosen
from cadenza.library.attention_heads import Heads
from cadenza.library.attention_kernels import preferring

# What makes a batch other than plain, where it is given. Caches come first: a step of decoding,
# where Python's time decides, is told by them.
SPECIAL = (
    "cache", "past_key_values", "past_key_value", "attention_mask", "position_ids",
    "encoder_hidden_states", "token_type_ids", "output_attentions", "output_hidden_states",
)  # fmt: skip
MASK = "attention_mask"


@dataclass(frozen=True)
class StackPlan:
    """Of a model's stack of layers: its name there, the names of the arguments, its windows."""

    layers: str
    parameters: tuple[str, ...]


def stack_forward(stock: Any) -> Forward:
    """The forward of models of a class that hold a list of layers."""

    @functools.wraps(stock.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        plan = self.__dict__.get(PLAN)
        if plan is None or not _is_plain(self, plan, args, kwargs):
            return stock.forward(self, *args, **kwargs)
        layers = [_Unmasked(layer) for layer in getattr(self, plan.layers)]
        return stock.forward(StandIn(self, **{plan.layers: layers}), *args, **kwargs)

    return forward


def _is_plain(model: Any, plan: StackPlan, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether a call is of whole sequences, one a row, that nobody asks for attention weights."""
    given = named(plan.parameters, args, kwargs) if args else kwargs
    for name in SPECIAL:
        value = given.get(name)
        if value is not None and value is not False:  # may be a tensor
            return False
    config = model.config
    asked = ("output_attentions", "output_hidden_states")
    return config._attn_implementation == "sdpa" and not any(
        getattr(config, name, False) for name in asked
    )


class _Unmasked(StandIn):
    """A layer that is called without its mask, where the mask says no more than causal."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layer = self.stands_for
        plan = layer.__dict__.get(PLAN)
        if plan is None or not _is_only_causal(layer, plan, _stream(args, kwargs).shape[1]):
            return layer(*args, **kwargs)
        place = plan.parameters.index(MASK)
        if place < len(args):
            args = (*args[:place], None, *args[place + 1 :])
        elif MASK in kwargs:
            kwargs = {**kwargs, MASK: None}
        return layer(*args, **kwargs)


def _stream(args: Any, kwargs: Mapping[str, Any]) -> Any:
    return args[0] if args else kwargs["hidden_states"]


def _is_only_causal(layer: nn.Module, plan: Plan, length: int) -> bool:
    """Whether a layer's attention sees all tokens before each one, in rows of this length."""
    attention = module_at(layer, plan.form.attention)
    windows = [
        getattr(owner, "sliding_window", None)
        for owner in (attention, layer, getattr(attention, "config", None))
    ]
    return bool(getattr(attention, "is_causal", False)) and all(
        window is None or length <= window for window in windows
    )


def fastest_kernel(
    attention: Any, plan: Plan, x: Tensor, given: Mapping[str, Any]
) -> AbstractContextManager[Any]:
    """Within, a model's own attention of x `[B, S, D]` runs on PyTorch's fastest causal kernel.

    Where the call is another one than that, PyTorch chooses, as it does without.
    """
    if not _asks_for_causal(attention, x, given):
        return preferring(())
    return preferring(chosen(x, Heads(plan.heads, plan.key_value_heads, plan.head_dim)))


def _asks_for_causal(attention: Any, x: Tensor, given: Mapping[str, Any]) -> bool:
    """Whether the model will call PyTorch's function with `is_causal` alone."""
    config = getattr(attention, "config", None)
    dropouts = (
        getattr(attention, "attention_dropout", 0.0),
        getattr(getattr(attention, "attn_dropout", None), "p", 0.0),
    )
    return (
        getattr(config, "_attn_implementation", None) == "sdpa"
        and bool(getattr(attention, "is_causal", False))
        and given.get(MASK, x) is None
        and x.shape[1] > 1
        and not (attention.training and any(dropouts))
    )
