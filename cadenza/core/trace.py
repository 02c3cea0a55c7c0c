"""A function run on symbols: its operands become inputs, what it returns the outputs.

The function is run, never read. An operand whose rows happen to equal M may be a matrix of M rows
or one of a known size: it starts undecided ("M?name"), and the first operation that needs the
answer decides it; the function is then run again.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Iterable, Mapping
from types import CellType
from typing import Any, NamedTuple

from cadenza.core.errors import ProgramError
from cadenza.core.ir import Builder, Graph, Node, Undecided, tensor_inside
from cadenza.core.lang import is_tensor
from cadenza.core.ops import BOOLEAN, INTEGER, REAL, Dim, Op
from cadenza.core.storage import check_products

Constant = float | int | bool | str | None


class Operand(NamedTuple):
    """A tensor argument: its name, `[rows, columns]` and dtype. Rows M, a number, or undecided."""

    name: str
    rows: Dim
    columns: int
    dtype: str


class Signature(NamedTuple):
    """All that compilation depends on: operands, constants, the size of M rows and autocast."""

    operands: tuple[Operand, ...]
    constants: tuple[tuple[str, Constant], ...] = ()
    autocast: str | None = None


def undecided(name: str) -> str:
    """The rows of an operand that has as many rows as M by chance or by meaning."""
    return f"M?{name}"


def kind_of(dtype: str) -> str:
    """The kind of number that a dtype holds."""
    if dtype == "bool":
        return BOOLEAN
    return INTEGER if dtype.startswith(("int", "uint")) else REAL


def trace(
    function: Callable[..., Any],
    signature: Signature,
    sizes: Mapping[str, int] | None = None,
    name: str = "program",
) -> Graph:
    """The program of `function` for a signature.

    `sizes` gives the number of rows of undecided operands. Raises ProgramError, naming the
    author's line, for anything that is not a program.
    """
    _check_closure(function)
    rows: dict[str, Dim] = {o.name: o.rows for o in signature.operands}
    while True:
        try:
            graph = _run(function, signature, rows, name)
        except Undecided as question:
            rows = _decide(rows, question.dims, sizes or {})
            continue
        open_names = [n for n, d in rows.items() if str(d).startswith("M?")]
        if not open_names:
            return graph
        rows |= {n: _size(rows[n], sizes or {}) for n in open_names}


def _check_closure(function: Callable[..., Any]) -> None:
    """Raises ProgramError if the function itself reads a tensor from a closure or a global."""
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None)
    if code is None:
        return
    cells = zip(code.co_freevars, getattr(function, "__closure__", None) or (), strict=False)
    found = {name: cell.cell_contents for name, cell in cells if _is_filled(cell)}
    for instruction in dis.get_instructions(code):
        if instruction.opname == "LOAD_GLOBAL":
            found[instruction.argval] = function.__globals__.get(instruction.argval)
    for name, value in found.items():
        if is_tensor(value):
            raise tensor_inside(f"{name}, a {type(value).__name__}", location(function))


def _is_filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _decide(
    rows: dict[str, Dim], dims: tuple[Dim, Dim], sizes: Mapping[str, int]
) -> dict[str, Dim]:
    """The rows with one question answered: equal to M, to another operand's, or a known size."""
    asked = next(d for d in dims if str(d).startswith("M?"))
    other = dims[1] if dims[0] == asked else dims[0]
    answer = _size(asked, sizes) if isinstance(other, int) else other
    return {name: answer if dim == asked else dim for name, dim in rows.items()}


def _size(dim: Dim, sizes: Mapping[str, int]) -> int:
    return int(sizes[str(dim).removeprefix("M?")])


def _run(
    function: Callable[..., Any], signature: Signature, rows: Mapping[str, Dim], name: str
) -> Graph:
    builder = Builder(signature.autocast)
    inputs = {o.name: _input(builder, o, rows[o.name]) for o in signature.operands}
    builder.tracing = True
    try:
        result = function(**inputs, **dict(signature.constants))
    finally:
        builder.tracing = False
    where = location(function)
    labels, values, structure = _returned(result, where)
    outputs = tuple(_output(v, builder, where) for v in values)
    _check_dependence(labels, outputs, where)
    names = {n: label for n, label in builder.names.items() if n.op is not Op.INPUT}
    graph = Graph(name, tuple(inputs.values()), outputs, labels, structure, names)
    double = any(o.dtype == "float64" for o in signature.operands)
    return check_products(graph, "float64" if double else "float32")


def _input(builder: Builder, operand: Operand, rows: Dim) -> Node:
    attributes = operand._asdict() | {"rows": rows, "kind": kind_of(operand.dtype)}
    return builder.make(Op.INPUT, (), attributes)


def location(function: Callable[..., Any]) -> str:
    """`file:line` of a function's definition."""
    code = getattr(function, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else ""


def _returned(result: Any, where: str) -> tuple[tuple[str, ...], tuple[Any, ...], str]:
    """Labels, values and structure of what a function returned."""
    if isinstance(result, dict):
        return tuple(str(k) for k in result), tuple(result.values()), "dict"
    if isinstance(result, tuple):
        return tuple(str(i) for i in range(len(result))), result, "tuple"
    return ("0",), (result,), "value"


def _output(value: Any, builder: Builder, where: str) -> Node:
    if isinstance(value, Node):
        return builder.lift(value, Op.INPUT)
    if is_tensor(value):
        raise tensor_inside(f"a {type(value).__name__} among the outputs")
    nested = isinstance(value, (tuple, list, dict))
    raise ProgramError(
        "an output that is not a value of the program",
        found="a nested container" if nested else f"{type(value).__name__} {value!r:.40}",
        expected="a value, a tuple of values or a dict of values",
        write="return y, or return a, b, or return {'a': a, 'b': b}",
        where=where,
    )


def _check_dependence(labels: Iterable[str], outputs: tuple[Node, ...], where: str) -> None:
    if not outputs:
        raise ProgramError("a program without outputs", write="return y", where=where)
    depends: dict[Node, bool] = {}
    for node in Graph("", (), outputs, ()).nodes():
        depends[node] = node.op is Op.INPUT or any(depends[i] for i in node.inputs)
    for label, output in zip(labels, outputs, strict=True):
        if not depends[output]:
            raise ProgramError(
                f"output {label} does not depend on the inputs",
                found=f"a constant {output.type}",
                expected="outputs computed from the operands",
                write="compute the constant outside of the program",
                where=where,
            )


