"""Makes docs/errors.md of the cases that the tests of errors hold: what causes each, what it says.

The cases are those lists themselves. Their code is read from the tests' files; what it raises is
caught here and shown without the place, which is a line of the reader's own.
"""

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import cache, partial
from itertools import takewhile
from types import ModuleType
from typing import Any, NamedTuple

import further_errors
import test_accumulate
import test_attention
import test_call_errors
import test_errors
import test_loss_arguments
import test_programs
from loss_options import example
from messages import tensor

import cadenza as cz
from cadenza.backends.triton.launch import NOT_CAPTURED
from cadenza.core.errors import CadenzaError
from cadenza.library.eager import WRITTEN_OVER

PATH = "docs/errors.md"
INTRODUCTION = """# Errors

Each message of the compiler, with the code that causes it and, in its last line, what to write
instead. This page is made by `python tests/rewrite_docs.py` of the cases that the tests of errors
hold: the code is run, and what it raises is shown. A test makes the page again.

A message starts with the file and the line of your own code (left out below, as they are yours)
and the problem; then it says what was found, what was expected, and what to write. Mistakes in a
program or in a call raise `ProgramError`, a `TypeError`; an operation outside of the language
raises `UnknownOperationError`, which is one, and an `AttributeError` too. What a back end can't do
raises `BackEndError`, a `ValueError`. All of them are a `CadenzaError`. `VerificationError` is the
one that you should never see: a pass of the compiler has broken a rule, and the fault is ours.

Where several lines of code stand before a message, it is that of the first; behind each is then
what its own message says was found. `cz` is `cadenza` and `L` is `cadenza.lang`. Where nothing is
said of it, x is `[5, 8]`; `tensor(5, 8)` is a random tensor of these sizes, `gain(12)` a weight of
a norm, and `rotary(4, 3)` are cos and sin.
"""
CAPTURED = f"""### `{NOT_CAPTURED.partition(";")[0]}`

```py
with torch.cuda.graph(graph):
    doubled(x, 2.0)                # its first call with these sizes
```

```text
{NOT_CAPTURED}
```
"""
SPENT = f"""### `normed: {WRITTEN_OVER.partition(",")[0]}`

```py
loss = normed(x, w).sum()          # on a GPU, CADENZA_OVERWRITE=1
try:
    loss.backward()                # ends for want of memory
except torch.OutOfMemoryError:
    loss.backward()                # call forward again instead
```

```text
normed: {WRITTEN_OVER}
```
"""


class Case(NamedTuple):
    """What causes an error, the error, and what is worth knowing of the operands."""

    code: str
    error: CadenzaError
    operands: str = ""


class Section(NamedTuple):
    """A list of cases in a module of tests: how one is run and how its code reads.

    `code` is given the list's row as it is written; `shown` names what its code makes use of.
    """

    title: str
    module: ModuleType
    table: str
    run: Callable[[Any], Any]
    code: Callable[[ModuleType, ast.expr], str]
    shown: str = ""
    operands: Callable[[Any], str] = lambda row: ""


def page() -> str:
    """The whole page."""
    surrounded = [Case(code, raised(inside(*how))) for code, *how in further_errors.ENVIRONMENTS]
    return "\n".join(
        [INTRODUCTION, *map(section_text, SECTIONS), groups_text(surrounded), CAPTURED, SPENT]
    )


def inside(
    surroundings: Callable[[], AbstractContextManager[Any]], call: Callable[[], Any]
) -> Callable[[], Any]:
    """A call while something is so."""

    def changed() -> Any:
        with surroundings():
            return call()

    return changed


def section_text(section: Section) -> str:
    """A section: what its code makes use of, then its cases."""
    shown = "".join(definition(section.module, name) for name in section.shown.split())
    before = f"```py\n{shown.rstrip()}\n```\n\n" if shown else ""
    return f"## {section.title}\n\n{before}{groups_text(cases(section))}"


def groups_text(found: list[Case]) -> str:
    """Cases, those with the same cure together under the message of the first."""
    groups: dict[str, list[Case]] = {}
    for case in found:
        groups.setdefault(cure(case.error), []).append(case)
    return "\n".join(map(group_text, groups.values()))


def cure(error: CadenzaError) -> str:
    """What a message says from what was expected on, all of it where it says nothing of that."""
    return str(error)[max(0, str(error).find("\n  expected: ")) :]


def group_text(group: list[Case]) -> str:
    """The code of some cases, comments behind it in one column, and the message of the first."""
    said = comments(group)
    width = max(len(case.code.splitlines()[-1]) for case in group)
    lines = [
        f"{case.code}{' ' * (width - len(case.code.splitlines()[-1]))}  # {comment}" if comment
        else case.code
        for case, comment in zip(group, said, strict=True)
    ]  # fmt: skip
    code = "\n".join(f"{line}\n" if "\n" in line else line for line in lines).rstrip()
    shown = message(group[0].error)
    return f"### {heading(shown)}\n\n```py\n{code}\n```\n\n```text\n{shown}\n```\n"


def heading(shown: str) -> str:
    """A message's problem; with what was found where that is only a function's name."""
    problem, *rest = shown.splitlines()
    found = f": {rest[0].removeprefix('  found:').strip()}" if " " not in problem else ""
    marks = "``" if "`" in problem else "`"
    space = " " if "`" in problem else ""
    return f"{marks}{space}{problem}{found}{space}{marks}"


def comments(group: list[Case]) -> list[str]:
    """What stands behind each line: its operands, or what was found where cases differ."""
    found = [found_of(case.error) for case in group]
    differ = len(set(found)) > 1
    return [
        case.operands or (text if differ else "") for case, text in zip(group, found, strict=True)
    ]


def found_of(error: CadenzaError) -> str:
    """What a message says was found."""
    return "".join(re.findall(r"\n  found:    (.*)", str(error)))


def message(error: CadenzaError) -> str:
    """A message without its place."""
    return re.sub(r"^\S+\.py:\d+: ", "", str(error))


# --- cases ---------------------------------------------------------------------------------------


def cases(section: Section) -> list[Case]:
    """The cases of a section, each run. Raises AssertionError for one that raises nothing."""
    table = getattr(section.module, section.table)
    rows = list(table.values()) if isinstance(table, dict) else table
    return [
        Case(
            section.code(section.module, text),
            raised(partial(section.run, row)),
            section.operands(row),
        )
        for text, row in zip(row_texts(section.module, section.table), rows, strict=False)
    ]


def raised(call: Callable[[], Any]) -> CadenzaError:
    """The error that a call raises."""
    try:
        call()
    except CadenzaError as error:
        return error
    raise AssertionError(f"{call} raises nothing")


@cache
def tree(module: ModuleType) -> ast.Module:
    """A module as it is written."""
    return ast.parse(inspect.getsource(module))


def row_texts(module: ModuleType, table: str) -> list[ast.expr]:
    """The rows of a list, or the values of a dictionary, as they are written; up to a `*`."""
    value = next(node.value for node in tree(module).body if names(node) == {table})
    rows = value.values if isinstance(value, ast.Dict) else value.elts
    return list(takewhile(lambda row: not isinstance(row, ast.Starred), rows))


def names(node: ast.stmt) -> set[str]:
    """The names that a statement gives to values."""
    if isinstance(node, ast.FunctionDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else []
    return {
        name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)
    }


def definition(module: ModuleType, name: str) -> str:
    """The statement that defines a name, as it is written, decorators too."""
    node = next(node for node in tree(module).body if name in names(node))
    first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
    lines = inspect.getsource(module).splitlines()[first - 1 : node.end_lineno]
    apart = "\n" if isinstance(node, ast.FunctionDef) else ""
    return f"{apart}{chr(10).join(lines)}\n"


def segment(module: ModuleType, node: ast.expr) -> str:
    """An expression as it is written, in one line."""
    return " ".join(ast.get_source_segment(inspect.getsource(module), node).split())


# --- how code reads ------------------------------------------------------------------------------


def body(module: ModuleType, row: ast.expr, within: str = "{}") -> str:
    """The body of the function that a row begins with; of one with a name its definition."""
    function = row.elts[0]
    if isinstance(function, ast.Name):
        return definition(module, function.id).strip()
    return within.format(segment(module, function.body))


def whole(within: str) -> Callable[[ModuleType, ast.expr], str]:
    """What a row begins with, put into other code."""
    return lambda module, row: within.format(segment(module, row.elts[0]))


def called(function: str) -> Callable[[ModuleType, ast.expr], str]:
    """A call of a row's operands and options, in that order; without a name of the row's first."""

    def code(module: ModuleType, row: ast.expr) -> str:
        name, first = (function, 0) if function else (segment(module, row.elts[0]), 1)
        values = [v for v in row.elts[first:] if not isinstance(v, ast.Constant | ast.JoinedStr)]
        return f"{name}({', '.join(part for value in values for part in passed(module, value))})"

    return code


def passed(module: ModuleType, value: ast.expr) -> Iterator[str]:
    """Arguments as a call has them: a tuple one by one, a dictionary by name."""
    if isinstance(value, ast.Tuple):
        yield from (segment(module, one) for one in value.elts)
    elif isinstance(value, ast.Dict):
        pairs = zip(value.keys, value.values, strict=True)
        yield from (f"{key.value}={segment(module, one)}" for key, one in pairs)
    elif isinstance(value, ast.BinOp) or segment(module, value).isupper():
        yield f"**{segment(module, value)}" if segment(module, value) != "UP" else "*UP"
    else:
        yield segment(module, value)


def traced(row: Any) -> Any:
    """Runs a row's function as a block on one operand."""
    return cz.block(row[0])(tensor(5, 8))


def of_loss(**changed: Any) -> Any:
    """linear_cross_entropy of an example with something changed."""
    return cz.ops.linear_cross_entropy(**{**example({}).operands, **changed})


def sizes(row: Any) -> str:
    """The sizes of a row's operands, by its function's parameters."""
    parameters = inspect.signature(row[0]).parameters
    return ", ".join(
        f"{name} {list(shape)}" for name, shape in zip(parameters, row[1], strict=True)
    )


SECTIONS = [
    Section("Shapes that do not fit", test_errors, "SHAPES",
            lambda row: cz.block(row[0])(*(tensor(*shape) for shape in row[1])), body,
            operands=sizes),
    Section("Arguments of functions", test_errors, "ARGUMENTS", traced, body),
    Section("What Python asks of a value", test_errors, "PYTHON", traced, body),
    Section("Operators outside of the language", test_errors, "OPERATORS", traced, body),
    Section("Functions outside of the language", test_errors, "UNKNOWN", traced, body),
    Section("What a function returns", test_call_errors, "OUTPUTS",
            traced, lambda m, row: body(m, row, "return {}")),
    Section("Tensors from elsewhere", test_call_errors, "ELSEWHERE",
            traced, body, "GLOBAL LIST MODULE helper"),
    Section("Calls", test_call_errors, "CALLS", lambda row: row[0](), body, "X normed doubled"),
    Section("Declared sizes", test_call_errors, "SIZES", lambda row: row[0](), body, "X declared"),
    Section("Declarations", test_call_errors, "DECLARATIONS",
            lambda row: cz.block(shapes=row[0])(lambda x, w: x), whole("@cz.block(shapes={})")),
    Section("Definitions", test_call_errors, "DEFINITIONS",
            lambda row: cz.block(row[0]), whole("cz.block({})")),
    Section("Programs of the library", test_programs, "REFUSED",
            lambda row: row[0](*row[1], **row[2]), called(""), "X HEADS UP"),
    Section("Losses", test_loss_arguments, "WRONG", lambda row: of_loss(**row[0]),
            lambda m, row: called("linear_cross_entropy")(m, ast.Tuple(row.elts[:1])).replace(
                "(", "(x, w, target, ", 1)),
    Section("Targets of losses", test_loss_arguments, "TARGETS",
            lambda row: of_loss(target=row[0](example({}).operands["target"])),
            lambda m, row: body(m, row, "linear_cross_entropy(x, w, {})")),
    Section("Attention", test_attention, "WRONG",
            lambda row: test_attention.causal_attention(row[0], **row[1]),
            called("causal_attention"), "HEADS"),
    Section("Weight gradients in place", test_accumulate, "WRONG",
            lambda row: test_accumulate.accumulate_weight_gradient(*row[0]),
            called("accumulate_weight_gradient"), "X"),
    Section("Programs, derivatives, back ends", further_errors, "FURTHER", lambda row: row[0](),
            body),
]  # fmt: skip
