"""PyTorch's kernels of causal attention, each of which is called by its name.

Which of them `F.scaled_dot_product_attention` takes is one setting of the whole process: whoever
changes it changes it under other threads. So nothing is set here while a call runs. On a GPU that
function is a composition, which asks the kernels one after another whether they serve a call and
calls the operator of the first that does; `attend` does the same, in an order of its own. Where
torch.compile traces, the setting is part of the graph, and PyTorch's function does the asking.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.backends import cuda
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from cadenza.library.attention_heads import Heads, Parts
from cadenza.library.autocast import autocast_dtype

OWN = "own"  # the kernel that PyTorch takes by itself
EXPANDED = "efficient, expanded"  # keys and values spread to as many heads as there are of queries
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
STOCK: Callable[..., Tensor] = torch._C._nn.scaled_dot_product_attention
Order = tuple[str, ...]


class Kernel(NamedTuple):
    """What PyTorch calls a kernel, whether it serves a call, and its operator."""

    back_end: SDPBackend
    serves: Callable[[Any], bool]
    operator: Callable[[Tensor, Tensor, Tensor, float | None], Tensor]


def _flash(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    found: Tensor = torch.ops.aten._scaled_dot_product_flash_attention.default(
        query, key, value, 0.0, True, scale=scale
    )[0]
    return found


def _cudnn(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    found: Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention.default(
        query, key, value, None, _is_trained(query, key, value), 0.0, True, scale=scale
    )[0]
    return found


def _efficient(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    found: Tensor = torch.ops.aten._scaled_dot_product_efficient_attention.default(
        query, key, value, None, _is_trained(query, key, value), 0.0, True, scale=scale
    )[0]
    return found


def _is_trained(*operands: Tensor) -> bool:
    return torch.is_grad_enabled() and any(operand.requires_grad for operand in operands)


_EFFICIENT = Kernel(SDPBackend.EFFICIENT_ATTENTION, cuda.can_use_efficient_attention, _efficient)
KERNELS = {
    "flash": Kernel(SDPBackend.FLASH_ATTENTION, cuda.can_use_flash_attention, _flash),
    "cudnn": Kernel(SDPBackend.CUDNN_ATTENTION, cuda.can_use_cudnn_attention, _cudnn),
    "efficient": _EFFICIENT,
    EXPANDED: _EFFICIENT,
}
ALL = (*dict.fromkeys(kernel.back_end for kernel in KERNELS.values()), SDPBackend.MATH)


def attend(
    query: Tensor, key: Tensor, value: Tensor, order: Order, scale: float | None = None
) -> Tensor:
    """Causal attention by the first of these kernels that serves it; of none, PyTorch chooses.

    query `[B, heads, S, columns]`, key and value `[B, key heads, S, columns]`, to query's shape.
    """
    if torch.compiler.is_compiling():
        return _traced(query, key, value, order, scale)
    query, key, value = _cast(query, key, value)
    for name in order:
        operands = expanded(query, key, value) if name == EXPANDED else (query, key, value)
        if serves(name, *operands):
            return KERNELS[name].operator(*operands, scale)
    return causal(query, key, value, scale=scale)


def _cast(query: Tensor, key: Tensor, value: Tensor) -> Parts:
    """As autocast has operands of PyTorch's function; its operators have none."""
    if autocast_dtype(query) is None:
        return query, key, value
    query, key, value = (part.to(call_dtype(part)) for part in (query, key, value))
    return query, key, value


def call_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which PyTorch's function would attend: the tensor's, but for autocast."""
    name = autocast_dtype(x)
    return x.dtype if name is None or x.dtype not in DTYPES else getattr(torch, name)


def serves(name: str, query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether a kernel serves a plain causal call of these operands, as they are."""
    grouped = query.shape[1] != key.shape[1]
    # PyTorch's function pads heads for flash, whose operator takes none but multiples of 8; the
    # efficient one is asked without sharing, since releases differ in where they expand its heads.
    if (name == "flash" and query.shape[-1] % 8) or (name in ("efficient", EXPANDED) and grouped):
        return False
    return KERNELS[name].serves(cuda.SDPAParams(query, key, value, None, 0.0, True, grouped))


def expanded(query: Tensor, key: Tensor, value: Tensor) -> Parts:
    """The same with as many heads of keys and values as there are of queries."""
    group = query.shape[1] // key.shape[1]
    if group == 1:
        return query, key, value
    return query, key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)


def causal(query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
    """Causal attention by PyTorch's own choice of a kernel."""
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scale, enable_gqa=grouped
    )


def _traced(query: Tensor, key: Tensor, value: Tensor, order: Order, scale: float | None) -> Tensor:
    if order[:1] == (EXPANDED,):
        (query, key, value), order = expanded(query, key, value), ("efficient", *order[1:])
    with preferring(order):
        return causal(query, key, value, scale)


# --- preferring kernels where a model calls PyTorch's function ------------------------------------


def preferring(order: Order) -> AbstractContextManager[Any]:
    """Within, plain causal calls of PyTorch's function run on the first kernel that serves them.

    That is so in this thread alone; in a graph that torch.compile makes, for all of its calls, and
    heads are never expanded there. With no order, PyTorch chooses.
    """
    if not torch.compiler.is_compiling():
        return Preferring(order) if order else nullcontext()
    order = unexpanded(order)
    return sdpa_kernel(listed(order), set_priority=True) if order else nullcontext()


def unexpanded(order: Order) -> Order:
    """Those that take a call's keys and values with the heads that they have."""
    return tuple(name for name in order if name != EXPANDED)


def listed(order: Order) -> list[SDPBackend]:
    """PyTorch's names of kernels, these first: none is out, or a call could fail."""
    return list(dict.fromkeys((*(KERNELS[name].back_end for name in order), *ALL)))


class Preferring(TorchFunctionMode):
    """Hears this thread's calls of PyTorch's functions, and does plain causal attention itself."""

    def __init__(self, order: Order) -> None:
        super().__init__()
        self.order = order

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is STOCK:
            return _heard(self.order, args, kwargs or {})
        return func(*args, **kwargs) if kwargs else func(*args)


class Asked(NamedTuple):
    """The arguments of PyTorch's function."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    def is_plain(self) -> bool:
        """Whether this is what `attend` does: heads are shared only where the caller says so."""
        if not self.is_causal or self.attn_mask is not None or self.dropout_p:
            return False
        fits = all(is_plain(part) and part.dim() == 4 for part in self[:3])
        return fits and (self.enable_gqa or self.query.shape[1] == self.key.shape[1])


def _heard(order: Order, args: tuple[Any, ...], named: dict[str, Any]) -> Tensor:
    try:
        asked = Asked(*args, **named)
    except TypeError:  # it takes more in another release
        return STOCK(*args, **named)
    if asked.is_plain() and is_free():
        return attend(*asked[:3], order, asked.scale)
    return STOCK(*args, **named)


# --- who may choose -------------------------------------------------------------------------------

# PyTorch's own orders: that of every process, and what its first call sets on some GPUs.
OWN_ORDERS = tuple(
    tuple(int(getattr(SDPBackend, name)) for name in order)
    for order in (
        ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH", "CUDNN_ATTENTION"),
        ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH"),
    )
)


def is_free() -> bool:
    """Whether nobody has told PyTorch which kernels to take, or does its attention instead."""
    enabled = (
        cuda.flash_sdp_enabled() and cuda.mem_efficient_sdp_enabled()
        and cuda.cudnn_sdp_enabled() and cuda.math_sdp_enabled()
        # What `sdpa_kernel` turns off whatever kernels it is given, unless it is named as well.
        and torch._C._get_overrideable_sdp_enabled()
    )  # fmt: skip
    order = tuple(torch._C._get_sdp_priority_order()[: len(OWN_ORDERS[0])])
    own = F.scaled_dot_product_attention is STOCK and not _is_heard()
    settled = torch.are_deterministic_algorithms_enabled()
    return bool(enabled) and own and order in OWN_ORDERS and not settled


def _is_heard() -> bool:
    """Whether a mode of somebody else's hears the functions of PyTorch that are called."""
    if not torch._C._len_torch_function_stack():
        return False
    modes = map(type, _get_current_function_mode_stack())
    return not {*modes} <= {DeviceContext, Preferring}


def is_plain(tensor: Tensor) -> bool:
    """Whether this is a tensor of PyTorch's own, which has numbers."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.numel() > 0


# --- of one tensor --------------------------------------------------------------------------------


def joined(mixed: Tensor) -> Tensor:
    """`[B, S, heads · columns]` of `[B, heads, S, columns]`."""
    return mixed.transpose(1, 2).flatten(2)


def scaled(qkv: Tensor, heads: Heads, spread: bool = False, **options: Any) -> Tensor:
    """F.scaled_dot_product_attention of qkv `[B, S, N]`: `[B, S, heads · columns]`.

    `spread` hands it as many heads of keys and values as there are of queries.
    """
    operands = heads.by_head(qkv)
    if spread:
        operands = expanded(*operands)
    grouped = heads.grouped and not spread
    return joined(F.scaled_dot_product_attention(*operands, enable_gqa=grouped, **options))
