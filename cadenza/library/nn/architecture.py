"""What a decoder layer is made of besides its sizes, and the names of well-known layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cadenza.library.arguments import checked
from cadenza.library.programs.parts import GATED, PLAIN

# The norms of a layer by where they stand, under Hugging Face's names.
PLACEMENTS = {
    "before": ("input_layernorm", "post_attention_layernorm"),
    "after": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "both": (
        "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    "parallel": ("input_layernorm",),
}  # fmt: skip


@checked
@dataclass(frozen=True)
class Architecture:
    """The make of a decoder layer; the defaults are Llama's. It has no tensors, and no dtype.

        before:    x1 = x + s · attention(norm(x)), y = x1 + s · feed_forward(norm(x1))
        after:     x1 = x + s · norm(attention(x)), y = x1 + s · norm(feed_forward(x1))
        both:      x1 = x + s · norm(attention(norm(x))), and y likewise
        parallel:  y = x + s · attention(norm(x)) + s · feed_forward(norm(x))

    with s = branch_scale, and each norm a parameter `[width]` of its own but in "parallel".

    - norm: "rms" or "layer"; norm_bias: whether LayerNorm has a bias `[width]`; norm_offset: what
      is added to RMSNorm's weights, 1 in Gemma.
    - placement: norms "before" each branch, "after" it (OLMo 2), "both" (Gemma 2), or "parallel":
      one norm before attention and feed-forward side by side (GPT-J, Cohere).
    - activation: a name that `cz.ops.linear` knows.
    - qkv_bias, output_bias, feed_forward_bias: which projections `[N, K]` have biases `[N]`.
    - qk_norm: RMSNorm of each query and key "head" (Qwen3), `[head_dim]`, over the whole "row"
      (OLMo 2), `[heads · head_dim]`, None.
    - interleaved: whether rotary pairs are neighbours, (2i, 2i + 1).
    - attention_scale: what scores are multiplied by, 1 / √head_dim by default; branch_scale: what
      each branch is multiplied by before it is added.
    - attention_window: tokens that each one sees, with itself (Mistral, every other layer of Gemma
      2, most of Gemma 3), None for all before it; attention_softcap: c of c · tanh(scores / c)
      (Gemma 2). They are numbers of a model, so no name has them.

    Raises ProgramError for values of a wrong kind, and ValueError for unknown words and for those
    that don't go together.
    """

    norm: str = "rms"
    norm_bias: bool = False
    norm_offset: float = 0.0
    placement: str = "before"
    activation: str = "swiglu"
    qkv_bias: bool = False
    output_bias: bool = False
    feed_forward_bias: bool = False
    qk_norm: str | None = None
    interleaved: bool = False
    attention_scale: float | None = None
    branch_scale: float = 1.0
    attention_window: int | None = None
    attention_softcap: float | None = None

    def __post_init__(self) -> None:
        _check_word("norm", self.norm, ("rms", "layer"))
        _check_word("placement", self.placement, tuple(PLACEMENTS))
        _check_word("activation", self.activation, (*PLAIN, *GATED))
        _check_word("qk_norm", self.qk_norm, (None, "head", "row"))
        if self.norm == "layer" and self.norm_offset:
            raise ValueError("norm_offset belongs to RMSNorm: leave it out with norm='layer'")
        if self.norm == "layer" and self.placement in ("after", "both"):
            raise ValueError("norms after a branch are RMSNorm: choose norm='rms'")
        if self.norm == "rms" and self.norm_bias:
            raise ValueError("norm_bias belongs to LayerNorm: leave it out with norm='rms'")

    @staticmethod
    def named(architecture: str | Architecture) -> Architecture:
        """The architecture of that name. Raises ValueError, with the names, for an unknown one."""
        if isinstance(architecture, Architecture):
            return architecture
        if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
            raise ValueError(
                f"no architecture {architecture!r}: choose one of {', '.join(ARCHITECTURES)}, "
                "or make an Architecture"
            )
        return ARCHITECTURES[architecture]


def _check_word(name: str, word: Any, words: tuple[Any, ...]) -> None:
    if word not in words:
        raise ValueError(f"{name}={word!r}: choose one of {', '.join(map(repr, words))}")


_GEMMA = {"norm_offset": 1.0, "activation": "geglu_tanh"}
ARCHITECTURES = {
    "llama": Architecture(),
    "mistral": Architecture(),
    "phi3": Architecture(),
    "qwen2": Architecture(qkv_bias=True),
    "qwen3": Architecture(qk_norm="head"),
    "gemma": Architecture(**_GEMMA),
    "gemma2": Architecture(placement="both", **_GEMMA),
    "gemma3": Architecture(placement="both", qk_norm="head", **_GEMMA),
    "olmo2": Architecture(placement="after", qk_norm="row"),
    "gpt2": Architecture(
        norm="layer", norm_bias=True, activation="gelu_tanh", qkv_bias=True, output_bias=True,
        feed_forward_bias=True,
    ),
    "gptj": Architecture(
        norm="layer", norm_bias=True, placement="parallel", activation="gelu_tanh",
        feed_forward_bias=True, interleaved=True,
    ),
    "cohere": Architecture(norm="layer", placement="parallel", interleaved=True),
}  # fmt: skip
