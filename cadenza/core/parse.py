"""Reads the printed form of a program back; the inverse of text.show.

Python's own grammar does the reading; only the shapes that show prints are accepted, and nothing
is ever executed.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

from cadenza.core.errors import ProgramError
from cadenza.core.ir import Builder, Graph, Node
from cadenza.core.ops import FLOATS, REAL, M, Op
from cadenza.core.trace import kind_of

_BINARY: dict[type, Callable[[Node, Node], Node]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip
_RELATIONS = {ast.Lt: "<", ast.LtE: "<=", ast.Eq: "==", ast.NotEq: "!="}
_CALLS = {op.label: op for op in Op if op not in (Op.INPUT, Op.CONSTANT)}


def parse(text: str) -> Graph:
    """The program that `text` prints. Raises ProgramError, naming the line, for anything else."""
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 1
        raise _unexpected(getattr(error, "msg", str(error)), "Python's syntax", line) from None
    if len(body) != 1:
        raise _unexpected(f"{len(body)} statements", "one function definition", 1)
    function = body[0]
    if not isinstance(function, ast.FunctionDef) or not _is_plain(function):
        raise _unexpected(function, "one function definition, of plain typed parameters")
    return _Reader(function).graph()


def _is_plain(function: ast.FunctionDef) -> bool:
    a = function.args
    extra = (a.posonlyargs, a.kwonlyargs, a.vararg, a.kwarg, a.defaults, function.returns)
    return not any((*extra, function.decorator_list))


def _unexpected(found: ast.AST | str, expected: str, line: int | None = None) -> ProgramError:
    text = found if isinstance(found, str) else ast.unparse(found)
    return ProgramError(
        "not a printed program",
        found=text.splitlines()[0][:80],
        expected=expected,
        write="what cadenza.core.text.show prints",
        where=f"line {line or getattr(found, 'lineno', '?')}",
    )


class _Reader:
    def __init__(self, function: ast.FunctionDef) -> None:
        self.function = function
        self.builder = Builder()
        self.values: dict[str, Node] = {}

    def graph(self) -> Graph:
        inputs = tuple(self._input(a) for a in self.function.args.args)
        names: dict[Node, str] = {}
        *lines, last = self.function.body
        for line in lines:
            match line:
                case ast.Assign(targets=[ast.Name(id=name)]) if name not in self.values:
                    self.values[name] = node = self._read(line.value)
                    names[node] = name
                case _:
                    raise _unexpected(line, "a new name = an expression")
        if not isinstance(last, ast.Return) or last.value is None:
            raise _unexpected(last, "return values")
        labels, outputs, structure = self._returned(last.value)
        return Graph(self.function.name, inputs, outputs, labels, structure, names)

    def _read(self, expression: ast.expr) -> Node:
        """The node of an expression; an error names the line of the text."""
        try:
            return self.value(expression)
        except ProgramError as error:
            raise error.moved(f"line {expression.lineno}") from None

    def _input(self, argument: ast.arg) -> Node:
        name = argument.arg
        match argument.annotation:
            case ast.Subscript(
                value=ast.Name(id=dtype),
                slice=ast.Tuple(elts=[rows, ast.Constant(value=columns)]),
            ) if (
                type(columns) is int
                and name not in self.values
                and (dtype in FLOATS or kind_of(dtype) != REAL)
            ):
                attributes = {"name": name, "dtype": dtype, "rows": _rows(rows), "columns": columns}
                node = self.builder.make(Op.INPUT, (), attributes | {"kind": kind_of(dtype)})
                self.values[name] = node
                return node
        raise _unexpected(argument, "a new name: dtype[rows, columns]")

    def _returned(self, value: ast.expr) -> tuple[tuple[str, ...], tuple[Node, ...], str]:
        if isinstance(value, ast.Dict):
            keys = [k.value for k in value.keys if isinstance(k, ast.Constant)]
            labels = tuple(key for key in keys if isinstance(key, str))
            if len(set(labels)) != len(value.keys):
                raise _unexpected(value, "different strings as keys")
            return labels, tuple(self._read(v) for v in value.values), "dict"
        if isinstance(value, ast.Tuple) and value.elts:
            labels = tuple(str(i) for i in range(len(value.elts)))
            return labels, tuple(self._read(v) for v in value.elts), "tuple"
        return ("0",), (self._read(value),), "value"

    def value(self, expression: ast.expr) -> Node:
        """The node that an expression stands for."""
        match expression:
            case ast.Name(id=name) if name in self.values:
                return self.values[name]
            case ast.Constant() | ast.UnaryOp(op=ast.USub(), operand=ast.Constant()):
                return self.builder.constant(_number(expression, _literal(expression)))
            case ast.UnaryOp(op=ast.USub()):
                return -self.value(expression.operand)
            case ast.BinOp(op=ast.Pow()):
                return self.value(expression.left).__pow__(_literal(expression.right))
            case ast.BinOp(op=ast.MatMult()):
                return self._product(expression)
            case ast.BinOp() if type(expression.op) in _BINARY:
                left, right = self.value(expression.left), self.value(expression.right)
                return _BINARY[type(expression.op)](left, right)
            case ast.Compare(ops=[relation]) if type(relation) in _RELATIONS:
                pair = self.value(expression.left), self.value(expression.comparators[0])
                return self.builder.apply(Op.COMPARE, *pair, relation=_RELATIONS[type(relation)])
            case ast.Call(func=ast.Name(id="constant"), args=[number]):
                return self._constant(expression, _literal(number))
            case ast.Call(func=ast.Name(id=name)) if name in _CALLS:
                inputs = [self.value(a) for a in expression.args]
                attributes = _keywords(expression, _CALLS[name].attributes)
                return self.builder.apply(_CALLS[name], *inputs, **attributes)
        raise _unexpected(expression, "an expression of the language")

    def _product(self, expression: ast.BinOp) -> Node:
        sides = [_untransposed(expression.left), _untransposed(expression.right)]
        (a, transpose_a), (b, transpose_b) = sides
        return self.builder.matmul(self.value(a), self.value(b), transpose_a, transpose_b)

    def _constant(self, call: ast.Call, value: Any) -> Node:
        number = float(value) if value in ("inf", "-inf", "nan") else _number(call, value)
        sizes = _keywords(call, ("rows", "columns")) if call.keywords else {}
        return self.builder.constant(number, **sizes)


def _untransposed(expression: ast.expr) -> tuple[ast.expr, bool]:
    if isinstance(expression, ast.Attribute) and expression.attr == "T":
        return expression.value, True
    return expression, False


def _rows(expression: ast.expr) -> int | str:
    match expression:
        case ast.Name(id="M"):
            return M
        case ast.Constant(value=int(value)) if value is not True:
            return value
    raise _unexpected(expression, "M or a number of rows")


def _number(expression: ast.expr, value: Any) -> float | int:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return value
    raise _unexpected(expression, "a number")


def _literal(expression: ast.expr) -> Any:
    try:
        return ast.literal_eval(expression)
    except ValueError:
        raise _unexpected(expression, "a number or a string") from None


def _keywords(call: ast.Call, names: tuple[str, ...]) -> dict[str, Any]:
    if tuple(k.arg for k in call.keywords) != names:
        raise _unexpected(call, f"the attributes {', '.join(names) or 'of none'}")
    return {str(k.arg): _literal(k.value) for k in call.keywords}
