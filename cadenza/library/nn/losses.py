"""Losses as modules, with the weight of the output layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from cadenza.core.errors import ProgramError
from cadenza.library.arguments import Size, checked
from cadenza.library.cross_entropy import linear_cross_entropy

OPTIONS = (
    "ignore_index", "reduction", "label_smoothing", "z_loss", "softcap", "chunk", "lean",
)  # fmt: skip


@checked
class LinearCrossEntropy(nn.Module):
    """The cross-entropy of linear logits, never all of them at once; a head and its loss.

        z = x · weightᵀ + bias, or softcap · tanh(that / softcap); lse = log Σₖ exp zₖ
        loss = mean over the tokens that count of lse − z_target

    as `cz.ops.linear_cross_entropy`, whose formula has all options: ignore_index, reduction,
    label_smoothing, z_loss, softcap, chunk, lean. x is `[..., width]` and shares the weight's
    dtype, float64, float32, bfloat16 or float16; target is `[...]`, int64. The loss is float32
    (float64 for float64): a scalar, or `[...]` for the reduction "none".

    - Parameters: `weight` `[vocabulary, width]` and `bias` `[vocabulary]` as of torch.nn.Linear, so
      a head's state_dict loads, and `loss.weight = embedding.weight` ties them; made on `device` in
      `dtype`, by default torch's own.
    - class_weight: F.cross_entropy's `weight`, `[vocabulary]`; a buffer that is not saved.

    Raises ProgramError for arguments of a wrong kind and for another option; when it is called, for
    shapes, dtypes and options that don't fit. A target outside of the vocabulary raises IndexError
    on a CPU; on a GPU its loss is NaN.
    """

    def __init__(
        self,
        width: Size,
        vocabulary: Size,
        *,
        bias: bool | None = False,
        class_weight: Tensor | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        _check_options(options)
        self.options = options
        self.weight = nn.Parameter(torch.empty(vocabulary, width, device=device, dtype=dtype))
        empty = torch.empty(vocabulary, device=device, dtype=dtype)
        self.bias = nn.Parameter(empty) if bias else None
        self.register_buffer("class_weight", class_weight, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Random weights of standard deviation 1 / √width, a bias of 0."""
        nn.init.normal_(self.weight, std=self.weight.shape[1] ** -0.5)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def extra_repr(self) -> str:
        """Sizes and options, as printed."""
        vocabulary, width = self.weight.shape
        named = {"bias": self.bias is not None, **self.options}
        return ", ".join([f"{width}, {vocabulary}", *(f"{n}={v!r}" for n, v in named.items())])

    def forward(
        self,
        x: Tensor,
        target: Tensor,
        *,
        token_weights: Tensor | None = None,
        num_items_in_batch: float | Tensor | None = None,
    ) -> Tensor:
        """The loss of x `[..., width]` against target `[...]`: a scalar, or `[...]` for "none".

        Shapes, dtypes and errors are those of `cadenza.ops.linear_cross_entropy`.
        """
        return linear_cross_entropy(
            x, self.weight, target, bias=self.bias, weight=self.class_weight,
            token_weights=token_weights, num_items_in_batch=num_items_in_batch, **self.options,
        )  # fmt: skip


def _check_options(options: dict[str, Any]) -> None:
    for name in options:
        if name not in OPTIONS:
            cure = "class_weight=" if name == "weight" else "an argument of the call, or none"
            raise ProgramError(
                f"LinearCrossEntropy has no option {name!r}",
                found=f"{name}={options[name]!r:.40}",
                expected=f"one of {', '.join(OPTIONS)}",
                write=cure,
            )
