"""The suite `model-accuracy`: logits and each parameter's gradient of a small Llama in training."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from cadenza.tools.bench.accuracy import Outputs, Trial, judged
from cadenza.tools.bench.case import Bench, Case, Record, Sizes, Suite
from cadenza.tools.bench.draw import Draw
from cadenza.tools.bench.hugging_face import accelerated, built, twin
from cadenza.tools.bench.stage import TRANSFORMS

Tensor = torch.Tensor
PATTERN = "llama"
SIZES = {"B": 2, "S": 512, "layers": 2, "D": 1024, "F": 2816, "H": 16, "KV": 4, "HD": 64,
         "V": 32000}  # fmt: skip


class ModelTrials:
    """One model whose parameters are drawn anew in place; a draw is the tokens."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.model = built(case, device)

    @torch.no_grad()
    def draw(self, draw: Draw, sizes: Sizes) -> Tensor:
        """Other weights, and tokens [B, S]."""
        for weight in self.model.parameters():
            shape = weight.shape
            weight.copy_(draw.row(*shape) if weight.dim() == 1 else draw.weight(*shape))
        return draw.whole(sizes["B"] * sizes["S"], sizes["V"]).view(sizes["B"], sizes["S"])

    def oracle(self, tokens: Tensor) -> Outputs:
        """Transformers' own code on the same numbers in float64."""
        wide = copy.deepcopy(self.model).double()
        return outcome(wide, loss_and_logits(wide), tokens)

    def trial(self, variant: str) -> Trial:
        """A variant as a function of a draw."""
        if variant == "ours":
            own = accelerated(self.model, logits=True)
            return partial(outcome, own, loss_and_logits(own))
        own = twin(self.model)
        return partial(outcome, own, TRANSFORMS[variant](loss_and_logits(own)))


def loss_and_logits(model: nn.Module) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """What a model makes of tokens that are their labels, too."""

    def both(tokens: Tensor) -> tuple[Tensor, Tensor]:
        found: Any = model(input_ids=tokens, labels=tokens)
        return found.loss, found.logits

    return both


def outcome(
    model: nn.Module, both: Callable[[Tensor], tuple[Tensor, Tensor]], tokens: Tensor
) -> Outputs:
    """The logits, and the loss's gradients as d and the parameter's name."""
    named = dict(model.named_parameters())
    with torch.enable_grad():
        loss, logits = both(tokens)
        gradients = torch.autograd.grad(loss, [*named.values()])
    found = {f"d {name}": one for name, one in zip(named, gradients, strict=True)}
    return {"logits": logits.detach(), **found}


def run(case: Case, bench: Bench) -> list[Record]:
    """A record for each variant: its errors by output, or why there are none."""
    return judged(ModelTrials(case, bench.device), case, bench)


def _sizes(_: str) -> dict[str, Sizes]:
    return {"2-layers-2x512": SIZES}


def _changed(_: str, given: Sizes) -> Sizes:
    return {name: given.get(name, size) for name, size in SIZES.items()}


MODEL_ACCURACY = Suite(
    "model-accuracy", ("ours", "eager"), (PATTERN,), _sizes, _changed, run, timed=False
)
