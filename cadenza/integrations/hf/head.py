"""The language-model head and its loss, from the last hidden states, in chunks of the logits.

The model's own forward runs, with stand-ins for its head and its loss: what it makes of logits
besides is tried out beforehand. The head's weight is used in the head's own forward, which takes
what the loss needs as a second argument.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cadenza.integrations.hf.layer import is_few, is_traced
from cadenza.integrations.hf.plan import named, unusable, warn_once
from cadenza.integrations.hf.replace import PLAN, Forward, is_accelerated
from cadenza.integrations.hf.standin import StandIn
from cadenza.library.autocast import autocast_dtype
from cadenza.library.cross_entropy import linear_cross_entropy

HEAD = "lm_head"
IGNORED = -100
EXCHANGED = "is another one than at cz.accelerate(model): call that again"


@dataclass(frozen=True)
class HeadPlan:
    """What a model makes of its logits: their softcap; and when it shall return them.

    `logits` is True for always, False for never beside a loss, "evaluation" for not in training;
    `loss` says which loss function was tried, as `chosen_loss` does.
    """

    softcap: float | None
    logits: bool | str
    parameters: tuple[str, ...]
    loss: tuple[Any, ...]

    def returns_logits(self, training: bool) -> bool:
        """Whether logits are returned beside a loss."""
        return not training if self.logits == "evaluation" else bool(self.logits)


@dataclass(frozen=True)
class LossRequest:
    """What a head computes a loss from besides hidden states."""

    target: Tensor
    softcap: float | None
    number: Tensor | float | None
    ignore_index: int


def model_forward(stock: Any) -> Forward:
    """The forward of models of a class with a head: labels give a loss that needs no logits."""

    @functools.wraps(stock.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        plan = self.__dict__.get(PLAN)
        if plan is None or not _serves(self, plan, args, kwargs):
            return stock.forward(self, *args, **kwargs)
        wanted = plan.returns_logits(self.training)
        head = _Head(self.get_submodule(HEAD), model=self, wanted=wanted, softcap=plan.softcap)
        own = StandIn(self, lm_head=head, loss_function=head.loss)
        found = stock.forward(own, *args, **kwargs)
        return found if wanted else without_logits(found)

    return forward


def head_forward(stock: Any) -> Forward:
    """The forward of a head: its logits, or the loss that is asked for."""

    @functools.wraps(stock.forward)
    def forward(self: Any, x: Tensor, asked: LossRequest | None = None) -> Tensor:
        if asked is None:
            return stock.forward(self, x)
        return linear_cross_entropy(
            x, self.weight, asked.target, bias=self.bias, softcap=asked.softcap,
            num_items_in_batch=asked.number, ignore_index=asked.ignore_index,
        )  # fmt: skip

    return forward


def _serves(model: Any, plan: HeadPlan, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call has labels, and a head and loss that nobody has changed or watches."""
    if kwargs.get("labels") is None and "labels" not in plan.parameters[: len(args)]:
        return False  # as a step of decoding, where Python's time decides
    given = named(plan.parameters, args, kwargs)
    keep = given.get("logits_to_keep", 0)
    if given.get("labels") is None or not (isinstance(keep, int) and keep == 0):
        return False
    if chosen_loss(model) != plan.loss:
        return False
    head = model._modules.get(HEAD)
    exchanged = head is None or not is_accelerated(head)
    reason = EXCHANGED if exchanged else unusable(head, type(head))
    if reason is not None and not torch.compiler.is_compiling():
        warn_once([f"{HEAD} {reason}"])
    return reason is None


class _Head(StandIn):
    """The head in its model's forward: it keeps hidden states, for the loss."""

    hidden: Tensor

    def __call__(self, hidden: Tensor) -> Tensor:
        self.__dict__["hidden"] = hidden
        if self.wanted or not self._fits(hidden):
            return self.stands_for(hidden)
        return hidden.new_zeros((*hidden.shape[:-1], 0))

    def _fits(self, hidden: Tensor) -> bool:
        """Whether programs do this loss: enough rows, of the weight's dtype."""
        same = hidden.dtype == self.stands_for.weight.dtype or autocast_dtype(hidden) is not None
        return same and not is_few(hidden) and not is_traced()

    def loss(self, logits: Tensor, labels: Tensor, vocab_size: int = 0, **options: Any) -> Tensor:
        """As the model's loss function, which takes logits, from hidden states."""
        hidden, ignored = self.hidden, options.get("ignore_index", IGNORED)
        if not self._fits(hidden):
            return self.model.loss_function(
                logits=logits, labels=labels, vocab_size=vocab_size, **options
            )
        target = options.get("shift_labels")
        if target is None:
            target = F.pad(labels, (0, 1), value=ignored)[..., 1:]
        target = target.to(hidden.device).reshape(hidden.shape[:-1])
        number = _number(options.get("num_items_in_batch"), hidden)
        return self.stands_for(hidden, LossRequest(target, self.softcap, number, ignored))


def _number(number: Any, hidden: Tensor) -> Any:
    """A number of items on the device of hidden states, without dimensions."""
    return number.to(hidden.device).reshape(()) if isinstance(number, Tensor) else number


def without_logits(found: Any) -> Any:
    """A model's outputs without its logits, which follow the loss."""
    if isinstance(found, tuple):
        return found[0], *found[2:]
    return type(found)(**{name: item for name, item in found.items() if name != "logits"})


def chosen_loss(model: Any) -> tuple[Any, ...]:
    """Which loss function a model has: one that was set, or one that its type names."""
    name = "_loss_function"
    own = model.__dict__.get(name), model._modules.get(name)
    return *own, getattr(model, "loss_type", None)


def has_head(model: nn.Module) -> bool:
    """Whether a model has a head of the known name, and a loss function."""
    return model._modules.get(HEAD) is not None and hasattr(type(model), "loss_function")
