"""The text of an emitted kernel as a person would write it: the same values, fewer, shorter lines.

A value without a name of the plan's that is used once, and is mere arithmetic, goes into the line
that uses it; brackets that say nothing go; lines end at column 100 where brackets let them break.
"""

from __future__ import annotations

import ast
import keyword
import re
from collections import Counter
from collections.abc import Iterable, Iterator

COLUMNS = 100
UNNAMED = re.compile(r"(\s*)(e\d+) = (.+)")
ASSIGNED = re.compile(r"\s+[\w, ]+ = .+")
ARITHMETIC = frozenset(
    {
        "tl.exp", "tl.log", "tl.sqrt", "tl.rsqrt", "tl.sigmoid", "tl.abs", "tl.erf", "tl.where",
        "tl.broadcast_to", "float", "device.tanh", "device.maximum", "device.minimum",
    }
)  # fmt: skip
PLAIN = (
    ast.Expression, ast.BinOp, ast.UnaryOp, ast.Compare, ast.Name, ast.Constant, ast.Tuple,
    ast.operator, ast.unaryop, ast.cmpop, ast.expr_context,
)  # fmt: skip


def readable(text: str) -> str:
    """Definitions of an emitted module, without the module's docstring."""
    lines: list[str] = []
    for block in _blocks(text.splitlines()):
        for line in _joined(block):
            lines += _folded(_plain(line))
    return "\n".join([*lines, ""])


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def _blocks(lines: Iterable[str]) -> Iterator[list[str]]:
    """Runs of lines of one depth: statements that follow one another, or parts of one."""
    block: list[str] = []
    for line in lines:
        if block and _indent(line) != _indent(block[0]):
            yield block
            block = []
        block.append(line)
    yield block


def _joined(block: Iterable[str]) -> list[str]:
    """Puts arithmetic that is used once where it is used, while the line stays short."""
    uses = Counter(name for line in block for name in re.findall(r"\be\d+\b", line))
    once = {name for name, count in uses.items() if count == 2}  # where it is made, where used
    lines: list[str] = []
    made: dict[str, tuple[int, str]] = {}
    gone: set[int] = set()
    for line in block:
        for name in [n for n in re.findall(r"\be\d+\b", line) if n in made]:
            place, value = made[name]
            longer = _unparsed(re.sub(rf"\b{name}\b", f"({value})", line))
            if len(longer) <= COLUMNS:
                line = longer
                gone.add(place)
        found = UNNAMED.fullmatch(line)
        if found and found[2] in once and _is_arithmetic(found[3]):
            made[found[2]] = len(lines), found[3]
        lines.append(line)
    return [line for place, line in enumerate(lines) if place not in gone]


def _is_arithmetic(value: str) -> bool:
    """Whether a value is the same wherever it is computed: nothing is read, nothing summed."""
    return all(_is_plain(node) for node in _calls_left_out(ast.parse(value, mode="eval")))


def _calls_left_out(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but the names of arithmetic functions and what broadcasts rows and columns."""
    if isinstance(tree, ast.Call) and ast.unparse(tree.func) in ARITHMETIC:
        children: Iterable[ast.AST] = tree.args
    elif isinstance(tree, ast.Subscript):
        children = [tree.value]
    else:
        yield tree
        children = ast.iter_child_nodes(tree)
    for child in children:
        yield from _calls_left_out(child)


def _is_plain(node: ast.AST) -> bool:
    return isinstance(node, PLAIN)


def _plain(line: str) -> str:
    """A statement without brackets that say nothing."""
    wordy = ASSIGNED.fullmatch(line) or "((" in line or "(BN)" in line
    return _unparsed(line) if wordy else line


def _unparsed(line: str) -> str:
    try:
        return _indent(line) + ast.unparse(ast.parse(line.strip()))
    except SyntaxError:  # part of a statement of several lines
        return line


# --- long lines -----------------------------------------------------------------------------------


def _folded(line: str) -> list[str]:
    """A line that is too long as several, broken between what stands in its first brackets."""
    indent = _indent(line)
    if len(line) <= COLUMNS:
        return [line]
    if line.endswith(",") and len(parts := _parts(line)) > 1:
        return [short for part in _filled(parts, indent) for short in _folded(part)]
    first = line.find("(")
    last = _closing(line, first)
    if first < 0 or last < 0:
        return [line]
    inside = _filled(_parts(line[first + 1 : last]), f"{indent}    ")
    if not re.search(r"\w$", line[:first]):  # brackets around one value: a comma would make a tuple
        inside[-1] = inside[-1].removesuffix(",")
    inside = [short for part in inside for short in _folded(part)]
    return [line[: first + 1], *inside, indent + line[last:]]


def _closing(line: str, first: int) -> int:
    """Where the bracket that opens there is closed; -1 if it is not."""
    depth = 0
    for place in range(max(0, first), len(line)):
        depth += (line[place] in "([{") - (line[place] in ")]}")
        if depth == 0:
            return place
    return -1


def _parts(text: str) -> list[str]:
    """What commas separate, but for commas within brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]


def _filled(parts: Iterable[str], indent: str) -> list[str]:
    lines = [indent]
    for part in parts:
        if len(lines[-1]) + len(part) + 2 > COLUMNS and lines[-1] != indent:
            lines[-1] = lines[-1].rstrip()
            lines.append(indent)
        lines[-1] += f"{part}, "
    return [*lines[:-1], lines[-1].rstrip()]


# --- names ----------------------------------------------------------------------------------------

# What templates call their own, besides names that end as those of pointers and masks do.
OF_TEMPLATES = re.compile(
    r"acc[01lr_]*|start|rows|parts?|kernel|pointers|memory|device|triton|tl|gl|gluon|float|range"
    r"|[abijt]|[chkg]\d*|[A-Z][A-Z_]*|.*_(in|out|parts|stride|tiles|box|ok|start)"
)


def value_name(name: str, lane: str) -> str:
    """What a kernel calls a value of this name in the plan; empty where that would be unclear."""
    full = f"{name}_{lane}" if name and lane else name
    unclear = any(OF_TEMPLATES.fullmatch(n) or keyword.iskeyword(n) for n in (name, full))
    return "" if unclear else full
