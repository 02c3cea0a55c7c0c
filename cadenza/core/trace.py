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

from cadenza.core.dispatch import is_tensor
from cadenza.core.errors import ProgramError
from cadenza.core.ir import Builder, Graph, Node, Undecided, topological
from cadenza.core.ops import BOOLEAN, FLOATS, INTEGER, REAL, Dim, Op
from cadenza.core.refusals import other_program, tensor_inside
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


def _is_known(dtype: str) -> bool:
    return dtype in FLOATS or kind_of(dtype) != REAL


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
    name = name if name.isidentifier() else "program"  # a lambda has no name to print
    rows: dict[str, Dim] = {o.name: o.rows for o in signature.operands}
    while True:
        try:
            graph = _run(function, signature, rows, name)
        except Undecided as question:
            rows = _decide(rows, question.dims, sizes or {})
            continue
        except ProgramError as error:
            error.args = (_with_sizes(str(error), sizes or {}),)
            raise
        open_names = [n for n, d in rows.items() if str(d).startswith("M?")]
        if not open_names:
            return graph
        rows |= {n: _size(rows[n], sizes or {}) for n in open_names}


def _with_sizes(text: str, sizes: Mapping[str, int]) -> str:
    """An error's text, with the rows of undecided operands as the numbers that the author knows."""
    for name in sorted(sizes, key=len, reverse=True):
        text = text.replace(undecided(name), str(sizes[name]))
    return text


def _check_closure(function: Callable[..., Any]) -> None:
    """Raises ProgramError if the function itself reads a tensor from a closure or a global."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return
    known = inspect.unwrap(function).__globals__ | _closure(inspect.unwrap(function))
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_DEREF"):
            value = known.get(instruction.argval)
            if is_tensor(value):
                line = instruction.positions.lineno if instruction.positions else None
                where = f"{code.co_filename}:{line or code.co_firstlineno}"
                raise tensor_inside(f"{instruction.argval}, a {type(value).__name__}", where)


def _closure(function: Any) -> dict[str, Any]:
    """What a function's free variables hold."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: cell.cell_contents for name, cell in cells if _is_filled(cell)}


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
    where = _return_line(function)
    labels, values, structure = _returned(result, where)
    outputs = tuple(_output(k, v, builder, where) for k, v in zip(labels, values, strict=True))
    _check_dependence(labels, outputs, where)
    names = {n: label for n, label in builder.names.items() if n.op is not Op.INPUT}
    graph = Graph(name, tuple(inputs.values()), outputs, labels, structure, names)
    double = any(o.dtype == "float64" for o in signature.operands)
    return check_products(graph, "float64" if double else "float32")


def _input(builder: Builder, operand: Operand, rows: Dim) -> Node:
    if not _is_known(operand.dtype):
        raise ProgramError(
            f"operand {operand.name} has a dtype that no program takes",
            found=operand.dtype,
            expected=f"{', '.join(FLOATS)}, whole numbers or bool",
            write=f"{operand.name}.to(...) before the call; a complex one as two real operands",
        )
    attributes = operand._asdict() | {"rows": rows, "kind": kind_of(operand.dtype)}
    return builder.make(Op.INPUT, (), attributes)


def location(function: Callable[..., Any]) -> str:
    """`file:line` of a function's definition."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else ""


def _return_line(function: Callable[..., Any]) -> str:
    """`file:line` where a function returns, its definition if there are several such lines."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    lines = {
        i.positions.lineno if i.positions else None
        for i in (dis.get_instructions(code) if code else ())
        if i.opname in ("RETURN_VALUE", "RETURN_CONST")
    }
    return f"{code.co_filename}:{lines.pop()}" if code and len(lines) == 1 else location(function)


def _returned(result: Any, where: str) -> tuple[tuple[str, ...], tuple[Any, ...], str]:
    """Labels, values and structure of what a function returned."""
    if isinstance(result, dict):
        for key in result:
            if not isinstance(key, str):
                raise _wrong_output(f"a dict with the key {key!r}", where)
        return tuple(result), tuple(result.values()), "dict"
    if isinstance(result, tuple):
        return tuple(str(i) for i in range(len(result))), result, "tuple"
    return ("0",), (result,), "value"


def _wrong_output(found: str, where: str) -> ProgramError:
    return ProgramError(
        "an output that is not a value of the program",
        found=found,
        expected="a value, a tuple of values or a dict of values by strings",
        write="return y, or return a, b, or return {'a': a, 'b': b}",
        where=where,
    )


def _output(label: str, value: Any, builder: Builder, where: str) -> Node:
    if isinstance(value, Node) and value.builder is builder:
        return value
    if isinstance(value, Node):
        raise other_program(f"output {label}, a value that another call traced", where)
    if is_tensor(value):
        raise tensor_inside(f"output {label}, a {type(value).__name__}", where)
    text = "" if isinstance(value, (tuple, list, dict)) else f" {value!r:.40}"
    raise _wrong_output(f"output {label}, a {type(value).__name__}{text}", where)


def _check_dependence(labels: Iterable[str], outputs: tuple[Node, ...], where: str) -> None:
    if not outputs:
        raise _wrong_output("no output", where)
    depends: dict[Node, bool] = {}
    for node in topological(outputs):
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
