"""The pointers of an emitted kernel, and what is known of the partials that it is given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cadenza.backends.triton.texts import ELEMENTWISE
from cadenza.core.ir import Node
from cadenza.core.ops import Op

# Operations on vectors that take no line of their own: they change which elements are read.
IN_PLACE = (
    Op.CONSTANT, Op.COLUMN_INDEX, Op.ROW_INDEX, Op.COLUMNS, Op.CONCAT, Op.SPLIT, Op.JOIN,
    Op.REPEAT, Op.TILE, Op.TRANSPOSE,
)  # fmt: skip
COLUMN_REDUCTIONS = (Op.COLUMN_SUM, Op.COLUMN_MAX)
SUFFIXES = {"load": "_in", "vector": "_in", "partial": "_parts", "store": "_out",
            "reduction": "_out"}  # fmt: skip
PARTIALS = {Op.ROW_VARIANCE: ("mean", "squares"), Op.LOGSUMEXP: ("top", "total")}


@dataclass(frozen=True)
class Argument:
    """A pointer of an emitted kernel: what it points to, and its name there.

    `role` is load, vector, partial (of an earlier kernel, to be finished here), store or reduction;
    `piece` tells apart the buffers of one reduction.
    """

    role: str
    node: Node
    name: str
    piece: str = ""


@dataclass
class Arguments:
    """The arguments of one kernel in order of first use, with names that clash with nothing."""

    names: dict[Node, str]
    found: dict[tuple[str, Node, str], Argument] = field(default_factory=dict)

    def get(self, role: str, node: Node, piece: str = "") -> Argument:
        """The argument of this content."""
        key = (role, node, piece)
        if key not in self.found:
            name = f"{self.name(node)}_{piece}" if piece else self.name(node)
            self.found[key] = Argument(role, node, name + SUFFIXES[role], piece)
        return self.found[key]

    def name(self, node: Node) -> str:
        """A value's own name, or one made for it."""
        if node not in self.names:
            taken = set(self.names.values())
            serial = len(self.names)
            while f"v{serial}" in taken:
                serial += 1
            self.names[node] = f"v{serial}"
        return self.names[node]


class Vectors:
    """What is known of the partials that earlier kernels have left.

    `few` are row reductions of which a kernel merges the partials itself: their number. `merged`
    are those that this kernel, one of vectors, merges: columns in all and in a tile.
    """

    def __init__(
        self, few: Mapping[Node, int] | None = None,
        merged: Mapping[Node, tuple[int, int]] | None = None,
    ) -> None:  # fmt: skip
        self.few, self.merged = few or {}, merged or {}


def in_memory(vector: Node) -> bool:
    """Whether a vector that is not finished where it is needed is finished in memory."""
    return vector.op not in ELEMENTWISE and vector.op not in IN_PLACE


def next_power(count: int) -> int:
    """The least power of two that is not less."""
    return 1 << max(0, count - 1).bit_length()
