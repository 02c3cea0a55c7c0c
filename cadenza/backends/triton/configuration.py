"""How a kernel's tiles are cut, and which cut is taken where nothing has been measured.

A default depends on a few facts of the kernel and on the target alone. It is the largest tile that
the target's compiler fits into registers and shared memory with an epilogue of that weight; a test
compiles every kernel of every built-in block with it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from cadenza.backends.triton.target import Target

if TYPE_CHECKING:
    from cadenza.backends.triton.source import Source
    from cadenza.core.ir import Node


@dataclass(frozen=True)
class Configuration:
    """Rows BM, columns BN and depth BK of a tile, warps, stages; the parts of an epilogue.

    `group` is how many row tiles are taken together; `descriptors` whether operands are brought
    in by tensor descriptors where the device and the operands allow it, `boxes` which of an
    epilogue's matrices ("load", "store") are moved so too. `pingpong` is Hopper's template, whose
    epilogues run under the next tile's product; what it can't take goes to the usual one. With
    `together` its consumers take neighbouring tiles of the same rows at a time, which come from
    memory once: fewer bytes for each product, and no product under an epilogue. `library` is
    torch's product instead, with a pointwise kernel behind it.
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
    pingpong: bool = False
    together: bool = False
    library: bool = False

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


class Facts(NamedTuple):
    """What the default of a product kernel depends on.

    `itemsize` is the bytes of an operand's number; `weight` how many matrices, vectors and
    partials its epilogue moves; `near` whether columns are paired within a tile, `half` whether the
    product is joined to pairs; `lanes` and `unit` are the source's. M, N and K are the product's
    sizes, None where only a call knows them.
    """

    itemsize: int
    weight: int
    near: bool
    half: bool
    lanes: int
    unit: int
    M: int | None
    N: int
    K: int | None

    @staticmethod
    def of(source: Source, product: Node, itemsize: int) -> Facts:
        """The facts of an emitted kernel."""
        layout, left = source.layout, product.inputs[0]
        turned = product.attributes["transpose_a"]
        rows, columns = (_known(size) for size in product.type[:2])
        depth = _known(left.type.rows if turned else left.type.columns)
        near = layout.lanes == 2 and 2 * int(layout.pairs or 0) < layout.width
        assert columns is not None
        weight = len(source.arguments)
        return Facts(
            itemsize, weight, near, layout.product_is_half, layout.lanes, source.unit,
            rows, columns, depth,
        )  # fmt: skip


def _known(size: Any) -> int | None:
    return int(size) if isinstance(size, int) else None


def default(facts: Facts, target: Target) -> Configuration:
    """The configuration of a product kernel on a target where none has been measured."""
    if not target.backend:
        return INTERPRETED
    cuts = DEFAULTS[family(target)]
    if facts.unit > 1:
        cut = cuts.whole_grouped if facts.itemsize == 4 else cuts.grouped
    elif facts.itemsize == 4:
        cut = cuts.nearest if target.tf32 else cuts.whole
    elif facts.near or facts.half:
        cut = cuts.near if facts.near else cuts.half
    else:
        cut = next((c for most, c in cuts.steps if facts.weight <= most), cuts.heavy)
        if facts.weight > SPARE and facts.N % cut.BN:
            cut = cuts.heavy
    return shrunk(cut, facts)


def shrunk(cut: Configuration, facts: Facts) -> Configuration:
    """The configuration for sizes that don't fill it: fewer rows, columns and parts, less depth."""
    BN = min(cut.BN, max(_power(facts.N), 16 * facts.lanes))
    deep = cut.BK * (2 if facts.itemsize == 1 else 1)  # as many bytes
    BK = deep if facts.K is None else min(deep, max(_power(facts.K), LEAST))
    BM = cut.BM if facts.M is None else min(cut.BM, max(_power(facts.M), LEAST))
    parts = max(1, min(cut.parts, BN // (16 * facts.lanes)))
    warps = cut.warps if BM * BN * 2 > cut.BM * cut.BN else max(4, cut.warps // 2)
    return replace(cut, BM=BM, BN=BN, BK=BK, parts=parts, warps=warps)


def _power(count: int) -> int:
    """The least power of two that is not less."""
    return 1 << max(0, count - 1).bit_length()


def strip(width: int, unit: int, holds: bool, lanes: int = 1) -> Strip:
    """How a kernel without a product goes over `width` columns of each of its lanes.

    It may have to hold whole rows.
    """
    across = _power(width)
    if holds:
        warps = 4 if across * lanes <= 4096 else 8
        found = Strip(BM=max(1, 4096 // across), W=across, warps=warps)
    else:
        # An H200 moves most bytes a second with rows of 512 bytes and little of each program; with
        # sums over groups of columns that many don't fit the registers.
        found = Strip(BM=8, W=max(16, min(across, 256 if unit == 1 else 128)), warps=4)
    return replace(found, W=max(found.W, unit))


class Defaults(NamedTuple):
    """A target's defaults: by the weight of the epilogue up to which each holds, lightest first.

    `heavy` is for those above, `near` for pairs within a tile, `half` for a product that is joined
    to pairs, `grouped` for sums over groups of
    columns, `nearest` for products of float32 whose factors are rounded to tf32, `whole` for others
    of float32, `whole_grouped` for float32 with such sums.
    """

    steps: tuple[tuple[int, Configuration], ...]
    heavy: Configuration
    near: Configuration
    half: Configuration
    grouped: Configuration
    nearest: Configuration
    whole: Configuration
    whole_grouped: Configuration


def family(target: Target) -> str:
    """Which defaults a target has."""
    if target.backend == "hip":
        return "amd"
    if isinstance(target.arch, int) and 90 <= target.arch < 120:
        return "hopper" if target.arch < 100 else "blackwell"
    return "ampere" if target.shared > 160_000 else "workstation"


SPARE = 3  # the weight above which masks of columns no longer fit the registers
LEAST = 16  # rows, columns and depth of the smallest product of matrices
INTERPRETED = Configuration(BM=16, BN=64, BK=16, warps=4, stages=2)
DEFAULTS = {
    "hopper": Defaults(
        (
            (2, Configuration(128, 256, 64, warps=8, stages=3, parts=2)),
            (3, Configuration(128, 256, 64, warps=8, stages=3, parts=4)),
            (7, Configuration(128, 256, 64, warps=8, stages=3, parts=8, boxes=("load",))),
        ),
        heavy=Configuration(128, 128, 64, warps=8, stages=4, parts=4, boxes=("load",)),
        near=Configuration(128, 128, 64, warps=8, stages=4, parts=2, boxes=("load",)),
        # An H200 reads the saved halves faster by pointers.
        half=Configuration(128, 128, 64, warps=8, stages=4, parts=4),
        grouped=Configuration(128, 128, 64, warps=8, stages=4, boxes=("load",)),
        nearest=Configuration(128, 128, 32, warps=8, stages=4, parts=4, boxes=("load",)),
        whole=Configuration(64, 64, 32, warps=4, stages=2, parts=2),
        whole_grouped=Configuration(32, 128, 32, warps=4, stages=2),
    ),
    "ampere": Defaults(
        (
            (1, Configuration(128, 256, 32, warps=8, stages=3, parts=2)),
            (8, Configuration(128, 128, 32, warps=8, stages=4, parts=2)),
        ),
        heavy=Configuration(128, 64, 64, warps=8, stages=3, parts=2),
        near=Configuration(128, 128, 32, warps=8, stages=4, parts=2),
        half=Configuration(128, 64, 64, warps=8, stages=3, parts=2),
        grouped=Configuration(64, 128, 64, warps=8, stages=3),
        nearest=Configuration(64, 64, 32, warps=4, stages=3, parts=4),
        whole=Configuration(64, 64, 32, warps=4, stages=2, parts=2),
        whole_grouped=Configuration(32, 128, 32, warps=4, stages=2),
    ),
    "amd": Defaults(
        ((2, Configuration(128, 128, 32, warps=8, stages=2)),),
        heavy=Configuration(128, 64, 64, warps=8, stages=2),
        near=Configuration(128, 64, 64, warps=8, stages=2),
        half=Configuration(128, 64, 64, warps=8, stages=2),
        grouped=Configuration(64, 128, 64, warps=8, stages=2),
        nearest=Configuration(64, 64, 32, warps=4, stages=2),
        whole=Configuration(64, 64, 32, warps=4, stages=2),
        whole_grouped=Configuration(16, 128, 32, warps=4, stages=2),
    ),
}
DEFAULTS["workstation"] = DEFAULTS["ampere"]._replace(
    steps=(
        (1, Configuration(128, 256, 32, warps=8, stages=3, parts=2)),
        (7, Configuration(128, 128, 64, warps=8, stages=2, parts=2)),
        (8, Configuration(128, 128, 32, warps=8, stages=3, parts=4)),
    ),
    near=Configuration(128, 128, 32, warps=8, stages=3, parts=2, boxes=("load",)),
)
DEFAULTS["blackwell"] = DEFAULTS["hopper"]._replace(
    grouped=Configuration(32, 128, 64, warps=8, stages=4),
    nearest=Configuration(128, 128, 32, warps=8, stages=3, parts=4),  # 4 stages, or boxes, spill
)
