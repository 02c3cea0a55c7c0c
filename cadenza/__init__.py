"""Cadenza: Transformer blocks as GEMM-epilogue programs, with derived gradients.

Public names are imported when they are first used, so that the command line answers without
loading torch. Importing anything here asks no device anything.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cadenza.core import lang
    from cadenza.integrations.hf import accelerate, revert
    from cadenza.library import models, nn, ops
    from cadenza.library.function import block, epilogue

__version__ = "0.1.0"
__all__ = ["accelerate", "block", "epilogue", "lang", "models", "nn", "ops", "revert"]

_HOME = {
    "accelerate": "cadenza.integrations.hf",
    "block": "cadenza.library.function",
    "epilogue": "cadenza.library.function",
    "lang": "cadenza.core",
    "models": "cadenza.library",
    "nn": "cadenza.library",
    "ops": "cadenza.library",
    "revert": "cadenza.integrations.hf",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'cadenza' has no attribute {name!r}")
    importlib.import_module("cadenza.backends")  # lang runs on tensors once torch is registered
    module = importlib.import_module(_HOME[name])
    value = getattr(module, name, None) or importlib.import_module(f"{_HOME[name]}.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
