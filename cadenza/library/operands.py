"""How a call's tensors become the `[rows, columns]` operands of a program.

Leading dimensions flatten to M. Which operands have M rows is declared by `shapes=`, or follows
from ranks; where neither decides, tracing does. Sizes may be symbolic (under torch.compile), so
nothing here asks whether M equals a number that is known.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch._C import _functorch
from torch.autograd import forward_ad

from cadenza.core.errors import ProgramError
from cadenza.core.ops import Dim, M
from cadenza.core.trace import Operand, undecided

Tensor = torch.Tensor
KINDS = ("int64", "int32", "bool")  # dtypes that a declared shape may end in
SIZE_PARTS = (ast.Name, ast.Load, ast.Constant, ast.BinOp, ast.Mult, ast.Add)


class Operands(NamedTuple):
    """The operands of a call: their types, the leading dimensions and M, their product."""

    operands: tuple[Operand, ...]
    leading: tuple[Any, ...]
    rows: Any


def checked_shapes(shapes: Any, parameters: Sequence[str], where: str) -> dict[str, str] | None:
    """The declared sizes, two an operand. Raises ProgramError, naming the declaration, if wrong."""
    if shapes is None or (isinstance(shapes, Mapping) and not shapes):
        return None
    known = isinstance(shapes, Mapping)
    for name, text in shapes.items() if known else ():
        if name not in parameters or not _is_shape(text):
            found, known = f"{name!r}: {text!r}", False
            break
    if known:
        return {name: " ".join(text.split()[:2]) for name, text in shapes.items()}
    raise ProgramError(
        "shapes that don't declare operands",
        found=found if isinstance(shapes, Mapping) else repr(shapes),
        expected=f"two sizes, a space between, for some of {', '.join(parameters)}: "
        "numbers, names, their products",
        write="shapes={'x': 'M D', 'w': '2*F D', 'rstd': 'M 1', 'bias': '1 N'}",
        where=where,
    )


def declared_dtypes(shapes: Mapping[str, str] | None) -> dict[str, str]:
    """The dtypes of operands that are declared to be no floating numbers: "M 1 int64"."""
    words = {name: text.split() for name, text in (shapes or {}).items()}
    return {name: found[2] for name, found in words.items() if len(found) > 2}


def _is_shape(text: object) -> bool:
    sizes = text.split() if isinstance(text, str) else []
    if len(sizes) == 3 and sizes[2] in KINDS:
        sizes.pop()
    return len(sizes) == 2 and all(map(_is_size, sizes))


def _is_size(token: str) -> bool:
    try:
        parts = list(ast.walk(ast.parse(token, mode="eval").body))
    except SyntaxError:
        return False
    numbers = [p.value for p in parts if isinstance(p, ast.Constant)]
    return all(isinstance(p, SIZE_PARTS) for p in parts) and all(type(n) is int for n in numbers)


def describe(
    names: Sequence[str],
    tensors: Sequence[Tensor],
    shapes: Mapping[str, str] | None,
    constants: Mapping[str, Any],
) -> Operands:
    """The operands of a call. Raises ProgramError where a tensor does not fit."""
    first, leading = _leading(names, tensors, shapes)
    rows = math.prod(leading)
    found = []
    for name, tensor in zip(names, tensors, strict=True):
        _check_dense(name, tensor)
        declared = shapes.get(name) if shapes else None
        dims = _declared(name, tensor, declared, leading) if declared else None
        pair = dims or _by_rank(name, tensor, leading, rows, first=name == first)
        found.append(Operand(name, pair[0], int(pair[1]), str(tensor.dtype)[6:]))
    if shapes:
        _check_sizes(found, shapes, constants)
    return Operands(tuple(found), leading, rows)


def check_plain(names: Sequence[str], tensors: Sequence[Tensor], instead: str) -> None:
    """Raises ProgramError for a sharded or sparse tensor, and for transforms that none has.

    `instead` is what to write where forward-mode derivatives or torch.func's are wanted.
    """
    if torch.compiler.is_compiling():
        return
    for name, tensor in zip(names, tensors, strict=True):
        _check_dense(name, tensor)
        if hasattr(tensor, "device_mesh"):
            raise ProgramError(
                f"operand {name} is sharded",
                found=f"a {type(tensor).__name__} {list(tensor.shape)}",
                expected="a tensor that holds all of its numbers, as a weight has them in the "
                "forward of the module that fully_shard was called on",
                write=f"fully_shard(layer), each weight used in its own layer; or "
                f"{name}.full_tensor()",
            )
        if forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None:
            raise ProgramError(
                "forward-mode derivatives of a program",
                found=f"a tangent of {name}",
                expected="derivatives by backward",
                write=instead,
            )
        batched = _functorch.is_batchedtensor(tensor)
        transformed = batched or _functorch.is_gradtrackingtensor(tensor)
        if transformed and _functorch.peek_interpreter_stack() is not None:
            kind = "vmap" if batched else "grad"
            raise ProgramError(
                "a program within a transform of torch.func",
                found=f"{name} within torch.func.{kind}, or another by it",
                expected="derivatives by backward, and what is batched as rows, [..., columns]",
                write=instead,
            )


def _check_dense(name: str, tensor: Tensor) -> None:
    if tensor.layout != torch.strided:
        raise ProgramError(
            f"operand {name} is not stored densely",
            found=f"a layout {tensor.layout}",
            expected="a tensor with strides",
            write=f"{name}.to_dense()",
        )


def _leading(
    names: Sequence[str], tensors: Sequence[Tensor], shapes: Mapping[str, str] | None
) -> tuple[str, tuple[Any, ...]]:
    """The first operand that has M rows, and its leading dimensions.

    One declared `M 1` may come as [...], without its column: it is asked last.
    """
    asked = []
    for name, tensor in zip(names, tensors, strict=True):
        rows, columns = (shapes or {}).get(name, "M ?").split()
        if tensor.dim() > 0 and rows == M:
            asked.append((columns == "1", name, tuple(tensor.shape)))
    column, name, shape = min(asked, key=operator.itemgetter(0), default=(False, "", (1,)))
    return name, shape if column and not _same(shape[-1], 1) else shape[:-1]


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
    if whole and _equal(shape, leading) and shape != (1,):  # one number: a seed
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
    rows, columns = text.split()
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
            expected=f"[{', '.join(text.split())}]",
            write=f"{name}.reshape(...) before the call",
        )
    padded = (1, 1, *shape)
    return padded[-2], padded[-1]


def _leading_mismatch(name: str, shape: tuple[Any, ...], leading: tuple[Any, ...]) -> ProgramError:
    return ProgramError(
        f"operand {name} has other leading dimensions than the first operand",
        found=f"{list(shape)}",
        expected=f"[{', '.join(map(str, (*leading, 'columns')))}]",
        write=f"{name}.expand(...) or reshape it, so that every operand with M rows has the same",
    )


def _check_sizes(
    operands: Sequence[Operand], shapes: Mapping[str, str], constants: Mapping[str, Any]
) -> None:
    """Binds the names of declared sizes, then checks every declared size."""
    sizes = {k: v for k, v in constants.items() if isinstance(v, int)}
    pairs = [
        (operand, token, actual)
        for operand in operands
        if operand.name in shapes
        for token, actual in zip(shapes[operand.name].split(), operand[1:3], strict=True)
        if token != M
    ]
    origins: dict[str, str] = {}  # the operands whose sizes the names have
    for operand, token, actual in sorted(pairs, key=lambda p: not p[1].isidentifier()):
        before = set(sizes)
        expected = _evaluate(token, sizes, int(actual))
        origins |= dict.fromkeys(sizes.keys() - before, operand.name)
        if expected != actual:
            others = sorted({o for n, o in origins.items() if n in _names(token)} - {operand.name})
            either = " or ".join([operand.name, *others])
            known = "" if token.isdigit() else f" with {token} = {expected}"
            known += f", as {' and '.join(others)} has it" if others else ""
            raise ProgramError(
                f"operand {operand.name} has the wrong size",
                found=f"[{operand.rows}, {operand.columns}]",
                expected=f"[{', '.join(shapes[operand.name].split())}]{known}",
                write=f"another tensor for {either}, or other shapes=",
            )


def _evaluate(token: str, sizes: dict[str, int], actual: int) -> int:
    """The value of a declared size; a name not yet bound takes the value that makes it true."""
    tree = _parsed(token)
    unknown = [name for name in _names(token) if name not in sizes]
    if not unknown:
        return _value(tree, sizes)
    unit = _value(tree, sizes | dict.fromkeys(unknown, 1))
    sizes[unknown[0]] = max(actual // max(unit, 1), 1)
    return _value(tree, sizes | {u: sizes.get(u, 1) for u in unknown})


def _names(token: str) -> list[str]:
    """The names in a declared size."""
    return [node.id for node in ast.walk(_parsed(token)) if isinstance(node, ast.Name)]


def size_of(token: str, sizes: Mapping[str, int]) -> int:
    """The value of a declared size such as `2*F`. Raises KeyError for a name without a size."""
    return _value(_parsed(token), sizes)


@lru_cache(maxsize=1024)
def _parsed(token: str) -> ast.expr:
    return ast.parse(token, mode="eval").body


def _value(tree: ast.expr, sizes: Mapping[str, int]) -> int:
    if isinstance(tree, ast.BinOp):
        left, right = _value(tree.left, sizes), _value(tree.right, sizes)
        return left * right if isinstance(tree.op, ast.Mult) else left + right
    return sizes[tree.id] if isinstance(tree, ast.Name) else int(ast.literal_eval(tree))


def as_matrix(tensor: Tensor, rows: Any, columns: int) -> Tensor:
    """The tensor as the 2-D operand that the program knows."""
    return tensor if tensor.shape == (rows, columns) else tensor.reshape(rows, columns)
