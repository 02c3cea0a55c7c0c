"""What one operation of torch computes and moves: a `Launch`, or nothing where it only looks.

An operation reads each tensor argument once and writes each result once; a dimension that is
spread over (stride 0) is read once. Views and new, unwritten memory cost nothing. FLOPs are those
of products and attention, by torch's own formulas for products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from cadenza.tools.audit.attention import attention_flops, is_attention

Tensor = torch.Tensor
PRODUCTS, ATTENTION, MEMORY, OPTIMIZER = "products", "attention", "memory", "optimizer"
COMMUNICATION, OTHER = "communication", "other"
CLASSES = (PRODUCTS, ATTENTION, MEMORY, OPTIMIZER, COMMUNICATION, OTHER)
NAMESPACES = ("aten", "prims")
LINEAR = ("mm", "addmm")  # what linear layers become, forward and backward
# Results that are memory alone, and views that don't call themselves so.
FREE = (
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view",
    "_reshape_alias", "detach", "alias", "lift_fresh", "_local_scalar_dense", "is_same_size",
    "empty_permuted", "sym_size", "sym_stride", "sym_numel", "sym_storage_offset",
)  # fmt: skip


class Launch(NamedTuple):
    """One kernel, as far as a prediction knows it.

    `kind` is one of CLASSES. `flops` are those of products and attention, elsewhere one for each
    number computed; `bytes` what must be moved. `dtype` is that of a product's operands, `cast` the
    numbers that must be cast first where it runs in 8 bits, and `narrow` whether it may.
    """

    name: str
    kind: str
    flops: int
    bytes: int
    dtype: str = "bfloat16"
    cast: int = 0
    narrow: bool = False


def size_of(tensor: Tensor) -> int:
    """Bytes of a tensor's numbers, each once, wherever it is spread over."""
    numbers = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        numbers *= size if stride or size == 0 else 1
    return int(numbers) * tensor.element_size()


def tensors_of(values: Any) -> list[Tensor]:
    """All tensors in arguments or results."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def is_view(function: Any) -> bool:
    """Whether an operation only looks at its arguments in another way, or makes bare memory."""
    name = function._schema.name.split("::")[-1]
    return function.namespace in ("prim", "profiler") or function.is_view or name in FREE


def launch_of(function: Any, args: Any, kwargs: Any, result: Any) -> Launch | None:
    """What an operation does, given its arguments and results; None for a view."""
    if is_view(function):
        return None
    name = function._schema.name.split("::")[-1]
    moved = bytes_of(function, args, kwargs, result)
    if is_attention(name):
        title = "attention backward" if "backward" in name else "attention"
        return Launch(title, ATTENTION, attention_flops(function, args, kwargs), moved)
    formula = flop_registry.get(function._overloadpacket)
    if formula is not None:
        flops = int(formula(*args, **kwargs, out_val=result))
        factors = tensors_of(args)[-2:]  # what an addmm is added to stands before them
        dtype = str(factors[0].dtype).removeprefix("torch.")
        half = sum(factor.numel() for factor in factors) // 2  # each is a factor twice
        title = f"{name} {_sizes(factors)}" if name in LINEAR else name
        return Launch(title, PRODUCTS, flops, moved, dtype, half, narrow=name in LINEAR)
    computed = sum(tensor.numel() for tensor in tensors_of(result))
    return Launch(name, _kind(function.namespace), computed, moved)


def _sizes(factors: list[Tensor]) -> str:
    """M × N × K of a product."""
    (rows, inner), (_, columns) = factors[0].shape, factors[1].shape
    return f"{rows} × {columns} × {inner}"


def _kind(namespace: str) -> str:
    if namespace.startswith(("c10d", "_c10d")):
        return COMMUNICATION
    return MEMORY if namespace in NAMESPACES else OTHER


def bytes_of(function: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Bytes that an operation reads and writes."""
    name = function._schema.name.split("::")[-1]
    if name in SPECIAL:
        return SPECIAL[name](args, result)
    read = sum(map(size_of, tensors_of((args, kwargs))))
    return read + written(function, args, kwargs, result)


def written(function: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Bytes of results, and of arguments that are changed in place."""
    changed = [value for value, write in _arguments(function, args, kwargs) if write]
    if changed:
        return sum(map(size_of, tensors_of(changed)))
    return sum(map(size_of, tensors_of(result)))


def _arguments(function: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, bool]]:
    """Each argument, and whether it is written."""
    for place, argument in enumerate(function._schema.arguments):
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        alias = argument.alias_info
        yield value, alias is not None and alias.is_write


# --- operations that touch less, or more, than all of their arguments -----------------------------


def _rows(args: Any, result: Any) -> int:
    """Some rows of a table: those are read, and written; the indices are read."""
    indices = sum(size_of(t) for t in tensors_of(args) if not t.is_floating_point())
    return 2 * size_of(result) + indices


def _scattered(args: Any, result: Any) -> int:
    """A gradient of rows, added to those of a table of zeros."""
    gradient, indices = args[0], args[1]
    return 3 * size_of(gradient) + size_of(indices) + size_of(result)


def _put(args: Any, result: Any) -> int:
    """Rows that are added to a table in place: read, and read and written there."""
    return 3 * size_of(args[2]) + sum(map(size_of, tensors_of(args[1])))


def _picked(args: Any, result: Any) -> int:
    """One number a row, of a matrix."""
    target = args[1]
    return 2 * size_of(target) + sum(map(size_of, tensors_of(result)))


def _unpicked(args: Any, result: Any) -> int:
    """A matrix of zeros but for one number a row."""
    return size_of(result) + size_of(args[2])


def _adam(args: Any, result: Any) -> int:
    """Parameters and both moments read and written, gradients read."""
    parameters, gradients, first, second = (sum(map(size_of, args[n])) for n in range(4))
    return 2 * (parameters + first + second) + gradients


SPECIAL: dict[str, Callable[[Any, Any], int]] = {
    "embedding": _rows,
    "index_select": _rows,
    "index": _rows,
    "gather": _rows,
    "index_put": _put,
    "index_put_": _put,
    "embedding_dense_backward": _scattered,
    "nll_loss_forward": _picked,
    "nll_loss_backward": _unpicked,
    "_fused_adamw_": _adam,
}
