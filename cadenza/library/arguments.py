"""The kinds of arguments that only torch has, for functions and modules that take tensors."""

from __future__ import annotations

import torch

from cadenza.core.arguments import KINDS, Kind, Size, Sizes, checked

__all__ = ["Size", "Sizes", "checked"]

KINDS["Tensor"] = Kind(lambda value: isinstance(value, torch.Tensor), "a tensor")
KINDS["torch.dtype"] = Kind(lambda value: isinstance(value, torch.dtype), "a torch.dtype")
