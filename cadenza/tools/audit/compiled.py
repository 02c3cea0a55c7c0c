"""A part's forward and backward as torch.compile would run them."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from cadenza.tools.audit.fusion import Kernels
from cadenza.tools.audit.parts import Part
from cadenza.tools.audit.trace import BACKWARD, FORWARD, Step, differentiable, seen_by

Tensor = torch.Tensor


def compiled(part: Part) -> Step:
    """What forward and backward of a part launch after torch.compile, its kernels fused."""
    from torch._functorch.aot_autograd import aot_function, make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    graphs: list[fx.Graph] = []

    def keep(module: fx.GraphModule, inputs: Any) -> Any:
        graphs.append(module.graph)
        return make_boxed_func(module.forward)

    tensors, call = _of_tensors(part)
    function = aot_function(
        call, keep, keep, partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about graphs that nobody will run
        outputs = differentiable(function(tensors))
        if outputs:
            torch.autograd.backward(outputs, [torch.empty_like(output) for output in outputs])
    found = [Kernels(graph).launches() for graph in graphs]
    forward, backward = found[0], found[1] if len(found) > 1 else []
    for tensor in tensors:
        tensor.grad = None
    return seen_by(part, {FORWARD: forward, BACKWARD: backward})


def _of_tensors(part: Part) -> tuple[list[Tensor], Any]:
    """All tensors that a part takes, its own among them, and a function of those."""
    own = {**part.weights, **dict(part.module.named_buffers())}
    leaves, structure = tree_flatten((part.args, part.kwargs))
    given = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def call(tensors: list[Tensor]) -> Any:
        full = list(leaves)
        for place, tensor in zip(given, tensors[len(own) :], strict=True):
            full[place] = tensor
        args, kwargs = tree_unflatten(full, structure)
        named = dict(zip(own, tensors, strict=False))
        with part.context():
            found = torch.func.functional_call(part.module, named, args, kwargs)
        return differentiable(found)

    return [*own.values(), *(leaves[place] for place in given)], call
