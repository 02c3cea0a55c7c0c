"""Autocast as torch.nn.functional.linear has it: a program casts its products' operands itself."""

from __future__ import annotations

import contextlib
from typing import Any

import torch


def autocast_dtype(tensor: torch.Tensor) -> str | None:
    """The dtype that torch's autocast asks for on the tensor's device, None when it is off."""
    device = tensor.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):  # torch knows none for meta
        return None
    return str(torch.get_autocast_dtype(device)).removeprefix("torch.")


def without_autocast(tensor: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Programs decide their own dtypes: torch's casts are off while one runs."""
    device = tensor.device.type
    if torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return contextlib.nullcontext()
