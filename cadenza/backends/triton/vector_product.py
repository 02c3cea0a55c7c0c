"""Products of a matrix with a vector: one fixed kernel, which reads the matrix once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from cadenza.backends.triton.launch import Argument, Launcher
from cadenza.backends.triton.launches import straight
from cadenza.backends.triton.memory import Memory, Step
from cadenza.core.ir import Node
from cadenza.core.readiness import is_vector

if TYPE_CHECKING:
    from cadenza.backends.triton.executable import Program


@triton.jit
def kernel(
    vector, matrix, out, N, K, stride,
    ALONG: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out[n] = sum of vector[k] times matrix[n, k] if ALONG, else matrix[k, n], in float32."""
    columns = tl.program_id(0) * BN + tl.arange(0, BN)
    total = tl.zeros((BN,), tl.float32)
    for first in range(0, K, BK):
        depth = first + tl.arange(0, BK)
        given = tl.load(vector + depth, mask=depth < K, other=0.0).to(tl.float32)
        if ALONG:
            mask = (columns < N)[:, None] & (depth < K)[None, :]
            at = columns.to(tl.int64)[:, None] * stride + depth[None, :]
            block = tl.load(matrix + at, mask=mask, other=0.0).to(tl.float32)
            total += tl.sum(block * given[None, :], 1)
        else:
            mask = (depth < K)[:, None] & (columns < N)[None, :]
            at = depth.to(tl.int64)[:, None] * stride + columns[None, :]
            block = tl.load(matrix + at, mask=mask, other=0.0).to(tl.float32)
            total += tl.sum(block * given[:, None], 0)
    tl.store(out + columns, total, mask=columns < N)


class VectorProduct(Step):
    """A row times a matrix, or a matrix times a column."""

    recorded = True

    def __init__(self, plan: Program, node: Node) -> None:
        self.plan, self.node = plan, node
        left, right = node.inputs
        self.vector, self.matrix = (left, right) if is_vector(left) else (right, left)
        side = "b" if is_vector(left) else "a"
        turned = bool(node.attributes[f"transpose_{side}"])
        self.along = turned if is_vector(left) else not turned  # each sum is over a stored row
        self.launchers: dict[bool, Launcher] = {}

    def launcher(self, along: bool) -> Launcher:
        """The kernel, for matrices summed along their rows in memory or across."""
        if along not in self.launchers:
            constants: dict[str, Any] = {"ALONG": along, "BN": 16 if along else 64, "BK": 128}
            self.launchers[along] = Launcher(kernel, constants, {"num_warps": 4})
        return self.launchers[along]

    def run(self, memory: Memory) -> None:
        matrix, along = straight(memory.values[self.matrix], self.along)
        vector = memory.values[self.vector]
        length = memory.length(self.node)
        out = memory.empty((length,), self.plan.dtypes[self.node])
        memory.values[self.node] = out
        given: list[Argument] = [vector, matrix, out, length, vector.numel(), matrix.stride(0)]
        launcher = self.launcher(along)
        block = launcher.constants["BN"]
        memory.launch(launcher, (-(-length // block), 1), given)
