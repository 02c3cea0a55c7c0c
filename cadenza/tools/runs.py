"""A run: a folder, and the trainer whose checkpoints it holds.

A run is started or resumed here, and every reason not to do so is found before a file is written.
"""

from __future__ import annotations

import dataclasses
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cadenza.tools.atomic import prepare_folder, write_whole
from cadenza.tools.checkpoint import FILE, Checkpoint, load_checkpoint, save_checkpoint
from cadenza.tools.corpus import corpus_of
from cadenza.tools.fault import Fault
from cadenza.tools.loop import forget_irregular_validation
from cadenza.tools.plot import loss_plot
from cadenza.tools.settings import BYTEWISE, Settings, check_steps, differing
from cadenza.tools.trainer import Trainer, build_model, device_named, enough_memory
from cadenza.tools.whole import architecture_of, is_whole, unfilled, whole_settings

METRICS, PLOT, SAMPLE = "metrics.json", "loss.png", "sample.txt"
COMPARISON, COMPARISON_PLOT = "compare.json", "compare.png"
MODEL = "model"
OUTPUTS = (FILE, METRICS, PLOT, SAMPLE, MODEL, COMPARISON, COMPARISON_PLOT)
PATHS = ("text", "init", "tokenizer")
# A save that takes no longer than this is taken whenever one is due; a longer one may take one part
# of so many of a run's time.
SHORT_SECONDS, PARTS = 1.0, 20


@dataclass
class Run:
    """`trainer` on its way to `target` steps, saved in `folder`."""

    folder: Path
    trainer: Trainer
    target: int
    saved: int = -1
    next_save: float = 0.0

    def save_when_due(self) -> None:
        """Save, unless that takes long and was done a short while ago."""
        if time.monotonic() >= self.next_save:
            self.save()

    def save_last(self) -> None:
        """Save, unless the present step is saved."""
        if self.saved != self.trainer.step:
            self.save()

    def save(self) -> None:
        """Write the checkpoint, then the metrics."""
        start = time.monotonic()
        self._write()
        end = time.monotonic()
        self.saved = self.trainer.step
        self.next_save = end + PARTS * max(0.0, end - start - SHORT_SECONDS)

    def _write(self) -> None:
        trainer = self.trainer
        checkpoint = Checkpoint(
            trainer.settings, self.target, trainer.corpus.digest, trainer.tensors(),
            architecture_of(trainer.model),
        )  # fmt: skip
        save_checkpoint(self.folder, checkpoint)
        metrics = {
            "settings": dataclasses.asdict(trainer.settings),
            "steps": trainer.step,
            "training": trainer.training,
            "validation": [{"step": k, "loss": v} for k, v in trainer.validation.items()],
        }
        write_whole(self.folder / METRICS, json.dumps(metrics, indent=1).encode())

    def draw(self) -> None:
        """Write the plot of all losses."""
        unit = self.trainer.corpus.tokenizer.unit
        picture = loss_plot(self.trainer.training, self.trainer.validation, unit)
        write_whole(self.folder / PLOT, picture)


def fresh_settings(given: dict[str, Any]) -> Settings:
    """Settings from the options given, checked; the others keep their defaults."""
    given = _absolute(given)
    settings = whole_settings(given) if is_whole(given) else Settings(**given)
    settings.check()
    return settings


def _absolute(given: dict[str, Any]) -> dict[str, Any]:
    """The options with paths that hold from any folder."""
    paths = {name: given[name] for name in PATHS if given.get(name) not in (None, BYTEWISE)}
    return given | {name: str(Path(path).absolute()) for name, path in paths.items()}


def fresh_folder(out: str | None) -> Path:
    """The folder to write to, created; by default a new one under runs/."""
    folder = _new_folder() if out is None else Path(out)
    if taken := [name for name in OUTPUTS if (folder / name).exists()]:
        raise Fault(
            f"--out {folder} already holds {taken[0]}: add --resume to continue a run, "
            "or choose another folder"
        )
    prepare_folder(folder)
    return folder


def _new_folder() -> Path:
    stem = time.strftime("%Y-%m-%d-%H%M%S")
    names = [stem, *(f"{stem}-{number}" for number in range(2, 100))]
    return next(Path("runs", name) for name in names if not Path("runs", name).exists())


def start_run(given: dict[str, Any], out: str | None, target: int) -> Run:
    """A new run in a folder of its own; raises Fault, having written nothing, on bad input."""
    check_steps(target)
    settings = fresh_settings(given)
    trainer = _trainer(settings)
    return Run(fresh_folder(out), trainer, target)


def resume_run(given: dict[str, Any], out: str | None, target: int | None) -> Run:
    """The run that `out` holds, as it stood; raises Fault where an option contradicts it."""
    given = _absolute(given)
    if out is None:
        raise Fault("--resume needs the folder of the run: add --out DIR")
    folder = Path(out)
    checkpoint = load_checkpoint(folder)
    if contradictions := differing(given, checkpoint.settings):
        raise Fault(
            f"{folder} holds another run: {'; '.join(contradictions)}: "
            "leave that out, or start a new run with another --out"
        )
    moved = {name: given[name] for name in ("text", "tokenizer") if given.get(name) is not None}
    settings = dataclasses.replace(checkpoint.settings, **moved)
    settings.check()
    trainer = _trainer(settings, checkpoint.architecture)
    _check_text(trainer, checkpoint)
    trainer.restore(checkpoint.tensors)
    target = _longer(trainer, checkpoint.target, target)
    run = Run(folder, trainer, target, saved=trainer.step)
    forget_irregular_validation(trainer, run.target)
    prepare_folder(folder)
    return run


def _trainer(settings: Settings, architecture: dict[str, Any] | None = None) -> Trainer:
    """The trainer of a new run, or one yet to be restored, of a whole model of that config.json."""
    corpus = corpus_of(settings)
    if architecture is None:
        return Trainer(build_model("cadenza", settings), settings, corpus)
    device = device_named(settings.device)
    with enough_memory():
        return Trainer(unfilled(architecture, settings, device), settings, corpus)


def _check_text(trainer: Trainer, checkpoint: Checkpoint) -> None:
    if trainer.corpus.digest != checkpoint.text_digest:
        name = trainer.settings.text or "the documentation of this Python"
        raise Fault(
            f"--text {name} differs from the text that the checkpoint was trained on: "
            "name that text, or start a new run with another --out"
        )


def _longer(trainer: Trainer, stored: int, given: int | None) -> int:
    target = stored if given is None else given
    if target < trainer.step:
        raise Fault(
            f"--steps {target} lies behind the {trainer.step} steps already taken: "
            f"choose {trainer.step} or more"
        )
    return target
