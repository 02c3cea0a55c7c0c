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
from cadenza.library.nn.feed_forward import FeedForward
from cadenza.library.nn.joint import Joint
from cadenza.library.nn.linear import drawn_seed
from cadenza.library.nn.norms import RMSNorm, norm_module, norm_options, norm_weight
from cadenza.library.nn.readable import readable
from cadenza.library.weights import joined_present


@checked
class Attention(Joint):
    """The projections of causal grouped-query attention, and attention between them.

        [q; k; v] = h · [q_proj; k_proj; v_proj]ᵀ, h = norm(x)
        qkv = [rope(q_norm(q)); rope(k_norm(k)); v]                  `project`, before attention
        y = softmax(capped(scale · q · kᵀ) + mask) · v, of each head                    `forward`

    `o_proj` is the layer's: its program takes y · o_projᵀ with all that follows. Projections are
    `cz.ops.qkv_projection`'s, attention is `cz.ops.causal_attention`'s. x is `[B, S, width]`, qkv
    `[B, S, (heads + 2 · key_value_heads) · head_dim]`, y `[B, S, heads · head_dim]`. x and the
    weights share a dtype, float64, float32, bfloat16 or float16, which qkv and y take.

    - Parameters: `q_proj.weight` `[heads · head_dim, width]`, `k_proj.weight` and `v_proj.weight`
      `[key_value_heads · head_dim, width]`, `o_proj.weight` `[width, heads · head_dim]`, and their
      `.bias`, `q_norm.weight` and `k_norm.weight`, where the architecture has them.
    - architecture: a name or an `Architecture`; of it count biases, norms of q and k, pairs,
      window, softcap and scale. eps is that of the norms of q and k.
    - head_dim is width / heads by default; dropout that of the softmax, in training only.

    Raises ProgramError for arguments of a wrong kind, ValueError for heads that don't fit and for
    an architecture of no name. When it is called, ProgramError for shapes, dtypes and numbers that
    don't fit, and for a projection that does more than its weight says: an adapter, a hook.
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
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.heads, self.key_value_heads, self.dropout = heads, key_value_heads, dropout
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
        parts = [readable(p, nn.Linear) for p in (self.q_proj, self.k_proj, self.v_proj)]
        return programs.qkv_projection(
            x, joined_present(p.weight for p in parts), joined_present(p.bias for p in parts),
            cos=cos, sin=sin, squares=squares, head_dim=self.head_dim, heads=self.heads,
            key_value_heads=self.key_value_heads,
            interleaved=self.architecture.interleaved and cos is not None,
            **self._norms(norm),
        )  # fmt: skip

    def _norms(self, norm: nn.Module | None) -> dict[str, Any]:
        """What the program takes of norm and of those of queries and keys."""
        found = norm_options(norm)
        if self.architecture.qk_norm is None:
            return found
        numbers = {"eps": self.eps, "norm_offset": self.architecture.norm_offset} | found
        eps, offset = numbers["eps"], numbers["norm_offset"]
        own = {"q_norm": self.q_norm, "k_norm": self.k_norm}
        return numbers | {name: norm_weight(module, eps, offset) for name, module in own.items()}

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
            dropout=self.dropout if self.training else 0.0,
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

        x1 = x + dropout(self_attn(input_layernorm(x)))
        y = x1 + dropout(mlp(post_attention_layernorm(x1)))

    with self_attn(h) = attention(h) · o_projᵀ. Norms elsewhere, branches side by side and a factor
    of the branches are the architecture's, as in `cz.ops.decoder_block`. x and y are
    `[B, S, width]`; x and the weights share a dtype, float64, float32, bfloat16 or float16, which y
    takes; arithmetic between the stored values is float32 (float64 for float64).

    - Parameters have the names and shapes of Hugging Face's models: `self_attn.` those of
      `Attention`, `mlp.` those of `FeedForward`, and of each norm `weight` `[width]` and, if it has
      one, `bias`: `input_layernorm`, `post_attention_layernorm`, `pre_feedforward_layernorm`,
      `post_feedforward_layernorm`.
    - heads, key_value_heads, head_dim: as in `Attention`; feed_forward: columns between up and
      down; eps: of all norms.
    - architecture: a name ("qwen3", "gemma2", "olmo2", "gpt2", …) or an `Architecture`; it says
      which norms and biases there are.
    - dropout: that of both branches, in training only. That of the softmax is self_attn.dropout.

    Raises ProgramError for arguments of a wrong kind, ValueError for sizes that don't fit and for
    an architecture of no name. When it is called, ProgramError for shapes and dtypes that don't
    fit, and for a module within that does more than its parameters say: an adapter, a hook.
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
            **self.mlp.branch(), **self._norms(),
        )  # fmt: skip

    def _norms(self) -> dict[str, Any]:
        """What the layer's program takes of the norms behind its attention."""
        placement = self.architecture.placement
        if placement == "before":
            return norm_options(self.post_attention_layernorm)
        if placement == "parallel":
            return norm_options(self.input_layernorm) | {"parallel": True}
        numbers = {"eps": self.eps, "norm_offset": self.architecture.norm_offset}
        if placement == "both":
            numbers |= norm_options(self.pre_feedforward_layernorm)
        eps, offset = numbers["eps"], numbers["norm_offset"]
        return numbers | {
            "attention_norm": norm_weight(self.post_attention_layernorm, eps, offset),
            "feed_forward_norm": norm_weight(self.post_feedforward_layernorm, eps, offset),
        }
