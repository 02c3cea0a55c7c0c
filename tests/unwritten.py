"""Memory that nobody has written reads as NaN: what a computation leaves out then shows."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.utils.deterministic


@contextmanager
def unwritten_is_nan() -> Iterator[None]:
    """Inside, each new tensor that torch leaves as it is, `torch.empty`, is NaN or the largest."""
    before = torch.are_deterministic_algorithms_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = filled
        torch.use_deterministic_algorithms(before)
