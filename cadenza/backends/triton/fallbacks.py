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

    recorded = True

    def __init__(self, product: Node, dtype: torch.dtype, reason: str) -> None:
        self.product, self.dtype, self.reason = product, dtype, reason
        self.turned = [bool(product.attributes[f"transpose_{side}"]) for side in "ab"]

    def run(self, memory: Memory) -> None:
        a, b = (
            memory.values[i].T if t else memory.values[i]
            for i, t in zip(self.product.inputs, self.turned, strict=True)
        )
        if not at_once(a, b, self.dtype):
            if memory.recording is not None:
                memory.recording.usable = False
            memory.values[self.product] = library_product(a, b, self.dtype)
            return
        shape, out = (a.shape[0], b.shape[1]), memory.places.get(self.product)
        if out is None or out.shape != shape or out.dtype != self.dtype:
            out = memory.empty(shape, self.dtype)
        memory.multiply(a, b, out)
        memory.values[self.product] = out


def library_product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b summed in float32 and rounded once to `dtype`."""
    if at_once(a, b, dtype):
        return torch.mm(a, b) if a.dtype == dtype else torch.mm(a, b, out_dtype=dtype)
    return torch.mm(a.float(), b.float()).to(dtype)


def at_once(a: Tensor, b: Tensor, dtype: torch.dtype) -> bool:
    """Whether torch has a product that reads these and leaves `dtype`."""
    if a.dtype != b.dtype:
        return False
    half = a.dtype in (torch.float16, torch.bfloat16)
    return a.dtype == dtype or (a.is_cuda and half and dtype == torch.float32)


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
