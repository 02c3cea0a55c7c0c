"""Back ends: each runs the compiler's plans on tensors. `chosen` picks one by name.

`auto` runs a plan by Triton where its tensors are on a GPU that Triton drives, and by the reference
back end elsewhere; float64 always by the reference back end.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from types import MappingProxyType
from typing import Any

import torch

from cadenza.backends import reference
from cadenza.core.errors import BackEndError, author_line, explanation
from cadenza.core.plan import Plan
from cadenza.core.plan_text import PairText

Tensor = torch.Tensor
Rest = Callable[[], None]  # what is left of a call
NAMES = ("auto", "reference", "triton")
NOTHING: Mapping[int, Tensor] = MappingProxyType({})
# Of Triton's settings those that torch.compile's first use changes for the whole process.
TRITON_LOADED = {n: os.environ.get(n) for n in ("TRITON_CACHE_DIR", "TRITON_PTXAS_PATH")}
log = logging.getLogger("cadenza")
if os.environ.get("CADENZA_LOG"):  # debug, info, warning: said on standard error
    log.setLevel(os.environ["CADENZA_LOG"].upper())
    log.addHandler(logging.StreamHandler())


def chosen(name: str | None) -> str:
    """The back end asked for by a call, else by CADENZA_BACKEND, else auto. Raises BackEndError."""
    asked = name or os.environ.get("CADENZA_BACKEND") or "auto"
    if asked not in NAMES:
        raise _unknown(asked, author_line() if name else "CADENZA_BACKEND")
    if asked == "triton" and not has_triton():
        raise BackEndError(
            explanation(
                "the back end triton needs Triton",
                "no package triton",
                "triton 3.6 or newer",
                "pip install triton (Linux), or backend='reference'",
                author_line(),
            )
        )
    return asked


def _unknown(name: str, where: str) -> BackEndError:
    names = ", ".join(NAMES)
    return BackEndError(explanation("no such back end", repr(name), f"one of {names}", "", where))


@cache
def has_triton() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


@cache
def _without_triton() -> None:
    log.warning("no package triton: programs on a GPU run by torch's operations, slowly")


class Executable:
    """A plan on the back end called `backend`, made ready where it is first needed.

    `described` gives the names of values and the text of kernels, for what is emitted.
    """

    def __init__(self, plan: Plan, backend: str, described: Callable[[], PairText]) -> None:
        self.plan, self.backend, self.described = plan, backend, described

    @cached_property
    def reference(self) -> reference.Executable:
        """The plan on the reference back end."""
        return reference.compile_plan(self.plan)

    @cached_property
    def triton(self) -> Any:
        """The plan on the Triton back end."""
        from cadenza.backends.triton import executable  # Triton is slow to import

        return executable.compile_plan(self.plan, described=self.described)

    def __call__(
        self, tensors: Sequence[Tensor], rows: int, into: Mapping[int, Tensor] = NOTHING,
        spent: Sequence[int] = (),
    ) -> list[Tensor]:  # fmt: skip
        """The outputs, new contiguous tensors, of inputs in the graph's order, each 2-D.

        Those at the positions `into` are written there instead; it may be an input that is added
        to. The inputs at the positions `spent` may be written over.
        """
        if self.backend != "reference" and self.by_triton(tensors[0]):
            found: list[Tensor] = self.triton(tensors, rows, into, spent)
            return found
        addresses_of(self.plan, tensors)
        return put(self.reference(tensors, rows), into)

    def begun(
        self, tensors: Sequence[Tensor], rows: int, kept: Sequence[int]
    ) -> tuple[list[Tensor], Rest]:
        """The outputs, of which those at the positions `kept` are made, and what makes the others.

        Until that has been called the inputs must stay as they are. It may never be called.
        """
        if self.backend != "reference" and self.by_triton(tensors[0]):
            found: tuple[list[Tensor], Rest] = self.triton.begun(tensors, rows, kept)
            return found
        return self(tensors, rows), done

    def by_triton(self, tensor: Tensor) -> bool:
        """Whether Triton's kernels run it where a tensor lies. Raises BackEndError if none can."""
        if self.backend == "triton":
            if not tensor.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
                raise BackEndError(
                    explanation(
                        "the back end triton runs on a GPU",
                        f"tensors on {tensor.device}",
                        "tensors on a GPU",
                        "x.cuda(), or TRITON_INTERPRET=1 to interpret",
                        "",
                    )
                )
            return True
        if not tensor.is_cuda:
            return False
        if not has_triton():
            _without_triton()
        return has_triton()


def done() -> None:
    """What is left of a call that is done."""


def addresses_of(plan: Plan, tensors: Sequence[Tensor]) -> list[int]:
    """Where a plan's inputs lie. Raises BackEndError for one whose memory is gone.

    A kernel would read anything there.
    """
    addresses = [tensor.data_ptr() for tensor in tensors]
    if 0 in addresses:
        _check_memory(plan, tensors)
    return addresses


def _check_memory(plan: Plan, tensors: Sequence[Tensor]) -> None:
    for node, tensor in zip(plan.graph.inputs, tensors, strict=True):
        if tensor.numel() and not tensor.data_ptr():
            raise BackEndError(
                explanation(
                    f"operand {node.attributes['name']} has no memory",
                    f"{list(tensor.shape)} over a storage that was freed, as of a weight that "
                    "is sharded outside of its module's forward",
                    "a tensor that holds its numbers",
                    "use each weight in the forward of the module that is sharded with it",
                    author_line(),
                )
            )


def put(outputs: list[Tensor], into: Mapping[int, Tensor]) -> list[Tensor]:
    """The outputs, those at the positions `into` in these tensors."""
    for position, place in into.items():
        if outputs[position] is not place:
            outputs[position] = place.copy_(outputs[position])
    return outputs


def compile_plan(plan: Plan, backend: str, described: Callable[[], PairText]) -> Executable:
    """A program made ready to run on the back end called `backend`."""
    if backend not in NAMES:
        raise _unknown(backend, "")
    return Executable(plan, backend, described)
