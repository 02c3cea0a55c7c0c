"""Rotary tables: cosine and sine of every position and frequency, from a model's configuration.

Angles are computed in float64 and rounded once, so tables don't limit a model in float64, nor long
contexts. Position ids are tensors, so packed sequences restart where their ids do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cadenza.core.arguments import is_whole
from cadenza.core.errors import ProgramError
from cadenza.library.arguments import checked

Total = int | Tensor  # torch.compile may have left open which number
SCALINGS = ("default", "linear", "llama3")


@checked
@dataclass(frozen=True)
class Rotary:
    """Rotary frequencies of a model, float64 `[columns / 2]`.

    `columns` of each head rotate. Pair i turns by position · fᵢ, fᵢ = base^(−2i / columns), then

    - scaling "linear": fᵢ / factor;
    - scaling "llama3": fᵢ where it turns more than `high_frequency_factor` times in
      `original_context` positions, fᵢ / factor where it turns less than `low_frequency_factor`
      times, and between them the two in proportion (Llama 3.1).

    Raises ProgramError for arguments of a wrong kind, and ValueError, naming the cure, where they
    are no frequencies.
    """

    columns: int
    base: float = 10000.0
    scaling: str = "default"
    factor: float = 1.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_context: int = 8192

    def __post_init__(self) -> None:
        if self.columns < 2 or self.columns % 2:
            raise ValueError(
                f"rotary embedding of {self.columns} columns: choose an even number from 2 on"
            )
        if self.scaling not in SCALINGS:
            raise ValueError(
                f"rotary scaling {self.scaling!r} is not supported: choose one of "
                f"{', '.join(SCALINGS)}, or make cos and sin yourself"
            )
        if not (self.base > 0 and self.factor > 0 and self.original_context > 0):
            raise ValueError(
                f"rotary base {self.base}, factor {self.factor} and original_context "
                f"{self.original_context} must be positive"
            )
        if not 0 < self.low_frequency_factor < self.high_frequency_factor:
            raise ValueError(
                f"low_frequency_factor {self.low_frequency_factor} must be positive and below "
                f"high_frequency_factor {self.high_frequency_factor}"
            )

    @classmethod
    def of(cls, config: Any) -> Rotary:
        """What a Hugging Face configuration says, an object or a mapping with its names.

        Reads head_dim (or hidden_size / num_attention_heads), rope_theta, rotary_dim or
        partial_rotary_factor, and rope_scaling or rope_parameters. Raises ValueError for a scaling
        or a form that is not supported.
        """
        given = config if isinstance(config, Mapping) else _Attributes(config)
        rope = given.get("rope_parameters") or given.get("rope_scaling") or {}
        if any(isinstance(value, Mapping) for value in rope.values()):
            raise ValueError(
                f"rotary parameters for each kind of layer ({', '.join(rope)}): make one "
                "Rotary(columns, base, ...) for each"
            )
        scaling = str(rope.get("rope_type", rope.get("type", "default")))
        return cls(
            _columns(given, rope),
            float(rope.get("rope_theta", given.get("rope_theta") or 10000.0)),
            scaling,
            **{own: kind(rope[name]) for name, (own, kind) in NAMES.items() if name in rope},
        )

    def frequencies(self, device: torch.device | str | None = None) -> Tensor:
        """Radians a position, float64 `[columns / 2]`, the fastest first."""
        exponents = torch.arange(0, self.columns, 2, dtype=torch.float64, device=device)
        plain = self.base ** -(exponents / self.columns)
        if self.scaling == "default":
            return plain
        if self.scaling == "linear":
            return plain / self.factor
        turns = self.original_context * plain / (2 * math.pi)
        low, high = self.low_frequency_factor, self.high_frequency_factor
        kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
        return plain * (kept + (1.0 - kept) / self.factor)


# What Hugging Face calls the numbers of a scaling.
NAMES = {
    "factor": ("factor", float),
    "low_freq_factor": ("low_frequency_factor", float),
    "high_freq_factor": ("high_frequency_factor", float),
    "original_max_position_embeddings": ("original_context", int),
}


class _Attributes:
    """An object's attributes as a mapping has its values."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def get(self, name: str) -> Any:
        """The attribute, None if there is none."""
        return getattr(self.config, name, None)


def _columns(config: Any, rope: Mapping[str, Any]) -> int:
    """How many columns of a head rotate."""
    if config.get("rotary_dim"):
        return int(config.get("rotary_dim"))
    head_dim = config.get("head_dim")
    if not head_dim:
        width, heads = config.get("hidden_size"), config.get("num_attention_heads")
        if not width or not heads:
            raise ValueError(
                "a configuration without head_dim, or hidden_size and num_attention_heads: "
                "make a Rotary(columns, base) instead"
            )
        head_dim = width // heads
    part = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    return int(head_dim * (1.0 if part is None else part))


@checked
def rotary_tables(
    config: Any, positions: Tensor, *, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """cos and sin of each position and frequency: position ids `[...]` to two `[..., R]`.

        cos[..., i] = cos(position · fᵢ), sin[..., i] = sin(position · fᵢ), fᵢ as `Rotary` says

    `config` is a `Rotary`, or a Hugging Face configuration (see `Rotary.of`); R is half of the
    columns that rotate. Computed in float64 on the positions' device and rounded to `dtype` once;
    programs take float32 tables beside bfloat16 values. Raises ValueError for a scaling that is not
    supported, and TypeError for positions that are no whole numbers.
    """
    if not _is_whole(positions):
        raise TypeError(f"positions of {positions.dtype}: give whole numbers, positions.long()")
    rotary = config if isinstance(config, Rotary) else Rotary.of(config)
    angles = positions.to(torch.float64)[..., None] * rotary.frequencies(positions.device)
    return angles.cos().to(dtype), angles.sin().to(dtype)


@checked
def packed_positions(cumulative_lengths: Tensor, total: Total) -> Tensor:
    """The position of each token in its own sequence, int64 `[total]`, for packed sequences.

    `cumulative_lengths` `[sequences + 1]` are where sequences start, and where the last one ends.
    Tokens behind that end count from 0 again. Raises ProgramError, a TypeError, for lengths that
    are no whole numbers in one dimension, and for a total below 0.
    """
    if not torch.compiler.is_compiling():  # a total may be open there
        _check_packed(cumulative_lengths, total)
    index = torch.arange(total, device=cumulative_lengths.device)
    return index - cumulative_lengths[packed_sequences(cumulative_lengths, total)]


def _is_whole(value: Tensor) -> bool:
    return not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)


def _check_packed(lengths: Tensor, total: Total) -> None:
    alone = total.dim() == 0 and _is_whole(total) if isinstance(total, Tensor) else is_whole(total)
    known = lengths.dim() == 1 and _is_whole(lengths) and alone and 0 <= int(total) < 2**63
    if not known:
        raise ProgramError(
            "packed_positions",
            found=f"cumulative_lengths {lengths.dtype} {list(lengths.shape)}, total={total!r:.40}",
            expected="whole numbers [sequences + 1], and at least 0 tokens",
            write="cumulative_lengths=torch.tensor([0, 3, 8]), total=8",
        )


def packed_sequences(cumulative_lengths: Tensor, total: Total) -> Tensor:
    """The number of the sequence that each token belongs to, int64 `[total]`."""
    index = torch.arange(total, device=cumulative_lengths.device)
    return torch.searchsorted(cumulative_lengths[1:].to(torch.int64), index, right=True)
