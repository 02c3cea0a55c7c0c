"""What exists between the steps of a plan, and what a step is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from cadenza.backends.triton.launch import Argument, Launcher
from cadenza.backends.triton.replay import Grid, Noted, Recording, multiply
from cadenza.backends.triton.source import Source
from cadenza.core.ir import Node

Tensor = torch.Tensor


@dataclass
class Memory:
    """What exists between steps. Vectors are 1-D; partials are [tiles, length]."""

    rows: int
    device: torch.device
    values: dict[Node, Tensor] = field(default_factory=dict)
    partials: dict[tuple[Node, str], Tensor] = field(default_factory=dict)
    recording: Recording | None = None
    places: dict[Node, Tensor] = field(default_factory=dict)  # of values that have one already

    def size(self, dim: Any) -> int:
        """A number of rows or columns."""
        return self.rows if dim == "M" else int(dim)

    def length(self, vector: Node) -> int:
        """How many numbers a vector has."""
        return self.size(vector.type.rows) * self.size(vector.type.columns)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """New memory."""
        tensor = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        if self.recording is not None:
            self.recording.allocated.append(tensor)
        return tensor

    def launch(self, launcher: Launcher, grid: Grid, given: Sequence[Argument]) -> None:
        """Runs a kernel."""
        launcher(grid, given, self.device)
        if self.recording is not None:
            self.recording.launches.append(Noted(launcher, grid, given))

    def multiply(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        """torch's product of a and b, summed in float32, as `out` has it."""
        multiply(a, b, out)
        if self.recording is not None:
            self.recording.launches.append(Noted(None, (0, 0), (a, b, out)))


class Step(ABC):
    """One thing that is done; `reason` says why it is not a template's kernel."""

    reason = ""
    recorded = False  # whether it only allocates and launches through Memory
    source: Source | None = None

    @abstractmethod
    def run(self, memory: Memory) -> None:
        """Does it."""
