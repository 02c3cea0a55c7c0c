"""Makes docs/reference.md of the tables that the compiler works by: every operation and function.

Types are asked of the type rules, derivatives read from the table of core/vjp, meanings from that
of backends/meaning, mathematics from the tables of docs/language.md, examples from the cases that
the tests run. What a primitive costs is told where `cadenza bench primitives` has measured it.
"""

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache
from types import ModuleType

import case_functions
import case_operations
from cases import Case
from test_docs import LANGUAGE, ROOT, read, table_rows

from cadenza.backends import meaning
from cadenza.core import lang, vjp
from cadenza.core.ir import Builder, Graph, Node, topological
from cadenza.core.locality import TILE_COLUMNS
from cadenza.core.ops import BOOLEAN, INTEGER, REAL, M, Op, Type
from cadenza.core.readiness import ACROSS
from cadenza.core.text import Text, expression, show
from cadenza.tools.bench.results import Results, cases, load, ratio

PATH = "docs/reference.md"
INTRODUCTION = """# Reference

Every operation and every function of `cadenza.lang`, one entry each; [the language](language.md)
says how they make a program. This page is made by `python tests/rewrite_docs.py` of the tables that
the compiler itself works by, and a test makes it again.

- **Types** follow from the type rule. M is the number of rows; sizes of 1 are spread, as in NumPy.
- **Derivative**: what the adjoint g of the result y gives to each argument, in mathematics and as
  the row of the table (`cadenza/core/vjp.py`) has it. What was spread is then summed.
- **Meaning**: the expression of PyTorch that the reference back end evaluates, the oracle of all
  other back ends.
- **Cost**: what it is in a kernel. Beside arithmetic on an accumulator that is there, what counts
  is bytes.
- **Example**: a case of the tests, which compare it with the expression behind it, gradients too.
  Functions there that are not PyTorch's stand in `tests/cases.py`.
"""

GROUPS = {
    "leaf": "Leaves",
    "elementwise": "Elementwise",
    "columns": "Columns",
    "reduction": "Reductions",
    "vector": "Vectors",
    "product": "Products",
}
MADE = "made where it is needed: nothing is moved"
COSTS = {
    "leaf": MADE,
    "elementwise": "elementwise: arithmetic on the accumulator, or on what was loaded",
    "columns": "elementwise: columns change their names or places, nothing is computed",
    "reduction": f"reduction inside of a tile: groups of at most {TILE_COLUMNS} columns",
    "vector": "elementwise: a vector is read the other way round",
    "product": "product: a kernel of its own, in whose epilogue the others run",
}
LOAD = "load: a matrix by tiles, a row or a column as a vector, each element once"
REDUCTION = "reduction: each tile leaves partials, finished by the kernel in need or a small one"

# Sizes that no two formulas share: the type rules answer numbers, and these say what they are.
SIZES = {
    "1": 1, "N": 24, "N/2": 12, "2·N": 48, "times·N": 72, "N/size": 6, "stop − start": 5,
    "N₂": 17, "N + N₂": 41, "n": 7, "K": 11,
}  # fmt: skip
FORMULAS = {size: formula for formula, size in SIZES.items()}
N = SIZES["N"]
ATTRIBUTES = {
    "name": "x", "dtype": "bfloat16", "kind": REAL, "value": 2.0, "exponent": 3, "relation": "<",
    "part": 0, "inner": 3, "start": 3, "stop": 8, "times": 3, "size": 4,
    "transpose_a": False, "transpose_b": False, "rows": M, "columns": N,
}  # fmt: skip
SHAPES = {Op.COLUMN_INDEX: (1, N), Op.ROW_INDEX: (M, 1), Op.CONSTANT: (1, 1)}
NAMES = {1: ("x",), 2: ("a", "b"), 3: ("c", "a", "b"), -1: ("a", "b")}
MATRIX = Type(M, N)
PLACE = "…"
ARGUMENTS = {
    Op.RANDOM: {"seed": Type(1, 1, INTEGER)},
    Op.WHERE: {"c": Type(M, N, BOOLEAN), "a": MATRIX, "b": MATRIX},
    Op.CONCAT: {"a": MATRIX, "b": Type(M, SIZES["N₂"])},
    Op.LOGSUMEXP: {"x": MATRIX, "shift": Type(M, 1)},
    Op.TRANSPOSE: {"x": Type(SIZES["n"], 1)},
    Op.MATMUL: {"a": Type(M, SIZES["K"]), "b": Type(SIZES["K"], N)},
}

# What `cadenza bench primitives` measures, and the entry that it is the cost of.
MEASURED = {
    "input": "residual", "add": "bias", "mul": "row-scale", "silu": "activation",
    "split": "paired-columns", "row_sum": "square-sum", "column_sum": "column-sum",
    "logsumexp": "log-sum-exp",
}  # fmt: skip


def page(results: Results | None = None) -> str:
    """The whole page; measured costs are those of `results`, or those that the repository keeps."""
    results = results or load(ROOT / "benchmarks" / "results", "primitives")
    costs = dict(measured(results))
    parts = [INTRODUCTION, "## Operations\n"]
    for group, title in GROUPS.items():
        parts += [f"### {title}\n", *(entry(op, costs) for op in Op if op.group == group)]
    own = [name for name in lang.__all__ if name not in {op.label for op in Op}]
    functions = (function_entry(name, costs) for name in own)
    return "\n".join([*parts, FUNCTIONS, *functions])


FUNCTIONS = """## Functions

These are ordinary functions over the operations. Their derivatives follow: for each case the
program is printed as traced, and the backward as derived. There, `saved0` is what forward kept and
`d_0` the adjoint of the result.
"""


# --- operations ----------------------------------------------------------------------------------


def entry(op: Op, costs: dict[str, str]) -> str:
    """Everything about one operation."""
    row = language_rows()[op.label]
    mathematics = row.get("y") or row["value"]
    lines = [
        f"#### `{op.label}`\n\n{row['write']}: {mathematics}\n",
        f"- **Types**: {types(op)}",
        *derivatives(op, row["adjoint of each argument"]),
        *meanings(op),
        f"- **Cost**: {cost(op)}{costs.get(op.label, '')}",
        *example(simplest(op)),
    ]
    return "\n".join([*lines, *sources(op), ""])


@cache
def language_rows() -> dict[str, dict[str, str]]:
    """The row of each operation in the tables of the language's page."""
    return {
        label: {column: cell.replace("\\|", "|") for column, cell in row.items()}
        for row in table_rows(read(LANGUAGE))
        for label in re.findall(r"`(\w+)`", row.get("operation", ""))
    }


def arguments(op: Op) -> dict[str, Type]:
    """Arguments that the type rule takes, by their names in derivatives."""
    return ARGUMENTS.get(op) or dict.fromkeys(NAMES[op.arity] if op.arity else (), MATRIX)


def attributes(op: Op) -> dict[str, object]:
    """Attributes that the type rule takes."""
    rows, columns = SHAPES.get(op, (M, N))
    known = ATTRIBUTES | {"rows": rows, "columns": columns}
    return {name: known[name] for name in op.attributes}


def types(op: Op) -> str:
    """From the types of the arguments to that of the result, as formulas."""
    given = arguments(op)
    result = op.infer(tuple(given.values()), attributes(op))
    kinds = "" if result.kind == REAL else f", {result.kind}"
    taken = ", ".join(f"{name} `{formula(kind)}`" for name, kind in given.items())
    own = [name for name in op.attributes if name not in ("rows", "columns", "kind")]
    stated = f", with {', '.join(own)}" if own else ""
    return f"{f'{taken} → ' if taken else ''}`{formula(result)}`{kinds}{stated}"


def formula(kind: Type) -> str:
    """A type by the names of its sizes. Raises KeyError for a size that has none."""
    rows, columns = (dim if dim == M else FORMULAS[dim] for dim in (kind.rows, kind.columns))
    return f"[{rows}, {columns}]"


def derivatives(op: Op, mathematics: str) -> list[str]:
    """The line of the derivative; none where no argument has one."""
    rows = [(name, derivative(op, place)) for place, name in enumerate(arguments(op))]
    shown = "; ".join(f"{name}: `{text}`" for name, text in rows if text)
    if not shown:
        return []
    numbers = f" for {chosen(op)}" if re.search(r"\d", shown) and chosen(op) else ""
    return [f"- **Derivative**: {mathematics}. In the table{numbers}, of {shown}"]


def chosen(op: Op) -> str:
    """The numbers that a row of the table which reads any is shown for."""
    numbers = {"N": N} if op.group in ("columns", "reduction") else {}
    numbers |= {name: value for name, value in attributes(op).items() if value is not False}
    return ", ".join(f"{name} = {value}" for name, value in numbers.items())


def derivative(op: Op, place: int) -> str | None:
    """What the table gives to the argument at a place: its row evaluated on symbols."""
    builder = Builder()
    values = {
        name: builder.make(
            Op.INPUT, (), kind._asdict() | {"name": name, "dtype": "float32"}
        )
        for name, kind in arguments(op).items()
    }  # fmt: skip
    y = builder.make(op, tuple(values.values()), attributes(op))
    g = builder.make(Op.INPUT, (), y.type._asdict() | {"name": "g", "dtype": "float32"})
    row = vjp._row(y)[place]
    return None if row is None else written(row(g, y, *values.values()), {**values, "y": y, "g": g})


def written(value: Node, known: dict[str, Node]) -> str:
    """A value as an expression in one line over those that have a name."""
    texts = {node: Text(name) for name, node in known.items()}
    for node in topological([value]):
        if node not in texts:
            texts[node] = expression(node, [texts[i] for i in node.inputs])
    return texts[value].text


def meanings(op: Op) -> list[str]:
    """The line of the meaning, as the table of the reference back end has it."""
    table = {**segments(meaning, "MEANING"), **segments(meaning, "LEAVES")}
    return [f"- **Meaning**: `{table[op.name]}`"] if op.name in table else []


def sources(op: Op) -> list[str]:
    """The function of the reference back end that an operation's meaning names, if it does."""
    function = meaning.MEANING.get(op)
    if not inspect.isfunction(function) or function.__name__ not in vars(meaning):
        return []
    return [f"\n```py\n{inspect.getsource(function)}```"]


@cache
def segments(module: ModuleType, table: str) -> dict[str, str]:
    """The text of each row of a table over operations, by the operation's name."""
    source = inspect.getsource(module)
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == table:
            for key, value in zip(node.value.keys, node.value.values, strict=True):
                found[key.attr] = " ".join(ast.get_source_segment(source, value).split())
    return found


def cost(op: Op) -> str:
    """What an operation is in a kernel."""
    if op is Op.INPUT:
        return LOAD
    return REDUCTION if op in ACROSS else COSTS[op.group]


def measured(results: Results) -> Iterator[tuple[str, str]]:
    """What each primitive adds to a product alone, where that was measured, by its entry."""
    entries = {primitive: label for label, primitive in MEASURED.items()}
    for variants in cases(results.records):
        ours, alone = variants.get("ours", {}), variants.get("products", {})
        share = ratio(ours, alone) if ours and alone else None
        if share is not None and ours["pattern"] in entries:
            where = f"{ours['size']}, {ours['dtype']}, {ours['mode']}, {ours['device']}"
            text = f". Measured: {100 * (share - 1):+.1f} % over the product alone ({where})"
            yield entries[ours["pattern"]], text


# --- functions -----------------------------------------------------------------------------------


def function_entry(name: str, costs: dict[str, str]) -> str:
    """Everything about one function that is composed of operations."""
    function = getattr(lang, name)
    parts = [f"### `{name}`\n", f"`L.{name}{call_of(function)}`\n", inspect.getdoc(function), ""]
    found = next(case for case in all_cases() if used(name, case))
    graph = programs()[found.name]
    groups = sorted(
        {cost(n.op).partition(":")[0] for n in graph[0].nodes()} - {MADE.partition(":")[0]}
    )
    parts += [f"- **Cost**: {', '.join(groups)}{costs.get(name, '')}", *example(found), ""]
    parts += [f"```text\n{show(one).rstrip()}\n```\n" for one in graph if one is not None]
    return "\n".join(parts)


def call_of(function: object) -> str:
    """A function's parameters with their defaults, without annotations."""
    signature = inspect.signature(function)
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=signature.empty))


# --- examples ------------------------------------------------------------------------------------


@cache
def all_cases() -> list[Case]:
    """The cases of functions, the ones called as their function first; then those of operations."""
    found = [*case_functions.FUNCTIONS, *case_operations.OPERATIONS]
    return sorted(found, key=lambda case: case.name not in lang.__all__)


@cache
def case_texts() -> dict[str, tuple[str, str]]:
    """The function and the oracle of each case as the tests' files say them, by the case's name."""
    found = {}
    for module in (case_functions, case_operations):
        source = inspect.getsource(module)
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("case", "declared"):
                name, *both = node.args
                found[name.value] = tuple(applied(source, one) for one in both[:2])
    return found


def applied(source: str, function: ast.expr) -> str:
    """The body of a lambda; of a function its name, with a place for its operands."""
    body = function.body if isinstance(function, ast.Lambda) else function
    text = " ".join(ast.get_source_segment(source, body).split())
    return text if isinstance(function, ast.Lambda) else f"{text}({PLACE})"


def used(name: str, case: Case) -> bool:
    """Whether a case writes a function of the language."""
    return re.search(rf"\bL\.{name}\b", case_texts()[case.name][0]) is not None


def written_in(op: Op, case: Case) -> bool:
    """Whether a case writes an operation, as a function or by its sign."""
    signs = re.findall(r"`a (\S+) b`", language_rows()[op.label]["write"])
    return used(op.label, case) or any(f" {sign} " in case_texts()[case.name][0] for sign in signs)


@cache
def programs() -> dict[str, tuple[Graph, Graph]]:
    """The traced program of each case and its derived backward, by the case's name."""
    return {case.name: program_of(case) for case in all_cases()}


def program_of(case: Case) -> tuple[Graph, Graph]:
    """A case's traced program and its backward, None where it has none."""
    given = case.tensors(SIZES["n"] * SIZES["K"])
    given = {n: v.requires_grad_() if v.is_floating_point() else v for n, v in given.items()}
    program = case.program()
    graph = program.graph(**given)
    return graph, program.backward_graph(**given)


def simplest(op: Op) -> Case | None:
    """The case called as an operation, else the smallest that writes it."""
    if op in (Op.INPUT, Op.CONSTANT):
        return None
    nodes = {case.name: programs()[case.name][0].nodes() for case in all_cases()}
    found = [case for case in all_cases() if any(n.op is op for n in nodes[case.name])]
    return min(
        found,
        key=lambda case: (case.name != op.label, not written_in(op, case), len(nodes[case.name])),
        default=None,
    )


def example(case: Case | None) -> list[str]:
    """The line of an example."""
    if case is None:
        return []
    names = ", ".join(case.operands)
    ours, oracle = (text.replace(PLACE, names) for text in case_texts()[case.name])
    sizes = {name: ", ".join(text.split()[:2]) for name, text in case.operands.items()}
    operands = ", ".join(f"{name} `[{size}]`" for name, size in sizes.items())
    return [f"- **Example**: `{ours}` of {operands} is `{oracle}`"]
