"""The text to learn, as tokens: where it comes from, what is held out, and the batches.

The last tenth is held out and never trained on. A batch is a pure function of (seed, step), so
resumed and compared runs see the same ones without storing a position or a random state.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from cadenza.tools.fault import Fault
from cadenza.tools.settings import Settings
from cadenza.tools.tokens import BYTES, Tokenizer, tokenizer_named

HELD_OUT_PART = 10  # one token in ten
VALIDATION_WINDOWS = 32


@dataclass(frozen=True)
class Corpus:
    """Tokens to train on and tokens held out, whole numbers `[length]` each, and their digest."""

    training: Tensor
    held_out: Tensor
    digest: str
    tokenizer: Tokenizer = BYTES

    def batch(self, seed: int, step: int, rows: int, context: int) -> Tensor:
        """Windows `[rows, context + 1]` int64 of the training tokens, decided by (seed, step)."""
        generator = torch.Generator().manual_seed(derived_seed("batch", seed, step))
        last = len(self.training) - context
        starts = torch.randint(last, (rows, 1), generator=generator)
        return self.training[starts + torch.arange(context + 1)].long()

    def validation(self, context: int) -> Tensor:
        """At most 32 windows `[windows, context + 1]` int64, spread evenly over the held-out."""
        fit = len(self.held_out) // (context + 1)
        count = min(fit, VALIDATION_WINDOWS)
        starts = torch.arange(count)[:, None] * (fit // count) * (context + 1)
        return self.held_out[starts + torch.arange(context + 1)].long()


def derived_seed(*parts: object) -> int:
    """A seed for one purpose: unrelated to that of any other purpose, the same everywhere."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:7], "big")


def corpus_of(settings: Settings) -> Corpus:
    """The corpus of a run. Raises Fault as `read_corpus` does."""
    return read_corpus(settings.text, settings.context, tokenizer_named(settings.tokenizer))


def read_corpus(path: str | None, context: int, tokenizer: Tokenizer = BYTES) -> Corpus:
    """The text in the file, or Python's documentation where None, split into its two parts.

    Raises Fault where it can't be read or doesn't hold one window of `context` + 1 tokens in
    each part.
    """
    both = tokenizer.encode(python_documentation() if path is None else _read(Path(path)))
    held_out = len(both) // HELD_OUT_PART
    if held_out < context + 1:
        raise Fault(
            f"{path or 'the documentation of Python'} holds {len(both)} {tokenizer.unit}s and a "
            f"context of {context} needs {HELD_OUT_PART * (context + 1)}: "
            "choose a longer --text or a smaller --context"
        )
    cut = len(both) - held_out
    digest = hashlib.sha256(both.numpy()).hexdigest()
    return Corpus(both[:cut], both[cut:], digest, tokenizer)


def python_documentation() -> bytes:
    """The topics that `help()` shows, in sorted order."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics)).encode()


def _read(path: Path) -> bytes:
    if path.exists() and not path.is_file():
        raise Fault(f"--text {path} is not a file: name a file of text")
    try:
        return path.read_bytes()
    except OSError as error:
        raise Fault(f"--text {path} cannot be read ({error.strerror}): name a text file") from error
