"""What a loss is taken of, as its operations get it, and the operands of one chunk of it.

An operation of torch takes a list of tensors, named by its call: x [M, D], w [V, D], target [M],
then as asked for bias [V], own_weight [M], class_weight [V], token_weights [M]. A program takes 2-D
operands: of some rows and all classes, or of all rows and some classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import torch

from cadenza.core.errors import CadenzaError
from cadenza.core.pipeline import Sums
from cadenza.library.fakes import fake
from cadenza.library.function import Program
from cadenza.library.operator import tied
from cadenza.library.specialize import Call, Specialization

Tensor = torch.Tensor
TRAINED = ("x", "w", "bias")  # by the bits of a mask of needed gradients
# Gradients of a chunk that is all there is, of the first of several, of one that follows. That of
# w is rounded at once where nothing is added to it and its range is that of float32.
ALONE = Sums(wide=frozenset(["bias"]))
FIRST = Sums(wide=frozenset(["bias", "w"]))
LATER = Sums(wide=frozenset(["bias"]), added=frozenset(["w"]))
OF_ROWS, OF_CLASSES = ("target", "own_weight"), ("bias", "class_weight")


class Batch:
    """The operands of a loss, their sizes and the options of its call."""

    def __init__(self, operands: Sequence[Tensor], call: str) -> None:
        self.call = Call.decode(call)
        self.named = dict(zip(self.call.names, operands, strict=True))
        self.options = dict(self.call.constants)
        self.x, self.w, self.target = operands[:3]
        self.rows, self.classes = self.x.shape[0], self.w.shape[0]
        self.wide = wide(self.x)

    def check_range(self) -> None:
        """Raises IndexError, on a CPU, for a target that is no class."""
        if self.target.device.type != "cpu":
            return  # a GPU would have to be waited for
        wrong = (self.target != self.options["ignore_index"]) & ~self.inside
        if bool(wrong.any()):
            found = int(self.target[wrong][0])
            raise IndexError(f"target {found} is outside of [0, {self.classes})")

    @property
    def inside(self) -> Tensor:
        """Whether each target is a class, [M]."""
        return (self.target >= 0) & (self.target < self.classes)

    @property
    def counts(self) -> Tensor:
        """Whether each row's loss is one, [M]."""
        return self.inside & (self.target != self.options["ignore_index"])

    @cached_property
    def whole(self) -> dict[str, Tensor]:
        """Numbers of the whole batch, each [1, 1]: the mean of the weights of all classes."""
        weights = self.named.get("class_weight")
        return {} if weights is None else {"mean_weight": weights.mean()[None, None]}

    @cached_property
    def columns(self) -> dict[str, Tensor]:
        """Numbers of the rows, each [M, 1]."""
        found = {name: self.named[name][:, None] for name in OF_ROWS if name in self.named}
        return found | ({"shift": self._shift()} if self.options["label_smoothing"] else {})

    def _shift(self) -> Tensor:
        """The first class's logit of each row, about: it holds what all logits have in common."""
        logit = (self.x @ self.w[0].to(self.x.dtype)).to(self.wide)
        bias, cap = self.named.get("bias"), self.options["softcap"]
        logit = logit if bias is None else logit + bias[0]
        return (logit if cap is None else cap * torch.tanh(logit / cap))[:, None]

    def of_rows(self, part: slice) -> dict[str, Tensor]:
        """The operands of some rows and all classes."""
        columns = {name: column[part] for name, column in self.columns.items()}
        classes = self.of_classes(slice(None))
        return {"x": self.x[part], "w": self.w, **columns, **classes, **self.whole}

    def of_vocabulary(self, part: slice) -> dict[str, Tensor]:
        """The operands of all rows and some classes; targets count from the first of them."""
        target = self.columns["target"] - part.start
        columns = {**self.columns, "target": target}
        return {"x": self.x, "w": self.w[part], **columns, **self.of_classes(part)}

    def of_classes(self, part: slice) -> dict[str, Tensor]:
        """Numbers of some classes, each [1, N]."""
        return {name: self.named[name][None, part] for name in OF_CLASSES if name in self.named}

    def sums(self, part: slice, trained: int) -> Sums:
        """How the gradients of a chunk of rows become those of all."""
        alone = part.start == 0 and part.stop == self.rows
        if not trained or (alone and self.w.dtype == torch.bfloat16):
            return ALONE
        return FIRST if part.start == 0 else LATER

    def compiled(
        self, program: Program, operands: dict[str, Tensor], trained: int = 0, sums: Sums = ALONE,
        **constants: Any,
    ) -> Specialization:  # fmt: skip
        """The program for those operands and options that it knows, with gradients of `trained`."""
        tensors = {n: v for n, v in operands.items() if n in program.parameters}
        known = {n: v for n, v in self.options.items() if n in program.parameters} | constants
        own = Call(
            tuple(tensors), tuple(known.items()), self.call.autocast, self.call.backend,
            wide=tuple(sorted(sums.wide)), added=tuple(sorted(sums.added)),
        )  # fmt: skip
        wanted = names_of(trained)
        needed = sum((name in wanted) << place for place, name in enumerate(tensors))
        return program.specializations.find(list(tensors.values()), own.encode(), needed)[0]


def wide(x: Tensor) -> torch.dtype:
    """The dtype of losses: float32, float64 for float64."""
    return torch.promote_types(x.dtype, torch.float32)


def parts(total: int, size: int) -> Iterator[slice]:
    """[0, total) in chunks of `size`."""
    return (slice(start, min(start + size, total)) for start in range(0, total, size))


def names_of(mask: int) -> list[str]:
    """The TRAINED in a mask."""
    return [name for bit, name in enumerate(TRAINED) if mask >> bit & 1]


def mask_of(names: Sequence[str], needs: Sequence[bool]) -> int:
    """The mask of the TRAINED among operands that need a gradient."""
    asked = {name for name, need in zip(names, needs, strict=True) if need}
    return sum((name in asked) << bit for bit, name in enumerate(TRAINED))


def by_operand(call: str, gradients: Sequence[Tensor], mask: int) -> list[Tensor | None]:
    """The gradient of each of an operation's operands, None outside of the mask of TRAINED."""
    known, wanted = dict(zip(TRAINED, gradients, strict=True)), names_of(mask)
    return [known[name] if name in wanted else None for name in Call.decode(call).names]


torch.library.define("cadenza::sum", "(Tensor numbers) -> Tensor")


def summed(numbers: Tensor) -> Tensor:
    """The sum of all numbers, in one order whether torch.compile is asked for it or not."""
    found: Tensor = torch.ops.cadenza.sum(numbers)
    return found


@torch.library.impl("cadenza::sum", "CompositeExplicitAutograd")
def _summed(numbers: Tensor) -> Tensor:
    return numbers.sum()


@fake("sum")
def _(numbers: Tensor) -> Tensor:
    return numbers.new_empty(())


def _sum_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.shape = inputs[0].shape


def _sum_backward(ctx: Any, adjoint: Tensor) -> Tensor:
    return adjoint.expand(ctx.shape)


torch.library.register_autograd("cadenza::sum", _sum_backward, setup_context=_sum_context)


def once(adjoint: Tensor, edge: Tensor | None = None) -> Tensor:
    """The adjoint; under create_graph=True one that makes further use of a gradient an error.

    From `edge`, an output, autograd gets back to operands that are not among what is saved.
    """
    return tied([adjoint], edge)[0] if torch.is_grad_enabled() else adjoint


def no_double_backward(ctx: Any, *gradients: Any) -> None:
    """The derivative of a derivative."""
    raise CadenzaError(
        "linear_cross_entropy can be differentiated once\n"
        "  write:    F.cross_entropy(F.linear(x, w), target) where a second derivative is needed; "
        "for an accelerated model, cz.revert(model)"
    )
