"""The programs that the tests of PyTorch citizenship share, each with operands that fit it.

Between them they have every kind of output (matrix, column, row, whole number, condition, cast,
an input as it came), every way to return (value, tuple, dict) and operands of every rank.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cadenza import block, epilogue
from cadenza import lang as L

K, N = 8, 12
RUN = torch.ops.cadenza.run.default
RUN_BACKWARD = torch.ops.cadenza.run_backward.default
Operands = dict[str, Any]


@epilogue
def norm_swiglu(acc, rstd):
    """An epilogue with a column operand: x [M, K], w [N, K], rstd [M, 1] to [M, N / 2]."""
    gate, up = L.split(acc * rstd)
    return L.silu(gate) * up


@block
def mlp(x, w_in, bias, w_out):
    """Two products, a bias row, a tuple: [M, K] and [M, 1]."""
    hidden = L.gelu(L.linear(x, w_in, bias))
    return x + L.linear(hidden, w_out), L.row_mean(hidden)


@block
def summary(x, w, index, eps=0.5):
    """A dict with an output of every kind; index [M, 1] holds whole numbers."""
    y = L.linear(x, w) + eps
    return {
        "y": L.relu(y),
        "picked": L.pick(y, index),
        "mask": y > 0.0,
        "index": index,
        "total": L.column_sum(y),
        "half": L.cast(y, "bfloat16"),
        "x": x,
    }


@block(shapes={"x": "M D", "weight": "1 D"})
def norm(x, weight, eps=1e-6):
    """No product at all, and declared shapes."""
    return L.rms_norm(x, weight, eps)


def tensor(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = True) -> torch.Tensor:
    """Random numbers from torch's generator, as a leaf."""
    return torch.randn(*shape, dtype=torch.float64).to(dtype).requires_grad_(grad)


def _norm_swiglu(lead: tuple[int, ...], **options: Any) -> Operands:
    return {
        "x": tensor(*lead, K, **options),
        "w": tensor(N, K, **options),
        "rstd": tensor(*lead, 1, **options),
    }


def _mlp(lead: tuple[int, ...], **options: Any) -> Operands:
    return {
        "x": tensor(*lead, K, **options),
        "w_in": tensor(N, K, **options),
        "bias": tensor(N, **options),
        "w_out": tensor(K, N, **options),
    }


def _summary(lead: tuple[int, ...], **options: Any) -> Operands:
    x, w = tensor(*lead, K, **options), tensor(N, K, **options)
    return {"x": x, "w": w, "index": torch.randint(N, lead)}


def _norm(lead: tuple[int, ...], **options: Any) -> Operands:
    return {"x": tensor(*lead, K, **options), "weight": tensor(K, **options)}


class Case(NamedTuple):
    """A program, and a maker of operands for some leading dimensions (dtype=, grad=)."""

    program: Callable[..., Any]
    operands: Callable[..., Operands]

    def call(self, operands: Operands, function: Callable[..., Any] | None = None) -> Any:
        """The program, or another function with its signature, on operands by name."""
        given = dict(operands)
        first = [given.pop("x"), given.pop("w")] if "rstd" in given else []
        return (function or self.program)(*first, **given)


CASES = {
    "epilogue": Case(norm_swiglu, _norm_swiglu),
    "tuple": Case(mlp, _mlp),
    "dict": Case(summary, _summary),
    "pointwise": Case(norm, _norm),
}


def values(returned: Any) -> list[torch.Tensor]:
    """What a program returned, as a list."""
    if isinstance(returned, dict):
        return list(returned.values())
    return [returned] if isinstance(returned, torch.Tensor) else list(returned)


def weighted(returned: Any) -> torch.Tensor:
    """A scalar to which every differentiable element of what a program returned adds its share."""
    return sum(
        (v.double() * torch.arange(1, v.numel() + 1).view(v.shape).cos()).sum()
        for v in values(returned)
        if v.requires_grad
    )


def gradients(returned: Any, operands: Operands) -> dict[str, torch.Tensor | None]:
    """The gradients of the operands that need one, given the loss `weighted`."""
    needed = {name: o for name, o in operands.items() if o.requires_grad}
    found = torch.autograd.grad(weighted(returned), list(needed.values()))
    return dict(zip(needed, found, strict=True))


def same(first: Any, second: Any) -> bool:
    """Whether two results (tensors, or lists or dicts of them) are equal bit by bit."""
    if isinstance(first, torch.Tensor):
        alike = first.dtype == second.dtype and first.shape == second.shape
        return alike and first.device == second.device and torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(v, second[k]) for k, v in first.items())
    return len(first) == len(second) and all(map(same, first, second))


class Calls(TorchDispatchMode):
    """Records every operation that torch dispatches, with its arguments and its results."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], Any]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.calls.append((function, args, result))
        return result

    def of(self, function: Any) -> list[tuple[Any, ...]]:
        """The arguments of each call of one operation."""
        return [args for called, args, _ in self.calls if called is function]


def assert_as_good(ours: Any, stock: Any, oracle: Any) -> None:
    """Ours errs at most twice as much as torch at the same dtype, plus one unit in the last place.

    Each is a tensor, or a dict of them; errors are Frobenius norms against the float64 oracle.
    """
    if isinstance(ours, dict):
        assert ours.keys() == stock.keys() == oracle.keys()
        for name in ours:
            assert_as_good(ours[name], stock[name], oracle[name])
        return
    errors = [float((t.detach().double() - oracle.detach()).norm()) for t in (ours, stock)]
    unit = torch.finfo(ours.dtype).eps * float(oracle.detach().norm())
    assert oracle.dtype == torch.float64
    assert errors[0] <= 2 * errors[1] + unit, (*errors, unit)
