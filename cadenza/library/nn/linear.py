"""A projection as a module, with what may stand around it."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from cadenza.library import programs
from cadenza.library.arguments import Size, checked
from cadenza.library.nn.norms import norm_options
from cadenza.library.programs.parts import is_gated


@checked
class Linear(nn.Module):
    """`cz.ops.linear` as a module: `weight` `[N, in_features]`, `bias` `[N]`, `norm.weight`.

        y = residual + dropout(softcap(scale · activation(norm(x) · weightᵀ + bias)))

    N is out_features, twice that for a gated activation ("swiglu", …): the gate's rows, then up's.
    norm is a torch.nn.LayerNorm, torch.nn.RMSNorm or cz.nn.RMSNorm of in_features. Parameters start
    as those of torch.nn.Linear. Dropout draws its seed from torch's random state, in training only.
    """

    def __init__(
        self,
        in_features: Size,
        out_features: Size,
        bias: bool | None = True,
        *,
        activation: str | None = None,
        norm: nn.Module | None = None,
        scale: float = 1.0,
        softcap: float | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        rows = 2 * out_features if is_gated(activation) else out_features
        self.weight = nn.Parameter(torch.empty(rows, in_features))
        self.register_parameter("bias", nn.Parameter(torch.empty(rows)) if bias else None)
        self.in_features, self.out_features, self.activation = in_features, out_features, activation
        self.norm, self.scale, self.softcap, self.dropout = norm, scale, softcap, dropout
        norm_options(norm)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws weight and bias as torch.nn.Linear does."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            bound = self.in_features**-0.5
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x `[..., in_features]` and residual `[..., out_features]` to `[..., out_features]`."""
        p = self.dropout if self.training else 0.0
        return programs.linear(
            x, self.weight, self.bias, residual=residual, seed=drawn_seed(x) if p else None,
            activation=self.activation, scale=self.scale, softcap=self.softcap, dropout=p,
            **norm_options(self.norm),
        )  # fmt: skip

    def extra_repr(self) -> str:
        """Sizes and options, as printed."""
        return (
            f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, "
            f"activation={self.activation!r}, scale={self.scale}, softcap={self.softcap}, "
            f"dropout={self.dropout}"
        )


def drawn_seed(x: Tensor) -> Tensor:
    """A seed from torch's random state on the device of x, which checkpointing restores."""
    return torch.randint(2**31 - 1, (), device=x.device)
