"""A case made ready to be measured: its operands on a device, and each variant as calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from cadenza.core.cost import Work
from cadenza.tools.bench import programs
from cadenza.tools.bench.case import Case, Record, Unavailable
from cadenza.tools.bench.measurement import Call, Calls
from cadenza.tools.bench.patterns import Product

Tensor = torch.Tensor
Transform = Callable[[Callable[..., Any]], Callable[..., Any]]
MOST_COPIES = 16
CACHES = 3  # copies of operands together are this many times as large as the cache
UNCOMPARED = ("bare", "products")  # variants that compute less than the others


class Stage(ABC):
    """One case on one device; a variant that it hasn't raises Unavailable.

    `gradients` says that calls need them, `peaks` that their memory is measured.
    """

    gradients = False
    peaks = False

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case, self.device = case, device

    @abstractmethod
    def ours(self) -> Calls:
        """The program."""

    @abstractmethod
    def stock(self, transform: Transform) -> Calls:
        """Torch's function, transformed first."""

    @abstractmethod
    def work(self) -> Work:
        """What the case has to compute and to move at least."""

    def facts(self) -> Record:
        """What a record says of the case besides."""
        return {}

    def bare_products(self) -> Sequence[tuple[Mapping[str, Tensor], Sequence[Product]]]:
        """For each copy its operands and the products of them."""
        return ()

    def bare(self) -> Calls:
        """The library's products, into memory that is there."""
        outputs: dict[tuple[torch.Size, torch.dtype], Tensor] = {}

        def one(product: Product, operands: Mapping[str, Tensor]) -> Call:
            a, b = product.matrices(operands)
            shape = torch.Size((a.shape[0], b.shape[1]))
            out = outputs.setdefault((shape, a.dtype), a.new_empty(shape))
            return partial(torch.mm, a.detach(), b.detach(), out=out)

        return self._all_products(one)

    def products(self) -> Calls:
        """Our products without an epilogue."""
        return self._all_products(_ours_alone)

    def _all_products(self, one: Callable[[Product, Mapping[str, Tensor]], Call]) -> Calls:
        copies = self.bare_products()
        if not copies:
            raise Unavailable(f"the suite {self.case.suite} has no bare products")
        return [in_turn([one(p, operands) for p in products]) for operands, products in copies]

    def makers(self) -> dict[str, Callable[[], Calls]]:
        """What makes the calls of each variant that the suite has."""
        stock = {name: partial(self.stock, transform) for name, transform in TRANSFORMS.items()}
        return {"ours": self.ours, **stock, "bare": self.bare, "products": self.products}

    def calls(self, variant: str) -> Calls:
        """The calls of a variant by its name. Raises Unavailable for one that the suite hasn't."""
        makers = self.makers()
        if variant not in makers:
            raise Unavailable(f"the suite {self.case.suite} has no variant {variant}")
        return makers[variant]()


def _ours_alone(product: Product, operands: Mapping[str, Tensor]) -> Call:
    a, b = operands[product.left].detach(), operands[product.right].detach()
    turned = {"transpose_a": product.transpose_left, "transpose_b": product.transpose_right}
    return partial(programs.product, a, b, **turned)


def in_turn(calls: Sequence[Call]) -> Call:
    """Some calls as one."""
    if len(calls) == 1:
        return calls[0]

    def run() -> None:
        for call in calls:
            call()

    return run


def _compiled(mode: str | None) -> Transform:
    # fullgraph: what can't be compiled, or too often, is an error and not silently eager.
    return partial(torch.compile, dynamic=False, fullgraph=True, mode=mode)


TRANSFORMS: dict[str, Transform] = {
    "compile": _compiled(None),
    "autotune": _compiled("max-autotune-no-cudagraphs"),
    "eager": lambda function: function,
}
# All names that there are, in the order of tables.
VARIANTS = (
    "ours", "lean", *TRANSFORMS, "liger", "flashinfer", "bare", "products", "ours-compile",
    "reordered",
)  # fmt: skip


def copies_for(size: int, device: torch.device) -> int:
    """How many copies of operands of that many bytes don't fit the cache together."""
    if device.type != "cuda":
        return 1
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return min(MOST_COPIES, max(1, -(-CACHES * cache // max(size, 1))))


def size_of(operands: Mapping[str, Any]) -> int:
    """Bytes of all tensors among the operands."""
    return sum(t.nbytes for t in operands.values() if isinstance(t, Tensor))
