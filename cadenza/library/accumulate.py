"""Weight gradients added to a gradient that exists, in place: an operation that one asks for.

Autograd adds gradients up by itself, one weight-sized tensor a use. This is for training loops that
keep a gradient in a dtype of their own, float32 beside bfloat16 weights say.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cadenza.backends import chosen
from cadenza.core import lang as L
from cadenza.core.errors import ProgramError
from cadenza.library.arguments import checked
from cadenza.library.fakes import fake
from cadenza.library.function import block
from cadenza.library.operands import check_plain
from cadenza.library.operator import check_devices
from cadenza.library.specialize import Call


@block(shapes={"gradient": "N K", "dy": "M N", "x": "M K"})
def added_weight_gradient(gradient, dy, x, *, dtype):
    """gradient + dyᵀ · x of dy [M, N] and x [M, K]: [N, K], rounded to `dtype` once."""
    return L.cast(gradient + L.matmul(dy, x, transpose_a=True), dtype)


@checked
def accumulate_weight_gradient(gradient: Tensor, x: Tensor, dy: Tensor) -> Tensor:
    """gradient += dyᵀ · x in place, the gradient of `linear(x, w)`'s weight: returns `gradient`.

    gradient `[N, K]` is float32, bfloat16 or as wide as x; x `[..., K]` and dy `[..., N]` share a
    dtype. The product is accumulated in float32 (float64 for float64).

    - A gradient of x's dtype: one product of the library that adds to it, and no other memory. Each
      call rounds the sum once, so a bfloat16 gradient loses what is below 2⁻⁹ of it.
    - A gradient of another dtype: a product whose epilogue adds to it, tile by tile, and rounds
      once. A float32 gradient keeps all that bfloat16 products give. Where the product is one of
      the library (float32 operands without tf32, or where that was measured to be faster), and on
      the reference back end, it takes `[N, K]` of other memory, in float32.

    Nothing is recorded for autograd, and autograd must not hold `gradient`: it mutates. Raises
    ProgramError for shapes and dtypes that don't fit, and for a gradient that requires a gradient.
    """
    _check(gradient, x, dy)
    torch.ops.cadenza.accumulate_weight_gradient(gradient, x.detach(), dy.detach())
    return gradient


torch.library.define(
    "cadenza::accumulate_weight_gradient", "(Tensor(a!) gradient, Tensor x, Tensor dy) -> ()"
)


@torch.library.impl("cadenza::accumulate_weight_gradient", "CompositeExplicitAutograd")
def _accumulate(gradient: Tensor, x: Tensor, dy: Tensor) -> None:
    rows, flat = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
    if gradient.dtype == x.dtype:
        gradient.addmm_(flat.T, rows)
        return
    operands = {"gradient": gradient, "dy": flat, "x": rows}
    options = (("dtype", str(gradient.dtype).removeprefix("torch.")),)
    call = Call(tuple(operands), options, None, chosen(None))
    specializations = added_weight_gradient.specializations
    compiled, _ = specializations.find(list(operands.values()), call.encode(), 0)
    compiled.forward_on(operands, rows.shape[0], {0: gradient})


@fake("accumulate_weight_gradient")
def _(gradient: Tensor, x: Tensor, dy: Tensor) -> None:
    return None


def _check(gradient: Tensor, x: Tensor, dy: Tensor) -> None:
    _check_places(gradient, x, dy)
    shape = [dy.shape[-1], x.shape[-1]] if min(x.dim(), dy.dim()) else []
    if list(gradient.shape) != shape or x.shape[:-1] != dy.shape[:-1]:
        raise ProgramError(
            "accumulate_weight_gradient",
            found=f"gradient {list(gradient.shape)}, x {list(x.shape)}, dy {list(dy.shape)}",
            expected="gradient [N, K], x [..., K], dy [..., N]",
        )
    allowed = (torch.float32, torch.bfloat16, x.dtype)
    if x.dtype != dy.dtype or not x.is_floating_point() or gradient.dtype not in allowed:
        raise ProgramError(
            "accumulate_weight_gradient",
            found=f"gradient of {gradient.dtype}, x of {x.dtype}, dy of {dy.dtype}",
            expected="x and dy of one floating dtype, gradient of float32, bfloat16 or that dtype",
            write="dy.to(x.dtype); gradient=torch.zeros(N, K, dtype=torch.float32)",
        )
    if gradient.requires_grad:
        raise ProgramError(
            "accumulate_weight_gradient into a tensor of autograd's",
            found="a gradient that requires a gradient",
            expected="a tensor of its own, as weight.grad is",
            write="gradient.detach(), or weight.grad",
        )


def _check_places(*tensors: Tensor) -> None:
    names = ("gradient", "x", "dy")
    check_plain(names, tensors, "gradient + dy.T @ x")
    check_devices(names, tensors)
