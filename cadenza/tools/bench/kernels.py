"""The suites of one product and its epilogue: `kernels`, and `primitives` of which CODA is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import combinations
from typing import Any

import torch

from cadenza.core.cost import Work, moved
from cadenza.core.ir import Graph
from cadenza.core.storage import dtypes_of
from cadenza.library.function import Program
from cadenza.tools.bench import rivals
from cadenza.tools.bench.case import Case, Sizes, Suite
from cadenza.tools.bench.contest import contest
from cadenza.tools.bench.draw import Draw
from cadenza.tools.bench.measurement import Calls
from cadenza.tools.bench.patterns import HEAD, LLAMA, PATTERNS, Drawn, Product
from cadenza.tools.bench.primitives import PRIMITIVES, primitives
from cadenza.tools.bench.stage import Stage, Transform, copies_for, size_of

Tensor = torch.Tensor
SQUARES = (2048, 4096, 8192)
BY_NAME = {pattern.name: pattern for pattern in PATTERNS}


def graph_work(graph: Graph, flops: int, rows: int) -> Work:
    """A program of one kernel: each input that it uses read and each output written once."""
    dtypes = dtypes_of(graph)
    touched = [node for node in (*graph.inputs, *graph.outputs) if node in dtypes]
    return Work(flops, moved(touched, dtypes, rows))


class Kernel(Stage):
    """A pattern: without gradients, on as many copies as the cache doesn't hold."""

    def __init__(self, case: Case, device: torch.device) -> None:
        super().__init__(case, device)
        self.pattern = BY_NAME[case.pattern]
        first = self._draw(0)
        copies = copies_for(size_of(first.ours), device)
        self.copies = [first, *(self._draw(number) for number in range(1, copies))]

    def _draw(self, number: int) -> Drawn:
        draw = Draw(self.case.torch_dtype, self.device, self.case.seed + number)
        return self.pattern.draw(draw, self.case.sizes)

    def ours(self) -> Calls:
        """The program on each copy."""
        return [partial(self.pattern.program, **copy.ours) for copy in self.copies]

    def stock(self, transform: Transform) -> Calls:
        """Torch's function on each copy."""
        function = transform(self.pattern.function)
        return [partial(function, **copy.stock) for copy in self.copies]

    def liger(self) -> Calls:
        """Liger-Kernel on each copy."""
        return [rivals.prepared("liger_kernel", self.case.pattern, c.stock) for c in self.copies]

    def flashinfer(self) -> Calls:
        """FlashInfer on each copy."""
        return [rivals.prepared("flashinfer", self.case.pattern, c.stock) for c in self.copies]

    def makers(self) -> dict[str, Callable[[], Calls]]:
        """As of every suite, and those of this one."""
        return {**super().makers(), "liger": self.liger, "flashinfer": self.flashinfer}

    def bare_products(self) -> Sequence[tuple[Mapping[str, Tensor], Sequence[Product]]]:
        """The one product."""
        return [(copy.ours, [self.pattern.product]) for copy in self.copies]

    def work(self) -> Work:
        """Of the program."""
        ours, product = self.copies[0].ours, self.pattern.product
        return program_work(self.pattern.program, ours, product)


def program_work(program: Program, operands: Mapping[str, Any], product: Product) -> Work:
    """What a program of one product has to compute and to move at least."""
    rows = next(v for v in operands.values() if isinstance(v, Tensor)).shape[0]
    return graph_work(program.graph(**operands), product.flops(operands), rows)


def _sizes(pattern: str) -> dict[str, Sizes]:
    squares = {str(n): {"M": n, "N": n, "K": n} for n in SQUARES}
    return {**squares, LLAMA: BY_NAME[pattern].sizes}


def kernel_sizes(pattern: str, given: Sizes) -> Sizes:
    """The sizes of a pattern of which some are given, those of the others by a square of 4096."""
    known = {"M": 4096, "N": 4096, "K": 4096}
    if pattern == "rope":
        both = {**known, "HD": HEAD, **given}
        known = {**known, "HD": HEAD, "heads": both["N"] // both["HD"]}
    return {name: given.get(name, size) for name, size in known.items()}


KERNELS = Suite(
    "kernels",
    ("ours", "compile", "autotune", "eager", "liger", "flashinfer", "bare", "products"),
    tuple(BY_NAME),
    _sizes,
    kernel_sizes,
    partial(contest, Kernel),
)


# --- primitives -----------------------------------------------------------------------------------


class Primitive(Stage):
    """One or two primitives over a product."""

    PRODUCT = Product("x", "w", transpose_right=True)

    def __init__(self, case: Case, device: torch.device) -> None:
        super().__init__(case, device)
        first = self._draw(0)
        copies = copies_for(size_of(first), device)
        self.copies = [first, *(self._draw(number) for number in range(1, copies))]

    def _draw(self, number: int) -> dict[str, Any]:
        draw = Draw(self.case.torch_dtype, self.device, self.case.seed + number)
        m, n, k = (self.case.sizes[name] for name in ("M", "N", "K"))
        matrices = {"x": draw.normal(m, k), "w": draw.weight(n, k), "residual": draw.normal(m, n)}
        vectors = {"r": draw.powers(m)[:, None].float(), "g": draw.row(n), "bias": draw.row(n)}
        return {**matrices, **vectors, "parts": self.case.pattern}

    def ours(self) -> Calls:
        """The program on each copy."""
        return [partial(primitives, **copy) for copy in self.copies]

    def stock(self, transform: Transform) -> Calls:
        """The program's own function on tensors."""
        function = transform(primitives.function)
        return [partial(function, **copy) for copy in self.copies]

    def bare_products(self) -> Sequence[tuple[Mapping[str, Tensor], Sequence[Product]]]:
        """The one product."""
        return [(copy, [self.PRODUCT]) for copy in self.copies]

    def work(self) -> Work:
        """Of the program."""
        return program_work(primitives, self.copies[0], self.PRODUCT)


def _pairs() -> tuple[str, ...]:
    return (*PRIMITIVES, *("+".join(pair) for pair in combinations(PRIMITIVES, 2)))


def _product_sizes(_: str) -> dict[str, Sizes]:
    return {"16384x4096x4096": {"M": 16384, "N": 4096, "K": 4096}}


def _product_changed(pattern: str, given: Sizes) -> Sizes:
    (known,) = _product_sizes(pattern).values()
    return {name: given.get(name, size) for name, size in known.items()}


PRIMITIVE = Suite(
    "primitives",
    ("ours", "bare", "products"),
    _pairs(),
    _product_sizes,
    _product_changed,
    partial(contest, Primitive),
)
