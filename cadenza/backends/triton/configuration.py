"""How a kernel's tiles are cut, and which cut is taken where nothing has been measured."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Configuration:
    """Rows BM, columns BN and depth BK of a tile, warps, stages; the parts of an epilogue.

    `group` is how many row tiles are taken together; `descriptors` whether operands are brought
    in by tensor descriptors where the device and the operands allow it, `boxes` which of an
    epilogue's matrices ("load", "store") are moved so too.
    """

    BM: int = 128
    BN: int = 128
    BK: int = 64
    warps: int = 8
    stages: int = 3
    parts: int = 1
    group: int = 8
    descriptors: bool = True
    boxes: tuple[str, ...] = ()

    def fitted(self, lanes: int, unit: int) -> Configuration | None:
        """The configuration with parts that hold whole groups of `unit` columns; None if none."""
        for parts in (self.parts, *(p for p in (4, 2, 1) if p < self.parts)):
            width = self.BN // (lanes * parts)
            if width >= unit and width >= 1:
                return replace(self, parts=parts)
        return replace(self, BN=unit * lanes, parts=1) if unit * lanes <= 256 else None

    def width(self, lanes: int) -> int:
        """Columns of a lane of a part."""
        return self.BN // (self.parts * lanes)


@dataclass(frozen=True)
class Strip:
    """How a kernel without a product goes over its matrices: BM rows by W columns at a time."""

    BM: int = 32
    W: int = 128
    warps: int = 4
    programs: int = 0  # along the rows; 0 for as many as fill the device


SMALL = Configuration(BM=16, BN=64, BK=16, warps=4, stages=2)
