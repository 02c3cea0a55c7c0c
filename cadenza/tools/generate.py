"""Text from a model: one token at a time, each from a full pass over the last window."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cadenza.tools.tokens import BYTES, Tokenizer

TEMPERATURE = 0.8


@torch.no_grad()
def generate(
    model: nn.Module, prompt: bytes, length: int, seed: int, tokenizer: Tokenizer = BYTES
) -> bytes:
    """The prompt (at least one token) and `length` more tokens, decided by the seed.

    `model` maps tokens `[1, S]` int64, S up to `model.config.context`, to logits `[1, S, V]`; those
    above the tokenizer's vocabulary are never drawn.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    tokens = tokenizer.encode(prompt).tolist()
    for _ in range(length):
        window = torch.tensor([tokens[-model.config.context :]], device=device)
        logits = model(window)[0, -1, : tokenizer.vocabulary]
        tokens.append(_draw(logits, generator))
    return tokenizer.decode(tokens)


def _draw(logits: Tensor, generator: torch.Generator) -> int:
    # On the CPU and in float64, so that the draw is the same whatever device made the logits.
    chances = torch.softmax(logits.detach().cpu().double() / TEMPERATURE, dim=0)
    return int(torch.multinomial(chances, 1, generator=generator))
