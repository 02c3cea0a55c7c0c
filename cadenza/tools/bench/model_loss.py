"""The suite `model-loss`: does an accelerated model learn as the stock one does?

Each variant trains the same weights on the same batches of a text. One more stock model takes the
batches in another order; how far apart those two are is the spread that ours has to lie inside.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import nn

from cadenza.tools.bench.case import Bench, Case, Record, Sizes, Suite, Unavailable
from cadenza.tools.bench.contest import failure, forget
from cadenza.tools.bench.hugging_face import Loss, built, our_loss, stock_loss
from cadenza.tools.bench.model import LLAMA_1B, MODELS
from cadenza.tools.corpus import Corpus, derived_seed, read_corpus
from cadenza.tools.fault import Fault

Tensor = torch.Tensor
PATTERN = "1b"
SIZES = {**LLAMA_1B, "S": 1024, "steps": 200}
STOCK, REORDERED = "eager", "reordered"
LOSSES: Mapping[str, Callable[[nn.Module], Loss]] = {
    "ours": our_loss, STOCK: stock_loss, REORDERED: stock_loss,
}  # fmt: skip
RATE, BETAS = 3e-4, (0.9, 0.95)
WARMING = 10  # one step in ten, in which the rate rises
POINTS = 10  # how often the held-out text is looked at


class Learning:
    """One training: a model of its own, its optimizer, and the batches in an order."""

    def __init__(self, variant: str, case: Case, corpus: Corpus, device: torch.device) -> None:
        if variant not in LOSSES:
            raise Unavailable(f"model-loss is of {', '.join(LOSSES)} alone")
        self.sizes, self.corpus, self.device = case.sizes, corpus, device
        model = built(case, device, tied=MODELS[PATTERN].tied)
        self.loss = LOSSES[variant](model)
        self.optimizer = torch.optim.AdamW(model.parameters(), RATE, BETAS, fused=True)
        rising = max(1, self.sizes["steps"] // WARMING)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min(1.0, (step + 1) / rising)
        )
        self.order = order(self.sizes["steps"], shuffled=variant == REORDERED)

    def run(self) -> Record:
        """The loss of every step, and of the held-out text at some of them.

        Raises FloatingPointError where one is no number.
        """
        steps, losses, held_out = self.sizes["steps"], [], []
        points = {-(-steps * point // POINTS) for point in range(1, POINTS + 1)}
        for number, step in enumerate(self.order, 1):
            losses.append(self._step(step))
            if number in points:
                held_out.append([number, self._held_out()])
        found = [float(f"{loss:.6g}") for loss in torch.stack(losses).tolist()]
        if not all(map(math.isfinite, (*found, *(loss for _, loss in held_out)))):
            raise FloatingPointError("its loss is no number any more")
        return {"losses": found, "held_out": held_out, "text": self.corpus.digest}

    def _step(self, step: int) -> Tensor:
        batch = self.corpus.batch(0, step, self.sizes["B"], self.sizes["S"] - 1)
        loss = self.loss(batch.to(self.device))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        return loss.detach()

    @torch.no_grad()
    def _held_out(self) -> float:
        windows = self.corpus.validation(self.sizes["S"] - 1)
        parts = [part.to(self.device) for part in windows.split(self.sizes["B"])]
        total = sum(self.loss(part).double() * len(part) for part in parts)
        return round(float(total) / len(windows), 6)


def order(steps: int, *, shuffled: bool) -> Sequence[int]:
    """The batches of a training by number, each once."""
    generator = torch.Generator().manual_seed(derived_seed("order", steps))
    found: list[int] = torch.randperm(steps, generator=generator).tolist()
    return found if shuffled else range(steps)


def run(case: Case, bench: Bench) -> list[Record]:
    """A record for each variant: its losses, or why there are none; ours with the verdict."""
    corpus = _corpus(case, bench.text)
    found: dict[str, Record] = {}
    for variant in bench.variants:
        forget()
        try:
            found[variant] = Learning(variant, case, corpus, bench.device).run()
        except Exception as error:  # noqa: BLE001  # whatever fails is that variant's result
            found[variant] = failure(error)
        bench.say(f"  {variant}: {found[variant].get('failed', 'trained')}")
    known = dict(differences(found))
    for variant, difference in known.items():
        found[variant]["difference"] = difference
    if {"ours", REORDERED} <= known.keys():
        found["ours"]["inside"] = known["ours"] <= known[REORDERED]
    return [{"variant": variant, **found[variant]} for variant in bench.variants]


def differences(found: Mapping[str, Record]) -> Iterator[tuple[str, float]]:
    """How far each variant's held-out loss is from the stock model's at most."""
    stock = found.get(STOCK, {}).get("held_out")
    for variant, record in found.items():
        if stock is not None and variant != STOCK and "held_out" in record:
            both = zip(record["held_out"], stock, strict=True)
            yield variant, round(max(abs(mine - other) for (_, mine), (_, other) in both), 6)


def _corpus(case: Case, text: str | None) -> Corpus:
    """The text in bytes, which are tokens. Raises Fault where it is too short, or V too small."""
    corpus = read_corpus(text, case.sizes["S"] - 1)
    if case.sizes["V"] < corpus.tokenizer.vocabulary:
        raise Fault(f"--size V={case.sizes['V']}: bytes are tokens, so V is 256 at least")
    return corpus


def check(cases: Sequence[Case], text: str | None) -> None:
    """Raises Fault for a text that the cases can't be trained on."""
    for case in cases:
        _corpus(case, text)


def _sizes(_: str) -> dict[str, Sizes]:
    return {"{steps}-steps-{B}x{S}".format(**SIZES): SIZES}


def _changed(_: str, given: Sizes) -> Sizes:
    return {name: given.get(name, size) for name, size in SIZES.items()}


MODEL_LOSS = Suite(
    "model-loss", tuple(LOSSES), (PATTERN,), _sizes, _changed, run, timed=False, check=check
)
