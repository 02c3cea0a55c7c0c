"""Weights that one product takes as one: parameters of their own, one behind another in memory.

Such weights are joined by looking at their memory as one tensor; others are copied together. Which
it is, is asked of the memory itself at each call, so whatever moves or replaces a parameter costs
time and never correctness. Backward is kept the parameters themselves, and joins them again.
Weights are put into one storage where they get their memory anyway, and never in a call: in one, it
may belong to whoever shards or offloads them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import accumulate, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

PLAIN = (Tensor, nn.Parameter)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
PARTS = "_cadenza_parts"  # attribute of a joined tensor
MODES = torch._C._TorchDispatchModeKey.__members__.values()  # of tracers; others only look on
Group = Sequence[Tensor]  # weights `[N, K]` of one K, or biases `[N]`, that one product takes


def is_plain(parameter: Tensor) -> bool:
    """Whether a parameter is a tensor that programs know."""
    return type(parameter) in PLAIN and parameter.dtype in FLOATS


def joined(parts: Group) -> Tensor:
    """Weights `[N, K]` or biases `[N]` as one, without a copy where their memory is one stretch.

    What keeps it for backward keeps what `parted` makes of it: autograd could see of one part alone
    that it is written to, and a copy would outlive the memory of whoever shards or offloads parts.

    torch.compile always copies: it can't know where a tensor lies, and may write where it believes
    nobody looks any more.
    """
    if len(parts) == 1:
        return parts[0]
    if _is_followed():
        return torch.cat([*parts])
    whole = _seen_as_one(parts) if is_one_stretch(parts) else torch.cat([*parts])
    setattr(whole, PARTS, parts)
    return whole


def joined_present(parts: Iterable[Tensor | None]) -> Tensor | None:
    """Those of the parts that are there, as one; None where there is none."""
    present = [part for part in parts if part is not None]
    return joined(present) if present else None


def any_joined(tensors: Iterable[Tensor]) -> bool:
    """Whether some tensor is one that `joined` made of several."""
    return True in [hasattr(tensor, PARTS) for tensor in tensors]


def parted(tensors: Iterable[Tensor]) -> tuple[list[Tensor], list[int]]:
    """Tensors with the parts of joined ones in their place, and how many parts each has."""
    groups = [getattr(tensor, PARTS, (tensor,)) for tensor in tensors]
    return [part for group in groups for part in group], [len(group) for group in groups]


def rejoined(tensors: Iterable[Tensor], counts: Sequence[int]) -> list[Tensor]:
    """The tensors that `parted` was given."""
    left = iter(tensors)
    return [joined([*islice(left, count)]) for count in counts]


def _is_followed() -> bool:
    """Whether something traces or transforms what is called, and would keep or miss an answer."""
    return (
        torch.compiler.is_compiling()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
        or forward_ad._current_level >= 0
        or torch._ops._len_torch_dispatch_stack_pre_dispatch() > 0
        or (torch._C._len_torch_dispatch_stack() > 0 and any(map(_is_on, MODES)))
    )


def _is_on(mode: Any) -> bool:
    return torch._C._get_dispatch_mode(mode) is not None


def is_one_stretch(parts: Group) -> bool:
    """Whether the parts lie one behind another in one storage."""
    first = parts[0]
    if not is_plain(first):
        return False
    dtype, width = first.dtype, first.shape[1:]
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


def _seen_as_one(parts: Group) -> Tensor:
    """Parts that are one stretch; their gradients are parts of its gradient."""
    if torch.is_grad_enabled() and any(part.requires_grad for part in parts):
        found: Tensor = _Joined.apply(*parts)
        return found
    return _whole(parts[0].detach(), parts)


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
        return _whole(parts[0].data, parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        needs = zip(gradients[0].split(ctx.rows), ctx.needs_input_grad, strict=True)
        return tuple(part if needed else None for part, needed in needs)


# --- where weights lie ----------------------------------------------------------------------------


def show_apart(state: dict[str, Any], groups: Iterable[Group]) -> None:
    """Gives the weights of groups storages of their own in a state_dict, of the same memory.

    Who writes a state_dict takes tensors of one storage for one weight under several names, and
    leaves all names but one out: safetensors and accelerate do.
    """
    plain = [group for group in groups if all(map(is_plain, group))]
    places = {weight.data_ptr() for group in plain for weight in group}
    for name, found in state.items() if places else ():
        here = type(found) is Tensor and found.device.type in ("cpu", "cuda") and found.numel() > 0
        if here and found.data_ptr() in places and not _is_alone(found):
            state[name] = torch.from_dlpack(found)


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
    return (
        len({*map(id, weights)}) == len(weights)
        and all(
            is_plain(weight)
            and (weight.dtype, weight.device, weight.shape[1:]) == kind
            and weight.is_contiguous()
            and weight.numel() > 0
            and not weight.is_meta
            and _is_its_own(weight)
            for weight in weights
        )
        and (all(map(_is_alone, weights)) or _are_unpickled(weights))
    )


def _is_its_own(weight: Tensor) -> bool:
    """Whether no other process is known to use a weight's memory, and torch lets it move."""
    if weight.is_inference() or torch.is_inference_mode_enabled():
        return False
    if weight.device.type == "cpu":  # elsewhere torch says of all that they are shared
        pinned = torch.cuda.is_initialized() and weight.is_pinned()
        return not (pinned or weight.is_shared())
    return True


def _is_alone(weight: Tensor) -> bool:
    """Whether a weight fills its storage."""
    return weight.untyped_storage().nbytes() == weight.nbytes


def _are_unpickled(weights: Group) -> bool:
    """Whether each has a storage of all of them to itself, as `pickle` reads what was in one."""
    places = [_place(weight, sizes_of(weights)) for weight in weights]
    return places == [*range(len(weights))]


def sizes_of(weights: Group) -> tuple[int, ...]:
    """How many numbers each of some weights has."""
    return tuple(weight.numel() for weight in weights)


def _place(weight: Tensor, sizes: Sequence[int]) -> int | None:
    """Which one a weight is in a storage of weights of these sizes; None where it is in another."""
    if weight.untyped_storage().nbytes() != sum(sizes) * weight.element_size():
        return None
    places = [*zip(accumulate((0, *sizes)), sizes, strict=False)]
    own = weight.storage_offset(), weight.numel()
    return places.index(own) if own in places else None


def take_apart(weights: Iterable[Tensor], groups: Collection[Sequence[int]]) -> None:
    """Gives weights storages of their own, with the same numbers.

    Those that are in a storage of a group of weights, of the sizes that `groups` say; others stay.
    """
    for weight in filter(is_plain, weights):
        if any(_place(weight, sizes) is not None for sizes in groups):
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
