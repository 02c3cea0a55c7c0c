"""Runs a graph as a whole: the oracle of single rewriting rules, which have no kernels.

Arithmetic is in the compute type; outputs and computed operands of products are rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cadenza.backends.steps import Owner, Steps, Values, torch_dtype
from cadenza.core.ir import Graph
from cadenza.core.ops import REAL, Op
from cadenza.core.storage import compute_dtype, storage_dtypes

Tensor = torch.Tensor


def run_graph(graph: Graph, tensors: Sequence[Tensor], rows: int) -> list[Tensor]:
    """The outputs of inputs in the graph's order, each 2-D, over `rows` rows."""
    compute = compute_dtype(graph)
    nodes = graph.nodes()
    names = storage_dtypes(nodes, compute)
    steps = Steps(nodes, getattr(torch, compute), graph.outputs)
    operands = {i for n in nodes if n.op is Op.MATMUL for i in n.inputs if i.type.is_matrix}
    values: Values = {"like": tensors[0].new_empty(0, dtype=steps.compute)}
    for node, tensor in zip(graph.inputs, tensors, strict=True):
        values[node] = tensor.to(steps.compute) if node.type.kind == REAL else tensor
    for node in nodes:
        if node.op is not Op.INPUT:
            values[node] = steps.step(node)(values, rows)
            if node in operands and node.op is not Op.CAST:
                values[node] = values[node].to(torch_dtype(node, names[node])).to(steps.compute)
    owner = Owner(tensors)
    return [owner.own(torch.as_tensor(values[o]), torch_dtype(o, names[o])) for o in graph.outputs]
