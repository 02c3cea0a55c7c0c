"""The suite `loss`: linear and cross-entropy, forward and backward, its time and its memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from cadenza.core.cost import Work
from cadenza.library.cross_entropy import linear_cross_entropy
from cadenza.tools.bench import rivals, stock
from cadenza.tools.bench.case import Case, Sizes, Suite
from cadenza.tools.bench.contest import contest
from cadenza.tools.bench.draw import Draw
from cadenza.tools.bench.measurement import Call, Calls
from cadenza.tools.bench.stage import Stage, Transform

Tensor = torch.Tensor
PATTERN = "linear-cross-entropy"
SIZES = {"M": 8192, "D": 4096, "V": 128256}


class Loss(Stage):
    """The mean loss of M tokens, and the gradients of x and w."""

    gradients, peaks = True, True

    def __init__(self, case: Case, device: torch.device) -> None:
        super().__init__(case, device)
        draw = Draw(case.torch_dtype, device, case.seed)
        m, d, v = (case.sizes[name] for name in ("M", "D", "V"))
        self.x, self.w = draw.normal(m, d).requires_grad_(), draw.weight(v, d).requires_grad_()
        self.target = draw.whole(m, v)

    def _call(self, loss: Call) -> Calls:
        return [lambda: torch.autograd.grad(loss(), (self.x, self.w))]

    def ours(self) -> Calls:
        """In chunks of rows."""
        return self._call(partial(linear_cross_entropy, self.x, self.w, self.target))

    def lean(self) -> Calls:
        """In chunks of the vocabulary."""
        return self._call(partial(linear_cross_entropy, self.x, self.w, self.target, lean=True))

    def stock(self, transform: Transform) -> Calls:
        """All logits at once."""
        return self._call(partial(transform(stock.linear_loss), self.x, self.w, self.target))

    def liger(self) -> Calls:
        """Liger-Kernel's fused linear cross-entropy, with sums of dw in float32 as ours."""
        rivals.need("liger_kernel")
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy as fused

        operands = self.x, self.w, self.target
        return self._call(lambda: fused(*operands, accum_dtype=torch.float32))

    def makers(self) -> dict[str, Callable[[], Calls]]:
        """As of every suite, and those of this one."""
        return {**super().makers(), "lean": self.lean, "liger": self.liger}

    def work(self) -> Work:
        """Three products; operands read and gradients written once."""
        m, d, v = (self.case.sizes[name] for name in ("M", "D", "V"))
        moved = 2 * (self.x.nbytes + self.w.nbytes) + self.target.nbytes
        return Work(6 * m * d * v, moved)


def _sizes(_: str) -> dict[str, Sizes]:
    return {f"{tokens}-tokens": {**SIZES, "M": tokens} for tokens in (8192, 65536)}


def _changed(_: str, given: Sizes) -> Sizes:
    return {name: given.get(name, size) for name, size in SIZES.items()}


LOSS = Suite(
    "loss",
    ("ours", "lean", "compile", "eager", "liger"),
    (PATTERN,),
    _sizes,
    _changed,
    partial(contest, Loss),
)
