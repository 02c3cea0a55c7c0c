"""One model in training: its weights, its optimizer, and the losses so far.

Its whole state is a dict of tensors. Two trainers of equal state and settings take the same steps
bit by bit, because a batch depends on the seed and the step alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from cadenza.library.models import Llama, StockLlama, checkpoint_layers
from cadenza.tools.corpus import Corpus, derived_seed
from cadenza.tools.fault import Fault
from cadenza.tools.settings import SMALL, Settings
from cadenza.tools.whole import build_whole

MODELS: dict[str, type[nn.Module]] = {"cadenza": Llama, "stock": StockLlama}
MOMENTS = ("step", "exp_avg", "exp_avg_sq")


class MemoryFault(Fault):
    """There is not enough memory."""


def device_named(name: str) -> torch.device:
    """The device, once a number was put there and read back; raises Fault where that fails."""
    try:
        device = torch.device(name)
        torch.ones(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason, others = str(error).splitlines()[0], "cpu" if name == "cuda" else "cpu or cuda"
        raise Fault(f"device {name!r} is not usable ({reason}): take --device {others}") from error
    return device


@contextmanager
def enough_memory() -> Iterator[None]:
    """Turn torch's complaint of too little memory into a Fault."""
    try:
        yield
    except RuntimeError as error:
        if "memory" not in str(error):
            raise
        raise MemoryFault(
            "there is not enough memory for these sizes: choose a smaller --batch, --context or "
            "model, a step in more parts (--accumulate), or --checkpointing"
        ) from error


def build_model(name: str, settings: Settings) -> nn.Module:
    """The model of that name in MODELS, with the initial weights that the seed decides.

    All models start from the stock twin's weights, drawn in float32 on the CPU. A whole model is
    the one of that name in `whole.KINDS`, and may start from a checkpoint.
    """
    device = device_named(settings.device)
    with enough_memory(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(derived_seed("weights", settings.seed))
        if settings.model != SMALL:
            return build_whole(name, settings, device)
        config = settings.config()
        model: nn.Module = StockLlama(config)
        if name != "stock":
            weights = model.state_dict()
            model = MODELS[name](config)
            model.load_state_dict(weights)
        return model.to(device, getattr(torch, settings.dtype))


class Trainer:
    """A model with AdamW, its corpus, and its loss at every step and validation."""

    def __init__(self, model: nn.Module, settings: Settings, corpus: Corpus) -> None:
        _check_vocabulary(model, corpus)
        self.model, self.settings, self.corpus = model, settings, corpus
        if settings.checkpointing:
            checkpoint_layers(model)
        self.optimizer = _optimizer(model, settings)
        self.training: list[float] = []
        self.validation: dict[int, float] = {}

    @property
    def step(self) -> int:
        """Steps taken."""
        return len(self.training)

    @enough_memory()
    def train_step(self) -> float:
        """One update; its mean cross-entropy before it, in nats. Raises Fault unless finite.

        The gradient is that of all the step's sequences, in however many parts they are taken.
        """
        shape = self.settings.batch, self.settings.context
        windows = self.corpus.batch(self.settings.seed, self.step, *shape)
        losses = [self._accumulate(part) for part in windows.split(self._part)]
        value = self._finite(math.fsum(loss.item() for loss in losses) / len(losses))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.training.append(value)
        return value

    @property
    def _part(self) -> int:
        """Sequences that are taken at a time."""
        return self.settings.batch // self.settings.accumulate

    def _accumulate(self, windows: Tensor) -> Tensor:
        """The mean loss of some of a step's sequences, whose gradient is added."""
        loss = self._loss(windows)
        (loss / self.settings.accumulate).backward()
        return loss.detach()

    @enough_memory()
    @torch.no_grad()
    def validate(self) -> float:
        """Mean cross-entropy in nats over the held-out windows, noted for the present step.

        Raises Fault unless finite.
        """
        windows = self.corpus.validation(self.settings.context)
        sums = [self._loss(part).item() * len(part) for part in windows.split(self._part)]
        self.validation[self.step] = self._finite(math.fsum(sums) / len(windows))
        return self.validation[self.step]

    def _finite(self, loss: float) -> float:
        if math.isfinite(loss):
            return loss
        raise Fault(f"the loss is {loss} after {self.step} steps: choose a smaller --learning-rate")

    def _loss(self, windows: Tensor) -> Tensor:
        windows = windows.to(self.settings.device)
        with self.arithmetic():
            return self.model(windows[:, :-1].contiguous(), windows[:, 1:].contiguous())

    def arithmetic(self) -> AbstractContextManager[object]:
        """What the model runs under: autocast to bfloat16 where the precision is mixed."""
        if self.settings.precision != "mixed":
            return nullcontext()
        return torch.autocast(torch.device(self.settings.device).type, torch.bfloat16)

    def _weights(self) -> dict[str, Tensor]:
        """The weights by name, a tied one once."""
        return {name: weight.detach() for name, weight in self.model.named_parameters()}

    def tensors(self) -> dict[str, Tensor]:
        """The whole state: weights under their own names, `optimizer/…` and `history/…`."""
        return {
            **self._weights(),
            **self._moments(),
            "history/training": torch.tensor(self.training, dtype=torch.float64),
            "history/validation": torch.tensor(
                list(self.validation.items()), dtype=torch.float64
            ).view(-1, 2),
        }

    def _moments(self) -> dict[str, Tensor]:
        state = self.optimizer.state
        return {
            f"optimizer/{moment}/{name}": state[weight][moment]
            for name, weight in self.model.named_parameters()
            if weight in state
            for moment in MOMENTS
        }

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Take on the state that `tensors()` gave; raises Fault where names or shapes differ."""
        _check_layout(self._layout(tensors), tensors)
        for name, weight in self._weights().items():
            weight.copy_(tensors[name])
        saved = self.optimizer.state_dict()
        saved["state"] = {
            index: {moment: tensors[f"optimizer/{moment}/{name}"] for moment in MOMENTS}
            for index, (name, _) in enumerate(self.model.named_parameters())
            if f"optimizer/step/{name}" in tensors
        }
        self.optimizer.load_state_dict(saved)
        self.training = tensors["history/training"].tolist()
        self.validation = {int(step): loss for step, loss in tensors["history/validation"].tolist()}

    def _layout(self, tensors: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
        """The shape that each tensor of a state must have."""
        layout = {name: tuple(weight.shape) for name, weight in self._weights().items()}
        for name, weight in self.model.named_parameters():
            if f"optimizer/step/{name}" in tensors:
                shapes = ((), tuple(weight.shape), tuple(weight.shape))
                layout |= {f"optimizer/{m}/{name}": s for m, s in zip(MOMENTS, shapes, strict=True)}
        for name, rank in (("history/training", 1), ("history/validation", 2)):
            found = tensors.get(name, torch.empty(0))
            layout[name] = tuple(found.shape) if found.dim() == rank else (-1,) * rank
        return layout


def _optimizer(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """AdamW; for whole models on a GPU the fused one, which needs no memory of their size."""
    rate = settings.learning_rate
    fused = settings.model != SMALL and torch.device(settings.device).type == "cuda"
    return torch.optim.AdamW(model.parameters(), lr=rate, fused=fused or None)


def _check_vocabulary(model: nn.Module, corpus: Corpus) -> None:
    needed, held = corpus.tokenizer.vocabulary, model.config.vocabulary
    if needed > held:
        raise Fault(
            f"the tokenizer has {needed} tokens, the model knows {held}: "
            "name the --tokenizer of this model"
        )


def _check_layout(expected: dict[str, tuple[int, ...]], tensors: dict[str, Tensor]) -> None:
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise Fault(
                f"the checkpoint holds {name} as {_shown(found.get(name))}, this model expects "
                f"{_shown(expected.get(name))}: start a new run with another --out"
            )


def _shown(shape: tuple[int, ...] | None) -> str:
    return "nothing" if shape is None else str(list(shape))
