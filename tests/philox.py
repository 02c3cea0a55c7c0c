"""Philox 4x32-10 as in Salmon et al., 2011, on Python's whole numbers: the oracle of `L.random`."""

import torch


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """The four words of one block."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        first, second = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1 = second >> 32 ^ c1 ^ k0, second & 0xFFFFFFFF
        c2, c3 = first >> 32 ^ c3 ^ k1, first & 0xFFFFFFFF
        k0, k1 = k0 + 0x9E3779B9 & 0xFFFFFFFF, k1 + 0xBB67AE85 & 0xFFFFFFFF
    return c0, c1, c2, c3


def uniform(seed: int, rows: int, columns: int) -> torch.Tensor:
    """[rows, columns] at float64: 24 bits of the block of (column, row) under the key `seed`."""
    key = (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF)
    words = [
        [philox((column, row & 0xFFFFFFFF, row >> 32, 0), key)[0] for column in range(columns)]
        for row in range(rows)
    ]
    bits = torch.tensor(words, dtype=torch.int64).reshape(rows, columns) >> 8
    return bits.double() / 2**24
