"""One small program for every operation of the closed set and every function of the language.

Each stands beside the same computation in torch, written without the language: the independent
oracle. Operands are "rows columns" and, where it matters, what they hold; M is the number of rows
of the call. Column counts are odd where the operation lets them be.
"""

import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from philox import uniform

import cadenza as cz
from cadenza.library.function import Program

Tensor = torch.Tensor
X = "M 7"


class Case(NamedTuple):
    """A program, its oracle in torch, and its operands by name.

    `declared` hands the operands' shapes to the program, which then need not follow from the call.
    """

    name: str
    function: Callable[..., Any]
    oracle: Callable[..., Any]
    operands: dict[str, str]
    declared: bool = False

    def program(self) -> Program:
        """A fresh program, compiled from nothing."""
        shapes = {name: " ".join(text.split()[:2]) for name, text in self.operands.items()}
        return cz.block(self.function, shapes=shapes if self.declared else None)

    def expected(self, **operands: Tensor) -> Any:
        """What the oracle returns, torch's own functions taking their operands by position."""
        return self.oracle(*operands.values())

    def tensors(self, rows: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
        """Random operands for a call of that many rows."""
        return {name: tensor(text, rows, dtype) for name, text in self.operands.items()}


def tensor(text: str, rows: int, dtype: torch.dtype) -> Tensor:
    """A random tensor as "rows columns contents" says; normal numbers if it says no contents."""
    height, columns, *contents = text.split()
    shape = (rows if height == "M" else int(height), int(columns))
    match contents:
        case []:
            return torch.randn(shape, dtype=dtype)
        case ["positive"]:
            return torch.rand(shape, dtype=dtype) * 1.5 + 0.5
        case ["apart"]:  # from zero
            return (torch.rand(shape, dtype=dtype) * 1.5 + 0.5) * torch.randn(shape).sign().to(
                dtype
            )
        case ["unit"]:
            return 2 * torch.rand(shape, dtype=dtype) - 1
        case ["whole"]:
            return torch.randint(-3, 4, shape).to(dtype)
        case ["index", limit]:
            return torch.randint(int(limit), shape)
        case ["mask"]:
            return torch.rand(shape) > 0.5
    raise ValueError(text)


def split_by_index(x: Tensor, part: int, inner: int) -> Tensor:
    """Part 0 or 1 of the columns seen as (outer, 2, inner), one column at a time."""
    return x[:, [j for j in range(x.shape[1]) if j // inner % 2 == part]]


def join_by_index(a: Tensor, b: Tensor, inner: int) -> Tensor:
    """The columns that `split_by_index` takes apart, one column at a time."""
    places = [(j // inner % 2, j // (2 * inner) * inner + j % inner) for j in range(2 * a.shape[1])]
    return torch.stack([(a, b)[part][:, source] for part, source in places], 1)


def rotated(x: Tensor, cos: Tensor, sin: Tensor, head_dim: int, heads: int) -> Tensor:
    """Pairs (i, i + r/2) of the first r columns of a head as complex numbers, times cos + i sin."""
    half = cos.shape[1]
    parts = []
    for head in x.split(head_dim, 1)[:heads]:
        turned = torch.complex(head[:, :half], head[:, half : 2 * half]) * torch.complex(cos, sin)
        parts += [turned.real, turned.imag, head[:, 2 * half :]]
    return torch.cat([*parts, x[:, heads * head_dim :]], 1)


def rotated_pairs(x: Tensor, cos: Tensor, sin: Tensor, head_dim: int, heads: int) -> Tensor:
    """Pairs (2i, 2i + 1) of the first r columns of a head as complex numbers, times cos + i sin."""
    half = cos.shape[1]
    parts = []
    for head in x.split(head_dim, 1)[:heads]:
        even, odd = head[:, 0 : 2 * half : 2], head[:, 1 : 2 * half : 2]
        turned = torch.complex(even, odd) * torch.complex(cos, sin)
        parts += [torch.stack([turned.real, turned.imag], 2).flatten(1), head[:, 2 * half :]]
    return torch.cat([*parts, x[:, heads * head_dim :]], 1)


def normed_heads(x: Tensor, w: Tensor, head_dim: int, heads: int, eps: float) -> Tensor:
    """RMSNorm of each of the first heads by torch."""
    weights = w.expand(heads, head_dim) if w.shape[1] == head_dim else w.view(heads, head_dim)
    parts = list(x.split(head_dim, 1))
    parts[:heads] = [
        F.rms_norm(part, (head_dim,), weight, eps)
        for part, weight in zip(parts, weights, strict=False)
    ]
    return torch.cat(parts, 1)


def largest_of_columns(x: Tensor) -> Tensor:
    """Minus infinity when there is no row."""
    return torch.cat([x, x.new_full((1, x.shape[1]), -math.inf)]).amax(0, keepdim=True)


def kept(x: Tensor, p: float, seed: int) -> Tensor:
    """x / (1 - p) where the random number is at least p, else 0."""
    return torch.where(uniform(seed, *x.shape) >= p, x / (1 - p), 0.0)


def picked(x: Tensor, index: Tensor) -> Tensor:
    """The element of each row at an index, 0 where it is out of range."""
    inside = (index >= 0) & (index < x.shape[1])
    return torch.where(inside, x.gather(1, index.clamp(0, x.shape[1] - 1)), 0.0)


def case(
    name: str, function: Callable[..., Any], oracle: Callable[..., Any], **operands: str
) -> Case:
    """A case with undeclared shapes; an operand that is not mentioned is a matrix [M, 7]."""
    names = inspect.signature(function).parameters
    return Case(name, function, oracle, {n: operands.get(n, X) for n in names})


def declared(
    name: str, function: Callable[..., Any], oracle: Callable[..., Any], **operands: str
) -> Case:
    """A case with declared shapes."""
    return case(name, function, oracle, **operands)._replace(declared=True)
