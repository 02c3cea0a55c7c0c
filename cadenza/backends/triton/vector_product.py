"""Products of a matrix with a vector: one fixed kernel, which reads the matrix once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cadenza.backends.triton.launch import Argument, Launcher
from cadenza.backends.triton.launches import straight
from cadenza.backends.triton.memory import Memory, Step
from cadenza.core.ir import Node
from cadenza.core.readiness import is_vector

if TYPE_CHECKING:
    from cadenza.backends.triton.program import Program


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
            from cadenza.backends.triton.templates.vector_kernel import cadenza_vector_product

            constants: dict[str, Any] = {"ALONG": along, "BN": 16 if along else 64, "BK": 128}
            self.launchers[along] = Launcher(cadenza_vector_product, constants, {"num_warps": 4})
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
