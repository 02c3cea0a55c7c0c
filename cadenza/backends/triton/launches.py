"""Launches of emitted kernels: what each is called with, and what it allocates."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from cadenza.backends.triton import modules
from cadenza.backends.triton.arguments import COLUMN_REDUCTIONS
from cadenza.backends.triton.arguments import Argument as Pointer
from cadenza.backends.triton.configuration import Configuration, Strip
from cadenza.backends.triton.launch import Argument, Descriptor, Launcher
from cadenza.backends.triton.memory import Memory, Step
from cadenza.backends.triton.source import Source
from cadenza.backends.triton.target import tf32_allowed
from cadenza.core.ir import Node
from cadenza.core.plan import Kernel
from cadenza.core.readiness import is_vector

if TYPE_CHECKING:
    from cadenza.backends.triton.program import Program

Tensor = torch.Tensor
TYPES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8",
    torch.uint8: "u8", torch.bool: "i1",
    torch.float8_e4m3fn: "fp8e4nv", torch.float8_e5m2: "fp8e5",
}  # fmt: skip


READ = ("load", "vector", "partial")  # before what is written: a product may be both


def rows_of(kernel: Kernel) -> Any:
    """The number of rows that a kernel goes over."""
    if kernel.product is not None:
        return kernel.product.type.rows
    made = [*kernel.stores, *(r.inputs[0] for r in kernel.reductions)]
    return next(n.type.rows for n in made if n.type.rows != 1)


class Launch(Step):
    """Runs an emitted kernel: its pointers, strides and numbers of partials, then ROWS."""

    recorded = True

    def __init__(self, source: Source, plan: Program) -> None:
        self.source, self.plan = source, plan
        self.launchers: dict[Any, Launcher] = {}

    @cached_property
    def function(self) -> Any:
        """Triton's function of the emitted text."""
        assert self.source is not None
        return modules.function(self.source.text)

    def launcher(self, **variant: Any) -> Launcher:
        """The function with its constants, some of them of this variant."""
        key = tuple(variant.values())
        if key not in self.launchers:
            constants = self.constants() | variant
            self.launchers[key] = Launcher(self.function, constants, self.options())
        return self.launchers[key]

    def arguments(self, memory: Memory) -> list[Argument]:
        """Pointers, strides and numbers of partials in order; allocates what is written."""
        assert self.source is not None
        given = self.source.arguments
        found = {p.name: self._read(p, memory) for p in given if p.role in READ}
        found |= {p.name: self._written(p, memory) for p in given if p.role not in READ}
        strides = [found[p.name].stride(0) for p in given if p.role == "load"]
        tiles = [found[p.name].shape[0] for p in given if p.role == "partial"]
        return [*(found[p.name] for p in given), *strides, *tiles]

    def _read(self, pointer: Pointer, memory: Memory) -> Tensor:
        if pointer.role == "partial":
            return memory.partials[pointer.node, pointer.piece]
        tensor = memory.values[pointer.node]
        if pointer.role == "load" and tensor.stride(1) != 1:
            tensor = memory.values[pointer.node] = tensor.contiguous()
        return tensor

    def _written(self, pointer: Pointer, memory: Memory) -> Tensor:
        if pointer.role == "store":
            return self.stored(memory, pointer.node)
        return self.reduced(memory, pointer.node, pointer.piece)

    def stored(self, memory: Memory, node: Node) -> Tensor:
        """New memory for a value that the kernel writes."""
        shape = [memory.size(d) for d in node.type[:2]]
        if is_vector(node):
            shape = [shape[0] * shape[1]]
        place = memory.places.get(node)
        if place is None:
            place = memory.empty(shape, self.plan.dtypes[node])
        memory.values[node] = place
        return place

    def reduced(self, memory: Memory, node: Node, piece: str) -> Tensor:
        """New memory for the partials of a reduction."""
        argument = node.inputs[0].type
        of_rows = node.op not in COLUMN_REDUCTIONS
        length = memory.size(argument.rows) if of_rows else int(argument.columns)
        shape = (self.tiles(memory, node), length)
        tensor = memory.partials[node, piece] = memory.empty(shape, torch.float32)
        return tensor

    def tiles(self, memory: Memory, node: Node) -> int:
        """How many partials of a reduction the kernel leaves: one, unless its tiles are several."""
        return 1

    @property
    def kernels(self) -> Sequence[Launch]:
        """The launches of which one is made: this one, and what may stand in for it."""
        return (self,)

    @property
    def spreads(self) -> bool:
        """Whether there are elements of a block for all threads, so that each has its own."""
        return False

    # --- compiling without a device ---------------------------------------------------------------

    def signature(self, descriptors: bool = False) -> dict[str, str]:
        """Triton's types of the function's parameters that are not constants, in order."""
        assert self.source is not None
        given = self.source.arguments
        types: dict[str, str] = {}
        for a in given:
            whole = a.role in ("partial", "reduction")
            types[a.name] = f"*{'fp32' if whole else TYPES[self.plan.dtypes[a.node]]}"
        types |= {f"{a.name}_stride": "i32" for a in given if a.role == "load"}
        types |= {f"{a.name}_tiles": "i32" for a in given if a.role == "partial"}
        return types | {"ROWS": "i32"}

    @abstractmethod
    def constants(self, descriptors: bool = False) -> dict[str, Any]:
        """The function's parameters that are constants."""

    @abstractmethod
    def resources(self) -> dict[str, Any]:
        """Warps, stages and registers."""

    def options(self) -> dict[str, Any]:
        """All that the compiler is told."""
        return self.resources() | {"enable_fp_fusion": self.plan.fuses}


class ProductLaunch(Launch):
    """A product with its epilogue."""

    def __init__(
        self, source: Source, plan: Program, kernel: Kernel, configuration: Configuration,
        natural: bool,
    ) -> None:  # fmt: skip
        super().__init__(source, plan)
        assert kernel.product is not None
        self.product, self.configuration, self.natural = kernel.product, configuration, natural
        left, right = self.product.inputs
        self.turned = [bool(self.product.attributes[f"transpose_{side}"]) for side in "ab"]
        contracted = left.type.rows if self.turned[0] else left.type.columns
        self.depth = contracted if isinstance(contracted, int) else None
        self.operands = (left, right)
        self.column_tiles = -(-int(self.product.type.columns) // configuration.BN)

    def tiles(self, memory: Memory, node: Node) -> int:
        if node.op in COLUMN_REDUCTIONS:
            return -(-memory.size(self.product.type.rows) // self.configuration.BM)
        return self.column_tiles

    def run(self, memory: Memory) -> None:
        cut, rows = self.configuration, memory.size(self.product.type.rows)
        a, ta = straight(memory.values[self.operands[0]], self.turned[0])
        b, tb = straight(memory.values[self.operands[1]], self.turned[1])
        describes = self.plan.describes(memory.device)
        left, right = self.described(a, ta, b, tb) if describes else (None, None)
        given: list[Argument] = [a if left is None else left, b if right is None else right]
        given += [a.stride(0), b.stride(0), *self.arguments(memory), rows]
        if self.depth is None:
            given.append(a.shape[0] if ta else a.shape[1])
        boxes = self.boxed(given) if describes else {}
        variant = boxes | {
            "A_TMA": left is not None, "B_TMA": right is not None, "TA": ta, "TB": tb,
            "WIDE": memory.device.type == "cpu" and a.dtype == torch.bfloat16,
            "PRECISION": self.precision(a.dtype),
        }  # fmt: skip
        programs = min(-(-rows // cut.BM) * self.column_tiles, self.plan.programs(memory.device))
        memory.launch(self.launcher(**variant), (programs, 1), given)

    @property
    def spreads(self) -> bool:
        cut = self.configuration
        return 32 * cut.warps <= cut.BM * cut.width(self.lanes) or not self.plan.target.backend

    def boxed(self, given: list[Argument]) -> dict[str, bool]:
        """Puts descriptors for the loads and stores that move as boxes; the constants for these."""
        assert self.source is not None
        cut, found = self.configuration, {}
        box = (cut.BM, cut.width(self.source.layout.lanes))
        for position, pointer in enumerate(self.source.arguments, 4):
            if pointer.name not in self.source.movable or pointer.role not in cut.boxes:
                continue
            tensor = given[position]
            if isinstance(tensor, Tensor) and fits_descriptor(tensor):
                given[position] = Descriptor(tensor, tensor.shape, tensor.stride(), box)
                found[f"{pointer.name}_box"] = True
        return found

    def precision(self, dtype: torch.dtype) -> str:
        """How float32 operands are multiplied: as torch's own switch allows."""
        return "tf32" if dtype == torch.float32 and tf32_allowed() else "ieee"

    def described(
        self, a: Tensor, ta: bool, b: Tensor, tb: bool
    ) -> tuple[Descriptor | None, Descriptor | None]:
        """Descriptors of the operands, None for one that is to be read by pointers."""
        if not self.configuration.descriptors:
            return None, None
        left = right = None
        cut = self.configuration
        if fits_descriptor(a):
            box = (cut.BK, cut.BM) if ta else (cut.BM, cut.BK)
            left = Descriptor(a, a.shape, a.stride(), box)
        if fits_descriptor(b):
            right = self._right(b, tb)
        return left, right

    def _right(self, b: Tensor, tb: bool) -> Descriptor | None:
        cut, (rows, columns), stride = self.configuration, b.shape, b.stride(0)
        assert self.source is not None
        layout = self.source.layout
        if layout.lanes == 1 or self.natural:
            return Descriptor(b, b.shape, b.stride(), (cut.BN, cut.BK) if tb else (cut.BK, cut.BN))
        inner, half = int(layout.pairs or 1), cut.BN // 2
        whole = 2 * inner == layout.width
        if not whole and inner % half:
            return None
        if tb:
            shape, strides = (rows // inner, inner, columns), (inner * stride, stride, 1)
            return Descriptor(b, shape, strides, (2, half, cut.BK))
        if inner * b.element_size() % 16:
            return None
        shape, strides = (rows, columns // inner, inner), (stride, inner, 1)
        return Descriptor(b, shape, strides, (cut.BK, 2, half))

    def signature(self, descriptors: bool = False) -> dict[str, str]:
        """As Launch's; with `descriptors`, as where both operands are read by them."""
        a, b = (TYPES[self.plan.dtypes[o]] for o in self.operands)
        before = {"a": f"*{a}", "b": f"*{b}"}
        if descriptors:
            before = {"a": f"tensordesc<{a}[{_box(self._boxes()[0])}]>",
                      "b": f"tensordesc<{b}[{_box(self._boxes()[1])}]>"}  # fmt: skip
        before |= {"a_stride": "i32", "b_stride": "i32"}
        depth = {"K": "i32"} if self.depth is None else {}
        rest = super().signature()
        if descriptors:
            box = f"{self.configuration.BM}, {self.configuration.width(self.lanes)}"
            for name in (n for n in rest if n in self.source.boxes and self.moves(n)):
                rest[name] = f"tensordesc<{rest[name][1:]}[{box}]>"
        return before | rest | depth

    @property
    def lanes(self) -> int:
        """Lanes of a tile in the accumulator."""
        assert self.source is not None
        return self.source.layout.lanes

    def _boxes(self) -> tuple[Sequence[int], Sequence[int]]:
        cut = self.configuration
        assert self.source is not None
        left = (cut.BK, cut.BM) if self.turned[0] else (cut.BM, cut.BK)
        if self.source.layout.lanes == 1 or self.natural:
            return left, (cut.BN, cut.BK) if self.turned[1] else (cut.BK, cut.BN)
        half = cut.BN // 2
        return left, (2, half, cut.BK) if self.turned[1] else (cut.BK, 2, half)

    def constants(self, descriptors: bool = False) -> dict[str, Any]:
        """As Launch's; with `descriptors`, as where both operands are read by them."""
        cut = self.configuration
        assert self.source is not None
        rounded = self.plan.target.tf32 and self.plan.dtypes[self.operands[0]] == torch.float32
        return {
            "BM": cut.BM, "BN": cut.BN, "BK": cut.BK, "GROUP": cut.group,
            "A_TMA": descriptors, "B_TMA": descriptors, "TA": self.turned[0], "TB": self.turned[1],
            "WIDE": False, "PRECISION": "tf32" if rounded else "ieee",
            "FLATTEN": self.depth is not None,
        } | {f"{n}_box": descriptors and self.moves(n) for n in self.source.boxes}  # fmt: skip

    def moves(self, name: str) -> bool:
        """Whether an argument is moved as boxes where descriptors can be had."""
        assert self.source is not None
        role = next(a.role for a in self.source.arguments if a.name == name)
        return name in self.source.movable and role in self.configuration.boxes

    def resources(self) -> dict[str, Any]:
        return {"num_warps": self.configuration.warps, "num_stages": self.configuration.stages}


def _box(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes))


def straight(tensor: Tensor, turned: bool) -> tuple[Tensor, bool]:
    """An operand with rows that are runs in memory, and whether it is then transposed."""
    if tensor.stride(1) == 1:
        return tensor, turned
    if tensor.stride(0) == 1:
        return tensor.T, not turned
    return tensor.contiguous(), turned


def fits_descriptor(tensor: Tensor) -> bool:
    """Whether a matrix with runs as rows can be read in boxes: aligned to 16 bytes throughout."""
    aligned = tensor.data_ptr() % 16 == 0
    return aligned and tensor.stride(0) * tensor.element_size() % 16 == 0


class PointwiseLaunch(Launch):
    """A kernel without a product."""

    def __init__(
        self, source: Source, plan: Program, kernel: Kernel, strip: Strip, holds: bool
    ) -> None:
        super().__init__(source, plan)
        self.strip, self.holds = strip, holds  # whether it holds whole rows
        self.height, layout = rows_of(kernel), source.layout
        self.strips = -(-(layout.width // (2 if layout.pairs else 1)) // strip.W)

    def programs(self, memory: Memory) -> int:
        """How many programs go down one strip."""
        rows = -(-memory.size(self.height) // self.strip.BM)
        most = self.strip.programs or 4 * self.plan.programs(memory.device)
        return max(1, min(rows, -(-most // self.strips)))

    def tiles(self, memory: Memory, node: Node) -> int:
        return self.programs(memory) if node.op in COLUMN_REDUCTIONS else self.strips

    def run(self, memory: Memory) -> None:
        given = [*self.arguments(memory), memory.size(self.height)]
        memory.launch(self.launcher(), (self.programs(memory), self.strips), given)

    def constants(self, descriptors: bool = False) -> dict[str, Any]:
        return {"BM": self.strip.BM, "W": self.strip.W}

    @property
    def spreads(self) -> bool:
        cut = self.strip
        return 32 * cut.warps <= cut.BM * cut.W or not self.plan.target.backend

    def resources(self) -> dict[str, Any]:
        return {"num_warps": self.strip.warps}


class VectorLaunch(Launch):
    """Finishes reductions, or makes vectors of vectors, all of one length."""

    BLOCK = 64

    def run(self, memory: Memory) -> None:
        assert self.source is not None
        made = next(a.node for a in self.source.arguments if a.role == "store")
        length = memory.length(made)
        given = [*self.arguments(memory), length]
        memory.launch(self.launcher(), (-(-length // self.BLOCK), 1), given)

    def constants(self, descriptors: bool = False) -> dict[str, Any]:
        return {"BM": self.BLOCK}

    def resources(self) -> dict[str, Any]:
        return {"num_warps": 4}
