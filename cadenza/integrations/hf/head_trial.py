"""Trying a model's head before it is accelerated: what its forward makes of logits and labels."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cadenza.integrations.hf.head import HEAD, IGNORED, HeadPlan, chosen_loss
from cadenza.integrations.hf.leaves import close, drawn
from cadenza.integrations.hf.recognise import CONV, Unknown, parameters_of
from cadenza.integrations.hf.standin import StandIn, stock_class

WIDTH, CLASSES, TOKENS = 8, 10, 6


def head_plan(model: Any, logits: bool | str) -> HeadPlan:
    """What a model makes of its logits. Raises Unknown, with the reason, for another than is known.

    Known is softcap, the causal loss over targets one token ahead, and nothing else.
    """
    head = model.get_submodule(HEAD)
    kind = stock_class(head)
    if kind is not nn.Linear:
        wrapped = "" if (kind.__module__, kind.__qualname__) == CONV else "wrapped, as "
        raise Unknown(f"{HEAD} is {wrapped}a {kind.__module__}.{kind.__qualname__}")
    softcap = getattr(model.config, "final_logit_softcapping", None)
    trial = _Trial(model)
    if not trial.is_softcapped(softcap):
        raise Unknown("its logits are more than a product and a softcap")
    if not _is_causal_loss(model.loss_function):
        raise Unknown("its loss is not the cross-entropy of the next token")
    return HeadPlan(softcap, logits, parameters_of(model), chosen_loss(model))


class _Outputs(tuple[Any, ...]):
    """What a model without its head returns: hidden states, and None for all else."""

    def __getattr__(self, name: str) -> Any:
        return self[0] if name == "last_hidden_state" else None


class _Trial:
    """A model's own forward over known hidden states and a small head."""

    def __init__(self, model: Any) -> None:
        hidden, weight = drawn(1, TOKENS, WIDTH, seed=80), drawn(CLASSES, WIDTH, seed=81)
        self.labels, self.product = torch.arange(TOKENS)[None], F.linear(hidden, weight)
        inner = getattr(model, "base_model_prefix", "")
        inner = inner if inner in model._modules else next(iter(model._modules))
        own = {
            inner: lambda *args, **kwargs: _Outputs((hidden,)),
            HEAD: lambda x: F.linear(x, weight),
            "loss_function": self._record,
        }
        self.heard: list[tuple[Tensor, Tensor]] = []
        stand_in = StandIn(model, training=False, **own)
        with torch.no_grad():
            found = stock_class(model).forward(
                stand_in, input_ids=self.labels, labels=self.labels, return_dict=True
            )
        self.loss, self.logits = found[0], found[1]

    def _record(self, logits: Tensor, labels: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.heard.append((logits, labels))
        return torch.tensor(0.25)

    def is_softcapped(self, softcap: float | None) -> bool:
        """Whether loss and caller get the logits under this softcap, and labels as they are."""
        logits, expected = self.product, self.product
        if softcap is not None:
            expected = softcap * torch.tanh(logits / softcap)
        ((heard, labels),) = self.heard
        same = close(heard, expected) and close(self.logits, expected)
        return same and torch.equal(labels, self.labels) and self.loss.item() == 0.25


def _is_causal_loss(function: Any) -> bool:
    """Whether a loss function is the cross-entropy of each token against the next one's label."""
    logits, labels = drawn(2, TOKENS, CLASSES, seed=82).float(), torch.arange(2 * TOKENS)
    labels = (labels % CLASSES).view(2, TOKENS)
    labels[0, 2] = IGNORED
    target = F.pad(labels, (0, 1), value=IGNORED)[:, 1:]
    total = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum")
    mean = F.cross_entropy(logits.flatten(0, 1), target.flatten())
    with torch.no_grad():
        found = function(logits=logits, labels=labels, vocab_size=CLASSES)
        shared = function(
            logits=logits, labels=labels, vocab_size=CLASSES, num_items_in_batch=torch.tensor(7)
        )
    return close(found, mean) and close(shared, total / 7)
