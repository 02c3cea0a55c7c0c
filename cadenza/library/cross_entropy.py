"""Linear + cross-entropy in chunks of rows, so that only one chunk's logits exist at a time.

For "mean" and "sum", forward also computes the unscaled gradients, chunk by chunk, and backward
multiplies them by the incoming scalar: three products. For "none" each row has its own incoming
gradient, so backward computes each chunk again: four products. The gradient of w accumulates in
float32 and is rounded once. The program of a chunk is the block linear_loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from cadenza.backends import chosen
from cadenza.core.errors import ProgramError
from cadenza.library.autocast import autocast_dtype, without_autocast
from cadenza.library.blocks import linear_loss
from cadenza.library.lean import check_range, no_double_backward, once
from cadenza.library.specialize import Call

Tensor = torch.Tensor
CHUNK_ELEMENTS = 2**27
REDUCTIONS = ("mean", "sum", "none")
X, W = 1, 2  # bits of the mask of needed gradients


def linear_cross_entropy(
    x: Tensor,
    w: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    chunk: int | None = None,
    lean: bool = False,
) -> Tensor:
    """The cross-entropy of logits x @ w.T against `target`, as F.cross_entropy of F.linear.

    x [..., D] and w [V, D] share a dtype; target [...] holds int64 classes, rows of `ignore_index`
    don't count. Returns float32 (float64 for float64): a scalar, the mean over the rows that
    count or the sum, or the loss of each row [...].

    At most `chunk` rows of logits exist at a time. `lean` takes `chunk` classes at a time instead
    and computes logits again in backward: four products, and no memory beside the gradients. Raises
    ProgramError for shapes, dtypes or arguments that don't fit, and IndexError for a class outside
    [0, V) on a CPU; on a GPU that row's loss is NaN.
    """
    other = max(1, target.numel() if lean else w.shape[0])
    size = max(128, CHUNK_ELEMENTS // other) if chunk is None else chunk
    _check(x, w, target, reduction, size)
    call = _call(autocast_dtype(x), ignore_index)
    batch = (x.reshape(-1, x.shape[-1]), w, target.reshape(-1), call, size)
    if lean:
        losses = torch.ops.cadenza.cross_entropy_lean(*batch)[0]
    elif reduction == "none":
        losses = torch.ops.cadenza.cross_entropy_rows(*batch)
    else:
        needed = (X * x.requires_grad + W * w.requires_grad) if torch.is_grad_enabled() else 0
        losses = torch.ops.cadenza.cross_entropy_sum(*batch, needed)[0]
    return _reduced(losses, target, ignore_index, reduction)


def _reduced(losses: Tensor, target: Tensor, ignore_index: int, reduction: str) -> Tensor:
    """The loss of each row, the sum, or the mean over the rows that count (NaN if none do)."""
    if reduction == "none":
        return losses.reshape(target.shape)
    total = losses.sum()
    if reduction == "sum":
        return total
    count = (target != ignore_index).sum()
    return torch.where(count > 0, total / count.clamp(min=1), torch.nan)


@torch._dynamo.assume_constant_result
def _call(autocast: str | None, ignore_index: int) -> str:
    constants = (("ignore_index", ignore_index),)
    return Call(("x", "w", "target"), constants, autocast, chosen(None), wide=("w",)).encode()


def _check(x: Tensor, w: Tensor, target: Tensor, reduction: str, rows: int) -> None:
    if reduction not in REDUCTIONS or rows < 1:
        raise ProgramError(
            "linear_cross_entropy",
            found=f"reduction={reduction!r}, chunk={rows}",
            expected=f"a reduction of {', '.join(REDUCTIONS)}, and at least one row at a time",
            write="reduction='mean', and chunk=None for a size of our choice",
        )
    if w.dim() != 2 or x.dim() < 1 or x.shape[-1] != w.shape[1] or x.shape[:-1] != target.shape:
        raise ProgramError(
            "linear_cross_entropy",
            found=f"x {list(x.shape)}, w {list(w.shape)}, target {list(target.shape)}",
            expected="x [..., D], w [V, D], target [...]",
        )
    if target.dtype != torch.int64:
        raise ProgramError(
            "linear_cross_entropy",
            found=f"target of {target.dtype}",
            expected="class numbers in torch.int64",
            write="target.long(); probabilities as targets are not supported",
        )


class _Gradients:
    """The gradients of x and w, filled chunk by chunk; an unneeded one stays empty."""

    def __init__(self, x: Tensor, w: Tensor, needed: int) -> None:
        wide = torch.promote_types(w.dtype, torch.float32)
        self.needed = needed
        self.x = torch.empty_like(x) if needed & X else x.new_empty(0)
        self.w = torch.zeros_like(w, dtype=wide) if needed & W else w.new_empty(0, dtype=wide)

    def add(self, rows: slice, gradients: dict[str, Tensor]) -> None:
        """Puts in one chunk."""
        if self.needed & X:
            self.x[rows] = gradients["x"]
        if self.needed & W:
            self.w += gradients["w"]


def _chunks(total: int, rows: int) -> Iterator[slice]:
    return (slice(start, min(start + rows, total)) for start in range(0, total, rows))


class _Batch(NamedTuple):
    """What a loss is taken of, and how many rows of it at a time."""

    x: Tensor
    w: Tensor
    target: Tensor
    call: str
    rows: int


def _run(batch: _Batch, needed: int, adjoint: Tensor | None = None) -> tuple[Tensor, _Gradients]:
    """The loss of each row, and the gradients for `adjoint`, one number a row (ones if None)."""
    x, w, target, call, rows = batch
    gradients = _Gradients(x, w, needed)
    losses = [x.new_empty(0, dtype=torch.promote_types(x.dtype, torch.float32))]
    with without_autocast(x), torch.no_grad():
        for part in _chunks(x.shape[0], rows):
            chunk = {"x": x[part], "w": w, "target": target[part, None]}
            specialization, _ = linear_loss.specializations.find(list(chunk.values()), call, needed)
            size = chunk["x"].shape[0]
            ones = losses[0].new_ones(size) if adjoint is None else adjoint[part]
            results = specialization.forward_on(chunk, size)
            losses.append(results[0].reshape(-1))
            gradients.add(part, specialization.backward_on(chunk, results, [ones[:, None]], size))
    return torch.cat(losses), gradients


torch.library.define(
    "cadenza::cross_entropy_sum",
    "(Tensor x, Tensor w, Tensor target, str call, int rows, int needed)"
    " -> (Tensor, Tensor, Tensor)",
)
torch.library.define(
    "cadenza::cross_entropy_rows",
    "(Tensor x, Tensor w, Tensor target, str call, int rows) -> Tensor",
)
torch.library.define(
    "cadenza::cross_entropy_rows_backward",
    "(Tensor adjoint, Tensor[] operands, str call, int rows, int needed) -> (Tensor, Tensor)",
)
torch.library.define(
    "cadenza::scaled_gradient", "(Tensor gradient, Tensor scale, ScalarType dtype) -> Tensor"
)


@torch.library.impl("cadenza::cross_entropy_sum", "CompositeExplicitAutograd")
def _sum(
    x: Tensor, w: Tensor, target: Tensor, call: str, rows: int, needed: int
) -> tuple[Tensor, Tensor, Tensor]:
    check_range(target, w.shape[0], call)
    losses, gradients = _run(_Batch(x, w, target, call, rows), needed)
    return losses.sum(), gradients.x, gradients.w


@torch.library.register_fake("cadenza::cross_entropy_sum")
def _(x: Tensor, w: Tensor, target: Tensor, call: str, rows: int, needed: int) -> Any:
    gradients = _Gradients(x, w, needed)
    total = x.new_empty((), dtype=torch.promote_types(x.dtype, torch.float32))
    return total, gradients.x, gradients.w


def _sum_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.needed, ctx.dtypes = inputs[5], (inputs[0].dtype, inputs[1].dtype)
    ctx.set_materialize_grads(False)  # else autograd makes zeros as large as both gradients
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*output[1:])


def _sum_backward(ctx: Any, scale: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if scale is None:
        return (None,) * 6
    scale = once(scale)
    scaled = [
        torch.ops.cadenza.scaled_gradient(gradient, scale, dtype) if ctx.needed & bit else None
        for gradient, dtype, bit in zip(ctx.saved_tensors, ctx.dtypes, (X, W), strict=True)
    ]
    return (*scaled, None, None, None, None)


torch.library.register_autograd(
    "cadenza::cross_entropy_sum", _sum_backward, setup_context=_sum_context
)


@torch.library.impl("cadenza::scaled_gradient", "CompositeExplicitAutograd")
def _scaled(gradient: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    wide = torch.promote_types(gradient.dtype, scale.dtype)
    return (gradient.to(wide) * scale).to(dtype)


@torch.library.register_fake("cadenza::scaled_gradient")
def _(gradient: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(gradient, dtype=dtype)


@torch.library.impl("cadenza::cross_entropy_rows", "CompositeExplicitAutograd")
def _rows(x: Tensor, w: Tensor, target: Tensor, call: str, rows: int) -> Tensor:
    check_range(target, w.shape[0], call)
    return _run(_Batch(x, w, target, call, rows), 0)[0]


@torch.library.register_fake("cadenza::cross_entropy_rows")
def _(x: Tensor, w: Tensor, target: Tensor, call: str, rows: int) -> Tensor:
    return x.new_empty(x.shape[0], dtype=torch.promote_types(x.dtype, torch.float32))


@torch.library.impl("cadenza::cross_entropy_rows_backward", "CompositeExplicitAutograd")
def _rows_again(
    adjoint: Tensor, operands: list[Tensor], call: str, rows: int, needed: int
) -> tuple[Tensor, Tensor]:
    x, w, target = operands
    gradients = _run(_Batch(x, w, target, call, rows), needed, adjoint)[1]
    return gradients.x, gradients.w.to(w.dtype)


@torch.library.register_fake("cadenza::cross_entropy_rows_backward")
def _(
    adjoint: Tensor, operands: list[Tensor], call: str, rows: int, needed: int
) -> tuple[Tensor, Tensor]:
    x, w, _ = operands
    gradients = _Gradients(x, w, needed)
    return gradients.x, gradients.w.to(w.dtype)


def _rows_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, target, ctx.call, ctx.rows = inputs
    ctx.save_for_backward(x, w, target)


def _rows_backward(ctx: Any, adjoint: Tensor) -> tuple[Tensor | None, ...]:
    adjoint = once(adjoint)
    needed = X * ctx.needs_input_grad[0] + W * ctx.needs_input_grad[1]
    results = torch.ops.cadenza.cross_entropy_rows_backward(
        adjoint, list(ctx.saved_tensors), ctx.call, ctx.rows, needed
    )
    by_input = [r if needed & bit else None for r, bit in zip(results, (X, W), strict=True)]
    return (*by_input, None, None, None)


torch.library.register_autograd(
    "cadenza::cross_entropy_rows", _rows_backward, setup_context=_rows_context
)


torch.library.register_autograd("cadenza::scaled_gradient", no_double_backward)
torch.library.register_autograd("cadenza::cross_entropy_rows_backward", no_double_backward)
