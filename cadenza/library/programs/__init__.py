"""The library's programs, each over `lang`: products and blocks whose operands are optional."""

from __future__ import annotations

from cadenza.library.programs.decoder import decoder_block, feed_forward
from cadenza.library.programs.projection import linear, norm, qkv_projection

__all__ = ["decoder_block", "feed_forward", "linear", "norm", "qkv_projection"]
