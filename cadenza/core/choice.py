"""Whether to defer at all: one decision for both passes, by the price of whole plans.

It must not depend on which gradients a call needs, or forward's rounding would: both forms are
priced with the gradients that training takes and at a fixed number of rows, and the cheaper one is
kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from cadenza.core.cost import GPUS, itemsize, kernel_work, vector_product_work
from cadenza.core.ir import Graph
from cadenza.core.plan import Plan
from cadenza.core.storage import dtypes_of
from cadenza.core.text import digest

GPU = GPUS["h100"]  # any will do: prices are compared with one another
_KEPT: dict[tuple[str, str], bool] = {}  # by the digests of both forms


def keeps_deferred(
    deferred: Graph, textbook: Graph, plans: Callable[[bool], Iterable[Plan]]
) -> bool:
    """Whether a program is computed in its deferred form; `plans` gives those of either form.

    In fp16 it is not: what a norm has not scaled yet may be outside of that range, and so may an
    adjoint be that a norm's factor has scaled.
    """
    if "float16" in dtypes_of(textbook).values():
        return False
    if all(a is b for a, b in zip(deferred.outputs, textbook.outputs, strict=True)):
        return True
    key = digest(deferred), digest(textbook)
    if key not in _KEPT:
        _KEPT[key] = price(plans(True)) <= price(plans(False))
    return _KEPT[key]


def price(plans: Iterable[Plan]) -> float:
    """The roofline time of all kernels and vector products, in seconds."""
    total = 0.0
    for plan in plans:
        dtypes = dtypes_of(plan.graph)
        narrowest = min(dtypes.values(), key=itemsize, default="float32")
        works = [kernel_work(kernel, dtypes) for kernel in plan.kernels]
        works += [vector_product_work(product, dtypes) for product in plan.vector_products]
        total += sum(work.seconds(GPU, narrowest) for work in works)
    return total
