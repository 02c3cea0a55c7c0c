"""Norms as modules: their weights, and what a program that begins with one takes of them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from cadenza.library import programs
from cadenza.library.arguments import Size, Sizes, checked
from cadenza.library.nn.architecture import Architecture
from cadenza.library.nn.readable import readable


@checked
class RMSNorm(nn.RMSNorm):
    """x · r · (weight + offset), r = 1 / √(mean(x²) + eps); `weight` `[width]`.

    With offset 1, as in Gemma, weights are stored minus one and start at zero.
    """

    def __init__(self, width: Size | Sizes, eps: float = 1e-6, offset: float = 0.0) -> None:
        self.offset = offset
        super().__init__(width, eps=eps)

    def reset_parameters(self) -> None:
        """Sets the weight that changes nothing."""
        nn.init.constant_(self.weight, 1.0 - self.offset)

    def forward(self, x: Tensor, squares: Tensor | None = None) -> Tensor:
        """x `[..., width]` to the same; squares `[..., 1]` are its rows' sums of squares."""
        return programs.norm(x, self.weight, squares=squares, offset=self.offset, eps=self.eps)

    def extra_repr(self) -> str:
        """Sizes and numbers, as printed."""
        return f"{super().extra_repr()}, offset={self.offset}"


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
    norm = readable(norm, nn.RMSNorm, nn.LayerNorm, RMSNorm)
    if isinstance(norm, nn.LayerNorm):
        options = {"norm": "layer", "norm_weight": norm.weight, "norm_bias": norm.bias}
        return options | {"eps": norm.eps}
    if norm.eps is None:
        raise TypeError("an RMSNorm whose eps depends on the dtype: give it one, as eps=1e-6")
    offset = getattr(norm, "offset", 0.0)
    return {"norm": "rms", "norm_weight": norm.weight, "norm_offset": offset, "eps": norm.eps}


def norm_weight(norm: nn.Module) -> Tensor:
    """The weight of an RMSNorm. Raises ProgramError for one that does more than that says."""
    return readable(norm, nn.RMSNorm, RMSNorm).weight
