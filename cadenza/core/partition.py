"""The minimum cut: which values to keep so that everything below can be computed from them.

One function with a table of weights. Pass to pass, a weight is the bytes held until backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import networkx
from networkx.algorithms.flow import dinitz

from cadenza.core.ir import Node

Weight = Callable[[Node], float]
Sources = Callable[[Node], Iterable[Node] | None]


def minimum_cut(roots: Iterable[Node], weight: Weight, sources: Sources) -> list[Node]:
    """The cheapest set of values from which all `roots` can be computed.

    `weight(node)` is the price of keeping a value, infinite if it can't be kept. `sources(node)`
    are the values it is computed from, None if it may not be computed again. What costs nothing is
    at hand: it is not among those returned. One unit a value is added, so two halves never beat
    their whole; among equal cuts the one nearest to the roots is taken. The order is that in which
    the values were made.
    """
    network: Any = networkx.DiGraph()
    network.add_nodes_from(["use", "origin"])
    nodes: dict[int, Node] = {}
    pending: list[tuple[Node, Any]] = [(root, "use") for root in roots]
    while pending:
        node, use = pending.pop()
        price = weight(node)
        if not price:
            continue
        network.add_edge((node.id, "in"), use)
        if node.id not in nodes:
            nodes[node.id] = node
            again = _connect(network, node, price, sources(node))
            pending.extend((source, (node.id, "out")) for source in again)
    _, (_, near_use) = networkx.minimum_cut(network, "origin", "use", flow_func=dinitz)
    kept = [n for n in nodes.values() if (n.id, "in") in near_use and (n.id, "out") not in near_use]
    return sorted(kept, key=lambda n: n.id)


def _connect(
    network: Any, node: Node, price: float, sources: Iterable[Node] | None
) -> Iterable[Node]:
    """Adds a value, by an edge towards use; returns what it may be computed from."""
    capacity = {} if math.isinf(price) else {"capacity": price + 1}
    network.add_edge((node.id, "out"), (node.id, "in"), **capacity)
    if sources is None:
        network.add_edge("origin", (node.id, "out"))
    return sources or ()
