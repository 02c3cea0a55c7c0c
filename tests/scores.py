"""The formula of attention, with every option, in plain operations of PyTorch."""

import torch
import torch.nn.functional as F
from torch import Tensor


def by_formula(
    qkv: Tensor, heads: int, key_value_heads: int, sequence: Tensor | None = None, **options
) -> Tensor:
    """softmax(scores) · v of each head, over what a token sees; options as causal_attention's."""
    head_dim = qkv.shape[-1] // (heads + 2 * key_value_heads)
    apart = qkv.unflatten(-1, (-1, head_dim)).transpose(1, 2)
    query, key, value = apart.split((heads, key_value_heads, key_value_heads), 1)
    key, value = (z.repeat_interleave(heads // key_value_heads, 1) for z in (key, value))
    scale, softcap = options.get("scale"), options.get("softcap")
    scores = query @ key.mT * (head_dim**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    seen = seen_tokens(qkv.shape[1], options.get("window"), sequence).to(qkv.device)
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    mixed = F.dropout(weights, options.get("dropout", 0.0)) @ value
    return mixed.transpose(1, 2).flatten(-2)


def seen_tokens(length: int, window: int | None = None, sequence: Tensor | None = None) -> Tensor:
    """Which tokens each token sees, `[length, length]`."""
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    if window is not None:
        seen = seen.triu(1 - window)
    return seen if sequence is None else seen & (sequence[:, None] == sequence).cpu()
