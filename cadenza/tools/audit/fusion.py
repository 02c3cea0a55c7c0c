"""The kernels of a part as torch.compile would have them: its own graphs, cut into kernels.

AOTAutograd traces forward and backward on fake tensors and decides what is saved, as torch.compile
does. What remains is an assumption about its code generator, stated here:

- A product, an attention kernel and anything else that is no arithmetic is a kernel of its own.
- Arithmetic and reductions that depend on the same of those kernels, and on one another, are one
  kernel: it reads each value from outside once and writes each value needed outside once.
- A sum over rows, whose loop runs the other way, is a kernel of its own.
- A value needed by a later kernel is stored, or computed again there, whichever moves less.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_map

from cadenza.tools.audit.counting import MEMORY, Launch, size_of, tensors_of
from cadenza.tools.audit.trace import launched

Tensor = torch.Tensor
Node = fx.Node
MOVING = (
    "cat", "full", "full_like", "iota", "arange", "gather", "scatter", "clone", "_to_copy", "copy",
    "constant_pad_nd", "slice_scatter", "select_scatter", "convert_element_type", "zeros", "ones",
    "scalar_tensor", "empty_strided",
)  # fmt: skip
REDUCING = (
    "sum", "mean", "amax", "amin", "max", "min", "prod", "any", "all", "argmax", "argmin", "var",
    "std", "var_mean", "logsumexp", "linalg_vector_norm", "cumsum",
)  # fmt: skip
SHOWN = 4  # operations that a kernel is called by


class Kernels:
    """The kernels of one graph, in the order in which they may run."""

    def __init__(self, graph: fx.Graph) -> None:
        self.nodes = list(graph.nodes)
        self.place = {node: place for place, node in enumerate(self.nodes)}
        self.stage = self._stages()
        self.group = self._groups()
        self.again = {node: sum(map(_size, self._sources(node))) for node in self.nodes}
        self.kept = self._kept()

    def launches(self) -> list[Launch]:
        """All of them."""
        found: list[tuple[int, Launch]] = []
        for node in self.nodes:
            if is_alone(node):
                found += [(self.place[node], launch) for launch in _alone(node)]
        members: dict[Node, list[Node]] = defaultdict(list)
        for node in self.kept:
            if is_fused(node):
                members[self.group[node]].append(node)
        for stored in members.values():
            found.append((max(self.place[n] for n in stored), self._fused(stored)))
        return [launch for _, launch in sorted(found, key=lambda pair: pair[0])]

    def _stages(self) -> dict[Node, int]:
        """How many kernels of their own lie one behind another before each value."""
        stages: dict[Node, int] = {}
        for node in self.nodes:
            before = (stages[i] + is_alone(base(i)) for i in node.all_input_nodes)
            stages[node] = max(before, default=0)
        return stages

    def _groups(self) -> dict[Node, Node]:
        """Which values are computed by one kernel: each value's first companion."""
        groups: dict[Node, Node] = {}

        def root(node: Node) -> Node:
            while groups[node] is not node:
                node = groups[node]
            return node

        for node in filter(is_fused, self.nodes):
            groups[node] = node
            if sums_rows(node):
                continue
            for source in map(base, node.all_input_nodes):
                alike = is_fused(source) and not sums_rows(source)
                if alike and self.stage[source] == self.stage[node]:
                    groups[root(source)] = root(node)
        return {node: root(node) for node in groups}

    def _sources(self, node: Node) -> Iterator[Node]:
        """What is read where a value is computed again: what lies in memory anyway."""
        pending, seen = [base(i) for i in node.all_input_nodes], set()
        while pending:
            source = pending.pop()
            if source in seen:
                continue
            seen.add(source)
            if can_repeat(source):
                pending += [base(i) for i in source.all_input_nodes]
            else:
                yield source

    def _kept(self) -> set[Node]:
        """The values that are stored: results, what other kernels take, what is dear to repeat."""
        kept: set[Node] = set()
        readers: dict[Node, set[Node]] = defaultdict(set)
        for node in reversed(self.nodes):
            if not is_fused(node):
                kept.update(base(i) for i in node.all_input_nodes if not is_view(node))
                continue
            away = readers[node] - {self.group[node]}
            if away and self._is_dear(node, len(away)):
                kept.add(node)
            passed = {self.group[node]} if node in kept else readers[node]
            for source in map(base, node.all_input_nodes):
                readers[source] |= passed
        return kept

    def _is_dear(self, node: Node, readers: int) -> bool:
        """Whether storing moves less than computing again in each other kernel that reads it."""
        if not can_repeat(node):
            return True
        here = any(self.group.get(base(user)) is self.group[node] for user in node.users)
        stored = (1 + readers) * _size(node) + (0 if here else self.again[node])
        return stored < readers * self.again[node]

    def _fused(self, stored: list[Node]) -> Launch:
        """One kernel, by the values that it stores."""
        own, read, names = self.group[stored[0]], {}, {}
        pending, seen = list(stored), set()
        while pending:
            node = pending.pop()
            if node in seen:
                continue
            seen.add(node)
            names[self.place[node]] = _name(node)
            for argument in node.all_input_nodes:
                source = base(argument)
                outside = source in self.kept and self.group.get(source) is not own
                if not is_fused(source) or outside:
                    read.setdefault(source, set()).add(argument)
                else:
                    pending.append(source)
        moved = sum(_size_of_views(node, views) for node, views in read.items())
        computed = sum(t.numel() for node in seen for t in tensors_of(node.meta.get("val")))
        return Launch(_title(names), MEMORY, computed, moved + sum(map(_size, stored)))


def _size_of_views(node: Node, views: set[Node]) -> int:
    """Bytes of a value that is read by these views of it."""
    return min(_size(node), sum(map(_size, views)))


def _title(names: dict[int, str]) -> str:
    words = list(dict.fromkeys(name for _, name in sorted(names.items())))
    return " ".join(words[:SHOWN]) + (" …" if len(words) > SHOWN else "")


def _name(node: Node) -> str:
    return str(getattr(node.target, "_schema", node).name.split("::")[-1])


def _size(node: Node) -> int:
    return sum(map(size_of, tensors_of(node.meta.get("val"))))


def _alone(node: Node) -> list[Launch]:
    """The kernels of an operation that is not fused."""
    args, kwargs = tree_map(_value, (tuple(node.args), dict(node.kwargs)))
    return launched(node.target, args, kwargs, node.meta["val"])


def _value(argument: Any) -> Any:
    return argument.meta["val"] if isinstance(argument, Node) else argument


# --- what nodes are -------------------------------------------------------------------------------


def is_view(node: Node) -> bool:
    """Whether a node is a part of, or another look at, what its first argument is."""
    if node.op != "call_function":
        return False
    if not isinstance(node.target, torch._ops.OpOverload):
        return True  # getitem
    return bool(node.target.is_view) or _name(node) in ("_unsafe_view", "alias", "detach")


def base(node: Node) -> Node:
    """The value that a view is of; an operation with several results stands for each of them."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def is_fused(node: Node) -> bool:
    """Whether a node is arithmetic or a reduction."""
    if node.op != "call_function" or is_view(node):
        return False
    tags = node.target.tags  # type: ignore[union-attr]  # no view: an operation of torch
    return torch.Tag.pointwise in tags or _name(node) in (*MOVING, *REDUCING)


def is_alone(node: Node) -> bool:
    """Whether a node is a kernel of its own."""
    return node.op == "call_function" and not is_view(node) and not is_fused(node)


def reduces(node: Node) -> bool:
    """Whether a node sums, or the like, over a dimension."""
    return node.op == "call_function" and not is_view(node) and _name(node) in REDUCING


def sums_rows(node: Node) -> bool:
    """Whether a node reduces dimensions before the last one, which stays."""
    if not reduces(node) or not isinstance(node.meta["val"], Tensor):
        return False
    given, found = node.all_input_nodes[0].meta["val"], node.meta["val"]
    return found.numel() > 1 and given.dim() > 1 and given.shape[-1] == found.shape[-1] > 1


def can_repeat(node: Node) -> bool:
    """Whether a value may be computed again where it is needed: it is no reduction."""
    return is_fused(node) and not reduces(node)
