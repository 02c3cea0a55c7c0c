"""Linear + cross-entropy in chunks of the vocabulary: the least memory, four products.

Forward keeps two numbers a row: the largest logit, and the logarithm of the sum of exponentials
below it, merged over the chunks (Milakov and Gimelshein, 2018). Backward computes each chunk's
logits again and finishes that chunk's rows of dw at once; dx adds up in float32.
"""

from __future__ import annotations

from typing import Any

import torch

from cadenza.library.autocast import without_autocast
from cadenza.library.fakes import fake
from cadenza.library.loss_batch import (
    Batch,
    by_operand,
    mask_of,
    no_double_backward,
    once,
    parts,
    wide,
)
from cadenza.library.loss_blocks import vocabulary_gradient, vocabulary_part
from cadenza.library.specialize import Call

Tensor = torch.Tensor
Statistics = tuple[Tensor, Tensor, Tensor, Tensor]
NOWHERE: dict[str, Tensor] = {}


def lean_losses(operands: list[Tensor], call: str, size: int) -> Tensor:
    """The loss of each row, [M], `size` classes at a time; operands as loss_batch names them."""
    losses: Tensor = torch.ops.cadenza.cross_entropy_lean(operands, call, size)[0]
    return losses


torch.library.define(
    "cadenza::cross_entropy_lean",
    "(Tensor[] operands, str call, int size) -> (Tensor, Tensor, Tensor)",
)
torch.library.define(
    "cadenza::cross_entropy_lean_backward",
    "(Tensor adjoint, Tensor[] operands, Tensor[] statistics, str call, int size, int needed)"
    " -> (Tensor, Tensor, Tensor)",
)


def _run(
    batch: Batch, program: Any, operands: dict[str, Tensor], places: dict[str, Tensor] = NOWHERE,
    **constants: Any,
) -> dict[str, Tensor]:  # fmt: skip
    """One chunk's program: its outputs by label, some of them at places that there are."""
    found = batch.compiled(program, operands, **constants)
    labels = found.structure[1]
    into = {labels.index(name): place for name, place in places.items()}
    return dict(zip(labels, found.forward_on(operands, batch.rows, into), strict=True))


def _merged(batch: Batch, size: int) -> Statistics:
    """Of all classes: the largest logit, the log-sum-exp below it, the target's logit, and the
    weighted sum of logits above the shift (0 without label smoothing), each [M, 1]."""
    top = batch.x.new_full((batch.rows, 1), -torch.inf, dtype=batch.wide)
    total, picked, apart = top.clone(), torch.zeros_like(top), torch.zeros_like(top)
    for part in parts(batch.classes, size):
        found = _run(batch, vocabulary_part, batch.of_vocabulary(part))
        new = torch.maximum(top, found["top"])
        total = torch.logaddexp(_below(new, top, total), _below(new, found["top"], found["total"]))
        top, picked = new, picked + found["picked"]
        apart = apart + found.get("apart", 0.0)
    return top, total, picked, apart


def _below(new: Tensor, top: Tensor, total: Tensor) -> Tensor:
    """A log-sum-exp below `top` as one below `new`; of nothing but logits of -inf, -inf."""
    return torch.where(top == -torch.inf, -torch.inf, total + (top - new))


def _losses(batch: Batch, statistics: Statistics) -> Tensor:
    """Each row's loss as `linear_loss` has it, [M, 1]."""
    top, total, picked, apart = statistics
    smoothing, z_loss = batch.options["label_smoothing"], batch.options["z_loss"]
    loss = (1.0 - smoothing) * ((top - picked) + total)
    loss = loss + z_loss * (top + total) ** 2 if z_loss else loss
    loss = loss * batch.columns.get("own_weight", 1.0)
    if smoothing:
        above = (top - batch.columns["shift"]) + total
        loss = loss + smoothing * (
            batch.whole.get("mean_weight", 1.0) * above - apart / batch.classes
        )
    loss = torch.where(batch.inside[:, None], loss, torch.nan)
    return torch.where(batch.columns["target"] == batch.options["ignore_index"], 0.0, loss)


def _factors(batch: Batch, adjoint: Tensor, top: Tensor, total: Tensor) -> dict[str, Tensor]:
    """What multiplies each part of the logits' gradient, each [M, 1]; 0 in rows without a loss."""
    smoothing, z_loss = batch.options["label_smoothing"], batch.options["z_loss"]
    adjoint = torch.where(batch.counts, adjoint, 0.0)[:, None]
    weighted = adjoint * batch.columns.get("own_weight", 1.0)
    own = (1.0 - smoothing) * weighted
    scale = own + 2.0 * z_loss * weighted * (top + total) if z_loss else own
    if not smoothing:
        return {"scale": scale, "own": own}
    scale = scale + smoothing * batch.whole.get("mean_weight", 1.0) * adjoint
    return {"scale": scale, "own": own, "spread": adjoint * (smoothing / batch.classes)}


@torch.library.impl("cadenza::cross_entropy_lean", "CompositeExplicitAutograd")
def _lean(operands: list[Tensor], call: str, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of each row, its largest logit and the logarithm of the sum below it, each [M]."""
    batch = Batch(operands, call)
    batch.check_range()
    with without_autocast(batch.x), torch.no_grad():
        statistics = _merged(batch, size)
        losses = _losses(batch, statistics)
    return losses[:, 0], statistics[0][:, 0], statistics[1][:, 0]


@fake("cross_entropy_lean")
def _(operands: list[Tensor], call: str, size: int) -> Any:
    x = operands[0]
    return tuple(x.new_empty(x.shape[0], dtype=wide(x)) for _ in range(3))


def _outputs(operands: list[Tensor], call: str, needed: int) -> dict[str, Tensor]:
    """The gradients of x, w and bias in the mask `needed`, not yet filled; unneeded ones empty."""
    named = dict(zip(Call.decode(call).names, operands, strict=True))
    x, w, bias = named["x"], named["w"], named.get("bias")
    return {
        "x": torch.zeros_like(x, dtype=wide(x)) if needed & 1 else x.new_empty(0),
        "w": torch.empty_like(w) if needed & 2 else w.new_empty(0),
        "bias": torch.empty_like(bias) if bias is not None and needed & 4 else x.new_empty(0),
    }


@torch.library.impl("cadenza::cross_entropy_lean_backward", "CompositeExplicitAutograd")
def _lean_backward(
    adjoint: Tensor,
    operands: list[Tensor],
    statistics: list[Tensor],
    call: str,
    size: int,
    needed: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, w and bias in the mask `needed`; an unneeded one is empty."""
    batch, gradients = Batch(operands, call), _outputs(operands, call, needed)
    top, total = (values[:, None] for values in statistics)
    with without_autocast(batch.x), torch.no_grad():
        known = {"top": top, "total": total, **_factors(batch, adjoint, top, total)}
        for part in parts(batch.classes, size):
            _add_chunk(batch, part, known, needed, gradients)
    return gradients["x"].to(batch.x.dtype), gradients["w"], gradients["bias"]


def _add_chunk(
    batch: Batch, part: slice, known: dict[str, Tensor], needed: int, gradients: dict[str, Tensor]
) -> None:
    """Puts in one chunk's gradients; of what it needs besides, nothing outlives this call."""
    operands = {**batch.of_vocabulary(part), **known}
    places = {}
    if needed & 1:
        operands["sum_x"] = places["x"] = gradients["x"]
    if needed & 2:
        places["w"] = gradients["w"][part]
    found = _run(batch, vocabulary_gradient, operands, places, needed=needed)
    if needed & 4:
        gradients["bias"][part] = found["bias"][0]


@fake("cross_entropy_lean_backward")
def _(
    adjoint: Tensor,
    operands: list[Tensor],
    statistics: list[Tensor],
    call: str,
    size: int,
    needed: int,
) -> Any:
    gradients = _outputs(operands, call, needed)
    return gradients["x"].to(operands[0].dtype), gradients["w"], gradients["bias"]


def _context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    operands, ctx.call, ctx.size = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*operands, *output[1:])


def _backward(ctx: Any, adjoint: Tensor, *_: Any) -> tuple[Any, ...]:
    *operands, top, total = ctx.saved_tensors
    needed = mask_of(Call.decode(ctx.call).names, ctx.needs_input_grad[0])
    results = torch.ops.cadenza.cross_entropy_lean_backward(
        once(adjoint), operands, [top, total], ctx.call, ctx.size, needed
    )
    return by_operand(ctx.call, results, needed), None, None


torch.library.register_autograd("cadenza::cross_entropy_lean", _backward, setup_context=_context)
torch.library.register_autograd("cadenza::cross_entropy_lean_backward", no_double_backward)
