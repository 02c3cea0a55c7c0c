"""The published sizes of dense Llama 3 and Qwen 3, and models of those sizes with new weights."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn

from cadenza.library.models.decoder import Decoder, initialise
from cadenza.library.models.decoder_config import DecoderConfig
from cadenza.library.rotary import Rotary

Model = TypeVar("Model", bound=nn.Module)


def _llama3(
    width: int, feed_forward: int, layers: int, heads: int, head_dim: int, factor: float
) -> DecoderConfig:
    """A Llama; the two small ones are tied and stretch their rotary frequencies by 32."""
    rotary = Rotary(
        head_dim, 500000.0, "llama3", factor, low_frequency_factor=1.0, high_frequency_factor=4.0,
        original_context=8192,
    )  # fmt: skip
    return DecoderConfig(
        family="llama", vocabulary=128256, width=width, layers=layers, heads=heads,
        key_value_heads=8, feed_forward=feed_forward, head_dim=head_dim, context=131072,
        rotary=rotary, eps=1e-5, tied=factor == 32.0,
    )  # fmt: skip


def _qwen3(
    width: int, feed_forward: int, layers: int, heads: int, *, tied: bool = False
) -> DecoderConfig:
    return DecoderConfig(
        family="qwen3", vocabulary=151936, width=width, layers=layers, heads=heads,
        key_value_heads=8, feed_forward=feed_forward, head_dim=128, context=40960,
        rotary=Rotary(128, 1e6), eps=1e-6, tied=tied,
    )  # fmt: skip


LLAMA3 = {
    "1B": _llama3(2048, 8192, 16, 32, 64, 32.0),  # 3.2
    "3B": _llama3(3072, 8192, 28, 24, 128, 32.0),  # 3.2
    "8B": _llama3(4096, 14336, 32, 32, 128, 8.0),  # 3.1
    "70B": _llama3(8192, 28672, 80, 64, 128, 8.0),  # 3.1
    "405B": _llama3(16384, 53248, 126, 128, 128, 8.0),  # 3.1
}
QWEN3 = {
    "0.6B": _qwen3(1024, 3072, 28, 16, tied=True),
    "1.7B": _qwen3(2048, 6144, 28, 16, tied=True),
    "4B": _qwen3(2560, 9728, 36, 32, tied=True),
    "8B": _qwen3(4096, 12288, 36, 32),
    "14B": _qwen3(5120, 17408, 40, 40),
    "32B": _qwen3(5120, 25600, 64, 64),
}


def llama3(
    size: str, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> Decoder:
    """A dense Llama 3 with new weights: "1B", "3B" of Llama 3.2, "8B", "70B", "405B" of Llama 3.1.

    On `device` and in `dtype`, by default torch's own. `device="meta"` takes no memory: to count
    parameters, or to be filled. Raises ValueError, naming the sizes, for another one.
    """
    return build(Decoder, _named("llama3", LLAMA3, size), device=device, dtype=dtype)


def qwen3(
    size: str, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> Decoder:
    """A dense Qwen 3 with new weights: "0.6B", "1.7B", "4B", "8B", "14B" or "32B".

    On `device` and in `dtype`, as `llama3`. Raises ValueError, naming the sizes, for another one.
    """
    return build(Decoder, _named("qwen3", QWEN3, size), device=device, dtype=dtype)


def _named(family: str, sizes: dict[str, DecoderConfig], size: str) -> DecoderConfig:
    if size not in sizes:
        raise ValueError(f"no {family} of size {size!r}: choose one of {', '.join(sizes)}")
    return sizes[size]


def build(
    kind: type[Model],
    config: DecoderConfig,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    drawn_on: torch.device | str | None = None,
) -> Model:
    """A model of that kind with new weights: those of `initialise`, drawn on `drawn_on`."""
    model = empty(kind, config, device=device, dtype=dtype)
    initialise(model, drawn_on)
    return model


def empty(
    kind: type[Model],
    config: DecoderConfig,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Model:
    """A model of that kind whose weights hold anything, made without drawing any."""
    with torch.device("meta"):
        model = kind(config)
    # Emptied weights are new ones, so the tied ones are tied again.
    model = model.to(dtype or torch.get_default_dtype())
    model = model.to_empty(device=device or torch.get_default_device())
    model.tie()
    return model
