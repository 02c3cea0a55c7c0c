"""The training loop: steps, with a look at the held-out text at fixed intervals and at the end."""

from __future__ import annotations

import time
from collections.abc import Callable

from cadenza.tools.interrupt import Interruption
from cadenza.tools.progress import Bar, Lines
from cadenza.tools.trainer import Trainer

VALIDATE_EVERY = 50


def advance(
    trainer: Trainer,
    target: int,
    show: Bar | Lines,
    interruption: Interruption,
    save: Callable[[], None],
) -> None:
    """Train to `target` steps or to an interruption, calling `save` after each validation."""
    while not interruption:
        if _is_due(trainer, target):
            show.validated(trainer.step, trainer.validate())
            save()
        if trainer.step >= target:
            return
        start = time.perf_counter()
        loss = trainer.train_step()
        show.pace.seconds.append(time.perf_counter() - start)
        show.step(loss)


def _is_due(trainer: Trainer, target: int) -> bool:
    regular = trainer.step % VALIDATE_EVERY == 0
    return (regular or trainer.step == target) and trainer.step not in trainer.validation


def forget_irregular_validation(trainer: Trainer, target: int) -> None:
    """Drop what a shorter run measured at its end, so that a resumed run equals an unbroken one."""
    trainer.validation = {
        step: loss
        for step, loss in trainer.validation.items()
        if step % VALIDATE_EVERY == 0 or step == target
    }
