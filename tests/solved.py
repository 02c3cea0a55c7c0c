"""The exercises with their solutions put in: what a learner has in the end."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXERCISES, SOLUTIONS = ROOT / "examples/exercises", ROOT / "tests/exercises"
NAMES = sorted(path.stem for path in EXERCISES.glob("*.py"))


def function(source: str, name: str) -> ast.FunctionDef:
    """The function of this name in a module's text."""
    found = [n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef) and n.name == name]
    assert len(found) == 1, f"{len(found)} functions {name}"
    return found[0]


def lines_of(node: ast.FunctionDef) -> tuple[int, int]:
    """Its first line, decorators among them, and its last."""
    return min(d.lineno for d in (*node.decorator_list, node)), node.end_lineno


def solution_lines(name: str) -> int:
    """How many lines the body of a solution has."""
    body = function((SOLUTIONS / f"{name}.py").read_text(encoding="utf-8"), name).body
    return body[-1].end_lineno - body[0].lineno + 1


def solved(name: str) -> str:
    """The text of an exercise with its function replaced by the solution's."""
    text, solution = (
        (folder / f"{name}.py").read_text(encoding="utf-8") for folder in (EXERCISES, SOLUTIONS)
    )
    (first, last), (start, end) = (lines_of(function(t, name)) for t in (text, solution))
    rows, new = text.splitlines(), solution.splitlines()
    return "\n".join([*rows[: first - 1], *new[start - 1 : end], *rows[last:], ""])
