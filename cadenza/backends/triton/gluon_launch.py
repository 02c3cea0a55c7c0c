"""Launches of products by Hopper's template; the plain template stands in for it.

Operands come in by tensor maps alone: where one can't be described, which is known only at the
launch, the kernel of the plain template runs instead. Both leave partials of 128 columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from cadenza.backends.triton.arguments import COLUMN_REDUCTIONS
from cadenza.backends.triton.body import Body
from cadenza.backends.triton.columns import Unsupported
from cadenza.backends.triton.configuration import Configuration
from cadenza.backends.triton.gluon_source import (
    BLOCK,
    COLUMNS,
    apart,
    cut_of,
    gluon_product_source,
)
from cadenza.backends.triton.launch import Argument, Descriptor
from cadenza.backends.triton.launches import TYPES, ProductLaunch, fits_descriptor, straight
from cadenza.backends.triton.memory import Memory
from cadenza.backends.triton.source import Source
from cadenza.core.ir import Node
from cadenza.core.ops import Op
from cadenza.core.plan import Kernel

if TYPE_CHECKING:
    from cadenza.backends.triton.program import Program

Tensor = torch.Tensor
REGISTERS = 168  # a thread of 384: then 240 for both consumers and 24 for the producer
HEAVY = Configuration(BM=128, BN=COLUMNS, BK=64, warps=4, stages=6, parts=4)
GROUPED = Configuration(BM=64, BN=COLUMNS, BK=64, warps=4, stages=6, parts=4)
LIGHT = Configuration(BM=192, BN=COLUMNS, BK=64, warps=4, stages=5, parts=4)


def default(source: Source) -> Configuration:
    """The tile that is taken where nothing is measured: as many rows as registers allow."""
    layout = source.layout
    loads = sum(a.role == "load" for a in source.arguments)
    if source.unit > 1 and loads > 1:  # sums of groups of columns, which whole parts wait for
        return GROUPED
    most = 0 if layout.lanes == 2 else 1
    near = layout.lanes == 2 and not apart(layout)
    return HEAVY if loads > most or near or heavy(source) else LIGHT


def heavy(source: Source) -> bool:
    """Whether an epilogue never leaves registers for three blocks of rows."""
    reduced = {a.node.op for a in source.arguments if a.role == "reduction"}
    columns = not reduced.isdisjoint((*COLUMN_REDUCTIONS, Op.LOGSUMEXP))
    return source.layout.product_is_half or columns


class SwizzledDescriptor(Descriptor):
    """A matrix of 16-bit numbers read in boxes that lie in shared memory as products read them."""

    __slots__ = ()

    def public(self) -> Any:
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        return TensorDescriptor(self.tensor, self.shape, self.strides, self.box, swizzled())


def swizzled() -> Any:
    """The layout in shared memory of a box with rows of 128 bytes."""
    # Triton is loaded where kernels are launched or compiled, not where plans are made.
    from triton.experimental.gluon.language import NVMMASharedLayout

    return NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


class GluonLaunch(ProductLaunch):
    """A product with its epilogue on Hopper; `otherwise` runs where operands can't be described."""

    def __init__(
        self, otherwise: ProductLaunch, kernel: Kernel, body: Body,
        text: tuple[str, str] = ("kernel", ""), cut: Configuration | None = None,
    ) -> None:  # fmt: skip
        assert otherwise.source is not None
        cut = replace(cut or default(otherwise.source), BN=COLUMNS)
        super().__init__(otherwise.source, otherwise.plan, kernel, cut, False)
        _check(self.plan, self.operands, otherwise)
        self.otherwise = otherwise
        if cut.together and self.column_tiles % 2:
            raise Unsupported(f"{self.column_tiles} tiles of columns, two at a time")
        source = self.source = gluon_product_source(body, *text, cut, self.depth)
        self.configuration = cut_of(source.layout, source.unit, cut)

    def tiles(self, memory: Memory, node: Node) -> int:
        if node.op in COLUMN_REDUCTIONS:  # one of each block, which is what an epilogue holds
            return -(-memory.size(self.product.type.rows) // BLOCK)
        return self.column_tiles

    def run(self, memory: Memory) -> None:
        a, ta = straight(memory.values[self.operands[0]], self.turned[0])
        b, tb = straight(memory.values[self.operands[1]], self.turned[1])
        if not (fits_descriptor(a) and fits_descriptor(b) and self.reaches(memory)):
            self.otherwise.run(memory)
            return
        rows, cut = memory.size(self.product.type.rows), self.configuration
        left, right = self._boxes(ta, tb)
        given: list[Argument] = [
            SwizzledDescriptor(a, a.shape, a.stride(), left),
            SwizzledDescriptor(b, b.shape, b.stride(), right),
            *self.arguments(memory), rows,
        ]  # fmt: skip
        if self.depth is None:
            given.append(a.shape[0] if ta else a.shape[1])
        turns = -(-rows // cut.BM) * self.column_tiles // self.abreast
        programs = min(turns, self.plan.programs(memory.device))
        memory.launch(self.launcher(TA=ta, TB=tb), (programs, 1), given)

    @property
    def kernels(self) -> Sequence[ProductLaunch]:
        return (self, self.otherwise)

    @property
    def abreast(self) -> int:
        """How many tiles are taken at a time, side by side."""
        return 2 if self.configuration.together else 1

    def reaches(self, memory: Memory) -> bool:
        """Whether offsets within a block of what is loaded fit 32 bits."""
        assert self.source is not None
        loads = (a.node for a in self.source.arguments if a.role == "load")
        return all(memory.values[n].stride(0) < 2**31 // BLOCK for n in loads)

    def _boxes(self, ta: bool, tb: bool) -> tuple[Sequence[int], Sequence[int]]:
        assert self.source is not None
        depth = self.configuration.BK
        width = COLUMNS // 2 if apart(self.source.layout) else COLUMNS
        return (depth, BLOCK) if ta else (BLOCK, depth), (width, depth) if tb else (depth, width)

    def signature(self, descriptors: bool = True) -> dict[str, str]:
        types = super().signature()
        for name, operand, box in zip("ab", self.operands, self._boxes(*self.turned), strict=True):
            element = TYPES[self.plan.dtypes[operand]]
            types[name] = f"tensordesc<{element}{list(box)},{swizzled()!r}>"
        return {n: text for n, text in types.items() if n not in ("a_stride", "b_stride")}

    def constants(self, descriptors: bool = True) -> dict[str, Any]:
        cut, (ta, tb) = self.configuration, self.turned
        return {
            "BM": cut.BM, "BK": cut.BK, "STAGES": cut.stages, "GROUP": cut.group,
            "TA": ta, "TB": tb, "ABREAST": self.abreast,
        }  # fmt: skip

    def resources(self) -> dict[str, Any]:
        return {"num_warps": 4, "maxnreg": REGISTERS}


def _check(plan: Program, operands: Sequence[Node], otherwise: ProductLaunch) -> None:
    found = {plan.dtypes[o] for o in operands}
    if len(found) > 1 or found.isdisjoint((torch.bfloat16, torch.float16)):
        raise Unsupported(f"a product of {' and '.join(sorted(map(str, found)))} by tensor maps")
    if otherwise.configuration.BN != COLUMNS:
        raise Unsupported(f"a plain kernel with tiles of {otherwise.configuration.BN} columns")
