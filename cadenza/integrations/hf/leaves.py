"""What norms and activations compute, found by running them on a few numbers.

Their code runs with small weights in place of its own, on a CPU and in float64, so nothing is asked
of a device and a module's own weights are not touched.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cadenza.integrations.hf.plan import EPS, NormKind
from cadenza.integrations.hf.standin import StandIn
from cadenza.library.programs.parts import PLAIN

WIDTH = 8
GATED = {"silu": "swiglu", "gelu": "geglu", "gelu_tanh": "geglu_tanh", "relu": "reglu"}
ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}
assert set(ACTIVATIONS) == set(PLAIN)


def close(found: Tensor, expected: Tensor) -> bool:
    """Whether two results are the same up to float32's rounding, which models do in places.

    By the Frobenius norm: what norms divide by is small in places, and makes rounding large there.
    """
    if found.shape != expected.shape:
        return False
    return bool((found - expected).double().norm() <= 1e-5 * expected.double().norm())


def drawn(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Numbers that nobody else's random state depends on, float64."""
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(shape, generator=generator, dtype=torch.float64)


def norm_kind(module: nn.Module) -> NormKind | None:
    """The norm that a module is, None for one that programs don't know."""
    x = drawn(3, WIDTH, seed=1, scale=0.02)  # so small that eps matters
    small = small_norm(module)
    if isinstance(module, nn.LayerNorm):
        expected = F.layer_norm(x, (WIDTH,), small.weight, small.bias, module.eps)
        known = len(module.normalized_shape) == 1 and module.weight is not None
        return NormKind("layer", 0.0, module.eps) if known and close(small(x), expected) else None
    if [*module._parameters] != ["weight"] or module.weight is None or module.weight.dim() != 1:
        return None
    for eps in (getattr(module, name, None) for name in EPS):
        for offset in (0.0, 1.0):
            if isinstance(eps, float) and close(
                small(x), F.rms_norm(x, (WIDTH,), small.weight + offset, eps)
            ):
                return NormKind("rms", offset, eps)
    return None


def small_norm(module: nn.Module, width: int = WIDTH, seed: int = 2) -> Any:
    """The norm's own code over another, small weight."""
    shift = 0.5 * drawn(width, seed=seed + 1) if getattr(module, "bias", None) is not None else None
    return StandIn(
        module, weight=1.0 + 0.5 * drawn(width, seed=seed), bias=shift, normalized_shape=(width,)
    )


def activation_name(module: Any, gated: bool) -> str | None:
    """The name by which programs know an activation, None for one that they don't."""
    x = drawn(64, seed=3, scale=3.0)
    for name, function in ACTIVATIONS.items():
        if close(module(x), function(x)) and (not gated or name in GATED):
            return GATED[name] if gated else name
    return None
