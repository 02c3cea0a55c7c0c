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
    are the values it is computed from: empty if it is at hand for free, None if it may not be
    computed again. One unit a value is added, so two halves never beat their whole; among equal
    cuts the one nearest to the roots is taken. The order is that of the search from the roots.
    """
    network: Any = networkx.DiGraph()
    network.add_nodes_from(["use", "origin"])
    nodes: dict[int, Node] = {}
    pending = list(roots)
    for root in pending:
        network.add_edge((root.id, "in"), "use")
    while pending:
        node = pending.pop()
        if node.id not in nodes:
            nodes[node.id] = node
            pending.extend(_connect(network, node, weight(node), sources(node)))
    _, (_, near_use) = networkx.minimum_cut(network, "origin", "use", flow_func=dinitz)
    kept = [n for n in nodes.values() if (n.id, "in") in near_use and (n.id, "out") not in near_use]
    return sorted(kept, key=lambda n: n.id)


def _connect(network: Any, node: Node, price: float, sources: Iterable[Node] | None) -> list[Node]:
    """Adds a value and what it is computed from; edges run from origin to use."""
    capacity = {} if math.isinf(price) else {"capacity": price + (1 if price else 0)}
    network.add_edge((node.id, "out"), (node.id, "in"), **capacity)
    if sources is None:
        network.add_edge("origin", (node.id, "out"))
        return []
    sources = list(sources)
    for source in sources:
        network.add_edge((source.id, "in"), (node.id, "out"))
    return sources
