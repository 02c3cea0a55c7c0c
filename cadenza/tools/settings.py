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
DTYPES = ("float32", "float64", "bfloat16")
DEFAULT_STEPS = 500
COMPARED_STEPS = {"float32": 500, "float64": 50, "bfloat16": 500}


def _option(default: Any, meaning: str) -> Any:
    return field(default=default, metadata={"help": meaning})


@dataclass(frozen=True)
class Settings:
    """Options of a run; `text` is an absolute path, or None for Python's documentation."""

    text: str | None = _option(None, "text to learn; Python's own documentation if left out")
    width: int = _option(256, "columns of the residual stream")
    layers: int = _option(4, "decoder layers")
    heads: int = _option(4, "query heads")
    key_value_heads: int = _option(2, "key and value heads")
    feed_forward: int = _option(704, "columns between gate and down")
    context: int = _option(128, "bytes of a training sequence")
    batch: int = _option(8, "sequences a step")
    learning_rate: float = _option(3e-4, "learning rate of AdamW, held constant")
    seed: int = _option(0, "decides the initial weights, the batches and the sample")
    dtype: str = _option("float32", "of weights and moments: " + ", ".join(DTYPES))
    device: str = _option("cpu", "device to train on, as torch names it")

    def config(self) -> LlamaConfig:
        """The model's sizes; raises Fault where they don't fit together."""
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
        self.config()
        if self.batch < 1:
            raise Fault(f"batch is {self.batch}, not a positive whole number: choose 1 or more")
        if not 0 < self.learning_rate <= 1:
            raise Fault(f"learning_rate is {self.learning_rate}: choose one up to 1, as 3e-4")
        if self.dtype not in DTYPES:
            raise Fault(f"unknown dtype {self.dtype!r}: choose one of {', '.join(DTYPES)}")


def flag(name: str) -> str:
    """How a setting is written on the command line."""
    return "--" + name.replace("_", "-")


def differing(given: dict[str, Any], stored: Settings) -> list[str]:
    """Given options, `text` aside, that contradict the stored settings, in words.

    A text is the same when its bytes are, whatever its path: `Checkpoint` compares digests.
    """
    names = [one.name for one in fields(Settings) if one.name != "text" and one.name in given]
    return [
        f"{flag(name)} {given[name]} differs from {getattr(stored, name)}"
        for name in names
        if given[name] != getattr(stored, name)
    ]


def check_steps(steps: int) -> None:
    """Raise Fault unless `steps` is positive."""
    if steps < 1:
        raise Fault(f"steps is {steps}, not a positive whole number: choose 1 or more")
