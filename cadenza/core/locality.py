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
        own = np.arange(int(product.type.columns))
        self.first = own  # of each column's class the first column; replaced, never written to
        self.columns: dict[Node, Columns] = {product: own}

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
        before = self.first
        mapped = self._mapped(node)
        if self.first is not before and self.widest() > TILE_COLUMNS:
            self.first = before
            return False
        self.columns[node] = mapped
        return True

    def widest(self) -> int:
        """The number of columns of the largest class."""
        return int(np.bincount(self.first).max(initial=0))

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
        """Makes one class of those of a[i] and b[i], for each i."""
        while True:
            one, other = self.first[a], self.first[b]
            if np.array_equal(one, other):
                return
            joined = self.first.copy()
            np.minimum.at(joined, np.maximum(one, other), np.minimum(one, other))
            self.first = _flat(joined)


def _flat(parents: Columns) -> Columns:
    """The root of each column, where `parents` leads towards it."""
    while True:
        nearer = parents[parents]
        if np.array_equal(nearer, parents):
            return parents
        parents = nearer
