"""The arguments of linear_cross_entropy: which fit, and what to write instead of one that doesn't.

Nothing here looks at a tensor's values, so nothing waits for a device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from cadenza.core.arguments import is_flag, is_int64, is_number
from cadenza.core.errors import ProgramError
from cadenza.library.operands import check_plain

Tensor = torch.Tensor
STOCK = "F.cross_entropy(F.linear(x, w), target)"
REDUCTIONS = ("mean", "sum", "none")
OPTIONAL = {
    "bias": "bias [V]",
    "weight": "weight [V], one number a class",
    "token_weights": "token_weights [...], one number a target",
}


def wrong(found: str, expected: str, write: str = "") -> ProgramError:
    """An argument that does not fit."""
    return ProgramError("linear_cross_entropy", found=found, expected=expected, write=write)


def check_terms(
    ignore_index: int, label_smoothing: float, z_loss: float, softcap: float | None
) -> None:
    """Raises ProgramError for what is no number, or one outside of its range."""
    if not is_int64(ignore_index):
        raise wrong(
            f"ignore_index={ignore_index!r}",
            "a whole number: a class that does not count, or one that does not exist",
            "ignore_index=-100 where every target counts",
        )
    if not (is_number(label_smoothing) and 0.0 <= label_smoothing <= 1.0):
        raise wrong(f"label_smoothing={label_smoothing!r}", "a number in [0, 1]", "such a number")
    if not (is_number(z_loss) and z_loss >= 0.0):
        raise wrong(f"z_loss={z_loss!r}", "the weight of logsumexp², at least 0", "z_loss=1e-4")
    if softcap is not None and not (is_number(softcap) and softcap > 0.0):
        raise wrong(f"softcap={softcap!r}", "a bound of the logits, above 0", "softcap=None")


def check_form(
    reduction: str, chunk: int | None, lean: bool, deprecated: Mapping[str, Any]
) -> None:
    """Raises ProgramError for what is no reduction, chunk or flag, and for any of `deprecated`."""
    for name, value in deprecated.items():
        if value is not None:
            raise wrong(
                f"{name}={value!r}",
                "no such argument: torch deprecates it",
                "reduction='mean', 'sum' or 'none'",
            )
    known = isinstance(reduction, str) and reduction in REDUCTIONS
    if not known or not (chunk is None or (is_int64(chunk) and chunk >= 1)):
        raise wrong(
            f"reduction={reduction!r:.40}, chunk={chunk!r:.40}",
            f"a reduction of {', '.join(REDUCTIONS)}, and at least one row at a time",
            "reduction='mean', and chunk=None for a size of our choice",
        )

    if not is_flag(lean):
        raise wrong(f"lean={lean!r:.40}", "True or False", "lean=True for the least memory")


def check_items(number: Any, reduction: str) -> None:
    """Raises ProgramError for a number of items that is none, or that nothing is divided by."""
    if number is None:
        return
    if reduction != "mean":
        raise wrong(
            f"num_items_in_batch and reduction={reduction!r}",
            "reduction='mean': the sum divided by that number",
            "one of both",
        )
    if not (is_number(number) or (isinstance(number, Tensor) and number.dim() == 0)):
        shape = f" {list(number.shape)}" if isinstance(number, Tensor) else ""
        raise wrong(
            f"num_items_in_batch, a {type(number).__name__}{shape}",
            "a number, or a tensor without dimensions",
            "num_items_in_batch=tensor.sum()",
        )
    if is_number(number) and not number >= 0:  # of a tensor a GPU would have to be waited for
        raise wrong(
            f"num_items_in_batch={number!r}",
            "a number of items, 0 or more",
            "num_items_in_batch=(target != ignore_index).sum()",
        )


def check_tensors(x: Tensor, w: Tensor, target: Tensor, optional: Mapping[str, Any]) -> None:
    """Raises ProgramError for what is no tensor, and where shapes, dtypes or devices don't fit."""
    given = {name: value for name, value in optional.items() if value is not None}
    operands = {"x": x, "w": w, "target": target, **given}
    for name, value in operands.items():
        if not isinstance(value, Tensor):
            raise wrong(f"{name}={value!r:.40}", "a tensor", f"{name}=torch.tensor(...)")
    _check_target(target)
    if w.dim() != 2 or x.dim() < 1 or x.shape[-1] != w.shape[1] or x.shape[:-1] != target.shape:
        raise wrong(
            f"x {list(x.shape)}, w {list(w.shape)}, target {list(target.shape)}",
            "x [..., D], w [V, D], target [...]",
            _fitting(x, w, target),
        )
    shapes = {"bias": w.shape[:1], "weight": w.shape[:1], "token_weights": target.shape}
    check_plain(tuple(operands), tuple(operands.values()), STOCK)
    for name, value in given.items():
        if value.shape != shapes[name]:
            wanted = ", ".join(map(str, shapes[name]))
            alike = value.numel() == shapes[name].numel()
            cure = f"{name}.view({wanted})" if alike else f"{name} of shape [{wanted}]"
            raise wrong(f"{name} {list(value.shape)}", OPTIONAL[name], cure)
    for name, value in {"w": w, "target": target, **given}.items():
        if value.device != x.device:
            found = f"x on {x.device}, {name} on {value.device}"
            raise wrong(found, "one device", f"{name}.to(x.device)")
    if "weight" in given and given["weight"].requires_grad:
        raise wrong(
            "a weight of the classes that requires a gradient",
            "one that doesn't: as in torch, the weight gets none",
            "weight.detach()",
        )


def _fitting(x: Tensor, w: Tensor, target: Tensor) -> str:
    """What to write where shapes of x, w and target don't fit: the likeliest slip."""
    rows = x.shape[:-1]
    if x.dim() and w.dim() == 2 and x.shape[-1] == w.shape[0] != w.shape[1]:
        return "w.T"
    if target.numel() == rows.numel() and target.shape != rows:
        return f"target.view({', '.join(map(str, rows))})"
    one_less = rows and target.dim() and rows[-1] == target.shape[-1] + 1
    if one_less and rows[:-1] == target.shape[:-1]:
        return "x[..., :-1, :], of the rows that have a target"
    return "a target for each row of x, and a w of as many columns as x"


def _check_target(target: Tensor) -> None:
    if target.is_floating_point():
        raise wrong(
            f"target of {target.dtype}, {list(target.shape)}",
            "class numbers in torch.int64; probabilities as targets are not supported",
            f"target.long(); for probabilities {STOCK}",
        )
    if target.dtype != torch.int64:
        raise wrong(f"target of {target.dtype}", "class numbers in torch.int64", "target.long()")
