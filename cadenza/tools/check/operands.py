"""Random operands of a program, floating ones at float64, to be cast from there.

Matrices are normal, weights such that products keep the size of what is multiplied. Columns, rows
and scalars lie between 0.5 and 1.5, for most of them scale or divide. A row comes as [N], a column
of whole numbers as [M], as torch's own functions take them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from cadenza.core.ir import Graph
from cadenza.core.ops import INTEGER, M, Op
from cadenza.core.trace import Operand
from cadenza.tools.target import Target

Tensor = torch.Tensor
Arguments = dict[str, Any]
HOST = torch.device("cpu")
FEW = 8  # a whole number lies below, if it is compared with no column's index


def drawn(
    target: Target, rows: int, limits: Mapping[str, int], device: torch.device = HOST, seed: int = 0
) -> Arguments:
    """The arguments of a call with so many rows: operands, and the constants of the target."""
    generator = torch.Generator(device).manual_seed(seed)
    operands = {
        operand.name: _one(operand, rows, limits.get(operand.name, FEW), generator)
        for operand in target.signature.operands
    }
    return {**operands, **dict(target.signature.constants)}


def index_limits(graph: Graph) -> dict[str, int]:
    """For operands that are compared with the indices of columns, how many of these there are."""
    found: dict[str, int] = {}
    for node in graph.nodes():
        indices = [i for i in node.inputs if i.op is Op.COLUMN_INDEX]
        if node.op is not Op.COMPARE or not indices:
            continue
        for other in node.inputs:
            if other.op is Op.INPUT and other.type.kind == INTEGER:
                name, count = str(other.attributes["name"]), int(indices[0].type.columns)
                found[name] = min(count, found.get(name, count))
    return found


def cast(arguments: Mapping[str, Any], dtype: torch.dtype) -> Arguments:
    """The arguments with floating tensors in another dtype."""
    return {
        name: value.to(dtype) if is_float(value) else value for name, value in arguments.items()
    }


def is_float(value: Any) -> bool:
    """Whether an argument is a floating tensor."""
    return isinstance(value, Tensor) and value.is_floating_point()


def _one(operand: Operand, rows: int, limit: int, generator: torch.Generator) -> Tensor:
    shape = (rows if operand.rows == M else int(operand.rows), operand.columns)
    dtype, chance = getattr(torch, operand.dtype), {"generator": generator}
    chance |= {"device": generator.device}
    if dtype == torch.bool:
        return torch.rand(shape, **chance) > 0.5
    if not dtype.is_floating_point:
        whole = torch.randint(limit, shape, dtype=dtype, **chance)
        return whole[:, 0] if operand.columns == 1 and operand.rows == M else _flat(whole, operand)
    if 1 in (operand.rows, operand.columns):
        return _flat(torch.rand(shape, dtype=torch.float64, **chance) + 0.5, operand)
    normal = torch.randn(shape, dtype=torch.float64, **chance)
    return normal if operand.rows == M else normal.mul_(operand.columns**-0.5)


def _flat(vector: Tensor, operand: Operand) -> Tensor:
    """A row as [N], a scalar without dimensions."""
    if operand.rows != 1:
        return vector
    return vector[0, 0] if operand.columns == 1 else vector[0]
