"""What a program compiles to: kernels, what they store and move, and what is left to torch.

The least that a pass can move is each of its inputs read once and each of its outputs written once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from cadenza.backends.triton.fallbacks import LibraryProduct, ReferenceKernel
from cadenza.core.cost import moved
from cadenza.core.plan import Kernel
from cadenza.core.plan_text import KernelText, PlanText, counts
from cadenza.core.readiness import reduces_matrix
from cadenza.core.storage import dtypes_of
from cadenza.tools.check.findings import Finding
from cadenza.tools.emitted import named_steps
from cadenza.tools.explain import Explanation

# What a template refused, by a part of its reason, and what to write instead.
CURES = {
    "a sum over groups": "group sums and maxima of the product's own columns, before others move",
    "groups of": "groups whose size is a power of two, at most 256 columns, aligned to the pairs",
    "that the same kernel makes": "the reduction as an output, and what is made of it in a later "
    "program",
    "columns paired in two ways": "one `inner` for all splits and joins of a kernel",
    "columns of the accumulator": "L.split by one `inner`; what mixes columns far apart does not "
    "fit a tile",
    "rows of": "what follows a reduction of so long a row as a second program, or sums that need "
    "no finished maximum: L.logsumexp takes it out by itself",
    "matrices of different numbers of rows": "what has other rows in a program of its own, its "
    "result as an operand",
    "a variance of": "L.row_variance of all columns of the product, or of a matrix that is loaded",
    "a reduction of whole rows": "the reduction as an output, and what follows in a later program",
    "a number of each row": "no .T of a column within an epilogue: pass it as a row",
    "random numbers of a vector": "L.random of a matrix, or the numbers as an operand",
}
OTHERWISE = "what the reason names as an output, and the rest as a program of its own"
ALLOWED = "float32 is multiplied by torch"  # not the author's doing
UNIT = 1e6
MORE = 1.01  # of the unfused program's bytes: vectors that it need not keep are not worth a word
PARTS = "programs of its parts: what this one loads again costs more than a store"


def plan_findings(found: Explanation, gpu: str) -> Iterator[Finding]:
    """A finding for each pass, then one on what a GPU's templates do not take."""
    for name, plan in found.plans.items():
        yield _pass(name, plan, found)
    yield _fuses(found, gpu)


def kernel_data(found: Explanation) -> list[dict[str, Any]]:
    """Each kernel with the bytes that it stores and moves."""
    return [
        {
            "name": text.name,
            "kind": text.kernel.kind,
            "stored": _stored(text.kernel, plan, found),
            "moved": found.works[text.name].bytes,
            "flops": found.works[text.name].flops,
        }
        for plan in found.plans.values()
        for text in plan.kernels
        if text.kernel is not None
    ]


def least(plan: PlanText, rows: int) -> int:
    """Bytes of every input that the pass uses and every output, each once."""
    graph = plan.plan.graph
    used = set(graph.nodes())
    return moved([*(i for i in graph.inputs if i in used), *graph.outputs], dtypes_of(graph), rows)


def _pass(name: str, plan: PlanText, found: Explanation) -> Finding:
    """One pass: its kernels, and its bytes beside the least and the unfused program's."""
    works = found.fused(name)
    total, unfused = (sum(w.bytes for w in ws) for ws in (works, found.unfused[name]))
    bound = least(plan, found.target.rows)
    kernels = [k.kernel for k in plan.kernels if k.kernel is not None]
    stored = sum(_stored(kernel, plan, found) for kernel in kernels)
    ratio = f"{total / bound:.2f} x the least, unfused {unfused / bound:.2f} x"
    sizes = f"stores {stored / UNIT:.1f} MB, moves {total / UNIT:.1f} MB: {ratio}"
    lines = [f"{counts(plan.plan)}; {sizes}", *_reasons(plan, found)]
    if name == "forward" and total > MORE * unfused:
        return Finding(name, False, "\n".join(lines), PARTS)
    return Finding(name, True, "\n".join(lines))


def _stored(kernel: Kernel, plan: PlanText, found: Explanation) -> int:
    return moved(kernel.stores, dtypes_of(plan.plan.graph), found.target.rows)


def _reasons(plan: PlanText, found: Explanation) -> Iterator[str]:
    """Why there are kernels without a product."""
    for text in plan.kernels:
        if text.kernel is None or text.kernel.product is not None:
            continue
        waits = [found.text.names[v] for v in text.kernel.vectors if _is_late(v)]
        held = [found.text.names[r] for r in text.kernel.body if reduces_matrix(r)]
        if waits:
            yield f"{text.name} waits for {', '.join(waits)}, finished from whole rows or columns"
        elif held:
            yield f"{text.name} holds whole rows, to reduce them"
        else:
            yield f"{text.name} makes operands of products from what comes in, before any has run"


def _is_late(vector: Any) -> bool:
    """Whether a finished vector is a reduction of a matrix, or made of one."""
    return reduces_matrix(vector) or any(_is_late(i) for i in vector.inputs)


def _fuses(found: Explanation, gpu: str) -> Finding:
    """Whether templates make every kernel of both passes."""
    problems: list[tuple[str, str]] = []
    for plan in found.plans.values():
        for name, step in named_steps(plan, found.text, gpu):
            left = isinstance(step, ReferenceKernel | LibraryProduct)
            if left and not step.reason.startswith(ALLOWED):
                problems.append((name, step.reason))
    if not problems:
        return Finding("fuses", True, f"{_number(found)} by templates, on {gpu}")
    lines = [f"{name} is left to torch: {reason}" for name, reason in dict(problems).items()]
    return Finding("fuses", False, "\n".join(lines), cure_of(problems[0][1]))


def cure_of(reason: str) -> str:
    """What to write instead of what a template refused."""
    return next((cure for part, cure in CURES.items() if part in reason), OTHERWISE)


def _number(found: Explanation) -> str:
    texts: Sequence[KernelText] = [k for plan in found.plans.values() for k in plan.kernels]
    return "the kernel" if len(texts) == 1 else f"all {len(texts)} kernels"
