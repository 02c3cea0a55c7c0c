"""How a call's tensors become the `[rows, columns]` operands of a program.

Leading dimensions flatten to M. Which operands have M rows is declared by `shapes=`, or follows
from ranks; where neither decides, tracing does. Sizes may be symbolic (under torch.compile), so
nothing here asks whether M equals a number that is known.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from cadenza.core.errors import ProgramError
from cadenza.core.ops import Dim, M
from cadenza.core.trace import Operand, undecided

Tensor = torch.Tensor
SHAPE = "M D, 2*F D, M 1, 1 N: two sizes, each a number, a name, or a product of these"


class Operands(NamedTuple):
    """The operands of a call: their types, the leading dimensions and M, their product."""

    operands: tuple[Operand, ...]
    leading: tuple[Any, ...]
    rows: Any


def describe(
    names: Sequence[str],
    tensors: Sequence[Tensor],
    shapes: Mapping[str, str] | None,
    constants: Mapping[str, Any],
) -> Operands:
    """The operands of a call. Raises ProgramError where a tensor does not fit."""
    leading = _leading(names, tensors, shapes)
    rows = math.prod(leading)
    found = []
    for name, tensor in zip(names, tensors, strict=True):
        declared = shapes.get(name) if shapes else None
        dims = _declared(name, tensor, declared, leading) if declared else None
        pair = dims or _by_rank(name, tensor, leading, rows, first=tensor is tensors[0])
        found.append(Operand(name, pair[0], int(pair[1]), str(tensor.dtype)[6:]))
    if shapes:
        _check_sizes(found, shapes, constants)
    return Operands(tuple(found), leading, rows)


def _leading(
    names: Sequence[str], tensors: Sequence[Tensor], shapes: Mapping[str, str] | None
) -> tuple[Any, ...]:
    """The leading dimensions of the first operand that has M rows."""
    for name, tensor in zip(names, tensors, strict=True):
        text = (shapes or {}).get(name)
        if tensor.dim() > 0 and (text is None or text.split()[0] == M):
            return tuple(tensor.shape[:-1])
    return ()


def _same(a: Any, b: Any) -> bool:
    """a == b, without deciding the size of a symbolic dimension that a number is compared to."""
    if isinstance(a, int) != isinstance(b, int):
        from torch.fx.experimental.symbolic_shapes import statically_known_true

        return bool(statically_known_true(a == b))
    return bool(a == b)


def _equal(first: Sequence[Any], second: Sequence[Any]) -> bool:
    return len(first) == len(second) and all(map(_same, first, second))


def _by_rank(
    name: str, tensor: Tensor, leading: tuple[Any, ...], rows: Any, first: bool
) -> tuple[Dim, Any]:
    shape = tuple(tensor.shape)
    whole = not (tensor.is_floating_point() or tensor.dtype == torch.bool)
    if not shape:
        return 1, 1
    if first:
        return M, shape[-1]
    if whole and _equal(shape, leading):
        return M, 1
    if len(shape) == 1:
        return 1, shape[0]
    if len(shape) == 2:
        return _rows_of(name, shape[0], rows), shape[1]
    if not _equal(shape[:-1], leading):
        raise _leading_mismatch(name, shape, leading)
    return M, shape[-1]


def _rows_of(name: str, own: Any, rows: Any) -> Dim:
    """A known number, or undecided where it happens to be equal to M."""
    if not _same(own, 1) and _same(own, rows):
        return undecided(name)
    return int(own)


def _declared(
    name: str, tensor: Tensor, text: str, leading: tuple[Any, ...]
) -> tuple[Dim, Any] | None:
    """Rows and columns of an operand with a declared shape; sizes are checked later."""
    rows, columns = _tokens(name, text)
    shape = tuple(tensor.shape)
    if rows == M:
        if columns == "1" and _equal(shape, leading):
            return M, 1
        if not shape or not _equal(shape[:-1], leading):
            raise _leading_mismatch(name, shape, leading)
        return M, shape[-1]
    if len(shape) > 2 or (len(shape) < 2 and rows != "1"):
        raise ProgramError(
            f"operand {name} has the wrong rank",
            found=f"a shape {list(shape)}",
            expected=f"[{text.replace(' ', ', ')}]",
            write=f"{name}.reshape(...) before the call",
        )
    return (1, *shape, 1)[-2:] if not shape else (1, *shape)[-2:]  # type: ignore[return-value]


def _tokens(name: str, text: str) -> tuple[str, str]:
    tokens = text.split()
    if len(tokens) != 2:
        raise ProgramError(f"shapes[{name!r}]", found=repr(text), expected=SHAPE)
    return tokens[0], tokens[1]


def _leading_mismatch(name: str, shape: tuple[Any, ...], leading: tuple[Any, ...]) -> ProgramError:
    return ProgramError(
        f"operand {name} has other leading dimensions than the first operand",
        found=f"{list(shape)}",
        expected=f"[{', '.join(map(str, leading))}, columns]",
        write=f"{name}.expand(...) or reshape it, so that every operand with M rows has the same",
    )


def _check_sizes(
    operands: Sequence[Operand], shapes: Mapping[str, str], constants: Mapping[str, Any]
) -> None:
    """Binds the names of declared sizes, then checks every declared size."""
    sizes = {k: v for k, v in constants.items() if isinstance(v, int)}
    pairs = [
        (operand.name, token, actual)
        for operand in operands
        if operand.name in shapes
        for token, actual in zip(shapes[operand.name].split(), operand[1:3], strict=True)
        if token != M
    ]
    for name, token, actual in sorted(pairs, key=lambda p: not p[1].isidentifier()):
        expected = _evaluate(name, token, sizes, int(actual))
        if expected != actual:
            known = ", ".join(f"{k}={v}" for k, v in sizes.items())
            raise ProgramError(
                f"operand {name} has the wrong size",
                found=f"{token} is {actual}",
                expected=f"{expected}, with {known}",
                write=f"shapes {shapes[name]!r} for {name}, or another tensor",
            )


def _evaluate(name: str, token: str, sizes: dict[str, int], actual: int) -> int:
    """The value of a declared size; a name not yet bound takes the value that makes it true."""
    try:
        tree = ast.parse(token, mode="eval").body
    except SyntaxError:
        raise ProgramError(f"shapes[{name!r}]", found=repr(token), expected=SHAPE) from None
    unknown = [n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id not in sizes]
    if not unknown:
        return _value(tree, sizes)
    unit = _value(tree, sizes | dict.fromkeys(unknown, 1))
    sizes[unknown[0]] = max(actual // max(unit, 1), 1)
    return _value(tree, sizes | {u: sizes.get(u, 1) for u in unknown})


def _value(tree: ast.expr, sizes: Mapping[str, int]) -> int:
    match tree:
        case ast.Constant(value=int(value)):
            return value
        case ast.Name(id=name):
            return sizes[name]
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _value(left, sizes) * _value(right, sizes)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _value(left, sizes) + _value(right, sizes)
    raise ProgramError("shapes", found=ast.unparse(tree), expected=SHAPE)


def as_matrix(tensor: Tensor, rows: Any, columns: int) -> Tensor:
    """The tensor as the 2-D operand that the program knows."""
    return tensor if tensor.dim() == 2 else tensor.reshape(rows, columns)
