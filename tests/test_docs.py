"""Runs what the documents show: every Python block, every example, every link.

The first half is checkers, each from a text to the list of its problems; the second applies them to
the repository, and each to a text that is wrong. A block runs in one namespace with the blocks
before it, under the document's own name and line numbers; a ```text block that directly follows it
is what it prints.
"""

import ast
import contextlib
import inspect
import io
import re
import runpy
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from cadenza import lang
from cadenza.core.ops import Op

ROOT = Path(__file__).resolve().parent.parent
LANGUAGE = "docs/language.md"
DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.md"))
)
EXAMPLES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("examples/*.py"))
EPILOGUE_LINES = (2, 6)


class Block(NamedTuple):
    """A fenced block: its language, the line of its first line, its text, and whether only blank
    lines stand between it and the block before."""

    language: str
    line: int
    text: str
    follows: bool


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a document, in order. Raises ValueError for one that is never closed."""
    found, fence, between = [], None, "start"
    for number, line in enumerate(text.splitlines(), 1):
        if fence is None and line.startswith("```"):
            fence, first, inside = line[3:].strip(), number + 1, []
        elif fence is not None and line.rstrip() == "```":
            body = "".join(f"{row}\n" for row in inside)
            found.append(Block(fence, first, body, between == ""))
            fence, between = None, ""
        elif fence is not None:
            inside.append(line)
        else:
            between += line.strip()
    if fence is not None:
        raise ValueError(f"the block that starts at line {first} is not closed")
    return found


def prose(text: str) -> str:
    """A document without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def failed_line(error: BaseException, path: str) -> int | None:
    """The last line of the document itself that an error passed through."""
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == path]
    return lines[-1] if lines else getattr(error, "lineno", None)


def run_block(path: str, block: Block, namespace: dict) -> tuple[str, list[str]]:
    """What a block prints, and what is wrong with it."""
    printed = io.StringIO()
    try:
        code = compile("\n" * (block.line - 1) + block.text, path, "exec")
        with contextlib.redirect_stdout(printed):
            exec(code, namespace)
    except Exception as error:  # noqa: BLE001 (whatever a document's code raises is a problem)
        place = f"{path}:{failed_line(error, path) or block.line}"
        return "", [f"{place}: {type(error).__name__}: {error} (block at line {block.line})"]
    return printed.getvalue(), []


def broken_blocks(path: str, text: str) -> list[str]:
    """Blocks that raise, and blocks that print something else than the document shows."""
    namespace, problems, printed, before = {"__name__": path}, [], "", ""
    for block in blocks(text):
        if block.language == "python":
            printed, found = run_block(path, block, namespace)
            problems += found
        shows_output = block.language == "text" and block.follows and before == "python"
        if shows_output and printed.rstrip() != block.text.rstrip():
            problems.append(f"{path}:{block.line}: printed instead:\n{printed.rstrip()}")
        before = block.language
    return problems


def table_rows(text: str) -> Iterator[dict[str, str]]:
    """Every row of every table, as its cells by the names of their columns."""
    header: list[str] = []
    for line in prose(text).splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if cells and header:
            yield dict(zip(header, cells, strict=False))
        header = (header or cells) if cells else []


def shown_names(text: str) -> tuple[set[str], set[str]]:
    """Operations and functions that stand in a heading or in their column of a table."""
    headings = [line for line in prose(text).splitlines() if line.startswith("#")]
    rows = list(table_rows(text))
    operations = "\n".join([*headings, *(row.get("operation", "") for row in rows)])
    functions = "\n".join([*headings, *(row.get("write", "") for row in rows)])
    return set(re.findall(r"`(\w+)`", operations)), set(re.findall(r"`L\.(\w+)", functions))


def unshown_options(text: str, name: str) -> list[str]:
    """Parameters with a default that no row of a function shows, as `parameter=`."""
    parameters = inspect.signature(getattr(lang, name)).parameters.values()
    options = [p.name for p in parameters if p.default is not p.empty]
    rows = "".join(re.findall(rf"^\| `L\.{name}\((.*?)\)`", text, re.MULTILINE))
    return [option for option in options if not re.search(rf"\b{option}=", rows)]


def undocumented(text: str) -> list[str]:
    """Operations and functions without a row, without an example, or with a row but gone."""
    operations, functions = shown_names(text)
    labels, names = {op.label for op in Op}, set(lang.__all__)
    code = "".join(b.text for b in blocks(text) if b.language == "python")
    used = set(re.findall(r"\bL\.(\w+)", code))
    return [
        *(f"operation {label} has no row" for label in sorted(labels - operations)),
        *(f"L.{name} has no row" for name in sorted(names - functions)),
        *(f"L.{n} lacks {o}=" for n in sorted(names & functions) for o in unshown_options(text, n)),
        *(f"L.{name} has no example" for name in sorted(names - used)),
        *(f"there is no operation {label}" for label in sorted(operations - labels)),
        *(f"there is no L.{name}" for name in sorted(functions - names)),
    ]


def messages(source: str) -> set[str]:
    """The string literals of a module, what is filled in replaced by an ellipsis."""
    literals = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            parts = [str(p.value) if isinstance(p, ast.Constant) else "…" for p in node.values]
            literals.add("".join(parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            literals.add(node.value)
    return literals


def unknown_messages(text: str, literals: set[str]) -> list[str]:
    """Messages in the table of errors that no literal begins with."""
    _, _, table = text.partition("| message begins |")
    rows = re.findall(r"^\| (.+?) \|", table.partition("\n\n")[0], re.MULTILINE)
    shown = [message for row in rows for message in row.split("; ")]
    known = [message for message in shown if any(t.startswith(message) for t in literals)]
    return [message for message in shown if message not in known] if shown else ["no table"]


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives to a document's headings."""
    titles = [line.lstrip("#").strip() for line in prose(text).splitlines() if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(path: str, text: str) -> list[str]:
    """Relative links that lead nowhere, and anchors that no heading has."""
    problems = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(text)):
        if "://" in link:
            continue
        target, _, anchor = link.partition("#")
        place = (ROOT / path).parent / target if target else ROOT / path
        if not place.exists():
            problems.append(f"{path}: {link} leads nowhere")
        elif anchor and anchor not in anchors(text if not target else place.read_text("utf-8")):
            problems.append(f"{path}: {link} has no such heading")
    return problems


def unknown_commands(text: str, makefile: str) -> list[str]:
    """`make` commands in code that the Makefile does not know."""
    targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
    code = "\n".join([b.text for b in blocks(text)] + re.findall(r"`[^`\n]+`", prose(text)))
    commands = sorted(set(re.findall(r"\bmake ([a-z]+)", code)))
    return [f"make {command} does not exist" for command in commands if command not in targets]


def programs(source: str) -> dict[str, ast.FunctionDef]:
    """The functions that `@cz.epilogue` or `@cz.block` decorates."""
    return {
        node.name: node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef)
        if any("cz.epilogue" in ast.unparse(d) or "cz.block" in ast.unparse(d)
               for d in node.decorator_list)
    }  # fmt: skip


def wrong_lengths(path: str, source: str) -> list[str]:
    """An example holds epilogues, and each is two to six lines."""
    found = programs(source)
    problems = [] if found else [f"{path}: no epilogue"]
    least, most = EPILOGUE_LINES
    for name, function in found.items():
        body = function.body[1:] if ast.get_docstring(function) else function.body
        lines = body[-1].end_lineno - body[0].lineno + 1 if body else 0
        if not least <= lines <= most:
            problems.append(f"{path}: {name} has {lines} lines, not {least} to {most}")
    return problems


def broken_example(path: Path) -> list[str]:
    """What goes wrong when an example is run as a script; it must also say something."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_path(str(path), run_name="__main__")
    except Exception as error:  # noqa: BLE001 (whatever an example raises is a problem)
        return [f"{path.name}:{failed_line(error, str(path))}: {type(error).__name__}: {error}"]
    return [] if printed.getvalue() else [f"{path.name}: prints nothing"]


def test_there_are_documents_and_six_examples():
    assert {"README.md", LANGUAGE, "examples/README.md"} <= set(DOCUMENTS)
    assert len(EXAMPLES) >= 6


@pytest.mark.parametrize("path", DOCUMENTS)
def test_the_code_in_a_document_runs_and_prints_what_is_shown(path):
    assert broken_blocks(path, read(path)) == []


@pytest.mark.parametrize("path", DOCUMENTS)
def test_links_lead_somewhere(path):
    assert broken_links(path, read(path)) == []


@pytest.mark.parametrize("path", DOCUMENTS)
def test_commands_exist(path):
    assert unknown_commands(read(path), read("Makefile")) == []


def test_every_operation_and_every_function_is_documented():
    assert undocumented(read(LANGUAGE)) == []


def test_every_message_in_the_table_of_errors_exists():
    sources = [p for layer in ("core", "library") for p in ROOT.glob(f"cadenza/{layer}/*.py")]
    literals = set().union(*(messages(path.read_text(encoding="utf-8")) for path in sources))
    assert unknown_messages(read(LANGUAGE), literals) == []


@pytest.mark.parametrize("path", EXAMPLES)
def test_an_example_runs(path):
    assert broken_example(ROOT / path) == []


@pytest.mark.parametrize("path", EXAMPLES)
def test_an_example_is_an_epilogue_of_two_to_six_lines_and_is_listed(path):
    assert wrong_lengths(path, read(path)) == []
    assert f"]({Path(path).name})" in read("examples/README.md")


def test_the_first_test_file_holds_the_programs_of_the_readme():
    code = "".join(b.text for b in blocks(read("README.md")) if b.language == "python")
    shown, tested = programs(code), programs(read("tests/test_tiny.py"))
    assert set(shown) == {"norm_swiglu", "llama_block"}
    for name, function in shown.items():
        assert ast.dump(function) == ast.dump(tested[name]), name


# --- each checker against a text that is wrong ---------------------------------------------------

GOOD = "# T\n\n```python\nx = 1\nprint(x)\n```\n\n```text\n1\n```\n"


def test_a_block_that_raises_is_named_by_file_and_line():
    text = GOOD + "\n```python\ny = x\nassert y == 2, 'two'\n```\n"
    assert broken_blocks("a.md", GOOD) == []
    assert broken_blocks("a.md", text) == ["a.md:14: AssertionError: two (block at line 13)"]


def test_a_block_that_does_not_parse_is_named_by_file_and_line():
    (problem,) = broken_blocks("a.md", "# T\n\n```python\nx = 1\nx = = 1\n```\n")
    assert problem.startswith("a.md:5: SyntaxError")


def test_other_output_than_shown_is_caught():
    (problem,) = broken_blocks("a.md", GOOD.replace("\n1\n", "\n2\n"))
    assert problem == "a.md:9: printed instead:\n1"


def test_text_that_follows_no_code_is_not_output():
    assert (
        broken_blocks("a.md", GOOD.replace("```text", "Words.\n\n```text").replace("1\n`", "`"))
        == []
    )


def test_a_block_that_is_not_closed_is_caught():
    with pytest.raises(ValueError, match="line 4 is not closed"):
        blocks("# T\n\n```python\nx = 1\n")


def new_problems(before: str, after: str) -> set[str]:
    """What is undocumented in a changed text only."""
    return set(undocumented(after)) - set(undocumented(before))


def test_an_operation_or_a_function_without_a_row_is_caught():
    text = read(LANGUAGE)
    row = next(line for line in text.splitlines() if line.startswith("| `L.rsqrt(x)`"))
    missing = {"operation rsqrt has no row", "L.rsqrt has no row"}
    assert new_problems(text, text.replace(f"{row}\n", "")) == missing
    misspelt = {"L.geglu has no row", "L.geglu has no example", "there is no L.geglow"}
    assert new_problems(text, text.replace("L.geglu(", "L.geglow(")) == misspelt


def test_a_row_of_an_operation_that_is_gone_is_caught():
    text = read(LANGUAGE)
    gone = text.replace("| `rsqrt` |", "| `rsqrt`, `cbrt` |")
    assert new_problems(text, gone) == {"there is no operation cbrt"}


def test_an_option_that_no_row_shows_is_caught():
    text = read(LANGUAGE)
    without = text.replace(", offset=0.0)`", ")`")
    assert new_problems(text, without) == {"L.rms_norm lacks offset="}


def test_a_name_in_prose_or_in_another_column_is_no_documentation():
    table = "| write | operation | y |\n|---|---|---|\n| `L.exp(x)` | `exp` | `log`, `L.log(x)` |\n"
    assert shown_names(f"`log` is `L.log(x)`\n\n{table}") == ({"exp"}, {"exp"})
    assert shown_names("### `tanh`: `L.tanh(x)`\n") == ({"tanh"}, {"tanh"})


def test_a_message_that_does_not_exist_is_caught():
    table = "| message begins | cure |\n|---|---|\n| add of … | x |\n| no such; no other … | y |\n"
    literals = messages("f(f'add of {a} and {b}', 'no', g='no such thing')")
    assert unknown_messages(table, literals) == ["no other …"]
    assert unknown_messages("Words.", literals) == ["no table"]


def test_links_that_lead_nowhere_are_caught():
    links = "[a](nowhere.md) [b](README.md) [c](#no-such) [d](#titles-two) [e](README.md#no-such)"
    assert broken_links("README.md", f"# Title's two\n\n{links}\n") == [
        "README.md: nowhere.md leads nowhere",
        "README.md: #no-such has no such heading",
        "README.md: README.md#no-such has no such heading",
    ]


def test_commands_that_do_not_exist_are_caught():
    text = "Words make sense. `make good ARGS=x`\n\n```\nmake bad    # comment\n```\n"
    assert unknown_commands(text, "good: stamp\n\tmake bad\n") == ["make bad does not exist"]


@pytest.mark.parametrize("lines", [1, 7])
def test_epilogues_of_another_length_are_caught(lines):
    body = "    acc = acc + 1\n" * (lines - 1) + "    return acc\n"
    source = f"@cz.epilogue\ndef f(acc):\n    '''Words.'''\n{body}"
    assert wrong_lengths("a.py", source) == [f"a.py: f has {lines} lines, not 2 to 6"]
    assert wrong_lengths("a.py", "x = 1") == ["a.py: no epilogue"]


def test_examples_that_fail_or_stay_silent_are_caught(tmp_path):
    wrong, silent = tmp_path / "wrong.py", tmp_path / "silent.py"
    wrong.write_text("if __name__ == '__main__':\n    assert 1 == 2, 'no'\n")
    silent.write_text("x = 1\n")
    assert broken_example(wrong) == ["wrong.py:2: AssertionError: no"]
    assert broken_example(silent) == ["silent.py: prints nothing"]
