"""A decoder layer as a unit, with the parameter names and shapes of Hugging Face's models.

Projections are separate parameters, in torch.nn.Linear modules; those that share an operand lie one
behind another in memory, and one product takes them as one. A layer ends at its residual stream and
the sums of squares of its rows; the next layer applies its own norm and QKV, so each weight is used
inside its own layer.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from cadenza.library import programs
from cadenza.library.arguments import Size, checked
from cadenza.library.attention import causal_attention
from cadenza.library.nn.architecture import PLACEMENTS, Architecture
from cadenza.library.nn.joint import Joint
from cadenza.library.nn.linear import drawn_seed
from cadenza.library.nn.norms import RMSNorm, norm_module, norm_options, norm_weight
from cadenza.library.nn.readable import readable
from cadenza.library.programs.parts import is_gated
from cadenza.library.weights import joined_present


@checked
class FeedForward(Joint):
    """down(activation([gate(x); up(x)])) `[..., width]` to the same, SwiGLU by default.

    Without a gated activation there is no gate_proj: down(activation(up(x))).
    """

    joint = ("gate_proj", "up_proj")

    def __init__(
        self,
        width: Size,
        feed_forward: Size,
        *,
        activation: str = "swiglu",
        bias: bool | None = False,
    ) -> None:
        super().__init__()
        self.activation = activation
        if is_gated(activation):
            self.gate_proj = nn.Linear(width, feed_forward, bias=bias)
        self.up_proj = nn.Linear(width, feed_forward, bias=bias)
        self.down_proj = nn.Linear(feed_forward, width, bias=bias)
        self.put_together()

    def operands(self) -> dict[str, Any]:
        """What a feed-forward block takes of this module; gate and up as one, if there is a gate.

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

    def forward(self, x: Tensor) -> Tensor:
        """x `[..., width]` to `[..., width]`, in x's dtype."""
        return programs.feed_forward(x, **self.operands())


@checked
class Attention(Joint):
    """The projections of causal grouped-query attention, and attention between them.

    `head_dim` is width / heads by default. Raises ValueError for heads that don't fit.
    """

    joint = ("q_proj", "k_proj", "v_proj")

    def __init__(
        self,
        width: Size,
        heads: int,
        key_value_heads: int,
        *,
        head_dim: Size | None = None,
        architecture: str | Architecture = "llama",
        eps: float = 1e-6,
    ) -> None:
        super().__init__()
        self.heads, self.key_value_heads = heads, key_value_heads
        self.head_dim = _head_dim(width, heads, key_value_heads, head_dim)
        self.architecture, self.eps = Architecture.named(architecture), eps
        wide, narrow = heads * self.head_dim, key_value_heads * self.head_dim
        bias = self.architecture.qkv_bias
        self.q_proj = nn.Linear(width, wide, bias=bias)
        self.k_proj = nn.Linear(width, narrow, bias=bias)
        self.v_proj = nn.Linear(width, narrow, bias=bias)
        self.o_proj = nn.Linear(wide, width, bias=self.architecture.output_bias)
        self.put_together()
        if self.architecture.qk_norm is not None:
            whole = self.architecture.qk_norm == "row"
            offset = self.architecture.norm_offset
            self.q_norm = RMSNorm(wide if whole else self.head_dim, eps, offset)
            self.k_norm = RMSNorm(narrow if whole else self.head_dim, eps, offset)

    def project(
        self,
        x: Tensor,
        norm: nn.Module | None = None,
        *,
        cos: Tensor | None = None,
        sin: Tensor | None = None,
        squares: Tensor | None = None,
    ) -> Tensor:
        """Queries, keys and values of norm(x), x `[..., width]`: rotated, as one `[..., N]`.

        cos and sin `[..., R]` are rotary tables; squares `[..., 1]` the sums of squares of x's
        rows, for an RMSNorm. Raises ProgramError for a projection that does more than its weight
        says.
        """
        names = ("q_norm", "k_norm") if self.architecture.qk_norm else ()
        parts = [readable(p, nn.Linear) for p in (self.q_proj, self.k_proj, self.v_proj)]
        return programs.qkv_projection(
            x, joined_present(p.weight for p in parts), joined_present(p.bias for p in parts),
            cos=cos, sin=sin, squares=squares, head_dim=self.head_dim, heads=self.heads,
            key_value_heads=self.key_value_heads,
            interleaved=self.architecture.interleaved and cos is not None,
            **{name: norm_weight(getattr(self, name)) for name in names},
            **{"eps": self.eps, "norm_offset": self.architecture.norm_offset if names else 0.0}
            | norm_options(norm),
        )  # fmt: skip

    def forward(self, qkv: Tensor, cumulative_lengths: Tensor | None = None) -> Tensor:
        """Causal attention of rotated heads qkv `[B, S, N]`: `[B, S, heads * head_dim]`.

        `cumulative_lengths` `[sequences + 1]` are where packed sequences start and end. Window,
        softcap and scale are the architecture's; ProgramError for numbers that mean nothing.
        """
        return causal_attention(
            qkv,
            heads=self.heads,
            key_value_heads=self.key_value_heads,
            cumulative_lengths=cumulative_lengths,
            window=self.architecture.attention_window,
            softcap=self.architecture.attention_softcap,
            scale=self.architecture.attention_scale,
        )


def _head_dim(width: int, heads: int, key_value_heads: int, head_dim: int | None) -> int:
    if min(heads, key_value_heads) < 1 or heads % key_value_heads:
        raise ValueError(
            f"{heads} heads for {key_value_heads} of keys and values: choose heads a multiple of "
            "key_value_heads"
        )
    if head_dim is None and width % heads:
        raise ValueError(
            f"width {width} is not divisible by {heads} heads: choose a multiple of {heads}, or "
            "give head_dim"
        )
    return width // heads if head_dim is None else head_dim


@checked
class DecoderLayer(nn.Module):
    """One decoder layer, from one residual stream to the next; Llama's by default.

    `architecture` is a name ("qwen3", "gemma2", "olmo2", "gpt2", …) or an `Architecture`; it says
    which of Hugging Face's norms and biases there are. `dropout` is that of both branches, in
    training. Raises ValueError for sizes that don't fit.
    """

    def __init__(
        self,
        width: Size,
        heads: int,
        key_value_heads: int,
        feed_forward: Size,
        eps: float = 1e-5,
        *,
        architecture: str | Architecture = "llama",
        head_dim: Size | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        make = Architecture.named(architecture)
        self.eps, self.architecture, self.dropout = eps, make, dropout
        self.self_attn = Attention(
            width, heads, key_value_heads, head_dim=head_dim, architecture=make, eps=eps
        )
        self.mlp = FeedForward(
            width, feed_forward, activation=make.activation, bias=make.feed_forward_bias
        )
        for name in PLACEMENTS[make.placement]:
            self.add_module(name, norm_module(width, eps, make))

    def forward(
        self,
        x: Tensor,
        squares: Tensor | None = None,
        cos: Tensor | None = None,
        sin: Tensor | None = None,
        cumulative_lengths: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The next stream `[B, S, width]` and its rows' sums of squares `[B, S, 1]`, float32.

        `squares` are those of x, taken again if None; cos and sin `[B, S, R]` are rotary tables of
        each token's position; `cumulative_lengths` `[sequences + 1]` are where sequences start and
        end that are packed into the B · S tokens.
        """
        attention, placement = self.self_attn, self.architecture.placement
        squares = squares if self.architecture.norm == "rms" and placement != "after" else None
        norm = None if placement == "after" else self.input_layernorm
        y = attention(
            attention.project(x, norm, cos=cos, sin=sin, squares=squares), cumulative_lengths
        )
        p, output = self.dropout if self.training else 0.0, readable(attention.o_proj, nn.Linear)
        return programs.decoder_block(
            x, y, output.weight, b_output=output.bias,
            seed=drawn_seed(x) if p else None, feed_forward_seed=drawn_seed(x) if p else None,
            dropout=p, scale=self.architecture.branch_scale,
            squares=squares if placement == "parallel" else None,
            **self.mlp.operands(), **self._norms(),
        )  # fmt: skip

    def _norms(self) -> dict[str, Any]:
        """What the layer's program takes of the norms behind its attention."""
        placement = self.architecture.placement
        if placement == "before":
            return norm_options(self.post_attention_layernorm)
        if placement == "parallel":
            return norm_options(self.input_layernorm) | {"parallel": True}
        branches = {
            "attention_norm": norm_weight(self.post_attention_layernorm),
            "feed_forward_norm": norm_weight(self.post_feedforward_layernorm),
        }
        if placement == "both":
            return branches | norm_options(self.pre_feedforward_layernorm)
        return branches | {"norm_offset": self.architecture.norm_offset, "eps": self.eps}
