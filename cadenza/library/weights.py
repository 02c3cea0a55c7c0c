"""Weights that one product takes as one: parameters of their own, one behind another in memory.

Such weights are joined by looking at their memory as one tensor; others are copied together. Which
it is, is asked of the memory itself at each call, so whatever moves or replaces a parameter costs
time and never correctness. Weights are put into one storage where they get their memory anyway,
and never in a call: in one, it may belong to whoever shards or offloads them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cadenza.core.errors import CadenzaError, explanation

PLAIN = (Tensor, nn.Parameter)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
Group = Sequence[Tensor]  # weights `[N, K]` of one K, or biases `[N]`, that one product takes


def is_plain(parameter: Tensor) -> bool:
    """Whether a parameter is a tensor that programs know."""
    return type(parameter) in PLAIN and parameter.dtype in FLOATS


def joined(parts: Group) -> Tensor:
    """Weights `[N, K]` or biases `[N]` as one, without a copy where their memory is one stretch.

    torch.compile always copies: it can't know where a tensor lies, and may write where it believes
    nobody looks any more.
    """
    if len(parts) == 1:
        return parts[0]
    if torch.compiler.is_compiling() or not is_one_stretch(parts):
        return torch.cat([*parts])
    if not (torch.is_grad_enabled() and any(part.requires_grad for part in parts)):
        return _whole(parts[0].detach(), parts)
    found: Tensor = _Joined.apply(*parts)
    return found


def joined_present(parts: Iterable[Tensor | None]) -> Tensor | None:
    """Those of the parts that are there, as one; None where there is none."""
    present = [part for part in parts if part is not None]
    return joined(present) if present else None


def is_one_stretch(parts: Group) -> bool:
    """Whether the parts lie one behind another in one storage.

    False while something traces or transforms what is called, and would keep or miss the answer.
    """
    if (
        torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
    ):
        return False
    first = parts[0]
    dtype, width = first.dtype, first.shape[1:]
    if not is_plain(first):
        return False
    place, storage = first.data_ptr(), first.untyped_storage().data_ptr()
    for part in parts:
        if type(part) not in PLAIN or part.dtype != dtype or not part.is_contiguous():
            return False
        if part.data_ptr() != place or part.untyped_storage().data_ptr() != storage:
            return False
        if part.shape[1:] != width:
            return False
        place += part.nbytes
    return True


def _whole(first: Tensor, parts: Group) -> Tensor:
    """The memory of parts that are one stretch, as one tensor."""
    width = first.shape[1:]
    rows = sum(part.shape[0] for part in parts)
    # Not the first part's strides: that of its rows means nothing where it has one row.
    return first.as_strided((rows, *width), (width.numel(), 1)[: first.dim()])


class _Joined(torch.autograd.Function):
    """Several weights seen as one; their gradients are parts of its gradient."""

    @staticmethod
    def forward(ctx: Any, *parts: Tensor) -> Tensor:
        ctx.rows = [part.shape[0] for part in parts]
        # Autograd could see of one part alone that it is written to.
        ctx.versions = [(part, _version(part)) for part in parts]
        return _whole(parts[0].data, parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        for part, version in ctx.versions:
            if _version(part) != version:
                raise _written(part)
        needs = zip(gradients[0].split(ctx.rows), ctx.needs_input_grad, strict=True)
        return tuple(part if needed else None for part, needed in needs)


def _version(part: Tensor) -> int:
    """How often a tensor was written to; of one made in inference mode torch doesn't know."""
    return 0 if part.is_inference() else int(part._version)


def _written(part: Tensor) -> CadenzaError:
    problem = "a weight was written to between forward and backward"
    found = f"other numbers in one of {list(part.shape)}"
    expected = "those that forward has seen"
    cure = "optimizer.step() and other writes after backward()"
    return CadenzaError(explanation(problem, found, expected, cure, ""))


# --- where weights lie ----------------------------------------------------------------------------


def put_together(weights: Group) -> None:
    """Puts weights into one storage, one behind another; they stay parameters of their own.

    Left as they are: weights of several dtypes, devices or widths, and those whose memory is
    somebody else's too: parts of a larger storage, shared with a process, pinned.
    """
    if len(weights) < 2 or is_one_stretch(weights) or not _may_move(weights):
        return
    whole = torch.cat([weight.data for weight in weights])
    parts = whole.split([weight.shape[0] for weight in weights])
    for weight, part in zip(weights, parts, strict=True):
        weight.data = part


def _may_move(weights: Group) -> bool:
    first = weights[0]
    kind = first.dtype, first.device, first.shape[1:]
    return len({*map(id, weights)}) == len(weights) and all(
        is_plain(weight)
        and (weight.dtype, weight.device, weight.shape[1:]) == kind
        and weight.is_contiguous()
        and weight.numel() > 0
        and not weight.is_meta
        and _is_its_own(weight)
        for weight in weights
    )


def _is_its_own(weight: Tensor) -> bool:
    """Whether nobody else is known to use a weight's memory."""
    if weight.is_inference() or torch.is_inference_mode_enabled():
        return False
    if weight.device.type == "cpu":  # elsewhere torch says of all that they are shared
        pinned = torch.cuda.is_initialized() and weight.is_pinned()
        if pinned or weight.is_shared():
            return False
    return weight.untyped_storage().nbytes() == weight.numel() * weight.element_size()


def take_apart(weights: Group) -> None:
    """Gives weights that share one storage storages of their own, with the same numbers."""
    if is_one_stretch(weights):
        for weight in weights:
            weight.data = weight.data.clone()


@contextlib.contextmanager
def kept_together(groups: Callable[[], Iterable[Group]]) -> Iterator[None]:
    """Puts the weights of a group together where they get other memory meanwhile."""
    before = [_places(weights) for weights in groups()]
    yield
    for weights, places in zip(groups(), before, strict=False):
        if _places(weights) != places:
            put_together(weights)


def _places(weights: Group) -> list[int]:
    return [weight.data_ptr() for weight in weights] if all(map(is_plain, weights)) else []
