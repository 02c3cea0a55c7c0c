"""Which inputs of a plan a kernel may write over, where nobody needs their numbers afterwards.

A program of a launch reads blocks of a matrix and then writes the blocks at the same places, where
no other program reads. So a matrix can take the memory of one that its kernel alone reads, if all
that is read of it is read before the first block is written, and at frames that are written. The
emitted kernel says what it reads and writes, and in what order: `Source.moves`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from cadenza.backends.triton.launches import Launch
from cadenza.backends.triton.tile import Move
from cadenza.core.ir import Node

if TYPE_CHECKING:
    from cadenza.backends.triton.program import Program


def takers(program: Program, spent: Iterable[Node]) -> dict[Node, Node]:
    """The values that may lie where a `spent` input does, each with that input."""
    graph, dtypes = program.plan.graph, program.dtypes
    products = {k.product for k in program.plan.kernels}  # the library's may come before reads
    found: dict[Node, Node] = {}
    for given in spent:
        launch = _only_reader(program, given)
        if launch is None:
            continue
        for value in _nodes(launch, "store"):
            taken = value in found or value in {*graph.outputs, *products}
            alike = value.type[:2] == given.type[:2] and dtypes[value] == dtypes[given]
            if alike and not taken and _reads_first(launch, given, value):
                found[value] = given
                break
    return found


def _only_reader(program: Program, given: Node) -> Launch | None:
    """The launch that reads a matrix beside its product, if nothing else reads it."""
    kernels = program.plan.kernels
    readers = [k for k in kernels if given in set(k.loads)]
    products = {i for k in kernels if k.product is not None for i in k.product.inputs}
    vectors = {i for v in program.plan.vector_products for i in v.inputs}
    if len(readers) != 1 or given in {*program.plan.graph.outputs, *products, *vectors}:
        return None
    steps = [step for step in program.steps if isinstance(step, Launch)]
    launches = [launch for launch in steps if given in set(_nodes(launch, "load"))]
    return launches[0] if len(launches) == 1 else None


def _nodes(launch: Launch, role: str) -> list[Node]:
    """What a launch loads, or stores."""
    assert launch.source is not None
    return [argument.node for argument in launch.source.arguments if argument.role == role]


def _reads_first(launch: Launch, given: Node, value: Node) -> bool:
    """Whether it does by whichever kernel it runs. No two threads may read one element."""
    return all(
        each.source is not None and each.spreads and are_read_first(each.source.moves, given, value)
        for each in launch.kernels
    )


def are_read_first(moves: Sequence[Move], given: Node, value: Node) -> bool:
    """Whether a kernel reads all that it reads of `given` before it writes `value`, and there."""
    reads = [(p, m.frame) for p, m in enumerate(moves) if m.node is given and not m.written]
    writes = [(p, m.frame) for p, m in enumerate(moves) if m.node is value and m.written]
    inside = {frame for _, frame in reads} <= {frame for _, frame in writes}
    return bool(reads and writes) and inside and reads[-1][0] < writes[0][0]
