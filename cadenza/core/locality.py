"""Which columns of an accumulator a kernel's epilogue ties together.

A tile must hold the two columns of a pair, the columns of a group, whatever is combined with one
another. Halves and heads tie few columns however far apart; a shift by one column ties them all,
and then the value can't be made in the epilogue: a pointwise kernel, which holds rows, makes it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cadenza.core.ir import Node
from cadenza.core.ops import Op

TILE_COLUMNS = 256  # columns of the widest tile; a class of tied columns must fit in one
Columns = Any  # an array of accumulator columns, -1 where a column is made of none


class Ties:
    """The classes of tied columns of one accumulator, grown value by value."""

    def __init__(self, product: Node) -> None:
        count = int(product.type.columns)
        self.parent = np.arange(count)
        self.columns: dict[Node, Columns] = {product: np.arange(count)}

    def admit(self, node: Node) -> bool:
        """Takes a value into the epilogue; False, and no change, if it would tie too many."""
        if node.attributes.get("size", 1) > TILE_COLUMNS:
            return False
        sources = [self.columns[i] for i in node.inputs if i in self.columns]
        if not sources:
            return True
        if all(s is sources[0] for s in sources) and node.op.group == "elementwise":
            self.columns[node] = sources[0]
            return True
        before = self.parent.copy()
        mapped = self._mapped(node)
        if np.bincount(self._roots()).max(initial=0) > TILE_COLUMNS:
            self.parent = before
            return False
        self.columns[node] = mapped
        return True

    def widest(self) -> int:
        """The number of columns of the largest class."""
        return int(np.bincount(self._roots()).max(initial=0))

    def _roots(self) -> Columns:
        while True:
            jumped = self.parent[self.parent]
            if np.array_equal(jumped, self.parent):
                return jumped
            self.parent = jumped

    def _of(self, node: Node, like: Node) -> Columns:
        """The columns of an input, spread over the columns of the value made of it."""
        found = self.columns.get(node)
        width = int(node.type.columns)
        own = np.full(width, -1) if found is None else found
        spread = int(like.type.columns)
        return own if width == spread else np.broadcast_to(own, spread)

    def _mapped(self, node: Node) -> Columns:
        """The accumulator columns of a value's columns; ties what it combines."""
        attributes = node.attributes
        if node.op is Op.CONCAT:
            return np.concatenate([self._of(i, i) for i in node.inputs])
        if node.op is Op.JOIN:
            parts = [self._of(i, i).reshape(-1, attributes["inner"]) for i in node.inputs]
            return np.stack(parts, 1).reshape(-1)
        x = self._of(node.inputs[0], node.inputs[0])
        if node.op is Op.SPLIT:
            return x.reshape(-1, 2, attributes["inner"])[:, attributes["part"]].reshape(-1)
        if node.op is Op.COLUMNS:
            return x[attributes["start"] : attributes["stop"]]
        if node.op is Op.REPEAT:
            return np.repeat(x, attributes["times"])
        if node.op is Op.TILE:
            return np.tile(x, attributes["times"])
        if node.op in (Op.GROUP_SUM, Op.GROUP_MAX):
            return self._grouped(x.reshape(-1, attributes["size"]))
        return self._tied([self._of(i, node) for i in node.inputs if int(i.type.columns) > 1])

    def _tied(self, arrays: list[Columns]) -> Columns:
        """Ties the columns that stand at the same place; one of them for each place."""
        result = arrays[0] if arrays else np.full(1, -1)
        for other in arrays[1:]:
            both = (result >= 0) & (other >= 0)
            self._unite(result[both], other[both])
            result = np.where(result >= 0, result, other)
        return result

    def _grouped(self, groups: Columns) -> Columns:
        """Ties the columns of each group; the largest of them stands for it."""
        chosen = groups.max(1)
        inside = groups >= 0
        self._unite(np.broadcast_to(chosen[:, None], groups.shape)[inside], groups[inside])
        return chosen

    def _unite(self, a: Columns, b: Columns) -> None:
        while True:
            roots = self._roots()
            low, high = np.minimum(roots[a], roots[b]), np.maximum(roots[a], roots[b])
            if np.array_equal(low, high):
                return
            np.minimum.at(self.parent, high, low)
