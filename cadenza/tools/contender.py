"""One part of a comparison, run in a process of its own so that its peak memory is its own.

`python -m cadenza.tools.contender` reads a request as JSON from standard input and writes its
result as JSON to the file that the request names; what it prints is for people.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cadenza.tools.corpus import corpus_of, derived_seed
from cadenza.tools.fault import Fault
from cadenza.tools.interrupt import Interruption
from cadenza.tools.loop import advance
from cadenza.tools.memory import PeakMemory
from cadenza.tools.progress import progress
from cadenza.tools.settings import Settings
from cadenza.tools.trainer import MemoryFault, Trainer, build_model, device_named

OURS, STOCK, PERTURBED, TIMING = "cadenza", "stock", "perturbed", "timing"
MODEL_OF = {OURS: "cadenza", STOCK: "stock", PERTURBED: "stock"}
TIMED_ROUNDS, WARMUP_ROUNDS = 12, 2


@dataclass(frozen=True)
class Request:
    """What to measure (a contender, or the timing of two), over how many steps, result where."""

    part: str
    settings: Settings
    steps: int
    result: str

    def to_json(self) -> str:
        """The request as text that `from_json` reads."""
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> Request:
        """The request that `to_json` wrote."""
        fields = json.loads(text)
        return Request(**(fields | {"settings": Settings(**fields["settings"])}))


def answer(request: Request) -> None:
    """Measure what is asked for and write the result to its file."""
    result = _timing(request) if request.part == TIMING else _trained(request)
    Path(request.result).write_text(json.dumps(result))


def trainer_of(part: str, settings: Settings) -> Trainer:
    """A contender before its first step, on the batches that all contenders see."""
    model = build_model(MODEL_OF[part], settings)
    if part == PERTURBED:
        perturb(model, derived_seed("perturb", settings.seed))
    return Trainer(model, settings, corpus_of(settings))


@torch.no_grad()
def perturb(model: nn.Module, seed: int) -> None:
    """Move every weight by one unit in the last place, up or down as the seed decides."""
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        up = torch.rand(weight.shape, generator=generator) < 0.5
        weight.copy_(_next(weight, up.to(weight.device)))


def _next(weight: Tensor, up: Tensor) -> Tensor:
    bound = torch.full_like(weight, float("inf"))
    return torch.nextafter(weight, torch.where(up, bound, -bound))


def _trained(request: Request) -> dict[str, Any]:
    settings = request.settings
    trainer = trainer_of(request.part, settings)
    memory = PeakMemory(device_named(settings.device))
    show = progress(request.part, 0, request.steps, settings.batch * settings.context)
    with show:
        advance(trainer, request.steps, show, Interruption(), save=lambda: None)
    return {
        "training": trainer.training,
        "validation": [{"step": k, "loss": v} for k, v in trainer.validation.items()],
        "seconds_per_step": statistics.median(show.pace.seconds),
        "peak_bytes": memory.bytes(),
    }


def _timing(request: Request) -> dict[str, float]:
    """How long a step takes, nothing where the two models don't fit in memory together."""
    try:
        return _timed(request)
    except MemoryFault:
        return {}


def _timed(request: Request) -> dict[str, float]:
    """Both models step by step in turn, so that the machine's moods fall on both alike."""
    trainers = {part: trainer_of(part, request.settings) for part in (OURS, STOCK)}
    seconds: dict[str, list[float]] = {part: [] for part in trainers}
    for _ in range(TIMED_ROUNDS):
        for part, trainer in trainers.items():
            seconds[part].append(_step_seconds(trainer))
    medians = {part: statistics.median(each[WARMUP_ROUNDS:]) for part, each in seconds.items()}
    return {**medians, "ratio": medians[OURS] / medians[STOCK]}


def _step_seconds(trainer: Trainer) -> float:
    start = time.perf_counter()
    trainer.train_step()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> int:
    """Answer the request on standard input; the exit code."""
    try:
        answer(Request.from_json(sys.stdin.read()))
    except Fault as fault:
        print("cadenza:", fault, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
