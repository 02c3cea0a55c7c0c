"""A projection as a module, with what may stand around it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from cadenza.core.arguments import is_number
from cadenza.core.errors import ProgramError
from cadenza.library import programs
from cadenza.library.arguments import Size, checked
from cadenza.library.nn.norms import both_norms
from cadenza.library.programs.parts import is_gated


@checked
class Linear(nn.Module):
    """`cz.ops.linear` as a module: a projection and all that may stand around it.

        a = activation(norm(x) · weightᵀ + bias)
        y = residual + dropout(output_norm(softcap(scale · a)))

    x is `[..., in_features]`, residual and y are `[..., out_features]`. x and weight share a dtype,
    float64, float32, bfloat16 or float16, which y takes; a wider residual widens y. Arithmetic is
    float32 (float64 for float64), with one rounding at the end.

    - Parameters: `weight` `[N, in_features]` and `bias` `[N]`, drawn as those of torch.nn.Linear; N
      is out_features, twice that for a gated activation: the gate's rows, then up's.
    - activation: a name that `cz.ops.linear` knows, or None.
    - norm: torch's or cz.nn's LayerNorm or RMSNorm of in_features, and so `norm.weight` and
      `norm.bias`; output_norm: such an RMSNorm of out_features, `output_norm.weight`. Beside a norm
      it is one of the same kind, eps and offset; a LayerNorm has no bias there.
    - dropout: a probability. The seed is drawn from torch's random state, in training only.
    - numbers: scale, 1 by default, and softcap, c of c · tanh(z / c), None by default.

    Raises ProgramError for arguments of a wrong kind, a name that is no activation, and an
    output_norm that doesn't go with norm; TypeError for a norm that is none. When it is called,
    ProgramError for shapes and dtypes that don't fit, and for numbers that mean nothing.
    """

    def __init__(
        self,
        in_features: Size,
        out_features: Size,
        bias: bool | None = True,
        *,
        activation: str | None = None,
        norm: nn.Module | None = None,
        output_norm: nn.Module | None = None,
        dropout: float = 0.0,
        **numbers: float | None,
    ) -> None:
        super().__init__()
        self.scale, self.softcap = _numbers(**numbers)
        rows = 2 * out_features if is_gated(activation) else out_features
        self.weight = nn.Parameter(torch.empty(rows, in_features))
        self.register_parameter("bias", nn.Parameter(torch.empty(rows)) if bias else None)
        self.in_features, self.out_features, self.activation = in_features, out_features, activation
        self.norm, self.output_norm, self.dropout = norm, output_norm, dropout
        both_norms(norm, output_norm)
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
            **both_norms(self.norm, self.output_norm),
        )  # fmt: skip

    def extra_repr(self) -> str:
        """Sizes and options, as printed."""
        return (
            f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, "
            f"activation={self.activation!r}, scale={self.scale}, softcap={self.softcap}, "
            f"dropout={self.dropout}"
        )


def _numbers(scale: Any = 1.0, softcap: Any = None, **unknown: Any) -> tuple[float, float | None]:
    """scale and softcap. Raises ProgramError for what is no number, and for another option."""
    for name in unknown:
        found = f"got an unexpected keyword argument {name!r}"
        raise _wrong("arguments", found, "those of the function")
    if not is_number(scale):
        raise _wrong("argument scale", f"scale={scale!r:.40}", "a number")
    if not (softcap is None or is_number(softcap)):
        raise _wrong("argument softcap", f"softcap={softcap!r:.40}", "a number or None")
    return scale, softcap


def _wrong(what: str, found: str, expected: str) -> ProgramError:
    return ProgramError(
        f"{what} of cz.nn.Linear",
        found=found,
        expected=expected,
        write="cz.nn.Linear(in_features, out_features, bias=True, *, activation=None, norm=None, "
        "output_norm=None, dropout=0.0, scale=1.0, softcap=None)",
    )


def drawn_seed(x: Tensor) -> Tensor:
    """A seed from torch's random state on the device of x, which checkpointing restores."""
    return torch.randint(2**31 - 1, (), device=x.device)
