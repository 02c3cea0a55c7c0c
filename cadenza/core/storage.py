"""Which dtype each value has where it is stored, and the compute type of a program.

Types say nothing of storage: arithmetic is float32 (float64 in a float64 program) and a value is
rounded once, where it is stored.
"""

from __future__ import annotations

from collections.abc import Iterable

from cadenza.core.errors import ProgramError
from cadenza.core.ir import Graph, Node
from cadenza.core.ops import BOOLEAN, FLOATS, INTEGER, Op


def compute_dtype(graph: Graph) -> str:
    """float64 when an input is float64, else float32."""
    double = any(i.attributes["dtype"] == "float64" for i in graph.inputs)
    return "float64" if double else "float32"


def storage_dtypes(nodes: Iterable[Node], statistic: str) -> dict[Node, str]:
    """The dtype of each value where it is stored, for nodes in topological order.

    A matrix takes the widest dtype of the matrices it is made of (under `L.cast`, that dtype);
    columns, rows and scalars are statistics, of dtype `statistic`.
    """
    stored: dict[Node, str] = {}
    for node in nodes:
        stored[node] = _storage_dtype(node, stored, statistic)
    return stored


def _storage_dtype(node: Node, stored: dict[Node, str], statistic: str) -> str:
    if node.op in (Op.INPUT, Op.CAST):
        return str(node.attributes["dtype"])
    if node.type.kind == INTEGER:
        return "int64"
    if node.type.kind == BOOLEAN and not node.inputs:
        return "bool"
    if not node.type.is_matrix:
        return statistic
    matrices = [stored[i] for i in node.inputs if i.type.is_matrix]
    return widest(matrices) or widest([stored[i] for i in node.inputs]) or statistic


def widest(dtypes: Iterable[str]) -> str:
    """The smallest floating dtype that holds all floating `dtypes`, "" when there is none."""
    floats = sorted((d for d in dtypes if d in FLOATS), key=FLOATS.index)
    if {"bfloat16", "float16"} <= set(floats) and floats[0] == "bfloat16":
        return "float32"
    return floats[0] if floats else ""


def check_products(graph: Graph, statistic: str) -> Graph:
    """The graph itself; raises ProgramError where a product's operands differ in dtype."""
    nodes = graph.nodes()
    stored = storage_dtypes(nodes, statistic)
    for node in nodes:
        if node.op is not Op.MATMUL:
            continue
        first, second = (stored[i] for i in node.inputs)
        if first != second and all(i.type.is_matrix for i in node.inputs):
            raise ProgramError(
                "a product needs operands of one dtype",
                found=f"{_called(node.inputs[0])}{first} and {_called(node.inputs[1])}{second}",
                expected="one dtype, as in torch.nn.functional.linear",
                write=f"tensor.to(...) before the call, L.cast(x, '{second}'), or autocast",
                where=node.source,
            )
    return graph


def _called(node: Node) -> str:
    return f"{node.attributes['name']} of " if node.op is Op.INPUT else ""
