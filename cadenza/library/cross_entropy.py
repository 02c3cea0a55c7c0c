"""Linear + cross-entropy in chunks of rows, so that only one chunk's logits exist at a time.

For "mean" and "sum", forward also computes the gradients, chunk by chunk, and backward multiplies
them by the incoming scalar: three products. What the sum is divided by is in the gradients already,
so that this scalar is 1 in most trainings, and rounds nothing; but for float16, whose range that
would leave. For "none" each row has its own incoming gradient, so backward computes each chunk
again: four products. The gradients of w and bias accumulate in float32. The program of a chunk is
the block linear_loss.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import torch

from cadenza.backends import chosen
from cadenza.library.autocast import autocast_dtype, without_autocast
from cadenza.library.fakes import fake
from cadenza.library.function import constant
from cadenza.library.lean import lean_losses
from cadenza.library.loss_arguments import check_form, check_items, check_tensors, check_terms
from cadenza.library.loss_batch import (
    ALONE,
    TRAINED,
    Batch,
    by_operand,
    mask_of,
    names_of,
    no_double_backward,
    once,
    parts,
    summed,
    wide,
)
from cadenza.library.loss_blocks import linear_loss, scaled
from cadenza.library.specialize import Call

Tensor = torch.Tensor
Operands = dict[str, Tensor]
Terms = dict[str, Any]  # ignore_index, label_smoothing, z_loss, softcap
CHUNK_ELEMENTS = 2**29  # of logits: 4096 rows of a vocabulary of 128256, in 1 GB
LEAN_ELEMENTS = 2**26
STEP = 128  # a chunk is a multiple of it


def linear_cross_entropy(
    x: Tensor,
    w: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    weight: Tensor | None = None,
    size_average: None = None,
    ignore_index: int = -100,
    reduce: None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    token_weights: Tensor | None = None,
    num_items_in_batch: float | Tensor | None = None,
    chunk: int | None = None,
    lean: bool = False,
) -> Tensor:
    """The cross-entropy of logits against `target`, as F.cross_entropy of F.linear(x, w, bias).

    With z = x @ w.T + bias, or softcap · tanh(that / softcap), lse = log Σₖ exp zₖ and y the
    target, a row costs

        t · (c_y · ((1 − ε) · (lse − z_y) + λ · lse²) + ε · Σₖ cₖ · (lse − zₖ) / V)

    where c is the `weight` of the classes [V], t the row's number in `token_weights` [...], ε
    `label_smoothing` and λ `z_loss`. A row whose target is `ignore_index` costs 0.

    x [..., D] and w [V, D] share a dtype; target [...] holds int64 classes; bias is [V]. Returns
    float32 (float64 for float64): by `reduction` "none" the loss of each row [...], by "sum" their
    sum, by "mean" the sum divided by Σ t · c_y over the rows that count (NaN if that is 0), or by
    `num_items_in_batch`, a number or a tensor without dimensions (0 if that is 0). Gradients reach
    x, w, bias and token_weights.

    At most `chunk` rows of logits exist at a time. `lean` takes `chunk` classes at a time instead
    and computes logits again in backward: four products, and no memory beside the gradients. Raises
    ProgramError for shapes, dtypes or arguments that don't fit, and IndexError for a class outside
    [0, V) on a CPU; on a GPU that row's loss is NaN.
    """
    check_terms(ignore_index, label_smoothing, z_loss, softcap)
    terms = {
        "ignore_index": constant(int(ignore_index)),
        "label_smoothing": constant(float(label_smoothing)),
        "z_loss": constant(float(z_loss)),
        "softcap": constant(None if softcap is None else float(softcap)),
    }
    check_form(reduction, chunk, lean, {"size_average": size_average, "reduce": reduce})
    check_items(num_items_in_batch, reduction)
    given = {"bias": bias, "weight": weight, "token_weights": token_weights}
    check_tensors(x, w, target, given)
    operands = _operands(x, w, target, given, terms)
    size = _chunk(target, w, lean) if chunk is None else chunk
    if reduction == "none":
        return _losses(operands, terms, size, lean).reshape(target.shape)
    if num_items_in_batch is not None:
        return _total(operands, terms, size, lean, _but_zero(num_items_in_batch))
    if reduction == "sum":
        return _total(operands, terms, size, lean)
    count = _count(operands, ignore_index)
    return torch.where(count != 0, _total(operands, terms, size, lean, _but_zero(count)), torch.nan)


def _chunk(target: Tensor, w: Tensor, lean: bool) -> int:
    """How many rows, or lean classes, are taken at a time."""
    rows = target.numel()
    elements, other = (LEAN_ELEMENTS, rows) if lean else (CHUNK_ELEMENTS, w.shape[0])
    size = max(STEP, elements // max(1, other) // STEP * STEP)
    if lean or w.dtype != torch.bfloat16:
        return size
    # In one chunk nothing is added up: the gradient of w takes 2 bytes a number instead of 4. The
    # number of rows itself would make torch.compile compile for each anew.
    whole = size + w.shape[1]
    return whole if rows <= whole else size


def _operands(
    x: Tensor, w: Tensor, target: Tensor, given: dict[str, Any], terms: Terms
) -> Operands:
    """The operands by the names that loss_batch knows, rows flattened to M."""
    compute, rows = wide(x), target.reshape(-1)
    found = {"x": x.reshape(-1, x.shape[-1]), "w": w, "target": rows, "bias": given["bias"]}
    weights, tokens = given["weight"], given["token_weights"]
    if weights is not None:
        weights = weights.to(compute)
        inside = (rows >= 0) & (rows < w.shape[0])
        found["own_weight"] = weights[torch.where(inside, rows, 0)]
        found["class_weight"] = weights if terms["label_smoothing"] else None
    found["token_weights"] = None if tokens is None else tokens.reshape(-1).to(compute)
    return {name: value for name, value in found.items() if value is not None}


def _losses(operands: Operands, terms: Terms, size: int, lean: bool) -> Tensor:
    """The loss of each row, [M]."""
    named = {name: value for name, value in operands.items() if name != "token_weights"}
    function = lean_losses if lean else torch.ops.cadenza.cross_entropy_rows
    call = _call(tuple(named), tuple(terms.items()), autocast_dtype(named["x"]))
    losses = function(list(named.values()), call, size)
    tokens = operands.get("token_weights")
    return losses if tokens is None else losses * tokens


def _total(
    operands: Operands, terms: Terms, size: int, lean: bool, divisor: float | Tensor | None = None
) -> Tensor:
    """The sum of the rows' losses over `divisor`."""
    x = operands["x"]
    if lean:
        total = summed(_losses(operands, terms, size, lean))
    elif divisor is None or (autocast_dtype(x) or str(x.dtype)[6:]) == "float16":
        total = _sum_of(operands, terms, size)
    else:
        tokens = operands.get("token_weights", x.new_ones(x.shape[0], dtype=wide(x)))
        return _sum_of({**operands, "token_weights": tokens / divisor}, terms, size)
    return total if divisor is None else total / divisor


def _sum_of(operands: Operands, terms: Terms, size: int) -> Tensor:
    """The sum of the rows' losses, with its gradients."""
    needs = [torch.is_grad_enabled() and value.requires_grad for value in operands.values()]
    call = _call(tuple(operands), tuple(terms.items()), autocast_dtype(operands["x"]))
    needed = mask_of(tuple(operands), needs)
    return torch.ops.cadenza.cross_entropy_sum(list(operands.values()), call, size, needed)[0]


def _count(operands: Operands, ignore_index: int) -> Tensor:
    """The weight of the rows that count."""
    weight = operands.get("own_weight", 1.0) * operands.get("token_weights", 1.0)
    return summed(torch.where(operands["target"] != ignore_index, weight, 0.0))


def _but_zero(number: float | Tensor) -> float | Tensor:
    """The number, infinity for 0: what is divided by no items is 0, and so are its gradients."""
    if not isinstance(number, Tensor):
        return float(number) or math.inf
    return torch.where(number == 0, math.inf, number)


@torch._dynamo.assume_constant_result
def _call(names: tuple[str, ...], terms: tuple[Any, ...], autocast: str | None) -> str:
    return Call(names, terms, autocast, chosen(None)).encode()


class _Gradients:
    """The gradients of x, w and bias, filled chunk by chunk; an unneeded one stays empty."""

    def __init__(self, named: Operands, mask: int, alone: bool = False) -> None:
        self.named, self.mask, self.needed, self.alone = named, mask, names_of(mask), alone
        self.brain = named["w"].dtype == torch.bfloat16

    @cached_property
    def filled(self) -> Operands:
        """What is filled; made for the first chunk's backward, when its forward has freed its own
        memory."""
        x, w = self.named["x"], self.named["w"]
        bias, dtype = self.named.get("bias", w), w.dtype if self.alone else wide(w)
        found = {
            "x": torch.empty_like(x) if "x" in self.needed else x.new_empty(0),
            "w": w.new_empty(w.shape if "w" in self.needed else (0,), dtype=dtype),
            "bias": bias.new_zeros(bias.shape if "bias" in self.needed else (0,), dtype=wide(bias)),
        }
        if not x.shape[0]:  # no chunk will fill it
            found["w"].zero_()
        return found

    def places(self, rows: slice) -> Operands:
        """Where the gradients of a chunk are written, or added."""
        found = {"x": self.filled["x"][rows], "w": self.filled["w"]}
        return {name: place for name, place in found.items() if name in self.needed}

    def add(self, gradients: Operands) -> None:
        """Adds those of a chunk that have no place."""
        if "bias" in self.needed:
            self.filled["bias"] += gradients["bias"].reshape(-1)

    def all(self) -> tuple[Tensor, Tensor, Tensor]:
        """Those of x, w and bias."""
        return self.filled["x"], self.filled["w"], self.filled["bias"]

    def until_backward(self) -> tuple[Tensor, Tensor, Tensor]:
        """Those that forward keeps: that of w rounded, where its range is that of float32."""
        x, w, bias = self.all()
        return x, w.bfloat16() if self.brain else w, bias


def _named(operands: list[Tensor], call: str) -> Operands:
    return dict(zip(Call.decode(call).names, operands, strict=True))


def _run(
    batch: Batch, size: int, needed: int, adjoint: Tensor | None = None
) -> tuple[Tensor, _Gradients]:
    """The loss of each row, and the gradients for `adjoint`, one number a row (ones if None)."""
    alone = batch.sums(slice(0, min(size, batch.rows)), needed) is ALONE
    gradients = _Gradients(batch.named, needed, alone)
    losses = batch.x.new_empty(batch.rows, dtype=batch.wide)
    given = torch.ones_like(losses) if adjoint is None else adjoint
    with without_autocast(batch.x), torch.no_grad():
        for part in parts(batch.rows, size):
            losses[part] = _run_chunk(batch, part, given[part], gradients)
    return losses, gradients


def _run_chunk(batch: Batch, part: slice, adjoint: Tensor, gradients: _Gradients) -> Tensor:
    """One chunk's losses [rows]; of what it needs besides, nothing outlives this call."""
    chunk, rows = batch.of_rows(part), adjoint.shape[0]
    sums = batch.sums(part, gradients.mask)
    compiled = batch.compiled(linear_loss, chunk, gradients.mask, sums)
    results = compiled.forward_on(chunk, rows)
    found = compiled.backward_on(
        chunk, results, [adjoint[:, None]], rows, gradients.places(part), spent=True
    )
    gradients.add(found)
    return results[0].reshape(-1)


torch.library.define(
    "cadenza::cross_entropy_sum",
    "(Tensor[] operands, str call, int rows, int needed)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
torch.library.define(
    "cadenza::cross_entropy_rows", "(Tensor[] operands, str call, int rows) -> Tensor"
)
torch.library.define(
    "cadenza::cross_entropy_rows_backward",
    "(Tensor adjoint, Tensor[] operands, str call, int rows, int needed)"
    " -> (Tensor, Tensor, Tensor)",
)
torch.library.define(
    "cadenza::scaled_gradient", "(Tensor gradient, Tensor scale, ScalarType dtype) -> Tensor"
)


@torch.library.impl("cadenza::cross_entropy_sum", "CompositeExplicitAutograd")
def _sum(operands: list[Tensor], call: str, rows: int, needed: int) -> tuple[Tensor, ...]:
    """The sum of the rows' losses, its gradients of x, w and bias, and the losses, that of
    token_weights."""
    batch = Batch(operands, call)
    batch.check_range()
    tokens = batch.named.get("token_weights")
    losses, gradients = _run(batch, rows, needed, tokens)
    total = (losses if tokens is None else losses * tokens).sum()
    return total, *gradients.until_backward(), losses


@fake("cross_entropy_sum")
def _(operands: list[Tensor], call: str, rows: int, needed: int) -> Any:
    x, gradients = operands[0], _Gradients(_named(operands, call), needed)
    total, losses = (x.new_empty(shape, dtype=wide(x)) for shape in ((), x.shape[:1]))
    return total, *gradients.until_backward(), losses


def _sum_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    operands, call, _, ctx.needed = inputs
    ctx.dtypes = {name: operand.dtype for name, operand in _named(operands, call).items()}
    ctx.set_materialize_grads(False)  # else autograd makes zeros as large as both gradients
    # From what is saved last autograd gets back to the operands, not from the sum, which callers
    # may change in place.
    ctx.mark_non_differentiable(*output[1:-1])
    ctx.save_for_backward(*output[1:])


def _sum_backward(ctx: Any, scale: Tensor | None, *_: Any) -> tuple[Any, ...]:
    needs = ctx.needs_input_grad[0]
    if scale is None:
        return [None] * len(needs), None, None, None
    tensors = ctx.saved_tensors  # once: checkpointing makes each of them once
    scale = once(scale, tensors[-1])
    saved = dict(zip((*TRAINED, "token_weights"), tensors, strict=True))
    scaled = [
        torch.ops.cadenza.scaled_gradient(saved[name], scale, dtype) if need else None
        for (name, dtype), need in zip(ctx.dtypes.items(), needs, strict=True)
    ]
    return scaled, None, None, None


torch.library.register_autograd(
    "cadenza::cross_entropy_sum", _sum_backward, setup_context=_sum_context
)


@torch.library.impl("cadenza::scaled_gradient", "CompositeExplicitAutograd")
def _scaled(gradient: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """gradient · scale, computed in float32 (float64 for float64) and rounded once."""
    if not gradient.numel():
        return torch.empty_like(gradient, dtype=dtype)
    matrix = gradient.reshape(gradient.shape[0], -1)
    operands = {"gradient": matrix, "scale": scale.reshape(1, 1)}
    options = (("dtype", str(dtype).removeprefix("torch.")),)
    call = Call(tuple(operands), options, None, chosen(None)).encode()
    compiled, _ = scaled.specializations.find(list(operands.values()), call, 0)
    return compiled.forward_on(operands, matrix.shape[0])[0].reshape(gradient.shape)


@fake("scaled_gradient")
def _(gradient: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(gradient, dtype=dtype)


@torch.library.impl("cadenza::cross_entropy_rows", "CompositeExplicitAutograd")
def _rows(operands: list[Tensor], call: str, rows: int) -> Tensor:
    batch = Batch(operands, call)
    batch.check_range()
    return _run(batch, rows, 0)[0]


@fake("cross_entropy_rows")
def _(operands: list[Tensor], call: str, rows: int) -> Tensor:
    return operands[0].new_empty(operands[0].shape[0], dtype=wide(operands[0]))


@torch.library.impl("cadenza::cross_entropy_rows_backward", "CompositeExplicitAutograd")
def _rows_again(
    adjoint: Tensor, operands: list[Tensor], call: str, rows: int, needed: int
) -> tuple[Tensor, Tensor, Tensor]:
    batch = Batch(operands, call)
    return _rounded(_run(batch, rows, needed, adjoint)[1], batch.named)


def _rounded(gradients: _Gradients, named: Operands) -> tuple[Tensor, Tensor, Tensor]:
    x, w, bias = gradients.all()
    return x, w.to(named["w"].dtype), bias.to(named.get("bias", w).dtype)


@fake("cross_entropy_rows_backward")
def _(
    adjoint: Tensor, operands: list[Tensor], call: str, rows: int, needed: int
) -> tuple[Tensor, Tensor, Tensor]:
    named = _named(operands, call)
    return _rounded(_Gradients(named, needed), named)


def _rows_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    operands, ctx.call, ctx.rows = inputs
    ctx.save_for_backward(*operands)


def _rows_backward(ctx: Any, adjoint: Tensor) -> tuple[Any, ...]:
    needed = mask_of(Call.decode(ctx.call).names, ctx.needs_input_grad[0])
    results = torch.ops.cadenza.cross_entropy_rows_backward(
        once(adjoint), list(ctx.saved_tensors), ctx.call, ctx.rows, needed
    )
    return by_operand(ctx.call, results, needed), None, None


torch.library.register_autograd(
    "cadenza::cross_entropy_rows", _rows_backward, setup_context=_rows_context
)
torch.library.register_autograd("cadenza::scaled_gradient", no_double_backward)
torch.library.register_autograd("cadenza::cross_entropy_rows_backward", no_double_backward)
