"""What a training run is made of: every option that its result depends on, stated once.

The command line takes its options from these fields, a checkpoint stores them, and a resumed run
must agree with them. Importing this file loads no torch, so that `--help` stays quick.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from cadenza.tools.fault import Fault

if TYPE_CHECKING:
    from cadenza.library.models import LlamaConfig

BYTES = 256
SMALL = "small"
WHOLE = (
    "llama3-1b", "llama3-3b", "llama3-8b", "llama3-70b", "llama3-405b",
    "qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b", "qwen3-14b", "qwen3-32b",
)  # fmt: skip
WHOLE_DEFAULTS = {"context": 4096, "batch": 4, "device": "cuda", "precision": "mixed"}
OWN_SIZES = ("width", "layers", "heads", "key_value_heads", "feed_forward")  # of the small model
BYTEWISE = "bytes"
DTYPES = ("float32", "float64", "bfloat16")
PRECISIONS = ("full", "mixed")
MODEL_HELP = (
    f"{SMALL}, or a whole one: {', '.join(WHOLE)}, that of --init if left out; the defaults of a "
    f"whole one are {', '.join(f'{name} {value}' for name, value in WHOLE_DEFAULTS.items())}"
)
TOKENIZER_HELP = "bytes, or a tokenizer.json of Hugging Face; that of --init if left out"
PRECISION_HELP = "full: all in --dtype; mixed: products in bfloat16, weights in float32"
ACCUMULATE_HELP = "parts that a step's sequences are taken in, one after another, to need less"
CHECKPOINTING_HELP = "compute each layer again in backward, to need less memory"
DEFAULT_STEPS = 500
COMPARED_STEPS = {"float32": 500, "float64": 50, "bfloat16": 500}


def _option(default: Any, meaning: str) -> Any:
    return field(default=default, metadata={"help": meaning})


@dataclass(frozen=True)
class Settings:
    """Options of a run; `text` is an absolute path, or None for Python's documentation.

    `init` and a `tokenizer` that is not "bytes" are absolute paths, too. In the settings of a whole
    model the sizes are those of its name or of `init`.
    """

    text: str | None = _option(None, "text to learn; Python's own documentation if left out")
    width: int = _option(256, "columns of the residual stream")
    layers: int = _option(4, "decoder layers")
    heads: int = _option(4, "query heads")
    key_value_heads: int = _option(2, "key and value heads")
    feed_forward: int = _option(704, "columns between gate and down")
    context: int = _option(128, "tokens of a training sequence")
    batch: int = _option(8, "sequences a step")
    learning_rate: float = _option(3e-4, "learning rate of AdamW, held constant")
    seed: int = _option(0, "decides the initial weights, the batches and the sample")
    dtype: str = _option("float32", "of weights and moments: " + ", ".join(DTYPES))
    device: str = _option("cpu", "device to train on, as torch names it")
    model: str = _option(SMALL, MODEL_HELP)
    init: str | None = _option(None, "folder of a Hugging Face checkpoint to start from")
    tokenizer: str = _option(BYTEWISE, TOKENIZER_HELP)
    precision: str = _option("full", PRECISION_HELP)
    accumulate: int = _option(1, ACCUMULATE_HELP)
    checkpointing: bool = _option(False, CHECKPOINTING_HELP)

    @property
    def arithmetic(self) -> str:
        """The dtype that products are computed in."""
        return "bfloat16" if self.precision == "mixed" else self.dtype

    def config(self) -> LlamaConfig:
        """The small model's sizes; raises Fault where they don't fit together."""
        from cadenza.library.models import LlamaConfig

        try:
            return LlamaConfig(
                vocabulary=BYTES,
                width=self.width,
                layers=self.layers,
                heads=self.heads,
                key_value_heads=self.key_value_heads,
                feed_forward=self.feed_forward,
                context=self.context,
            )
        except ValueError as error:
            raise Fault(str(error)) from error

    def check(self) -> None:
        """Raise Fault, naming the cure, for values no run can have."""
        self._check_model()
        if self.batch < 1:
            raise Fault(f"batch is {self.batch}, not a positive whole number: choose 1 or more")
        if not 0 < self.learning_rate <= 1:
            raise Fault(f"learning_rate is {self.learning_rate}: choose one up to 1, as 3e-4")
        if self.dtype not in DTYPES:
            raise Fault(f"unknown dtype {self.dtype!r}: choose one of {', '.join(DTYPES)}")
        self._check_precision()
        self._check_parts()

    def _check_model(self) -> None:
        if self.model == SMALL:
            self.config()
            if self.tokenizer != BYTEWISE:
                raise Fault("--tokenizer belongs to whole models: leave it out, or choose --model")
        elif self.context < 1:
            raise Fault(f"context is {self.context}, not a positive whole number: choose 1 or more")

    def _check_precision(self) -> None:
        if self.precision not in PRECISIONS:
            names = ", ".join(PRECISIONS)
            raise Fault(f"unknown precision {self.precision!r}: choose one of {names}")
        if self.precision == "mixed" and self.dtype != "float32":
            raise Fault(
                f"--precision mixed keeps weights in float32, not {self.dtype}: leave --dtype out, "
                "or add --precision full"
            )

    def _check_parts(self) -> None:
        if self.accumulate < 1 or self.batch % self.accumulate:
            raise Fault(
                f"accumulate is {self.accumulate}, which doesn't divide a batch of {self.batch}: "
                "choose a number of parts that does"
            )


def flag(name: str) -> str:
    """How a setting is written on the command line."""
    return "--" + name.replace("_", "-")


def differing(given: dict[str, Any], stored: Settings) -> list[str]:
    """Given options, text and tokenizer aside, that contradict the stored settings, in words.

    A text is the same when its tokens are, whatever its path: `Checkpoint` compares digests.
    """
    free = ("text", "tokenizer")
    names = [one.name for one in fields(Settings) if one.name not in free and one.name in given]
    return [
        f"{flag(name)} {given[name]} differs from {getattr(stored, name)}"
        for name in names
        if given[name] != getattr(stored, name)
    ]


def check_steps(steps: int) -> None:
    """Raise Fault unless `steps` is positive."""
    if steps < 1:
        raise Fault(f"steps is {steps}, not a positive whole number: choose 1 or more")
