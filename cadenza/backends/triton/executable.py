"""A plan made ready to run on a GPU: steps in order, each a launch, a library product or torch.

What crosses steps is in `Memory`: stored matrices and finished vectors by value, partials by
reduction. A kernel that no template can make runs as the reference back end runs it, and the
reason is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from cadenza.backends import reference
from cadenza.backends.steps import Owner, torch_dtype
from cadenza.backends.triton import modules
from cadenza.backends.triton.body import COLUMN_REDUCTIONS, Arguments, Body, Vectors, in_memory
from cadenza.backends.triton.body import next_power
from cadenza.backends.triton.columns import Layout, Unsupported
from cadenza.backends.triton.configuration import Configuration, Strip
from cadenza.backends.triton.source import (
    Source,
    pieces_of,
    pointwise_source,
    product_source,
    vector_source,
)
from cadenza.core.ir import Node
from cadenza.core.ops import Op
from cadenza.core.plan import Kernel, Plan
from cadenza.core.readiness import is_vector, reduces_matrix
from cadenza.core.schedule import ROW_LIMIT
from cadenza.core.storage import compute_dtype, dtypes_of

Tensor = torch.Tensor
Choose = Callable[[Kernel], Configuration]
FEW = 16  # a kernel merges this many partials of a row itself


@dataclass
class Memory:
    """What exists between steps. Vectors are 1-D; partials are [tiles, length]."""

    rows: int
    device: torch.device
    values: dict[Node, Tensor] = field(default_factory=dict)
    partials: dict[tuple[Node, str], Tensor] = field(default_factory=dict)

    def size(self, dim: Any) -> int:
        """A number of rows or columns."""
        return self.rows if dim == "M" else int(dim)

    def length(self, vector: Node) -> int:
        """How many numbers a vector has."""
        return self.size(vector.type.rows) * self.size(vector.type.columns)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """New memory."""
        return torch.empty(tuple(shape), dtype=dtype, device=self.device)


class Step:
    """One thing that is done; `reason` says why it is not a template's kernel."""

    reason = ""
    source: Source | None = None

    def run(self, memory: Memory) -> None:
        """Does it."""
        raise NotImplementedError


def layout_of(kernel: Kernel) -> Layout:
    """How the tiles of a kernel are seen."""
    paired = [n for n in kernel.body if n.op in (Op.SPLIT, Op.JOIN) and n.type.is_matrix]
    if kernel.product is None:
        made = [*kernel.stores, *(r.inputs[0] for r in kernel.reductions), *kernel.loads]
        inner = min((int(n.attributes["inner"]) for n in paired), default=None)
        return Layout(max(int(node.type.columns) for node in made), inner)
    of_product, columns = {kernel.product}, int(kernel.product.type.columns)
    for node in kernel.body:
        if any(i in of_product for i in node.inputs):
            of_product.add(node)
    found = {int(n.attributes["inner"]) for n in paired if n in of_product}
    if len(found) > 1:
        raise Unsupported(f"columns paired in two ways: {sorted(found)}")
    if not found:
        return Layout(columns)
    joins = [n for n in paired if n in of_product and n.op is Op.JOIN]
    splits = [n for n in paired if n in of_product and n.op is Op.SPLIT]
    half = not splits and all(int(n.type.columns) == 2 * columns for n in joins)
    return Layout(2 * columns if half else columns, found.pop(), half)


def rows_of(kernel: Kernel) -> Any:
    """The number of rows that a kernel goes over."""
    if kernel.product is not None:
        return kernel.product.type.rows
    made = [*kernel.stores, *(r.inputs[0] for r in kernel.reductions)]
    return next(n.type.rows for n in made if n.type.rows != 1)


# --- launches -------------------------------------------------------------------------------------


class Launch(Step):
    """Runs an emitted kernel: pointers and strides by the source's arguments."""

    def __init__(self, source: Source, plan: Program) -> None:
        self.source, self.plan = source, plan

    @cached_property
    def function(self) -> Any:
        """Triton's function of the emitted text."""
        assert self.source is not None
        return modules.function(self.source.text)

    def given(self, memory: Memory) -> dict[str, Any]:
        """Pointers, strides and numbers of partials, by name; allocates what is written."""
        assert self.source is not None
        found: dict[str, Any] = {}
        for argument in self.source.arguments:
            node, name = argument.node, argument.name
            if argument.role == "load":
                tensor = memory.values[node]
                if tensor.stride(1) != 1:
                    tensor = memory.values[node] = tensor.contiguous()
                found[name], found[f"{name}_stride"] = tensor, tensor.stride(0)
            elif argument.role == "vector":
                found[name] = memory.values[node]
            elif argument.role == "partial":
                found[name] = tensor = memory.partials[node, argument.piece]
                found[f"{name}_tiles"] = tensor.shape[0]
            elif argument.role == "store":
                found[name] = self.stored(memory, node)
            else:
                found[name] = self.reduced(memory, node, argument.piece)
        return found

    def stored(self, memory: Memory, node: Node) -> Tensor:
        """New memory for a value that the kernel writes."""
        shape = [memory.length(node)] if is_vector(node) else (
            [memory.size(d) for d in node.type[:2]])  # fmt: skip
        tensor = memory.values[node] = memory.empty(shape, self.plan.dtypes[node])
        return tensor

    def tiles(self, memory: Memory, node: Node) -> int:
        """How many partials of a reduction the kernel leaves."""
        raise NotImplementedError

    def reduced(self, memory: Memory, node: Node, piece: str) -> Tensor:
        """New memory for the partials of a reduction; a single one is the finished vector."""
        tiles = self.tiles(memory, node)
        of_rows = node.op not in COLUMN_REDUCTIONS
        argument = node.inputs[0].type
        length = memory.size(argument.rows) if of_rows else int(argument.columns)
        tensor = memory.partials[node, piece] = memory.empty((tiles, length), torch.float32)
        return tensor


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

    def tiles(self, memory: Memory, node: Node) -> int:
        cut = self.configuration
        if node.op in COLUMN_REDUCTIONS:
            return -(-memory.size(self.product.type.rows) // cut.BM)
        return self.column_tiles

    @property
    def column_tiles(self) -> int:
        """How many tiles lie side by side."""
        return -(-int(self.product.type.columns) // self.configuration.BN)

    def run(self, memory: Memory) -> None:
        cut, rows = self.configuration, memory.size(self.product.type.rows)
        operands = [_straight(memory.values[o], t) for o, t in zip(self.operands, self.turned)]
        (a, ta), (b, tb) = operands
        depth = a.shape[0] if ta else a.shape[1]
        number = -(-rows // cut.BM) * self.column_tiles
        given = self.given(memory)
        if self.depth is None:
            given["K"] = depth
        wide = memory.device.type == "cpu" and a.dtype == torch.bfloat16
        self.function[(min(number, self.plan.programs(memory.device)),)](
            a, b, a.stride(0), b.stride(0), **given, ROWS=rows,
            BM=cut.BM, BN=cut.BN, BK=cut.BK, GROUP=cut.group, A_TMA=False, B_TMA=False,
            TA=ta, TB=tb, WIDE=wide, PRECISION="ieee", FLATTEN=self.depth is not None,
            num_warps=cut.warps, num_stages=cut.stages,
        )  # fmt: skip


def _straight(tensor: Tensor, turned: bool) -> tuple[Tensor, bool]:
    """An operand with rows that are runs in memory, and whether it is then transposed."""
    if tensor.stride(1) == 1 or tensor.shape[1] == 1:
        return (tensor, turned) if tensor.stride(1) == 1 else (tensor.contiguous(), turned)
    if tensor.stride(0) == 1:
        return tensor.T, not turned
    return tensor.contiguous(), turned


class PointwiseLaunch(Launch):
    """A kernel without a product."""

    def __init__(self, source: Source, plan: Program, kernel: Kernel, strip: Strip) -> None:
        super().__init__(source, plan)
        self.strip, self.height = strip, rows_of(kernel)
        layout = source.layout
        self.strips = -(-(layout.width // (2 if layout.pairs else 1)) // strip.W)

    def programs(self, memory: Memory) -> int:
        """How many programs go down one strip."""
        rows = -(-memory.size(self.height) // self.strip.BM)
        most = self.strip.programs or 4 * self.plan.programs(memory.device)
        return max(1, min(rows, -(-most // self.strips)))

    def tiles(self, memory: Memory, node: Node) -> int:
        return self.programs(memory) if node.op in COLUMN_REDUCTIONS else self.strips

    def run(self, memory: Memory) -> None:
        self.function[(self.programs(memory), self.strips)](
            **self.given(memory), ROWS=memory.size(self.height), BM=self.strip.BM, W=self.strip.W,
            num_warps=self.strip.warps,
        )  # fmt: skip


class VectorLaunch(Launch):
    """Finishes reductions, or makes vectors of vectors, all of one length."""

    BLOCK = 64

    def run(self, memory: Memory) -> None:
        assert self.source is not None
        given = self.given(memory)
        length = memory.length(next(a.node for a in self.source.arguments if a.role == "store"))
        grid = (-(-length // self.BLOCK),)
        self.function[grid](**given, ROWS=length, BM=self.BLOCK, num_warps=4)


# --- torch's operations ---------------------------------------------------------------------------


class LibraryProduct(Step):
    """torch.mm, in float32 or in the dtype in which the product alone is stored."""

    def __init__(self, product: Node, dtype: torch.dtype, reason: str) -> None:
        self.product, self.dtype, self.reason = product, dtype, reason
        self.turned = [bool(product.attributes[f"transpose_{side}"]) for side in "ab"]

    def run(self, memory: Memory) -> None:
        a, b = (
            memory.values[i].T if t else memory.values[i]
            for i, t in zip(self.product.inputs, self.turned, strict=True)
        )
        memory.values[self.product] = library_product(a, b, self.dtype)


def library_product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b summed in float32 and rounded once to `dtype`."""
    if dtype == a.dtype:
        return torch.mm(a, b)
    if a.is_cuda and dtype == torch.float32 and a.dtype in (torch.float16, torch.bfloat16):
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a.float(), b.float()).to(dtype)


class ReferenceKernel(Step):
    """A kernel as the reference back end runs it."""

    def __init__(self, plan: Program, position: int, reason: str) -> None:
        self.plan, self.position, self.reason = plan, position, reason

    def run(self, memory: Memory) -> None:
        found = self.plan.reference_memory(memory)
        kernel = self.plan.plain.kernels[self.position]
        kernel.run(found)
        for node in kernel.kernel.stores:
            memory.values[node] = found.stored[node]
        for node in kernel.kernel.reductions:
            memory.values[node] = found.vectors[node].reshape(-1)


class ReferenceVector(Step):
    """A vector by torch's operations: a product with a vector, or a reduction of vectors."""

    reason = "a vector of vectors"

    def __init__(self, plan: Program, node: Node) -> None:
        self.plan, self.node = plan, node

    def run(self, memory: Memory) -> None:
        value = self.plan.reference_memory(memory).vector(self.node)
        memory.values[self.node] = torch.as_tensor(value, device=memory.device).reshape(-1)


# --- programs -------------------------------------------------------------------------------------


class Program:
    """The steps of a plan."""

    def __init__(self, plan: Plan, names: Mapping[Node, str], choose: Choose) -> None:
        self.plan, self.names, self.choose = plan, dict(names), choose
        self.texts: dict[Kernel, tuple[str, str]] = {}
        stored = dtypes_of(plan.graph)
        self.dtypes = {n: torch_dtype(n, stored[n]) for n in plan.graph.nodes()}
        self.left: dict[Node, Launch] = {}  # reductions of which a launch has left partials
        self.finished: set[Node] = {i for i in plan.graph.inputs if is_vector(i)}
        self.steps: list[Step] = []
        for position, kernel in enumerate(plan.kernels):
            self._kernel(position, kernel)
        for output in plan.graph.outputs:
            if is_vector(output):
                self._need(output, output=True)

    @cached_property
    def plain(self) -> reference.Executable:
        """The plan on the reference back end."""
        return reference.compile_plan(self.plan)

    def programs(self, device: torch.device) -> int:
        """How many programs fill the device."""
        if device.type != "cuda":
            return 3
        return torch.cuda.get_device_properties(device).multi_processor_count

    def reference_memory(self, memory: Memory) -> Any:
        """What exists, as the reference back end sees it."""
        found = reference.Memory(self.plain, {}, memory.rows, memory.device)
        for node, tensor in memory.values.items():
            if not is_vector(node):
                found.stored[node] = tensor
                continue
            shape = [memory.size(d) for d in node.type[:2]]
            vector = tensor.reshape(shape)
            found.vectors[node] = vector.to(found.vectors["like"].dtype) if (
                node.type.kind == "real") else vector  # fmt: skip
        return found

    # --- building ---------------------------------------------------------------------------------

    def _kernel(self, position: int, kernel: Kernel) -> None:
        reasons = []
        for make in (self._product, self._library) if kernel.product is not None else (
            self._pointwise,
        ):  # fmt: skip
            try:
                steps = make(kernel, "; ".join(reasons))
            except Unsupported as error:
                reasons.append(str(error))
                continue
            self._add(steps, kernel)
            return
        for vector in kernel.vectors:
            self._need_leaves(vector)
        for reduction in kernel.reductions:
            for other in reduction.inputs[1:]:
                self._need_leaves(other)
        self.steps.append(ReferenceKernel(self, position, "; ".join(reasons)))
        self.finished.update(kernel.reductions)

    def _add(self, steps: Sequence[Step], kernel: Kernel) -> None:
        for step in steps:
            if isinstance(step, Launch):
                assert step.source is not None
                for argument in step.source.arguments:
                    if argument.role == "vector":
                        self._need(argument.node)
            self.steps.append(step)
        last = steps[-1]
        if isinstance(last, Launch):
            self.left |= dict.fromkeys(kernel.reductions, last)

    def _body(self, kernel: Kernel, layout: Layout, holds_rows: bool = False) -> Body:
        few = {n: t for n in self.left if (t := self._few(n))}
        arguments = Arguments(self.names)
        return Body(kernel, arguments, Vectors(few), layout, holds_rows)

    def _few(self, node: Node) -> int:
        """How many partials there are of a row reduction, 0 if they are merged elsewhere."""
        if node in self.finished or node.op not in (Op.ROW_SUM, Op.ROW_MAX):
            return 0
        launch = self.left[node]
        tiles = launch.column_tiles if isinstance(launch, ProductLaunch) else (
            launch.strips if isinstance(launch, PointwiseLaunch) else FEW + 1)  # fmt: skip
        return tiles if tiles <= FEW else 0

    def _product(self, kernel: Kernel, reason: str) -> list[Step]:
        assert kernel.product is not None
        left, right = kernel.product.inputs
        if self.dtypes[left] not in (torch.bfloat16, torch.float16, torch.float32):
            raise Unsupported(f"a product of {self.dtypes[left]}")
        layout = layout_of(kernel)
        trial = self._body(kernel, layout)
        cut, natural = self.choose(kernel), False
        source = product_source(trial, "", "", 1, natural, None)  # tells the unit of its columns
        fitted = cut.fitted(layout.lanes, source.unit)
        if fitted is None:
            raise Unsupported(f"groups of {source.unit} columns in one part of a tile")
        if layout.lanes == 2:
            natural = fitted.width(2) % layout.pairs == 0
        body = self._body(kernel, layout)
        launch = ProductLaunch(source, self, kernel, fitted, natural)
        title, text = self._text(kernel)
        launch.source = product_source(body, title, text, fitted.parts, natural, launch.depth)
        return [launch]

    def _text(self, kernel: Kernel) -> tuple[str, str]:
        return self.texts.get(kernel, ("kernel", ""))

    def _library(self, kernel: Kernel, reason: str) -> list[Step]:
        product = kernel.product
        assert product is not None
        if len(kernel.stores) == 1 and kernel.stores[0] is product and not kernel.reductions:
            return [LibraryProduct(product, self.dtypes[product], reason)]
        rest = replace(kernel, product=None, loads=(product, *kernel.loads))
        step = LibraryProduct(product, torch.float32, reason)
        return [step, *self._pointwise(rest, reason)]

    def _pointwise(self, kernel: Kernel, reason: str) -> list[Step]:
        layout = layout_of(kernel)
        holds = any(reduces_matrix(n) and n.op not in COLUMN_REDUCTIONS for n in kernel.body)
        body = self._body(kernel, layout, holds)
        title, text = self._text(kernel)
        source = pointwise_source(body, title, text)
        across = next_power(layout.width // (2 if layout.pairs else 1))
        strip = Strip(BM=max(1, 4096 // across), W=across, warps=4 if across <= 4096 else 8)
        if across > ROW_LIMIT and holds:
            raise Unsupported(f"rows of {layout.width} columns held by one program")
        if not holds:
            strip = Strip(BM=32, W=max(16, source.unit, min(across, 128)))
        strip = replace(strip, W=max(strip.W, source.unit))
        launch = PointwiseLaunch(source, self, kernel, strip)
        launch.reason = reason
        return [launch]

    # --- vectors ----------------------------------------------------------------------------------

    def _need_leaves(self, node: Node) -> None:
        """Has all that a vector is made of finished."""
        if node in self.finished or node.op in (Op.CONSTANT, Op.COLUMN_INDEX, Op.ROW_INDEX):
            return
        if in_memory(node):
            self._need(node)
        else:
            for source in node.inputs:
                self._need_leaves(source)

    def _need(self, node: Node, output: bool = False) -> None:
        """Has a vector finished, in memory."""
        if node in self.finished or (node.op in (Op.CONSTANT,) and not output):
            return
        if in_memory(node) and not reduces_matrix(node):
            for source in node.inputs:
                if is_vector(source):
                    self._need_leaves(source)
            self.steps.append(ReferenceVector(self, node))
        else:
            self._vector(node)
        self.finished.add(node)

    def _vector(self, node: Node) -> None:
        for leaf in _leaves(node):
            if leaf is not node and (leaf not in self.left or leaf in self.finished):
                self._need(leaf)
        merged = {n: self._tile(n) for n in self.left if n not in self.finished}
        empty = Kernel(None, (), (), (), (), ())
        body = Body(empty, Arguments(self.names), Vectors(merged=merged), Layout(1))
        source = vector_source(body, [node], f"{body.arguments.name(node)}, a vector", "")
        self.steps.append(VectorLaunch(source, self))

    def _tile(self, node: Node) -> tuple[int, int]:
        """Columns of a row that is reduced, in all and in a tile."""
        columns, launch = int(node.inputs[0].type.columns), self.left[node]
        assert launch.source is not None
        layout = launch.source.layout
        if isinstance(launch, PointwiseLaunch):
            width = launch.strip.W * (2 if layout.pairs else 1)
        else:
            assert isinstance(launch, ProductLaunch)
            width = launch.configuration.BN * (2 if layout.product_is_half else 1)
        return columns, width * columns // layout.width


def _leaves(node: Node) -> Iterator[Node]:
    """The vectors in memory that a vector is made of."""
    if node.op in (Op.CONSTANT, Op.COLUMN_INDEX, Op.ROW_INDEX):
        return
    if in_memory(node):
        yield node
        if reduces_matrix(node):
            for other in node.inputs[1:]:
                yield from _leaves(other)
        return
    for source in node.inputs:
        yield from _leaves(source)


class Executable:
    """A plan made ready to run; it takes and gives what the reference back end does."""

    def __init__(
        self, plan: Plan, choose: Choose = lambda kernel: Configuration(),
        names: Mapping[Node, str] | None = None,
    ) -> None:  # fmt: skip
        self.plan, self.choose, self.names = plan, choose, names or {}
        self.wide = compute_dtype(plan.graph) == "float64"

    @cached_property
    def program(self) -> Program:
        """The steps."""
        return Program(self.plan, self.names, self.choose)

    def __call__(self, tensors: Sequence[Tensor], rows: int) -> list[Tensor]:
        """The outputs, new contiguous tensors, of inputs in the graph's order, each 2-D."""
        if rows == 0 or self.wide:
            return self.program.plain(tensors, rows)
        memory = Memory(rows, tensors[0].device)
        for node, tensor in zip(self.plan.graph.inputs, tensors, strict=True):
            memory.values[node] = tensor.reshape(-1) if is_vector(node) else tensor
        for step in self.program.steps:
            step.run(memory)
        owner = Owner(tensors)
        return [owner.own(self._output(memory, o), self.program.dtypes[o]) for o in self.outputs]

    @property
    def outputs(self) -> Iterable[Node]:
        """What it returns."""
        return self.plan.graph.outputs

    def _output(self, memory: Memory, node: Node) -> Tensor:
        return memory.values[node].reshape([memory.size(d) for d in node.type[:2]])


def compile_plan(plan: Plan, **options: Any) -> Executable:
    """A plan made ready to run."""
    return Executable(plan, **options)
