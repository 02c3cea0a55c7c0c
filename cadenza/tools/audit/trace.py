"""The kernels of a part as they are launched one by one: each of torch's operations is one.

The part runs on fake tensors, forward and backward, under a mode that sees what reaches the
dispatcher. Cadenza's operations are the kernels of their plans.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cadenza.tools.audit.counting import ATTENTION, OPTIMIZER, Launch, launch_of, tensors_of
from cadenza.tools.audit.parts import Part
from cadenza.tools.audit.plans import is_program, launches

Tensor = torch.Tensor
FORWARD, BACKWARD = "forward", "backward"
PASSES = (FORWARD, BACKWARD, OPTIMIZER)
Step = dict[str, list[Launch]]  # by pass


class Counter(TorchDispatchMode):
    """Collects the launches of what runs while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Launch] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.found += launched(func, args, kwargs, result)
        return result


def launched(function: Any, args: Any, kwargs: Any, result: Any) -> list[Launch]:
    """The kernels of one operation."""
    if is_program(function):
        return launches(function, args)
    launch = launch_of(function, args, kwargs, result)
    return [] if launch is None else [launch]


def traced(part: Part) -> Step:
    """What forward and backward of a part launch, each operation by itself."""
    with part.context(), Counter() as forward:
        outputs = differentiable(part.module(*part.args, **part.kwargs))
    adjoints = [torch.empty_like(output) for output in outputs]
    with Counter() as backward:
        if outputs:
            torch.autograd.backward(outputs, adjoints)
    for tensor in (*part.trained, *tensors_of((part.args, part.kwargs))):
        tensor.grad = None
    return seen_by(part, {FORWARD: forward.found, BACKWARD: backward.found})


def differentiable(result: Any) -> list[Tensor]:
    """The results that a gradient comes in by: a loss, where there is one, else all."""
    loss = getattr(result, "loss", None)
    if loss is None and isinstance(result, dict):
        loss = result.get("loss")
    return [t for t in tensors_of(result if loss is None else loss) if t.requires_grad]


def seen_by(part: Part, step: Step) -> Step:
    """A step's launches, attention by the pairs that it sees."""
    return {name: list(_seen(found, part.visible)) for name, found in step.items()}


def _seen(found: Iterable[Launch], visible: float) -> Iterator[Launch]:
    for launch in found:
        scaled = launch.kind == ATTENTION and visible < 1.0
        yield launch._replace(flops=int(launch.flops * visible)) if scaled else launch


def updated(part: Part) -> list[Launch]:
    """What AdamW launches to update a part's parameters, once warm: PyTorch's fused kernel."""
    weights = part.trained
    if not weights:
        return []
    optimizer = torch.optim.AdamW(weights, fused=True)
    for weight in weights:
        weight.grad = torch.empty_like(weight)
    optimizer.step()
    with Counter() as counter:
        optimizer.step()
    for weight in weights:
        weight.grad = None
    return [launch._replace(kind=OPTIMIZER) for launch in counter.found if launch.bytes > 2**10]
