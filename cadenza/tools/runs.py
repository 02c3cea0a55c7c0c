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
from cadenza.tools.corpus import read_corpus
from cadenza.tools.fault import Fault
from cadenza.tools.loop import forget_irregular_validation
from cadenza.tools.plot import loss_plot
from cadenza.tools.settings import Settings, check_steps, differing
from cadenza.tools.trainer import Trainer, build_model

METRICS, PLOT, SAMPLE = "metrics.json", "loss.png", "sample.txt"
COMPARISON, COMPARISON_PLOT = "compare.json", "compare.png"
OUTPUTS = (FILE, METRICS, PLOT, SAMPLE, COMPARISON, COMPARISON_PLOT)


@dataclass
class Run:
    """`trainer` on its way to `target` steps, saved in `folder`."""

    folder: Path
    trainer: Trainer
    target: int

    def save(self) -> None:
        """Write the checkpoint, then the metrics."""
        trainer = self.trainer
        digest = trainer.corpus.digest
        checkpoint = Checkpoint(trainer.settings, self.target, digest, trainer.tensors())
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
        picture = loss_plot(self.trainer.training, self.trainer.validation)
        write_whole(self.folder / PLOT, picture)


def fresh_settings(given: dict[str, Any]) -> Settings:
    """Settings from the options given, checked; the others keep their defaults."""
    if given.get("text") is not None:
        given = given | {"text": str(Path(given["text"]).absolute())}
    settings = Settings(**given)
    settings.check()
    return settings


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
    if out is None:
        raise Fault("--resume needs the folder of the run: add --out DIR")
    folder = Path(out)
    checkpoint = load_checkpoint(folder)
    if contradictions := differing(given, checkpoint.settings):
        raise Fault(
            f"{folder} holds another run: {'; '.join(contradictions)}: "
            "leave that out, or start a new run with another --out"
        )
    settings = checkpoint.settings
    if given.get("text") is not None:
        settings = dataclasses.replace(settings, text=str(Path(given["text"]).absolute()))
    settings.check()
    trainer = _trainer(settings)
    _check_text(trainer, checkpoint)
    trainer.restore(checkpoint.tensors)
    run = Run(folder, trainer, _longer(trainer, checkpoint.target, target))
    forget_irregular_validation(trainer, run.target)
    prepare_folder(folder)
    return run


def _trainer(settings: Settings) -> Trainer:
    corpus = read_corpus(settings.text, settings.context)
    return Trainer(build_model("cadenza", settings), settings, corpus)


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
