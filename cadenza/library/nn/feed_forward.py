"""A feed-forward block as a module, and what a decoder layer's program takes of one."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from cadenza.core.errors import ProgramError
from cadenza.library import programs
from cadenza.library.arguments import Size, checked
from cadenza.library.nn.joint import Joint
from cadenza.library.nn.linear import drawn_seed
from cadenza.library.nn.norms import both_norms
from cadenza.library.nn.readable import readable
from cadenza.library.programs.parts import is_gated
from cadenza.library.weights import joined_present


@checked
class FeedForward(Joint):
    """`cz.ops.feed_forward` as a module, with the projections of Hugging Face's models.

        u = swiglu([h · gate_projᵀ; h · up_projᵀ]) = silu(h · gate_projᵀ) · (h · up_projᵀ)
        y = dropout(output_norm(u · down_projᵀ)), and x + y if `skip`; h = norm(x)

    x and y are `[..., width]`. x and the weights share a dtype, float64, float32, bfloat16 or
    float16, which y takes; arithmetic is float32 (float64 for float64).

    - Parameters: `gate_proj.weight` and `up_proj.weight` `[feed_forward, width]`,
      `down_proj.weight` `[width, feed_forward]`; with `bias`, the `.bias` of each. There is no
      gate_proj without a gated activation: u = activation(h · up_projᵀ).
    - activation: a name that `cz.ops.linear` knows, or None.
    - norm, output_norm (both of width) and dropout as in `cz.nn.Linear`.

    Raises ProgramError for arguments of a wrong kind, a name that is no activation, and an
    output_norm that doesn't go with norm; TypeError for a norm that is none. When it is called,
    ProgramError for shapes and dtypes that don't fit, and for a projection or a norm that does
    more than its parameters say: an adapter, a hook.
    """

    joint = ("gate_proj", "up_proj")

    def __init__(
        self,
        width: Size,
        feed_forward: Size,
        *,
        activation: str | None = "swiglu",
        bias: bool | None = False,
        norm: nn.Module | None = None,
        output_norm: nn.Module | None = None,
        dropout: float = 0.0,
        skip: bool = False,
    ) -> None:
        super().__init__()
        self.activation, self.dropout, self.skip = activation, dropout, bool(skip)
        if is_gated(activation):
            self.gate_proj = nn.Linear(width, feed_forward, bias=bias)
        self.up_proj = nn.Linear(width, feed_forward, bias=bias)
        self.down_proj = nn.Linear(feed_forward, width, bias=bias)
        self.norm, self.output_norm = norm, output_norm
        both_norms(norm, output_norm)
        self.put_together()

    def operands(self) -> dict[str, Any]:
        """What a program takes of the projections; gate and up as one, if there is a gate.

        Raises ProgramError for a projection that does more than its weight says.
        """
        names = ("gate_proj", "up_proj") if is_gated(self.activation) else ("up_proj",)
        ups = [readable(getattr(self, name), nn.Linear) for name in names]
        down = readable(self.down_proj, nn.Linear)
        return {
            "w_up": joined_present(up.weight for up in ups),
            "w_down": down.weight,
            "b_up": joined_present(up.bias for up in ups),
            "b_down": down.bias,
            "activation": self.activation,
        }

    def branch(self) -> dict[str, Any]:
        """`operands`, for a layer with norms, dropout and residual stream of its own.

        Raises ProgramError where this module has some, too: the layer would leave them out. And
        where it does more than its projections say, since it is not called.
        """
        readable(self, FeedForward)
        if self.norm or self.output_norm or self.dropout or self.skip:
            raise ProgramError(
                "a layer's feed-forward with what the layer does itself",
                found=f"norm={self.norm!r}, output_norm={self.output_norm!r}, "
                f"dropout={self.dropout}, skip={self.skip}",
                expected="projections and an activation alone",
                write="DecoderLayer(..., dropout=...), and norms by its architecture",
            )
        return self.operands()

    def forward(self, x: Tensor) -> Tensor:
        """x `[..., width]` to the same shape and dtype."""
        p = self.dropout if self.training else 0.0
        return programs.feed_forward(
            x, **self.operands(), **both_norms(self.norm, self.output_norm),
            seed=drawn_seed(x) if p else None, dropout=p, skip=self.skip,
        )  # fmt: skip

    def extra_repr(self) -> str:
        """Options, as printed."""
        return f"activation={self.activation!r}, dropout={self.dropout}, skip={self.skip}"
