"""The language's random numbers: Philox 4x32-10 by counters, in torch's integer arithmetic.

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). The counter is
(column, row, row >> 32, 0), the key is the 64-bit seed; the number is the upper 24 bits of the
first word, over 2**24.
"""

from __future__ import annotations

import torch

MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
Word = torch.Tensor | int


def _multiply(word: Word, multiplier: int) -> tuple[Word, Word]:
    """Upper and lower 32 bits of a product; int64 wraps, which keeps all 64 bits."""
    product = torch.as_tensor(word) * multiplier
    return (product >> 32) & MASK, product & MASK


def philox(counter: tuple[Word, Word, Word, Word], key: tuple[Word, Word]) -> tuple[Word, ...]:
    """Four 32-bit words (as int64) from four counter words and two key words."""
    c0, c1, c2, c3 = counter
    for round_number in range(10):
        k0, k1 = ((k + round_number * w) & MASK for k, w in zip(key, WEYL, strict=True))
        high0, low0 = _multiply(c0, MULTIPLIERS[0])
        high1, low1 = _multiply(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
    return c0, c1, c2, c3


def uniform(seed: torch.Tensor | int, rows: int, columns: int, like: torch.Tensor) -> torch.Tensor:
    """Numbers in [0, 1) of shape [rows, columns], on the device and in the dtype of `like`."""
    row = torch.arange(rows, device=like.device)[:, None]
    column = torch.arange(columns, device=like.device)[None, :]
    word = philox((column, row & MASK, row >> 32, 0), (seed & MASK, (seed >> 32) & MASK))[0]
    bits = torch.as_tensor(word).expand(rows, columns) >> 8
    return bits.to(like.dtype) * 2.0**-24
