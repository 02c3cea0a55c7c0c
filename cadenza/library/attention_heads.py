"""The heads of one tensor of queries, keys and values."""

from __future__ import annotations

from numbers import Integral
from operator import index
from typing import NamedTuple

from torch import Tensor

from cadenza.core.errors import ProgramError

Parts = tuple[Tensor, Tensor, Tensor]


class Heads(NamedTuple):
    """How many heads of queries there are, how many of keys and of values, and their columns."""

    queries: int
    keys: int
    columns: int

    @staticmethod
    def of(qkv: Tensor, queries: int, keys: int) -> Heads:
        """Those of qkv `[B, S, (queries + 2 · keys) · columns]`; ProgramError where none fit."""
        whole = is_whole(queries) and is_whole(keys)
        fits = whole and min(queries, keys) > 0 and queries % max(keys, 1) == 0
        fits = fits and isinstance(qkv, Tensor) and qkv.dim() == 3
        if not fits or qkv.shape[2] % (queries + 2 * keys):
            shape = list(qkv.shape) if isinstance(qkv, Tensor) else f"a {type(qkv).__name__}"
            raise ProgramError(
                "causal_attention of heads that don't fit",
                found=f"qkv {shape}, heads={queries!r}, key_value_heads={keys!r}",
                expected="[B, S, (heads + 2 * key_value_heads) * head_dim], and heads a multiple "
                "of key_value_heads",
                write="qkv as qkv_projection returns it, of x [B, S, D]",
            )
        # Where sizes are symbols, those of a head are not: `index` makes them numbers.
        return Heads(index(queries), index(keys), index(qkv.shape[2] // (queries + 2 * keys)))

    @property
    def grouped(self) -> bool:
        """Whether several query heads share a head of keys and values."""
        return self.queries != self.keys

    @property
    def group(self) -> int:
        """Query heads of each head of keys and values."""
        return self.queries // self.keys

    def apart(self, qkv: Tensor) -> Parts:
        """Views `[..., heads, columns]` of queries, keys and values `[..., N]`."""
        parts = qkv.unflatten(-1, (-1, self.columns))
        query, key, value = parts.split((self.queries, self.keys, self.keys), dim=-2)
        return query, key, value

    def by_head(self, qkv: Tensor) -> Parts:
        """Views `[B, heads, S, columns]` of queries, keys and values `[B, S, N]`."""
        query, key, value = (part.transpose(1, 2) for part in self.apart(qkv))
        return query, key, value


def is_whole(number: object) -> bool:
    """Whether this is a whole number of Python's or NumPy's, which True is not."""
    return isinstance(number, (int, Integral)) and not isinstance(number, bool)
