"""The steps of a plan on a GPU, in order: launches, library products, torch's operations.

A product that no template can make is torch's, with a pointwise kernel behind it; a kernel that
none can make runs as the reference back end runs it. The reason is kept in the step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, TypeVar

import torch

from cadenza.backends import reference
from cadenza.backends.steps import torch_dtype
from cadenza.backends.triton.arguments import (
    COLUMN_REDUCTIONS,
    Arguments,
    Vectors,
    in_memory,
    next_power,
)
from cadenza.backends.triton.body import Body
from cadenza.backends.triton.columns import Layout, Unsupported
from cadenza.backends.triton.configuration import Configuration, Facts, Strip, default, strip
from cadenza.backends.triton.fallbacks import LibraryProduct, ReferenceKernel, ReferenceVector
from cadenza.backends.triton.gluon_launch import GluonLaunch
from cadenza.backends.triton.launches import Launch, PointwiseLaunch, ProductLaunch, VectorLaunch
from cadenza.backends.triton.memory import Memory, Step
from cadenza.backends.triton.source import pointwise_source, product_source, vector_source
from cadenza.backends.triton.target import INTERPRETER, Target
from cadenza.backends.triton.vector_product import VectorProduct
from cadenza.backends.triton.vectors import LEAVES, is_ready
from cadenza.core.ir import Node
from cadenza.core.ops import REAL, Op
from cadenza.core.plan import Kernel, Plan
from cadenza.core.plan_text import Line, PairText, PlanText
from cadenza.core.readiness import is_vector, reduces_matrix
from cadenza.core.schedule import ROW_LIMIT
from cadenza.core.storage import dtypes_of

Tensor = torch.Tensor
log = logging.getLogger("cadenza")
LARGEST = (Op.ROW_MAX, Op.COLUMN_MAX, Op.GROUP_MAX)
Choice = Configuration | Strip
Choose = Callable[[Kernel], Choice | None]
# Told of each kernel as its steps are made, and how other steps for it are made.
Offer = Callable[[Kernel, Sequence[Step], Callable[[Choice], Sequence[Step]]], None]
Chosen = TypeVar("Chosen", Configuration, Strip)
MEASURED = "torch's product was measured to be faster"
FEW = 4  # a kernel merges this many partials of a row itself, in each part of each tile


def layout_of(kernel: Kernel) -> Layout:
    """How the tiles of a kernel are seen."""
    paired = [n for n in kernel.body if n.op in (Op.SPLIT, Op.JOIN) and n.type.is_matrix]
    if kernel.product is None:
        made = [*kernel.stores, *(r.inputs[0] for r in kernel.reductions), *kernel.loads]
        inner = min((int(n.attributes["inner"]) for n in paired), default=None)
        widest, pair = max(int(node.type.columns) for node in made), 2 * (inner or 1)
        return Layout(-(-widest // pair) * pair if inner else widest, inner)
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


class Program:
    """The steps of a plan."""

    def __init__(
        self, plan: Plan, choose: Choose | None = None, text: PairText | None = None,
        target: Target = INTERPRETER, offer: Offer | None = None,
    ) -> None:  # fmt: skip
        self.plan, self.choose, self.target, self.offer = plan, choose, target, offer
        self.names = {n: name for n, name in text.names.items() if usable(name)} if text else {}
        self.texts = {k.kernel: k for p in _plans(text) for k in p.kernels if k.kernel}
        self.said = {line.text.partition(" = ")[0]: line for line in _vector_lines(text)}
        stored = dtypes_of(plan.graph)
        self.dtypes = {n: torch_dtype(n, stored[n]) for n in plan.graph.nodes()}
        # The gradient of a largest value finds it again among values that another kernel computes:
        # they must be the same to the last bit, so a product and a sum are never fused there.
        self.fuses = not any(n.op in LARGEST or _equals(n) for n in plan.graph.nodes())
        self.left: dict[Node, Launch] = {}  # reductions of which a launch has left partials
        self.finished: set[Node] = {i for i in plan.graph.inputs if is_vector(i)}
        self.steps: list[Step] = []
        for position, kernel in enumerate(plan.kernels):
            self._kernel(position, kernel)
            known: dict[Node, bool] = {}
            for output in plan.graph.outputs:
                if is_vector(output) and is_ready(output, (self.finished, self.left), known):
                    self._need(output, output=True)
        for output in plan.graph.outputs:
            if is_vector(output):
                self._need(output, output=True)
        self._tell()

    def _tell(self) -> None:
        """Logs what no template makes, and why: once for a plan and a target."""
        for step in self.steps:
            if step.reason:
                reason = "; ".join(dict.fromkeys(step.reason.split("; ")))
                log.info("%s: a %s: %s", self.plan.graph.name, type(step).__name__, reason)

    @cached_property
    def plain(self) -> reference.Executable:
        """The plan on the reference back end."""
        return reference.compile_plan(self.plan)

    def programs(self, device: torch.device) -> int:
        """How many programs fill the device."""
        if device.type != "cuda":
            return 3
        return torch.cuda.get_device_properties(device).multi_processor_count

    def describes(self, device: torch.device) -> bool:
        """Whether the device reads operands by tensor descriptors: Hopper and later."""
        return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)

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
            if self.offer is not None:
                self.offer(kernel, steps, partial(self.otherwise, kernel))
            self._add(steps, kernel)
            return
        self.finished.update(kernel.reductions)  # of which it may need one for another
        for vector in kernel.vectors:
            self._need_leaves(vector)
        for reduction in kernel.reductions:
            for other in reduction.inputs[1:]:
                self._need_leaves(other)
        self.steps.append(ReferenceKernel(self, position, "; ".join(reasons)))

    def otherwise(self, kernel: Kernel, choice: Choice) -> list[Step]:
        """Steps for a kernel by another choice, right after it was made; Unsupported if none."""
        if isinstance(choice, Strip):
            return self._pointwise(kernel, "", choice)
        if choice.pingpong and self.target.name == "sm_90":
            return [self._pingpong(kernel, choice)]
        return self._chosen_product(kernel, choice) or self._library(kernel, MEASURED)

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
            assert last.source is not None
            whole = {a.node for a in last.source.arguments if a.role == "store"}
            self.finished.update(whole.intersection(kernel.reductions))
            self.left |= {n: last for n in kernel.reductions if n not in whole}

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
        if self.dtypes[left] != self.dtypes[right]:
            raise Unsupported(f"a product of {self.dtypes[left]} and {self.dtypes[right]}")
        if self.dtypes[left] == torch.float32 and self.target.backend and not self.target.tf32:
            raise Unsupported("float32 is multiplied by torch, unless it allows tf32")
        found = self._chosen_product(kernel, self._choice(kernel, Configuration))
        if not found:
            raise Unsupported(MEASURED)
        return found

    def _choice(self, kernel: Kernel, kind: type[Chosen]) -> Chosen | None:
        """What was chosen for a kernel, if it is of this kind."""
        found = self.choose(kernel) if self.choose else None
        return found if isinstance(found, kind) else None

    def _chosen_product(self, kernel: Kernel, cut: Configuration | None) -> list[Step]:
        """The template's launch; none if the choice is the library."""
        if cut is not None and cut.library:
            return []
        if cut is not None and cut.pingpong and self.target.name == "sm_90":
            try:
                return [self._pingpong(kernel, cut)]
            except Unsupported:
                cut = _plain(cut)
        return [self._persistent(kernel, cut)]

    def _pingpong(self, kernel: Kernel, cut: Configuration) -> GluonLaunch:
        """Hopper's template; where operands can't be described the usual one runs instead."""
        usual = replace(_plain(cut), BN=128, warps=8, stages=3, boxes=())
        body = self._body(kernel, layout_of(kernel))
        return GluonLaunch(self._persistent(kernel, usual), kernel, body, self._text(kernel), cut)

    def _persistent(self, kernel: Kernel, cut: Configuration | None) -> ProductLaunch:
        """The template for every device, by default as its target has it."""
        assert kernel.product is not None
        left = kernel.product.inputs[0]
        layout = layout_of(kernel)
        trial = self._body(kernel, layout)
        natural = False
        source = product_source(trial, "", "", 1, natural, None)  # tells the unit of its columns
        facts = Facts.of(source, kernel.product, self.dtypes[left].itemsize)
        cut = cut or default(facts, self.target)
        if any(size & (size - 1) for size in (cut.BM, cut.BN, cut.BK)):
            raise Unsupported(f"tiles of {cut.BM} x {cut.BN} x {cut.BK}, not all powers of two")
        fitted = cut.fitted(layout.lanes, source.unit)
        if fitted is None:
            raise Unsupported(f"groups of {source.unit} columns in one part of a tile")
        if layout.lanes == 2:
            natural = fitted.width(2) % layout.pairs == 0
        body = self._body(kernel, layout)
        if fitted.boxes:
            body.part = fitted.width(layout.lanes)
            body.tiled = body.part * fitted.parts
        launch = ProductLaunch(source, self, kernel, fitted, natural)
        title, text = self._text(kernel)
        launch.source = product_source(body, title, text, fitted.parts, natural, launch.depth)
        return launch

    def _text(self, kernel: Kernel) -> tuple[str, str]:
        found = self.texts.get(kernel)
        if found is None:
            return "kernel", ""
        lines = [f"{line.role:<8}{line.text}" for line in found.lines]
        return f"{found.name}: {found.title}", "\n".join(lines)

    def _library(self, kernel: Kernel, reason: str) -> list[Step]:
        product = kernel.product
        assert product is not None
        if len(kernel.stores) == 1 and kernel.stores[0] is product and not kernel.reductions:
            return [LibraryProduct(product, self.dtypes[product], reason)]
        rest = replace(kernel, product=None, loads=(product, *kernel.loads))
        if kernel in self.texts:
            self.texts[rest] = self.texts[kernel]
        step = LibraryProduct(product, torch.float32, reason)
        return [step, *self._pointwise(rest, reason)]

    def _pointwise(self, kernel: Kernel, reason: str, cut: Strip | None = None) -> list[Step]:
        layout = layout_of(kernel)
        holds = any(reduces_matrix(n) and n.op not in COLUMN_REDUCTIONS for n in kernel.body)
        body = self._body(kernel, layout, holds)
        title, text = self._text(kernel)
        source = pointwise_source(body, title, text)
        lanes = 2 if layout.pairs else 1
        across = layout.width // lanes
        if next_power(across) > ROW_LIMIT and holds:
            raise Unsupported(f"rows of {layout.width} columns held by one program")
        cut = cut or self._choice(kernel, Strip) or strip(across, source.unit, holds, lanes)
        launch = PointwiseLaunch(source, self, kernel, cut, holds)
        launch.reason = reason
        return [launch]

    # --- vectors ----------------------------------------------------------------------------------

    def _need_leaves(self, node: Node) -> None:
        """Has all that a vector is made of finished."""
        if node in self.finished or node.op in LEAVES:
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
        if node.op is Op.MATMUL and any(not is_vector(i) for i in node.inputs):
            for source in node.inputs:
                if is_vector(source):
                    self._need(source, output=True)
            self.steps.append(VectorProduct(self, node))
        elif in_memory(node) and not reduces_matrix(node):
            for source in node.inputs:
                if is_vector(source):
                    self._need_leaves(source)
            self.steps.append(ReferenceVector(self, node))
        else:
            self._vector(node)
        self.finished.add(node)

    def _vector(self, node: Node) -> None:
        alike = [n for n in self.left if n not in self.finished and _length(n) == _length(node)]
        merged = {n: self._tile(n) for n in alike}
        empty = Kernel(None, (), (), (), (), ())
        body = Body(empty, Arguments(self.names), Vectors(merged=merged), Layout(1))
        name = body.arguments.name(node)
        said = f"{self.said[name].role:<8}{self.said[name].text}" if name in self.said else ""
        source = vector_source(body, [node], f"{name}: a vector", said)
        for argument in source.arguments:
            if argument.role == "vector":
                self._need(argument.node)
        if any(a.role == "partial" and a.node in self.finished for a in source.arguments):
            self._vector(node)  # what it merged is also read from other columns, so from memory
            return
        self.steps.append(VectorLaunch(source, self))

    def _tile(self, node: Node) -> tuple[int, int]:
        """Columns of a row that is reduced, in all and in a tile."""
        columns, launch = int(node.inputs[0].type.columns), self.left[node]
        assert launch.source is not None
        layout = launch.source.layout
        if isinstance(launch, PointwiseLaunch):
            width = launch.strip.W * (2 if layout.pairs else 1)
            if not layout.pairs:
                return columns, width
        else:
            assert isinstance(launch, ProductLaunch)
            width = launch.configuration.BN * (2 if layout.product_is_half else 1)
        return columns, width * columns // layout.width


def _plain(cut: Configuration) -> Configuration:
    """A pingpong configuration as the plain template has it, whose tiles are powers of two."""
    return replace(cut, BM=128, pingpong=False, together=False)


def usable(name: str) -> bool:
    """Whether a value's name can be part of an emitted name."""
    return name.isascii() and name.isidentifier()


def _plans(text: PairText | None) -> list[PlanText]:
    return [plan for plan in (text.forward, text.backward) if plan] if text else []


def _vector_lines(text: PairText | None) -> Iterator[Line]:
    """The lines of plans that say what vectors are."""
    for plan in _plans(text):
        for line in (*(line for k in plan.kernels for line in k.lines), *plan.ends):
            if line.role in ("partial", "finish", "reduce"):
                yield line


def _equals(node: Node) -> bool:
    real = all(i.type.kind == REAL for i in node.inputs)
    return node.op is Op.COMPARE and node.attributes["relation"] == "==" and real


def _length(vector: Node) -> Any:
    """How many numbers a vector has: M or a number."""
    return vector.type.rows if vector.type.columns == 1 else vector.type.columns
