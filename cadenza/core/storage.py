"""Which dtype each value has where it is stored, and the compute type of a program.

Types say nothing of storage: arithmetic is float32 (float64 in a float64 program) and a value is
rounded once, where it is stored.
"""

from __future__ import annotations

from collections.abc import Iterable
from weakref import WeakKeyDictionary

from cadenza.core.errors import ProgramError
from cadenza.core.ir import Graph, Node, topological
from cadenza.core.ops import BOOLEAN, FLOATS, INTEGER, Op

_KNOWN: WeakKeyDictionary[Graph, dict[Node, str]] = WeakKeyDictionary()


def compute_dtype(graph: Graph) -> str:
    """float64 when an input is float64, else float32."""
    return widest_statistic(graph.inputs)


def widest_statistic(inputs: Iterable[Node]) -> str:
    """The dtype of columns, rows and scalars computed from these inputs."""
    double = any(i.attributes["dtype"] == "float64" for i in inputs)
    return "float64" if double else "float32"


def dtypes_of(graph: Graph) -> dict[Node, str]:
    """The dtype of each value of a program where it is stored; kept as long as the graph is."""
    found = _KNOWN.get(graph)
    if found is None:
        found = _KNOWN[graph] = storage_dtypes(graph.nodes(), compute_dtype(graph))
    return found


def storage_dtype(node: Node) -> str:
    """The dtype that one value has where it is stored."""
    nodes = topological([node])
    statistic = widest_statistic(n for n in nodes if n.op is Op.INPUT)
    return storage_dtypes(nodes, statistic)[node]


def is_found_rounded(node: Node) -> bool:
    """Whether a matrix comes back rounded in backward: of a product, and stored narrower."""
    nodes = topological([node])
    statistic = widest_statistic(n for n in nodes if n.op is Op.INPUT)
    by_product = any(n.op is Op.MATMUL for n in nodes)
    return (
        node.type.is_matrix and by_product and storage_dtypes(nodes, statistic)[node] != statistic
    )


def storage_dtypes(nodes: Iterable[Node], statistic: str) -> dict[Node, str]:
    """The dtype of each value where it is stored, for nodes in topological order.

    A matrix takes the widest dtype of the matrices it is made of (under `L.cast`, that dtype), and
    that of the inputs if it is made of columns and rows alone; columns, rows and scalars, and sums
    over groups of columns, are statistics, of dtype `statistic`, and widen nothing.
    """
    nodes = list(nodes)
    matrices = [n for n in nodes if n.op is Op.INPUT and n.type.is_matrix]
    usual = widest(str(n.attributes["dtype"]) for n in matrices) or statistic
    stored: dict[Node, str] = {}
    strong: set[Node] = set()
    for node in nodes:
        own = _own_dtype(node, statistic)
        deciding = [stored[i] for i in node.inputs if i in strong]
        if (own and node.type.is_matrix and node.op in (Op.INPUT, Op.CAST)) or (
            not own and widest(deciding)
        ):
            strong.add(node)
        stored[node] = own or widest(deciding) or usual
    return stored


def _own_dtype(node: Node, statistic: str) -> str:
    """The dtype that a value has whatever it is made of, or ""."""
    if node.op in (Op.INPUT, Op.CAST):
        return str(node.attributes["dtype"])
    if node.type.kind == INTEGER:
        return "int64"
    if node.type.kind == BOOLEAN and not node.inputs:
        return "bool"
    grouped = node.op in (Op.GROUP_SUM, Op.GROUP_MAX)
    return statistic if grouped or not node.type.is_matrix else ""


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
        fits = first == second and first in FLOATS
        if not fits and all(i.type.is_matrix for i in node.inputs):
            raise ProgramError(
                "a product needs operands of one dtype",
                found=" and ".join(f"{_called(i)} of {stored[i]}" for i in node.inputs),
                expected="one floating dtype, as in torch.nn.functional.linear",
                write=f"{_converted(node, first, second)}, or autocast",
                where=node.source,
            )
    return graph


def _converted(product: Node, first: str, second: str) -> str:
    """What gives the second operand the first's dtype; the other way round if that is no float."""
    operand, dtype = product.inputs[first in FLOATS], first if first in FLOATS else second
    dtype = dtype if dtype in FLOATS else "float32"
    if operand.op is Op.INPUT:
        return f"{_called(operand)}.to(torch.{dtype}) before the call"
    return f"L.cast(value, '{dtype}')"


def _called(node: Node) -> str:
    return str(node.attributes["name"]) if node.op is Op.INPUT else "a value"
