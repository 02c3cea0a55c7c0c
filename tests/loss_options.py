"""Linear + cross-entropy by torch's own operations, with every option: the oracle of its tests.

An `Example` is one call: operands that require gradients, and what is fixed. `both` runs it by
`linear_cross_entropy` and by the oracle, for one random incoming gradient.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn import functional as F

import cadenza as cz

Tensor = torch.Tensor
Function = Callable[..., Tensor]
TRAINED = ("x", "w", "bias", "token_weights")
FORMS = {"default": False, "lean": True}


def oracle(
    x: Tensor,
    w: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    z_loss: float = 0.0,
    token_weights: Tensor | None = None,
    num_items_in_batch: Any = None,
    reduction: str = "mean",
    **options: Any,
) -> Tensor:
    """F.cross_entropy of F.linear; what that lacks is added to its rows. Logits are float32."""
    z = F.linear(x, w, bias)
    z = z.to(torch.promote_types(z.dtype, torch.float32))
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    flat, targets = z.flatten(0, -2) if z.dim() > 1 else z[None], target.flatten()
    if not z_loss and token_weights is None and num_items_in_batch is None:
        loss = F.cross_entropy(flat, targets, reduction=reduction, **options)
        return loss.reshape(target.shape) if reduction == "none" else loss
    loss = F.cross_entropy(flat, targets, reduction="none", **options)
    counts, share = targets != options.get("ignore_index", -100), torch.ones_like(loss)
    if options.get("weight") is not None:
        share = options["weight"][torch.where(counts, targets, 0)]
    loss = loss + torch.where(counts, share * z_loss * flat.logsumexp(-1) ** 2, 0.0)
    if token_weights is not None:
        loss, share = loss * token_weights.flatten(), share * token_weights.flatten()
    if reduction == "none":
        return loss.reshape(target.shape)
    if num_items_in_batch is not None:
        return loss.sum() / num_items_in_batch
    return loss.sum() / (share[counts].sum() if reduction == "mean" else 1.0)


class Example(NamedTuple):
    """Operands by name, those of TRAINED among them requiring gradients, and options."""

    operands: dict[str, Tensor]
    options: dict[str, Any]

    def run(self, function: Function, dtype: torch.dtype | None = None, **own: Any) -> list[Tensor]:
        """The loss, and the gradients for an incoming gradient that depends on its shape alone."""
        given = {n: converted(n, v, dtype) for n, v in self.operands.items()}
        loss = function(**given, **self.options, **own)
        generator = torch.Generator().manual_seed(7)
        upstream = torch.randn(loss.shape, generator=generator, dtype=torch.float64)
        wanted = [v for v in given.values() if v.requires_grad]
        return [loss, *torch.autograd.grad(loss, wanted, upstream.to(loss.dtype))]

    def both(self, **own: Any) -> tuple[list[Tensor], list[Tensor]]:
        """Loss and gradients by us, and by the oracle."""
        return self.run(cz.ops.linear_cross_entropy, **own), self.run(oracle)


def converted(name: str, value: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A leaf of its own; statistics stay at least float32."""
    if not value.is_floating_point():
        return value
    if dtype is not None:
        wide = torch.promote_types(dtype, torch.float32)
        value = value.to(wide if name in ("weight", "token_weights") else dtype)
    return value.detach().clone().requires_grad_(name in TRAINED)


def example(
    options: Mapping[str, Any],
    rows: int = 13,
    width: int = 5,
    classes: int = 9,
    dtype: torch.dtype = torch.float64,
) -> Example:
    """Random operands; `True` among the options asks for the optional operand of that name."""
    target = torch.randint(0, classes, (rows,))
    target[::4] = -100
    operands = {
        "x": torch.randn(rows, width).to(dtype),
        "w": torch.randn(classes, width).to(dtype) / width**0.5,
        "target": target,
        "bias": torch.randn(classes).to(dtype),
        "weight": torch.rand(classes, dtype=torch.promote_types(dtype, torch.float32)),
        "token_weights": torch.rand(rows, dtype=torch.promote_types(dtype, torch.float32)),
    }
    kept = {
        n: v for n, v in operands.items() if n in ("x", "w", "target") or options.get(n) is True
    }
    return Example(kept, {n: v for n, v in options.items() if n not in operands})


def combinations() -> Iterator[dict[str, Any]]:
    """Every combination of options but the reduction."""
    for chosen in product((0, 1), repeat=6):
        bias, weight, tokens, smoothing, z_loss, softcap = map(bool, chosen)
        flags = {"bias": bias, "weight": weight, "token_weights": tokens}
        terms = {"label_smoothing": 0.1 * smoothing, "z_loss": 0.01 * z_loss}
        yield {**flags, **terms, "softcap": 2.0 if softcap else None}


REDUCTIONS = {
    "mean": {"reduction": "mean"},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "items": {"num_items_in_batch": 7},
}
EVERYTHING = {
    "bias": True, "weight": True, "token_weights": True, "label_smoothing": 0.1, "z_loss": 0.01,
    "softcap": 2.0,
}  # fmt: skip
SINGLE = {
    "plain": {},
    "bias": {"bias": True},
    "weight": {"weight": True},
    "token_weights": {"token_weights": True},
    "label_smoothing": {"label_smoothing": 0.1},
    "z_loss": {"z_loss": 0.01},
    "softcap": {"softcap": 2.0},
    "everything": EVERYTHING,
}

each_form = pytest.mark.parametrize("lean", FORMS.values(), ids=FORMS)
each_option = pytest.mark.parametrize("options", SINGLE.values(), ids=SINGLE)
each_reduction = pytest.mark.parametrize("reduction", REDUCTIONS.values(), ids=REDUCTIONS)


def assert_equal(actual: list[Tensor], expected: list[Tensor], tolerance: float = 1e-12) -> None:
    """Equal shapes and dtypes, values to a tolerance, NaN where there is NaN."""
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)
