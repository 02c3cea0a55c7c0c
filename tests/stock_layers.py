"""Decoder layers in stock torch modules, of the makes that `cz.nn.DecoderLayer` knows.

Each is written as its model's authors write it, branch by branch, from torch's own functions.
"""

import torch
import torch.nn.functional as F
from stock_programs import GATES, activated
from torch import Tensor, nn


class GemmaNorm(nn.Module):
    """RMSNorm of which weights are stored minus one."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], 1.0 + self.weight, self.eps)


class StockMlp(nn.Module):
    """A feed-forward, gated or not."""

    def __init__(self, width: int, feed_forward: int, activation: str, bias: bool) -> None:
        super().__init__()
        self.activation = activation
        if activation in GATES:
            self.gate_proj = nn.Linear(width, feed_forward, bias=bias)
        self.up_proj = nn.Linear(width, feed_forward, bias=bias)
        self.down_proj = nn.Linear(feed_forward, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.activation in GATES:
            return self.down_proj(GATES[self.activation](self.gate_proj(x)) * self.up_proj(x))
        return self.down_proj(activated(self.up_proj(x), self.activation))


class StockAttention(nn.Module):
    """Causal attention; q_norm and k_norm, where there are any, by head or over the row."""

    softcap: float | None = None

    def __init__(self, sizes: dict, biases: tuple[bool, bool], norms: dict | None) -> None:
        super().__init__()
        self.head_dim, self.interleaved = sizes["head_dim"], sizes["interleaved"]
        width, heads, narrow = sizes["width"], sizes["heads"], sizes["key_value_heads"]
        wide, narrow = heads * self.head_dim, narrow * self.head_dim
        self.q_proj = nn.Linear(width, wide, bias=biases[0])
        self.k_proj = nn.Linear(width, narrow, bias=biases[0])
        self.v_proj = nn.Linear(width, narrow, bias=biases[0])
        self.o_proj = nn.Linear(wide, width, bias=biases[1])
        self.whole = bool(norms and norms["whole"])
        if norms:
            self.q_norm = norms["make"](wide if self.whole else self.head_dim)
            self.k_norm = norms["make"](narrow if self.whole else self.head_dim)

    def _heads(self, z: Tensor, norm: nn.Module | None) -> Tensor:
        """Heads `[B, heads, S, head_dim]`, normed."""
        if norm is not None and self.whole:
            z = norm(z)
        z = z.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        return z if norm is None or self.whole else norm(z)

    def _turned(self, z: Tensor, tables: tuple[Tensor, Tensor] | None) -> Tensor:
        if tables is None:
            return z
        cos, sin = (table[:, None] for table in tables)
        columns = 2 * cos.shape[-1]
        turning, still = z[..., :columns], z[..., columns:]
        if self.interleaved:
            a, b = turning[..., ::2], turning[..., 1::2]
            turned = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
        else:
            a, b = turning.chunk(2, -1)
            turned = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
        return torch.cat((turned, still), -1)

    def forward(
        self, x: Tensor, tables: tuple[Tensor, Tensor] | None, mask: Tensor | None = None
    ) -> Tensor:
        normed = hasattr(self, "q_norm")
        query = self._turned(self._heads(self.q_proj(x), self.q_norm if normed else None), tables)
        key = self._turned(self._heads(self.k_proj(x), self.k_norm if normed else None), tables)
        value = self._heads(self.v_proj(x), None)
        key, value = (
            z.repeat_interleave(query.shape[1] // z.shape[1], dim=1) for z in (key, value)
        )
        scores = query @ key.transpose(-1, -2) / self.head_dim**0.5
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        seen = torch.ones_like(scores[0, 0], dtype=torch.bool).tril() if mask is None else mask
        mixed = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value
        return self.o_proj(mixed.transpose(1, 2).flatten(-2))


class StockLayer(nn.Module):
    """A decoder layer of a make: x `[B, S, width]` to the same."""

    def __init__(self, make: str, sizes: dict, feed_forward: int, eps: float) -> None:
        super().__init__()
        self.make, width = make, sizes["width"]
        norm, activation, biases, qk_norm, names = MAKES[make]
        norms = {"whole": qk_norm == "row", "make": lambda n: norm(n, eps)} if qk_norm else None
        sizes = sizes | {"interleaved": make in ("gptj", "cohere")}
        self.self_attn = StockAttention(sizes, biases[:2], norms)
        self.mlp = StockMlp(width, feed_forward, activation, biases[2])
        for name in names:
            self.add_module(name, norm(width, eps))

    def forward(
        self, x: Tensor, tables: tuple[Tensor, Tensor] | None, mask: Tensor | None = None
    ) -> Tensor:
        if self.make in ("gptj", "cohere"):
            h = self.input_layernorm(x)
            return x + self.self_attn(h, tables, mask) + self.mlp(h)
        if self.make == "olmo2":
            x = x + self.post_attention_layernorm(self.self_attn(x, tables, mask))
            return x + self.post_feedforward_layernorm(self.mlp(x))
        attended = self.self_attn(self.input_layernorm(x), tables, mask)
        if self.make in ("gemma2", "gemma3"):
            x = x + self.post_attention_layernorm(attended)
            fed = self.mlp(self.pre_feedforward_layernorm(x))
            return x + self.post_feedforward_layernorm(fed)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x))


def _rms(width: int, eps: float) -> nn.Module:
    return nn.RMSNorm(width, eps)


def _layer_without_bias(width: int, eps: float) -> nn.Module:
    return nn.LayerNorm(width, eps, bias=False)


NONE, SOME, ALL = (False, False, False), (True, False, False), (True, True, True)
TWO = ("input_layernorm", "post_attention_layernorm")
FOUR = (*TWO, "pre_feedforward_layernorm", "post_feedforward_layernorm")
# The norm, the activation, biases (q, k, v; o; feed-forward), the norm of q and k, and of what.
MAKES = {
    "llama": (_rms, "swiglu", NONE, None, TWO),
    "mistral": (_rms, "swiglu", NONE, None, TWO),
    "phi3": (_rms, "swiglu", NONE, None, TWO),
    "qwen2": (_rms, "swiglu", SOME, None, TWO),
    "qwen3": (_rms, "swiglu", NONE, "head", TWO),
    "gemma": (GemmaNorm, "geglu_tanh", NONE, None, TWO),
    "gemma2": (GemmaNorm, "geglu_tanh", NONE, None, FOUR),
    "gemma3": (GemmaNorm, "geglu_tanh", NONE, "head", FOUR),
    "olmo2": (_rms, "swiglu", NONE, "row", (TWO[1], FOUR[3])),
    "gpt2": (nn.LayerNorm, "gelu_tanh", ALL, None, TWO),
    "gptj": (nn.LayerNorm, "gelu_tanh", (False, False, True), None, TWO[:1]),
    "cohere": (_layer_without_bias, "swiglu", NONE, None, TWO[:1]),
}
