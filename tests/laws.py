"""The laws of this code base, as functions from a source text to the list of its violations.

Each takes `(path, source)`, the path relative to the root of the repository and with forward
slashes, and answers one line a violation; an empty list says that the law holds. `test_laws.py`
applies them to the repository, and each to a text that breaks it. Nothing here imports what it
judges: sources are parsed, never run.
"""

import ast
import io
import re
import statistics
import sys
import tokenize
from collections.abc import Iterator
from functools import cache

COLUMNS = 100
FUNCTION_LINES = 40
FILE_LINES = 400
TEMPLATE_LINES = 600
DOCSTRING_LINES = 15
PARAMETERS = 6
PUBLIC_PARAMETERS = 8
MEDIAN_LINES = 8
MOST_LINES = 26

# A layer imports those before it and itself, never those after it. "surface" is the modules that
# stand directly in the package: the public names.
LAYERS = ("core", "backends", "library", "integrations", "surface", "tools", "__main__")

# What else each layer may import besides the standard library. Anything more is a new dependency,
# to be argued for.
TENSORS = frozenset({"torch", "numpy"})
PACKAGES = {
    "core": frozenset({"networkx", "numpy"}),
    "backends": TENSORS | {"triton"},
    "library": TENSORS | {"safetensors"},
    "integrations": TENSORS | {"safetensors", "transformers"},
    "surface": TENSORS,
    # Beside our own: what `cadenza bench` measures where it is installed.
    "tools": TENSORS
    | {"safetensors", "rich", "typer", "matplotlib"}
    | {"liger_kernel", "flashinfer", "transformers"}
    # What reads a tokenizer.json for `cadenza train`; without it bytes are tokens.
    | {"tokenizers"},
    "__main__": frozenset(),
}

# Names that say nothing of what stands in a file.
EMPTY_NAMES = frozenset(
    word + plural
    for word in ("util", "helper", "common", "misc", "manager")
    for plural in ("", "s")
)

# Functions whose signature is torch's, with the name of the one it mirrors: "path:function".
MIRRORS: dict[str, str] = {
    "cadenza/library/cross_entropy.py:linear_cross_entropy": "torch.nn.functional.cross_entropy",
}

# Where every function is a traced program: its parameters are a block's inputs and weights.
TRACED_FILES = re.compile(r"cadenza/library/blocks(\.py|/.*)|examples/.*")
TRACED_DECORATORS = frozenset({"epilogue", "block", "jit"})  # jit: what Triton compiles

# Written in pieces, so that this file is not itself a violation.
FOREIGN = re.compile(
    r"(?<![\w.~-])/(?:" + "|".join(("home", "Users", "root", "work", "farm")) + r")/"
    r"|[A-Z]:\\+Users\\"
    r"|py" + r"pi\.org|python" + r"hosted\.org|npm" + r"js\.(?:org|com)|deb\." + r"debian\.org"
    r"|download\.py" + r"torch\.org|crates" + r"\.io|conda\." + r"anaconda\.org"
)

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def parsed(source: str) -> ast.Module:
    """The tree of a file, made once for all that look at it."""
    return ast.parse(source)


def layer_of(path: str) -> str:
    """The layer that a file of the package belongs to."""
    parts = path.removesuffix(".py").split("/")[1:]
    if len(parts) > 1:
        return parts[0]
    return "__main__" if parts == ["__main__"] else "surface"


def imported(path: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every import, wherever it stands, as its line and absolute dotted name."""
    package = path.split("/")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            outer = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*outer, *filter(None, [node.module])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and called(node) in {"import_module", "__import__"}:
            yield from ((node.lineno, name) for name in named_modules(node, package))


def named_modules(call: ast.Call, package: list[str]) -> list[str]:
    """The module that `import_module("…")` names, when the name stands there to read."""
    names = [argument.value for argument in call.args[:1] if isinstance(argument, ast.Constant)]
    return [".".join(package) + name if name.startswith(".") else name for name in names]


def called(node: ast.expr) -> str:
    """The last name of `a.b.name` or of a call to it."""
    if isinstance(node, ast.Call):
        return called(node.func)
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def imports(path: str, source: str) -> list[str]:
    """Imports go one way, and each layer takes only the packages that are its own."""
    layer = layer_of(path)
    if layer not in LAYERS:
        return [f"{path}: there is no layer {layer!r}; the layers are {', '.join(LAYERS)}"]
    found = []
    for line, name in imported(path, parsed(source)):
        top, _, rest = name.partition(".")
        if top == "cadenza":
            target = rest.split(".")[0]
            target = target if target in LAYERS else "surface"
            allowed = LAYERS.index(target) <= LAYERS.index(layer)
        else:
            allowed = top in sys.stdlib_module_names or top in PACKAGES[layer]
        if not allowed:
            found.append(f"{path}:{line}: {layer} imports {name}")
    return found


def functions(tree: ast.AST) -> Iterator[Function]:
    """Every function and method, nested ones too."""
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def length(function: Function) -> int:
    """Lines from `def` to the end, without decorators and docstring."""
    lines = function.end_lineno - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function) is not None:
        lines -= first.end_lineno - first.lineno + 1
    return lines


def line_width(path: str, source: str) -> list[str]:
    """A line ends at column 100."""
    return [
        f"{path}:{number}: {len(line)} columns, at most {COLUMNS}"
        for number, line in enumerate(source.splitlines(), 1)
        if len(line) > COLUMNS
    ]


def file_length(path: str, source: str) -> list[str]:
    """A file ends at line 400; the fixed text of generated kernels at 600."""
    limit = TEMPLATE_LINES if "/templates/" in path else FILE_LINES
    lines = len(source.splitlines())
    return [f"{path}: {lines} lines, at most {limit}"] if lines > limit else []


def function_length(path: str, source: str) -> list[str]:
    """A function ends at 40 lines."""
    return [
        f"{path}:{function.lineno}: {function.name} has {length(function)} lines, "
        f"at most {FUNCTION_LINES}"
        for function in functions(parsed(source))
        if length(function) > FUNCTION_LINES
    ]


def typical_length(lengths: list[int]) -> list[str]:
    """Over all functions the median is at most 8 lines, and nine in ten stay under 26."""
    median = statistics.median(lengths)
    long = sum(lines >= MOST_LINES for lines in lengths)
    found = [f"the median function has {median:g} lines"] if median > MEDIAN_LINES else []
    if 10 * long > len(lengths):
        found.append(f"{long} of {len(lengths)} functions have {MOST_LINES} lines or more")
    return found


def public_names(source: str) -> set[str]:
    """What a module lists in its `__all__`."""
    for node in parsed(source).body:
        if isinstance(node, ast.Assign) and [called(name) for name in node.targets] == ["__all__"]:
            return set(ast.literal_eval(node.value))
    return set()


def parameter_count(function: Function, method: bool) -> int:
    """Parameters as the caller counts them: `self` is none, `*a` and `**k` are one each."""
    a = function.args
    static = any(called(decorator) == "staticmethod" for decorator in function.decorator_list)
    named = len(a.posonlyargs) + len(a.args) + len(a.kwonlyargs)
    return named + bool(a.vararg) + bool(a.kwarg) - (method and not static)


def is_traced(path: str, function: Function) -> bool:
    """Whether a function is a program: it is run on symbols, and takes what its block takes."""
    decorators = {called(decorator) for decorator in function.decorator_list}
    return bool(TRACED_FILES.fullmatch(path) or decorators & TRACED_DECORATORS)


def parameters(path: str, source: str, public: frozenset[str] = frozenset()) -> list[str]:
    """At most 6 parameters; 8 for an entry in `public` and the methods of a public class."""
    tree = parsed(source)
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    owner = {id(method): group for group in classes for method in group.body}
    found = []
    for function in functions(tree):
        group = owner.get(id(function))
        known = {function.name, group.name if group else ""} & public
        limit = PUBLIC_PARAMETERS if known else PARAMETERS
        count = parameter_count(function, method=group is not None)
        exempt = is_traced(path, function) or f"{path}:{function.name}" in MIRRORS
        if count > limit and not exempt:
            found.append(
                f"{path}:{function.lineno}: {function.name} has {count} parameters, at most {limit}"
            )
    return found


def telling_name(path: str, source: str = "") -> list[str]:
    """No file and no folder is named utils, helpers, common, misc or manager."""
    words = set(re.split(r"[^a-z]+", path.lower()))
    return [f"{path}: {word!r} says nothing" for word in sorted(words & EMPTY_NAMES)]


def module_docstring(path: str, source: str) -> list[str]:
    """A module says in at most 15 lines what it is."""
    docstring = ast.get_docstring(parsed(source))
    if not docstring:
        return [f"{path}:1: no module docstring"]
    lines = len(docstring.splitlines())
    too_long = f"{path}:1: module docstring of {lines} lines, at most {DOCSTRING_LINES}"
    return [too_long] if lines > DOCSTRING_LINES else []


def public_docstrings(path: str, source: str) -> list[str]:
    """A function or class that others may call says what it takes and gives."""
    return [
        f"{path}:{node.lineno}: {node.name} has no docstring"
        for node in parsed(source).body
        if isinstance(node, Function | ast.ClassDef)
        if not node.name.startswith("_") and not ast.get_docstring(node) and not overloaded(node)
    ]


def overloaded(node: Function | ast.ClassDef) -> bool:
    """Whether this is one signature of a function whose docstring stands at its body."""
    return any(isinstance(d, ast.Name) and d.id == "overload" for d in node.decorator_list)


def foreign_text(path: str, source: str) -> list[str]:
    """No text names a folder of someone's machine or the host of a package registry."""
    return [
        f"{path}:{number}: {match.group()}"
        for number, line in enumerate(source.splitlines(), 1)
        for match in FOREIGN.finditer(line)
    ]


def skip_reasons(path: str, source: str) -> list[str]:
    """A test that is skipped or expected to fail says why."""
    tree = parsed(source)
    reasoned = {
        id(node.func)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and gives_reason(node)
    }
    return [
        f"{path}:{node.lineno}: {ast.unparse(node)} without a reason"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and id(node) not in reasoned
        if node.attr in {"skip", "skipif", "xfail", "importorskip"}
        if ast.unparse(node).startswith(("pytest.", "unittest."))
    ]


def gives_reason(call: ast.Call) -> bool:
    """Whether a call has a reason that is not empty; `skip` and `xfail` take it first."""
    reasons = [keyword.value for keyword in call.keywords if keyword.arg in {"reason", "msg"}]
    if called(call) in {"skip", "xfail"}:
        reasons += call.args[:1]
    return any(not isinstance(reason, ast.Constant) or reason.value for reason in reasons)


def silencing_reasons(path: str, source: str) -> list[str]:
    """A comment that silences a checker names the rule and says why."""
    silences = re.compile(r"#\s*(?:type:\s*ignore|(?:ruff:\s*)?no" + r"qa|fmt:\s*off)")
    argued = re.compile(r"(?:\[[\w, -]+\]|:\s*[A-Z]+\d+(?:,\s*[A-Z]+\d+)*|fmt:\s*off)\W+\w+\W+\w+")
    comments = tokenize.generate_tokens(io.StringIO(source).readline)
    return [
        f"{path}:{token.start[0]}: {token.string} without a reason"
        for token in comments
        if token.type == tokenize.COMMENT and silences.search(token.string)
        if not argued.search(token.string)
    ]
