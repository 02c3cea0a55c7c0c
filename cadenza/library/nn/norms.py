"""Norms as modules: their weights, and what a program that begins with one takes of them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from cadenza.core.errors import ProgramError
from cadenza.library import programs
from cadenza.library.arguments import Size, Sizes, checked
from cadenza.library.nn.architecture import Architecture
from cadenza.library.nn.readable import readable
from cadenza.library.programs.parts import check_offset


@checked
class RMSNorm(nn.RMSNorm):
    """RMSNorm of each row, as torch.nn.RMSNorm over one dimension; `cz.ops.norm` as a module.

        y = x · r · (weight + offset), r = 1 / √(mean(x²) + eps)

    x and y are `[..., width]` in x's dtype: float64, float32, bfloat16 or float16; arithmetic is
    float32 (float64 for float64). `weight` is `[width]`; without `elementwise_affine` there is
    none. With offset 1, as in Gemma, weights are stored minus one and start at zero.

    Raises ProgramError for arguments of a wrong kind and for an offset without a weight; when it is
    called, for another width than x's, and for squares that are not `[..., 1]`.
    """

    def __init__(
        self,
        width: Size | Sizes,
        eps: float = 1e-6,
        offset: float = 0.0,
        elementwise_affine: bool = True,
    ) -> None:
        self.offset = offset
        super().__init__(width, eps=eps, elementwise_affine=elementwise_affine)
        check_offset(offset, self.weight)

    def reset_parameters(self) -> None:
        """Sets the weight that changes nothing."""
        if self.elementwise_affine:
            nn.init.constant_(self.weight, 1.0 - self.offset)

    def forward(self, x: Tensor, squares: Tensor | None = None) -> Tensor:
        """x `[..., width]` to the same shape and dtype.

        squares `[..., 1]`, the sums of squares of x's rows, are taken instead of Σ x².
        """
        return programs.norm(x, self.weight, squares=squares, offset=self.offset, eps=self.eps)

    def extra_repr(self) -> str:
        """Sizes and numbers, as printed."""
        return f"{super().extra_repr()}, offset={self.offset}"


@checked
class LayerNorm(nn.LayerNorm):
    """LayerNorm of each row, as torch.nn.LayerNorm over one dimension; `cz.ops.norm` as a module.

        y = (x − mean(x)) / √(variance(x) + eps) · weight + bias

    The variance is that of all of the row, divided by width. x and y are `[..., width]` in x's
    dtype: float64, float32, bfloat16 or float16; arithmetic is float32 (float64 for float64).
    `weight` and `bias` are `[width]`; without `elementwise_affine` there is neither.

    Raises ProgramError for arguments of a wrong kind and, when it is called, for another width than
    x's.
    """

    def __init__(
        self,
        width: Size | Sizes,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool | None = True,
    ) -> None:
        super().__init__(width, eps, elementwise_affine, bool(bias))

    def forward(self, x: Tensor) -> Tensor:
        """x `[..., width]` to the same shape and dtype."""
        return programs.norm(x, self.weight, self.bias, kind="layer", eps=self.eps)


def norm_module(width: int, eps: float, architecture: Architecture) -> nn.Module:
    """The norm of a layer of that architecture."""
    if architecture.norm == "layer":
        return nn.LayerNorm(width, eps, bias=architecture.norm_bias)
    return RMSNorm(width, eps, architecture.norm_offset)


def norm_options(norm: nn.Module | None) -> dict[str, Any]:
    """What a program that begins with this norm takes of it; nothing for None.

    Raises TypeError for a module that is neither RMSNorm nor LayerNorm over one dimension, for one
    that does more than its weight says, and for an RMSNorm without eps.
    """
    if norm is None:
        return {}
    if not isinstance(norm, nn.RMSNorm | nn.LayerNorm) or len(norm.normalized_shape) != 1:
        raise TypeError(
            f"a norm of {norm!r}: give torch.nn.LayerNorm, torch.nn.RMSNorm or cz.nn.RMSNorm of "
            "one dimension"
        )
    norm = readable(norm, nn.RMSNorm, nn.LayerNorm, RMSNorm, LayerNorm)
    if isinstance(norm, nn.LayerNorm):
        options = {"norm": "layer", "norm_weight": norm.weight, "norm_bias": norm.bias}
        return options | {"eps": norm.eps}
    if norm.eps is None:
        raise TypeError("an RMSNorm whose eps depends on the dtype: give it one, as eps=1e-6")
    offset = getattr(norm, "offset", 0.0)
    return {"norm": "rms", "norm_weight": norm.weight, "norm_offset": offset, "eps": norm.eps}


def both_norms(norm: nn.Module | None, output_norm: nn.Module | None) -> dict[str, Any]:
    """What a program takes of the norm that it begins with and of that of its output.

    The program has one kind of norm, one eps and one offset. Raises as `norm_options` does, and
    ProgramError for an output_norm of other ones, with a bias or without a weight.
    """
    found = norm_options(norm)
    if output_norm is None:
        return found
    own = norm_options(output_norm)
    weight, bias = own.pop("norm_weight"), own.pop("norm_bias", None)
    wanted = found if norm is not None else own | {"norm": "rms"}
    if weight is None or bias is not None or any(own[name] != wanted[name] for name in own):
        raise ProgramError(
            "a norm of the output that the program can't take",
            found=f"output_norm={output_norm!r}, norm={norm!r}",
            expected="an RMSNorm, or beside a norm its kind, eps and offset; with a weight, "
            "without a bias",
            write="output_norm=cz.nn.RMSNorm(out_features, norm.eps, norm.offset), or "
            "cz.nn.LayerNorm(out_features, norm.eps, bias=False) beside a LayerNorm",
        )
    if norm is None:
        found = {"norm_offset": own["norm_offset"], "eps": own["eps"]}
    return found | {"output_norm": weight}


def norm_weight(norm: nn.Module, eps: float, offset: float) -> Tensor:
    """The weight of an RMSNorm in a layer whose program has one eps and one offset for its norms.

    Raises ProgramError for a norm of other ones, for one without a weight, which would be left out,
    and for one that does more than its weight says.
    """
    norm = readable(norm, nn.RMSNorm, RMSNorm)
    if norm.weight is None or (norm.eps, getattr(norm, "offset", 0.0)) != (eps, offset):
        raise ProgramError(
            "a norm in a layer whose program can't take it",
            found=repr(norm),
            expected=f"an RMSNorm with a weight, eps={eps!r} and offset={offset!r}, as the others",
            write=f"cz.nn.RMSNorm(width, {eps!r}, {offset!r}), or that eps for the whole layer",
        )
    return norm.weight
