"""Random operands: fresh normal numbers, never zeros, whose products keep a size near one."""

from __future__ import annotations

import torch

Tensor = torch.Tensor


class Draw:
    """Draws tensors of one dtype on one device, from a seed."""

    def __init__(self, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        self.dtype, self.device = dtype, device
        self.generator = torch.Generator(device).manual_seed(seed)

    def normal(self, rows: int, columns: int, scale: float = 1.0) -> Tensor:
        """[rows, columns], normal, of standard deviation `scale`."""
        drawn = torch.empty(rows, columns, dtype=self.dtype, device=self.device)
        return drawn.normal_(0.0, scale, generator=self.generator)

    def weight(self, rows: int, columns: int, inner: int | None = None) -> Tensor:
        """[rows, columns]; a product with it over `inner` (the columns) keeps the size."""
        return self.normal(rows, columns, (inner or columns) ** -0.5)

    def row(self, columns: int) -> Tensor:
        """[columns], weights of a norm: around one."""
        return 1.0 + 0.3 * self.normal(1, columns)[0]

    def powers(self, count: int) -> Tensor:
        """[count], ½, 1 or 2: a factor that rounds nothing, so it may be taken in anywhere."""
        return 2.0 ** (self.whole(count, 3) - 1).to(self.dtype)

    def whole(self, count: int, below: int) -> Tensor:
        """[count], whole numbers from 0."""
        return torch.randint(below, (count,), generator=self.generator, device=self.device)

    def angles(self, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        """cos and sin, [rows, columns]: rotary tables."""
        frequencies = 1e4 ** -torch.linspace(0, 1, columns, device=self.device)
        angles = torch.arange(rows, device=self.device)[:, None] * frequencies
        return angles.cos().to(self.dtype), angles.sin().to(self.dtype)
