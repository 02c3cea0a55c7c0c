"""Operations for training code: what stands between a decoder's attention calls, and its loss.

Those with a `.plain` are programs over `lang`; the others are made of several, or of none.
"""

from __future__ import annotations

from cadenza.library.accumulate import accumulate_weight_gradient
from cadenza.library.attention import causal_attention
from cadenza.library.blocks import square_sum
from cadenza.library.cross_entropy import linear_cross_entropy
from cadenza.library.programs import (
    decoder_block,
    feed_forward,
    linear,
    norm,
    qkv_projection,
)
from cadenza.library.rotary import Rotary, packed_positions, rotary_tables

__all__ = [
    "Rotary", "accumulate_weight_gradient", "causal_attention", "decoder_block", "feed_forward",
    "linear", "linear_cross_entropy", "norm", "packed_positions", "qkv_projection",
    "rotary_tables", "square_sum",
]  # fmt: skip
