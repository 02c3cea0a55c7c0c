"""Modules over Cadenza's programs, with the parameter names and shapes of stock models."""

from __future__ import annotations

from cadenza.library.nn.architecture import Architecture
from cadenza.library.nn.decoder import Attention, DecoderLayer
from cadenza.library.nn.feed_forward import FeedForward
from cadenza.library.nn.linear import Linear
from cadenza.library.nn.losses import LinearCrossEntropy
from cadenza.library.nn.norms import LayerNorm, RMSNorm

__all__ = [
    "Architecture", "Attention", "DecoderLayer", "FeedForward", "LayerNorm", "Linear",
    "LinearCrossEntropy", "RMSNorm",
]  # fmt: skip
