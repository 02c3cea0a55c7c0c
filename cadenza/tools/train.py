"""`cadenza train`: a model on text, from the first step to a sample of its own.

The small Llama on bytes, or a whole model, which is then written as Hugging Face has it, too.
"""

from __future__ import annotations

from signal import SIGINT
from typing import Any

from cadenza.tools.atomic import write_whole
from cadenza.tools.corpus import derived_seed
from cadenza.tools.generate import generate
from cadenza.tools.interrupt import Interruption, interruptible
from cadenza.tools.launcher import shell_line
from cadenza.tools.loop import advance
from cadenza.tools.progress import Pace, clock, progress
from cadenza.tools.runs import MODEL, SAMPLE, Run, resume_run, start_run
from cadenza.tools.settings import BYTEWISE, DEFAULT_STEPS, SMALL
from cadenza.tools.trainer import Trainer
from cadenza.tools.whole import export

SAMPLE_PROMPT = b"The "
SAMPLE_BYTES = 256


def train(given: dict[str, Any], *, out: str | None, resume: bool, steps: int | None) -> int:
    """Train to the end or to Ctrl-C; the exit code. Raises Fault on bad input."""
    target = DEFAULT_STEPS if steps is None else steps
    run = resume_run(given, out, steps) if resume else start_run(given, out, target)
    _announce(run)
    try:
        pace, interruption = _train(run)
        if not interruption:
            _conclude(run, pace)
            return 0
        print(f"stopped and saved after step {run.trainer.step}; to go on:")
    except KeyboardInterrupt:
        print("stopped at once, with the last checkpoint in place; to go on:")
        interruption = Interruption(SIGINT)
    print(shell_line("train", "--out", str(run.folder), "--resume"), flush=True)
    return interruption.exit_code


def _announce(run: Run) -> None:
    count = sum(weight.numel() for weight in run.trainer.model.parameters())
    corpus = run.trainer.corpus
    unit = f"{corpus.tokenizer.unit}s"
    print(f"run in {run.folder}: {count:,} parameters, seed {run.trainer.settings.seed}")
    print(f"{len(corpus.training):,} {unit} to train on, {len(corpus.held_out):,} held out")
    settings = run.trainer.settings
    if settings.init is not None and settings.tokenizer == BYTEWISE:
        print("tokens are bytes: if --init learned others, add --tokenizer with its tokenizer.json")
    if run.trainer.step:
        print(f"resumed after step {run.trainer.step}", flush=True)


def _train(run: Run) -> tuple[Pace, Interruption]:
    settings = run.trainer.settings
    tokens = settings.batch * settings.context
    show = progress("step", run.trainer.step, run.target, tokens)
    with interruptible() as interruption, show:
        advance(run.trainer, run.target, show, interruption, run.save_when_due)
    run.save_last()
    run.draw()
    return show.pace, interruption


def _conclude(run: Run, pace: Pace) -> None:
    trainer = run.trainer
    first, last = trainer.validation[0], trainer.validation[trainer.step]
    print(f"held-out loss {last:.4f} after {trainer.step} steps, {first:.4f} before the first")
    if pace.seconds:
        speed = pace.tokens_per_second()
        print(f"{clock(sum(pace.seconds))} of training, {speed:,.0f} tokens/s")
    if trainer.settings.model != SMALL:
        export(trainer.model, run.folder / MODEL, trainer.settings.tokenizer)
        print(f"written for Hugging Face: {run.folder / MODEL}")
    text = sample(trainer)
    write_whole(run.folder / SAMPLE, text.encode())
    print(f"sample:\n{text}")


def sample(trainer: Trainer) -> str:
    """Text that the model writes on from a fixed beginning, decided by weights and seed."""
    seed = derived_seed("sample", trainer.settings.seed)
    with trainer.arithmetic():
        tokenizer = trainer.corpus.tokenizer
        written = generate(trainer.model, SAMPLE_PROMPT, SAMPLE_BYTES, seed, tokenizer)
    text = written.decode(errors="replace")
    # A control character could move the cursor or change the terminal's state.
    return "".join(
        one if one.isprintable() or one in "\n\t" else "\N{REPLACEMENT CHARACTER}" for one in text
    )
