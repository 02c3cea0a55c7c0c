"""Seconds of a launch on a named GPU, from its sustained rates, in 16 bits or with 8-bit products.

A launch takes as long as computing or moving takes, whichever is longer. With 8-bit products a
linear layer's operands are cast first, unless the kernel that makes them stores them so.
"""

from __future__ import annotations

from typing import NamedTuple

from cadenza.core.cost import GPUS, Gpu, itemsize
from cadenza.tools.audit.counting import ATTENTION, MEMORY, OPTIMIZER, PRODUCTS, Launch
from cadenza.tools.fault import Fault

ATTENTION_SHARE = 0.4
# Of the bandwidth that other kernels sustain. PyTorch's fused AdamW on an H200, in bf16: 0.49 for
# 1.9 and 0.62 for 1.2 billion weights (docs/audit.md, docs/performance.md).
OPTIMIZER_SHARE = 0.55
EIGHT = "fp8"
WITHOUT_EIGHT = ("a100",)
SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
COMPUTING = (PRODUCTS, ATTENTION)  # what may be bound by arithmetic
CAST_BYTES = 4  # a number is read in 16 bits and written in 8, as it is and transposed


class Timed(NamedTuple):
    """A launch, or the cast before it, and its seconds."""

    name: str
    kind: str
    seconds: float
    flops: int
    bytes: int


class Rates(NamedTuple):
    """A GPU's rates; `attention` is the share of the nominal rate that attention sustains."""

    key: str
    gpu: Gpu
    attention: float = ATTENTION_SHARE

    @property
    def has_eight(self) -> bool:
        """Whether its products run in 8 bits."""
        return self.key not in WITHOUT_EIGHT

    def timed(self, launch: Launch, precision: str) -> list[Timed]:
        """The launch, after the cast of its operands where it has to be."""
        narrow = precision == EIGHT and launch.narrow and itemsize(launch.dtype) == 2
        found = []
        if narrow and launch.cast:
            moved = CAST_BYTES * launch.cast
            found.append(Timed("cast to fp8", MEMORY, moved / self.gpu.bytes, 0, moved))
        computing = launch.flops / self.flops(launch, narrow) if launch.kind in COMPUTING else 0.0
        moving = self.gpu.bytes * (OPTIMIZER_SHARE if launch.kind == OPTIMIZER else 1.0)
        seconds = max(computing, launch.bytes / moving)
        return [*found, Timed(launch.name, launch.kind, seconds, launch.flops, launch.bytes)]

    def flops(self, launch: Launch, narrow: bool) -> float:
        """FLOP/s that a launch sustains."""
        if launch.kind == ATTENTION:
            return self.gpu.nominal(launch.dtype) * 1e12 * self.attention
        return self.gpu.flops(launch.dtype) * (2 if narrow and launch.kind == PRODUCTS else 1)

    def assumptions(self) -> list[str]:
        """What the times rest on."""
        gpu = self.gpu
        eight = (
            f"fp8: products of layers at twice the 16-bit rate, the head as before; a cast of "
            f"{CAST_BYTES} bytes a number before them unless the kernel that makes the operand "
            "stores it in 8 bits, as Cadenza's epilogues would: it does not do so yet"
        )
        return [
            f"{gpu.name}: {gpu.half:g} TFLOP/s in 16 bits and {gpu.memory:g} TB/s nominal, of "
            f"which products sustain {gpu.computing:g}, memory {gpu.moving:g}, attention "
            f"{self.attention:g} (assumed)",
            f"the optimizer moves its bytes at {OPTIMIZER_SHARE:g} of that, as PyTorch's fused "
            "AdamW does on an H200",
            "a kernel takes as long as computing or moving takes, whichever is longer; gaps "
            "between kernels, communication and the host are left out",
            *([eight] if self.has_eight else [f"{gpu.name} has no fp8"]),
        ]


def rates_of(
    key: str, computing: float | None, moving: float | None, attention: float | None
) -> Rates:
    """The rates of a GPU by its name in `explain`, with other shares where given."""
    name = key.lower()
    if name not in GPUS:
        raise Fault(f"unknown --gpu {key!r}: one of {', '.join(GPUS)}")
    for option, share in (("computing", computing), ("moving", moving), ("attention", attention)):
        if share is not None and not 0 < share <= 1:
            raise Fault(f"--{option} {share:g} is no share: choose a number above 0, at most 1")
    gpu = GPUS[name]
    changed = {"computing": computing, "moving": moving}
    gpu = gpu._replace(**{name: share for name, share in changed.items() if share is not None})
    return Rates(name, gpu, attention or ATTENTION_SHARE)
