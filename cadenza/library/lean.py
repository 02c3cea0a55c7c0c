"""Linear + cross-entropy in chunks of the vocabulary: the least memory, four products.

Forward keeps two numbers a row: the largest logit, and the logarithm of the sum of exponentials
below it, merged over the chunks (Milakov and Gimelshein, 2018). Backward computes each chunk's
logits again and finishes that chunk's rows of dw at once; dx adds up in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from cadenza.core.errors import CadenzaError
from cadenza.library.autocast import without_autocast
from cadenza.library.blocks import vocabulary_gradient, vocabulary_part
from cadenza.library.specialize import Call

Tensor = torch.Tensor


def ignored(call: str) -> int:
    """The class that does not count."""
    return int(dict(Call.decode(call).constants)["ignore_index"])


def check_range(target: Tensor, classes: int, call: str) -> None:
    """IndexError for a class that does not exist, on a CPU; a GPU would have to be waited for."""
    if target.device.type != "cpu":
        return
    wrong = (target != ignored(call)) & ((target < 0) | (target >= classes))
    if bool(wrong.any()):
        raise IndexError(f"target {int(target[wrong][0])} is outside of [0, {classes})")


def once(adjoint: Tensor) -> Tensor:
    """The adjoint; under create_graph=True one that makes further use of a gradient an error."""
    needless = adjoint.requires_grad or not torch.is_grad_enabled()
    return adjoint if needless else adjoint.detach().requires_grad_()


def no_double_backward(ctx: Any, *gradients: Any) -> None:
    """The derivative of a derivative."""
    raise CadenzaError(
        "linear_cross_entropy can be differentiated once\n"
        "  write:    F.cross_entropy(F.linear(x, w), target) where a second derivative is needed"
    )


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _chunks(classes: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, classes)) for start in range(0, classes, size))


def _run(program: Any, operands: dict[str, Tensor], constants: dict[str, Any], call: str) -> Any:
    """One chunk's program: its outputs by label, of 2-D operands."""
    general = Call.decode(call)
    own = Call(tuple(operands), tuple(constants.items()), general.autocast, general.backend)
    tensors = list(operands.values())
    found, _ = program.specializations.find(tensors, own.encode(), 0)
    results = found.forward_on(operands, tensors[0].shape[0])
    return dict(zip(found.structure[1], results, strict=True))


torch.library.define(
    "cadenza::cross_entropy_lean",
    "(Tensor x, Tensor w, Tensor target, str call, int size) -> (Tensor, Tensor, Tensor)",
)
torch.library.define(
    "cadenza::cross_entropy_lean_backward",
    "(Tensor adjoint, Tensor[] operands, str call, int size, int needed) -> (Tensor, Tensor)",
)


@torch.library.impl("cadenza::cross_entropy_lean", "CompositeExplicitAutograd")
def _lean(
    x: Tensor, w: Tensor, target: Tensor, call: str, size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of each row, its largest logit and the logarithm of the sum below it, each [M]."""
    check_range(target, w.shape[0], call)
    rows = x.shape[0]
    top = x.new_full((rows, 1), -torch.inf, dtype=_wide(x))
    total, picked = top.clone(), torch.zeros_like(top)
    with without_autocast(x), torch.no_grad():
        for part in _chunks(w.shape[0], size):
            operands = {"x": x, "w": w[part], "target": target[:, None] - part.start}
            found = _run(vocabulary_part, operands, {}, call)
            new = torch.maximum(top, found["top"])
            total = torch.logaddexp(total + (top - new), found["total"] + (found["top"] - new))
            top, picked = new, picked + found["picked"]
        classes = target[:, None]
        losses = (top - picked) + total
        losses = torch.where((classes >= 0) & (classes < w.shape[0]), losses, torch.nan)
        losses = torch.where(classes == ignored(call), 0.0, losses)
    return losses[:, 0], top[:, 0], total[:, 0]


@torch.library.register_fake("cadenza::cross_entropy_lean")
def _(x: Tensor, w: Tensor, target: Tensor, call: str, size: int) -> Any:
    return tuple(x.new_empty(x.shape[0], dtype=_wide(x)) for _ in range(3))


@torch.library.impl("cadenza::cross_entropy_lean_backward", "CompositeExplicitAutograd")
def _lean_backward(
    adjoint: Tensor, operands: list[Tensor], call: str, size: int, needed: int
) -> tuple[Tensor, Tensor]:
    """The gradients of x and w in the mask `needed`; an unneeded one is empty."""
    x, w, target, top, total = operands
    dx = torch.zeros_like(x, dtype=_wide(x)) if needed & 1 else x.new_empty(0)
    dw = torch.empty_like(w) if needed & 2 else w.new_empty(0)
    counts = torch.where(target == ignored(call), 0.0, adjoint)
    columns = {"top": top[:, None], "total": total[:, None], "adjoint": counts[:, None]}
    constants = {"dtype": str(_wide(x))[6:], "needed": needed}
    with without_autocast(x), torch.no_grad():
        for part in _chunks(w.shape[0], size):
            own = {"x": x, "w": w[part], "target": target[:, None] - part.start, **columns}
            found = _run(vocabulary_gradient, own, constants, call)
            if needed & 1:
                dx += found["x"]
            if needed & 2:
                dw[part] = found["w"]
    return dx.to(x.dtype), dw


@torch.library.register_fake("cadenza::cross_entropy_lean_backward")
def _(adjoint: Tensor, operands: list[Tensor], call: str, size: int, needed: int) -> Any:
    x, w = operands[:2]
    dx = torch.empty_like(x) if needed & 1 else x.new_empty(0)
    return dx, torch.empty_like(w) if needed & 2 else w.new_empty(0)


def _context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, w, target, ctx.call, ctx.size = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(x, w, target, *output[1:])


def _backward(ctx: Any, adjoint: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    needed = ctx.needs_input_grad[0] + 2 * ctx.needs_input_grad[1]
    results = torch.ops.cadenza.cross_entropy_lean_backward(
        once(adjoint), list(ctx.saved_tensors), ctx.call, ctx.size, needed
    )
    by_input = [r if needed & bit else None for r, bit in zip(results, (1, 2), strict=True)]
    return (*by_input, None, None, None)


torch.library.register_autograd("cadenza::cross_entropy_lean", _backward, setup_context=_context)
torch.library.register_autograd("cadenza::cross_entropy_lean_backward", no_double_backward)
