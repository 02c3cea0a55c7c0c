"""The suite `model`: whole training steps of Hugging Face's Llama with random weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch

from cadenza.core.cost import Work
from cadenza.tools.audit.attention import pairs
from cadenza.tools.bench import rivals
from cadenza.tools.bench.case import Case, Record, Sizes, Suite
from cadenza.tools.bench.contest import contest
from cadenza.tools.bench.draw import Draw
from cadenza.tools.bench.hugging_face import Loss, built, loss_of, our_loss, stock_loss, twin
from cadenza.tools.bench.measurement import Calls
from cadenza.tools.bench.stage import TRANSFORMS, Stage, Transform

Tensor = torch.Tensor
# So small that weights stay as they were drawn, however many steps a variant takes.
RATE = 1e-5
# How often a step reads or writes each parameter's bytes at least: its weight in forward and
# backward, its gradient twice, and in the optimizer the weight and two moments, both ways.
PASSES = 10
HELD = 3  # weights and two moments


class Model(NamedTuple):
    """A model's sizes, whether its head is its embedding, and whether backward recomputes."""

    sizes: Sizes
    tied: bool = False
    checkpointed: bool = False

    @property
    def name(self) -> str:
        """Its layers and its tokens."""
        return "{layers}-layers-{B}x{S}".format(**self.sizes)


LLAMA_1B = {"B": 4, "S": 4096, "layers": 16, "D": 2048, "F": 8192, "H": 32, "KV": 8, "HD": 64,
            "V": 128256}  # fmt: skip
LLAMA_8B = {"B": 2, "S": 8192, "layers": 4, "D": 4096, "F": 14336, "H": 32, "KV": 8, "HD": 128,
            "V": 128256}  # fmt: skip
MODELS: Mapping[str, Model] = {
    "1b": Model(LLAMA_1B, tied=True),
    "8b-width": Model(LLAMA_8B),
    "8b-width-checkpointed": Model(LLAMA_8B, checkpointed=True),
}


class Training(Stage):
    """Steps of one model: all variants move the same parameters, by one optimizer."""

    gradients, peaks = True, True

    def __init__(self, case: Case, device: torch.device) -> None:
        super().__init__(case, device)
        kind, shape = MODELS[case.pattern], (case.sizes["B"], case.sizes["S"])
        self.model = built(case, device, tied=kind.tied, checkpointed=kind.checkpointed)
        draw = Draw(case.torch_dtype, device, case.seed)
        self.tokens = draw.whole(shape[0] * shape[1], case.sizes["V"]).view(shape)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE, fused=True)

    def step(self, loss: Loss) -> Tensor:
        """Forward, backward, optimizer; the loss before it."""
        try:
            found = loss(self.tokens)
            found.backward()
            self.optimizer.step()
        finally:  # a variant that doesn't fit leaves no gradients to the others
            self.optimizer.zero_grad()
        return found.detach()

    def ours(self) -> Calls:
        """The accelerated model."""
        return [partial(self.step, our_loss(self.model))]

    def ours_compiled(self) -> Calls:
        """The accelerated model through `torch.compile`."""
        return [partial(self.step, TRANSFORMS["compile"](our_loss(self.model)))]

    def stock(self, transform: Transform) -> Calls:
        """The model as transformers has it."""
        return [partial(self.step, transform(stock_loss(self.model)))]

    def liger(self) -> Calls:
        """The model with Liger-Kernel's operations, as it puts them into an instance."""
        own = twin(self.model)
        entered = rivals.liger_model(own)
        loss = loss_of(own)

        def step() -> Tensor:
            with entered():
                return self.step(loss)

        return [step]

    def makers(self) -> dict[str, Callable[[], Calls]]:
        """As of every suite, and those of this one."""
        return {**super().makers(), "ours-compile": self.ours_compiled, "liger": self.liger}

    def work(self) -> Work:
        """The products and attention's, forward and twice in backward; each parameter's passes."""
        s = self.case.sizes
        tokens, columns = s["B"] * s["S"], (2 * s["H"] + 2 * s["KV"]) * s["HD"]
        weights = s["layers"] * s["D"] * (columns + 3 * s["F"]) + s["V"] * s["D"]
        seen = s["layers"] * s["B"] * s["H"] * pairs(s["S"], s["S"], causal=True)
        flops = 6 * tokens * weights + 12 * seen * s["HD"]
        return Work(flops, PASSES * self._bytes())

    def _bytes(self) -> int:
        return sum(weight.nbytes for weight in self.model.parameters())

    def facts(self) -> Record:
        """Tokens of a step, and the bytes of weights and moments, which are there between steps."""
        sizes = self.case.sizes
        return {"tokens": sizes["B"] * sizes["S"], "held_bytes": HELD * self._bytes()}


def _sizes(pattern: str) -> dict[str, Sizes]:
    return {MODELS[pattern].name: MODELS[pattern].sizes}


def _changed(pattern: str, given: Sizes) -> Sizes:
    return {name: given.get(name, size) for name, size in MODELS[pattern].sizes.items()}


MODEL = Suite(
    "model",
    ("ours", "ours-compile", "compile", "liger", "eager"),
    tuple(MODELS),
    _sizes,
    _changed,
    partial(contest, Training),
)
