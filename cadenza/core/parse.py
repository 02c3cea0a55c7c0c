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
from cadenza.core.ops import Op
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
    except SyntaxError as error:
        raise ProgramError(
            "a program that does not parse", found=str(error), where=f"line {error.lineno}"
        ) from None
    if len(body) != 1 or not isinstance(body[0], ast.FunctionDef):
        raise _unexpected(body[0] if body else ast.Pass(lineno=1), "one function definition")
    return _Reader(body[0]).graph()


def _unexpected(node: ast.AST, expected: str) -> ProgramError:
    line = getattr(node, "lineno", "?")
    found = ast.unparse(node) if hasattr(node, "lineno") else type(node).__name__
    return ProgramError(
        "not a printed program",
        found=found[:80],
        expected=expected,
        write="what cadenza.core.text.show prints",
        where=f"line {line}",
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
            if not (isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name)):
                raise _unexpected(line, "name = expression")
            name = line.targets[0].id
            node = self.values[name] = self.value(line.value)
            if not name.rstrip("0123456789") in ("acc", "v"):
                names[node] = name
        if not isinstance(last, ast.Return) or last.value is None:
            raise _unexpected(last, "return values")
        labels, outputs, structure = self._returned(last.value)
        return Graph(self.function.name, inputs, outputs, labels, structure, names)

    def _input(self, argument: ast.arg) -> Node:
        note = argument.annotation
        if not (
            isinstance(note, ast.Subscript)
            and isinstance(note.value, ast.Name)
            and isinstance(note.slice, ast.Tuple)
        ):
            raise _unexpected(argument, "name: dtype[rows, columns]")
        rows, columns = (_dim(d) for d in note.slice.elts)
        dtype = note.value.id
        attributes = {"name": argument.arg, "dtype": dtype, "rows": rows, "columns": columns}
        node = self.builder.make(Op.INPUT, (), attributes | {"kind": kind_of(dtype)})
        self.values[argument.arg] = node
        return node

    def _returned(self, value: ast.expr) -> tuple[tuple[str, ...], tuple[Node, ...], str]:
        if isinstance(value, ast.Dict):
            labels = tuple(str(_literal(k)) for k in value.keys if k is not None)
            return labels, tuple(self.value(v) for v in value.values), "dict"
        if isinstance(value, ast.Tuple):
            labels = tuple(str(i) for i in range(len(value.elts)))
            return labels, tuple(self.value(v) for v in value.elts), "tuple"
        return ("0",), (self.value(value),), "value"

    def value(self, expression: ast.expr) -> Node:
        """The node that an expression stands for."""
        match expression:
            case ast.Name(id=name) if name in self.values:
                return self.values[name]
            case ast.Constant() | ast.UnaryOp(op=ast.USub(), operand=ast.Constant()):
                return self.builder.constant(_literal(expression))
            case ast.UnaryOp(op=ast.USub()):
                return -self.value(expression.operand)
            case ast.BinOp(op=ast.Pow()):
                return self.value(expression.left) ** _literal(expression.right)
            case ast.BinOp(op=ast.MatMult()):
                return self._product(expression)
            case ast.BinOp() if type(expression.op) in _BINARY:
                left, right = self.value(expression.left), self.value(expression.right)
                return _BINARY[type(expression.op)](left, right)
            case ast.Compare(ops=[relation]) if type(relation) in _RELATIONS:
                pair = self.value(expression.left), self.value(expression.comparators[0])
                return self.builder.apply(Op.COMPARE, *pair, relation=_RELATIONS[type(relation)])
            case ast.Call(func=ast.Name(id="constant")):
                return self._constant(expression)
            case ast.Call(func=ast.Name(id=name)) if name in _CALLS:
                inputs = [self.value(a) for a in expression.args]
                return self.builder.apply(_CALLS[name], *inputs, **_keywords(expression))
        raise _unexpected(expression, "an expression of the language")

    def _product(self, expression: ast.BinOp) -> Node:
        sides = [_untransposed(expression.left), _untransposed(expression.right)]
        (a, transpose_a), (b, transpose_b) = sides
        return self.builder.matmul(self.value(a), self.value(b), transpose_a, transpose_b)

    def _constant(self, call: ast.Call) -> Node:
        value = _literal(call.args[0])
        number = float(value) if isinstance(value, str) else value
        return self.builder.constant(number, **_keywords(call))


def _untransposed(expression: ast.expr) -> tuple[ast.expr, bool]:
    if isinstance(expression, ast.Attribute) and expression.attr == "T":
        return expression.value, True
    return expression, False


def _dim(expression: ast.expr) -> int | str:
    if isinstance(expression, ast.Name):
        return expression.id
    return int(_literal(expression))


def _literal(expression: ast.expr) -> Any:
    try:
        return ast.literal_eval(expression)
    except ValueError:
        raise _unexpected(expression, "a number or a string") from None


def _keywords(call: ast.Call) -> dict[str, Any]:
    return {str(k.arg): _literal(k.value) for k in call.keywords}
