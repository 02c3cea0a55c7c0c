"""What Cadenza's operations in a trace become: the kernels of their plans.

A program's kernels are those of its plan at the call's rows, as `explain` prices them. The loss of
linear logits runs its program chunk by chunk and adds up the chunks' gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from cadenza.core.cost import bytes_of, kernel_work, vector_product_work
from cadenza.core.ir import Node
from cadenza.core.ops import Op
from cadenza.core.plan_text import KernelText, PlanText
from cadenza.core.storage import dtypes_of
from cadenza.library.loss_batch import Batch, parts
from cadenza.library.loss_blocks import linear_loss
from cadenza.library.operator import find
from cadenza.library.specialize import BY_DIGEST, Specialization
from cadenza.tools.audit.counting import MEMORY, PRODUCTS, Launch, size_of

Tensor = torch.Tensor


def is_program(function: Any) -> bool:
    """Whether an operation of torch is one of Cadenza's that kernels are known of."""
    return function.namespace == "cadenza" and _name(function) in EXPANDED


def launches(function: Any, args: Sequence[Any]) -> list[Launch]:
    """The kernels of one of Cadenza's operations."""
    return list(EXPANDED[_name(function)](*args))


def _name(function: Any) -> str:
    return str(function._schema.name.split("::")[-1])


def _run(program: str, tensors: Any, call: str, needed: int, content: str) -> Iterator[Launch]:
    specialization, operands = find(program, tensors, call, needed)
    yield from forward(specialization, operands.rows)


def _run_backward(digest: str, values: Any, adjoints: Any, rows: int) -> Iterator[Launch]:
    yield from backward(BY_DIGEST[digest], rows)


def forward(specialization: Specialization, rows: int) -> Iterator[Launch]:
    """The kernels of a program's forward pass."""
    yield from _kernels(specialization.text.forward, specialization, rows, first=True)


def backward(specialization: Specialization, rows: int) -> Iterator[Launch]:
    """The kernels of its backward pass; none where no gradient is needed."""
    plan = specialization.text.backward
    if plan is not None:
        yield from _kernels(plan, specialization, rows, first=False)


def _kernels(
    plan: PlanText, specialization: Specialization, rows: int, first: bool
) -> Iterator[Launch]:
    dtypes, program = dtypes_of(plan.plan.graph), specialization.pair.program.name
    seen: set[Node] = set()
    for text in plan.kernels:
        assert text.kernel is not None
        work = kernel_work(text.kernel, dtypes, rows)
        title = f"{program} {_title(text)}"
        if text.kernel.product is None:
            computed = sum(bytes_of(node.type, "int8", rows) for node in text.kernel.body)
            yield Launch(title, MEMORY, computed, work.bytes)
            continue
        operands = text.kernel.product.inputs
        cast = _foreign(operands, seen, rows) if first else 0
        yield Launch(title, PRODUCTS, *work, dtypes[operands[0]], cast, narrow=True)
    for text in plan.beside:
        assert text.node is not None
        work = vector_product_work(text.node, dtypes, rows)
        yield Launch(f"{program} {text.name}", MEMORY, *work)


def _title(text: KernelText) -> str:
    return f"{text.name}: {text.product}" if text.product else text.name


def _foreign(operands: Sequence[Node], seen: set[Node], rows: int) -> int:
    """Numbers of operands that no kernel of the plan stores, each counted once."""
    fresh = [node for node in operands if node.op is Op.INPUT and node not in seen]
    seen.update(fresh)
    return sum(bytes_of(node.type, "int8", rows) for node in fresh)


# --- the loss -------------------------------------------------------------------------------------


def _loss(operands: Sequence[Tensor], call: str, size: int, needed: int) -> Iterator[Launch]:
    """The loss, and with `needed` its gradients, by chunks of `size` rows."""
    batch = Batch(operands, call)
    for part in parts(batch.rows, size):
        yield from _chunk(batch, part, needed)


def _chunk(batch: Batch, part: slice, needed: int) -> Iterator[Launch]:
    operands, rows = batch.of_rows(part), part.stop - part.start
    sums = batch.sums(part, needed)
    program = batch.compiled(linear_loss, operands, needed, sums)
    found = [*forward(program, rows), *(backward(program, rows) if needed else ())]
    yield from (launch._replace(narrow=False, cast=0) for launch in found)
    if "bias" in program.pair.gradients:
        summed = operands["bias"].numel() * batch.wide.itemsize
        yield Launch("adds a chunk's gradient of bias", MEMORY, 0, 3 * summed)


def _rows(operands: Any, call: str, size: int) -> Iterator[Launch]:
    yield from _loss(operands, call, size, 0)


def _rows_again(adjoint: Any, operands: Any, call: str, size: int, needed: int) -> Iterator[Launch]:
    yield from _loss(operands, call, size, needed)


def _scaled(gradient: Tensor, scale: Tensor, dtype: torch.dtype) -> Iterator[Launch]:
    """gradient · scale in float32, then rounded."""
    rounded = gradient.numel() * dtype.itemsize
    wide = gradient.numel() * torch.promote_types(gradient.dtype, scale.dtype).itemsize
    widened = size_of(gradient) + wide if wide != size_of(gradient) else 0
    narrowed = wide + rounded if wide != rounded else 0
    yield Launch("scales a gradient", MEMORY, 0, widened + 2 * wide + narrowed)


EXPANDED: dict[str, Callable[..., Iterator[Launch]]] = {
    "run": _run,
    "run_backward": _run_backward,
    "cross_entropy_sum": _loss,
    "cross_entropy_rows": _rows,
    "cross_entropy_rows_backward": _rows_again,
    "scaled_gradient": _scaled,
}
