"""Steps made of torch's operations: library products, and what no template can make."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from cadenza.backends.triton.memory import Memory, Step
from cadenza.core.ir import Node

if TYPE_CHECKING:
    from cadenza.backends.triton.program import Program

Tensor = torch.Tensor


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
        place = memory.places.get(self.product)
        if place is not None and self._fits(place, a, b):
            memory.values[self.product] = torch.mm(a, b, out=place)
        else:
            memory.values[self.product] = library_product(a, b, self.dtype)

    def _fits(self, place: Tensor, a: Tensor, b: Tensor) -> bool:
        alike = a.dtype == b.dtype == self.dtype == place.dtype
        return alike and place.shape == (a.shape[0], b.shape[1])


def library_product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b summed in float32 and rounded once to `dtype`."""
    if a.dtype == b.dtype == dtype:
        return torch.mm(a, b)
    half = a.dtype == b.dtype and a.dtype in (torch.float16, torch.bfloat16)
    if a.is_cuda and half and dtype == torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a.float(), b.float()).to(dtype)


class ReferenceKernel(Step):
    """A kernel as the reference back end runs it."""

    def __init__(self, plan: Program, position: int, reason: str) -> None:
        self.plan, self.position, self.reason = plan, position, reason

    def made(self) -> Sequence[Node]:
        """The values that are there afterwards."""
        kernel = self.plan.plan.kernels[self.position]
        return (*kernel.stores, *kernel.reductions)

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

    def made(self) -> Sequence[Node]:
        """The value that is there afterwards."""
        return (self.node,)

    def run(self, memory: Memory) -> None:
        value = self.plan.reference_memory(memory).vector(self.node)
        memory.values[self.node] = torch.as_tensor(value, device=memory.device).reshape(-1)
