"""Holds the repository to the laws of `laws.py`, and each law to a text that breaks it.

The second half matters as much as the first: a law that nothing can break is no law. Every law is
given a small bad source that it must catch and a good one, close by, that it must let pass.
"""

import subprocess
import sys
from functools import cache
from pathlib import Path

import laws
import pytest

ROOT = Path(__file__).resolve().parent.parent

# Packages that only some commands need, and devices that only a run needs.
NOT_ON_IMPORT = ("triton", "matplotlib", "rich", "typer")
DEVICE_QUESTIONS = ("is_available", "device_count", "current_device", "get_device_properties")
IMPORT_PROBE = """
import sys, torch
asked = []
def question(name):
    answer = getattr(torch.cuda, name)
    return lambda *a, **k: asked.append(f"asked torch.cuda.{name}") or answer(*a, **k)
for name in QUESTIONS:
    setattr(torch.cuda, name, question(name))
STATEMENT
asked += [f"imported {name}" for name in PACKAGES if name in sys.modules]
asked += ["initialised CUDA"] * torch.cuda.is_initialized()
print(*asked, sep="\\n")
"""


@cache
def repository_files() -> dict[str, str]:
    """Every text file that is or would be committed, by its path; without git, every file."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode == 0:
        paths = [ROOT / path for path in listed.stdout.split("\0") if path]
    else:
        paths = [path for path in ROOT.rglob("*") if not hidden(path.relative_to(ROOT))]
    texts = {path: text_of(path) for path in paths if path.is_file()}
    return {
        path.relative_to(ROOT).as_posix(): text for path, text in texts.items() if text is not None
    }


def hidden(path: Path) -> bool:
    """Whether a path leads through a folder that tools made."""
    made = ("__pycache__", "runs", "build", "dist")
    return any(part in made or part.startswith(".") for part in path.parts)


def text_of(path: Path) -> str | None:
    """A file's text; None for one that is no text."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None


def python_files(*folders: str) -> list[tuple[str, str]]:
    """The Python files of some folders, or of all."""
    return [
        (path, source)
        for path, source in repository_files().items()
        if path.endswith(".py") and (not folders or path.startswith(folders))
    ]


def public_entries() -> frozenset[str]:
    """The names that `cadenza`, `cadenza.ops`, `cadenza.nn` and `cadenza.lang` are made of."""
    modules = ("cadenza/", "cadenza/library/ops", "cadenza/library/nn", "cadenza/core/lang")
    paths = {f"{module.removesuffix('/')}/__init__.py" for module in modules}
    paths |= {f"{module}.py" for module in modules[1:]}
    texts = repository_files()
    return frozenset().union(*(laws.public_names(texts.get(path, "")) for path in paths))


def violations(law, files) -> str:
    """What a law finds in some files, one line each."""
    assert files, "no file to judge: the law would hold of nothing"
    return "\n".join(line for path, source in files for line in law(path, source))


def import_report(statement: str, packages=NOT_ON_IMPORT) -> str:
    """What a statement, in a process of its own, imported and asked of the devices."""
    probe = IMPORT_PROBE.replace("STATEMENT", statement).replace("PACKAGES", repr(packages))
    probe = probe.replace("QUESTIONS", repr(DEVICE_QUESTIONS))
    done = subprocess.run([sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("law", [laws.line_width, laws.file_length, laws.function_length])
def test_every_python_file_keeps_the_limits(law):
    assert violations(law, python_files()) == ""


@pytest.mark.parametrize("law", [laws.module_docstring, laws.silencing_reasons])
def test_every_python_file_explains_itself(law):
    assert violations(law, python_files()) == ""


def test_imports_go_one_way():
    assert violations(laws.imports, python_files("cadenza/")) == ""


def test_public_functions_and_classes_have_docstrings():
    assert violations(laws.public_docstrings, python_files("cadenza/")) == ""


def test_functions_take_few_parameters():
    def law(path, source):
        return laws.parameters(path, source, public_entries())

    assert violations(law, python_files("cadenza/", "examples/")) == ""


def test_no_exemption_has_outlived_its_function(monkeypatch):
    exempt = laws.MIRRORS
    monkeypatch.setattr(laws, "MIRRORS", {})
    for place, mirrored in exempt.items():
        path, name = place.split(":")
        found = laws.parameters(path, repository_files().get(path, ""))
        assert mirrored.startswith("torch."), place
        assert any(f" {name} has " in line for line in found), place


def test_functions_are_short_as_a_rule():
    lengths = [
        laws.length(function)
        for _, source in python_files("cadenza/")
        for function in laws.functions(laws.ast.parse(source))
    ]
    assert laws.typical_length(lengths) == []


def test_names_of_files_say_something():
    assert violations(laws.telling_name, repository_files().items()) == ""


def test_no_text_names_a_machine_or_a_registry():
    assert violations(laws.foreign_text, repository_files().items()) == ""


def test_tests_skip_only_for_a_reason():
    assert violations(laws.skip_reasons, python_files("tests/")) == ""


def test_importing_the_package_asks_no_device_and_no_optional_package():
    assert import_report("import cadenza") == ""


def test_the_command_line_works_from_a_checkout():
    command = [sys.executable, "-m", "cadenza", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "train" in done.stdout


LONG_DOCSTRING = '"""\n' + "line\n" * 16 + '"""\n'
BODY = "    pass\n"
SIX, SEVEN, NINE = ("a, b, c, d, e, f", "a, b, c, d, e, f, g", "a, b, c, d, e, f, g, h, i")

# A law, where the text stands, the text, and a part of what the law must say about it; an empty
# part says that the law must let it pass.
CASES = [
    (laws.imports, "cadenza/core/ir.py", "import torch", "1: core imports torch"),
    (laws.imports, "cadenza/core/ir.py", "def f():\n    import pandas", "2: core imports pandas"),
    (laws.imports, "cadenza/core/ir.py", "from ..library import nn", "core imports cadenza.lib"),
    (laws.imports, "cadenza/core/a/b.py", "from ...backends.x import y", "core imports cadenza.b"),
    (laws.imports, "cadenza/core/ir.py", "from .. import backends", "core imports cadenza.back"),
    (laws.imports, "cadenza/core/ir.py", "from cadenza import lang", "core imports cadenza.lang"),
    (laws.imports, "cadenza/core/ir.py", "import_module('torch.fx')", "core imports torch.fx"),
    (laws.imports, "cadenza/backends/a.py", "import cadenza.library.nn", "backends imports"),
    (laws.imports, "cadenza/backends/a.py", "from cadenza.tools import cli", "backends imports"),
    (laws.imports, "cadenza/library/a.py", "import matplotlib", "library imports matplotlib"),
    (laws.imports, "cadenza/library/a.py", "from cadenza.tools import cli", "library imports"),
    (laws.imports, "cadenza/integrations/a.py", "import cadenza", "integrations imports cadenza"),
    (laws.imports, "cadenza/__init__.py", "from .tools import cli", "surface imports"),
    (laws.imports, "cadenza/tools/a.py", "import requests", "tools imports requests"),
    (laws.imports, "cadenza/utility/a.py", "", "there is no layer 'utility'"),
    (laws.imports, "cadenza/core/ir.py", "import ast, networkx\nfrom . import ops", ""),
    (laws.imports, "cadenza/backends/a.py", "import torch\nfrom cadenza.core import ir", ""),
    (laws.imports, "cadenza/__init__.py", "from cadenza.library import nn", ""),
    (laws.imports, "cadenza/tools/a.py", "import cadenza\nfrom cadenza import lang", ""),
    (laws.imports, "cadenza/__main__.py", "from cadenza.tools.cli import main", ""),
    (laws.line_width, "a.py", "\n" + "x" * 101, "a.py:2: 101 columns"),
    (laws.line_width, "a.py", "×" * 100, ""),
    (laws.file_length, "a.py", "x\n" * 401, "401 lines"),
    (laws.file_length, "a.py", "x\n" * 400, ""),
    (laws.file_length, "cadenza/backends/triton/templates/a.py", "x\n" * 601, "601 lines"),
    (laws.function_length, "a.py", "def f():\n" + BODY * 40, "f has 41 lines"),
    (laws.function_length, "a.py", "def g():\n def f():\n" + BODY * 40, "f has 41 lines"),
    (laws.function_length, "a.py", f"@d\ndef f():\n    {LONG_DOCSTRING}" + BODY * 39, ""),
    (laws.parameters, "a.py", f"def f({SEVEN}): pass", "f has 7 parameters, at most 6"),
    (laws.parameters, "a.py", "def f(a, b, c, d, e, *f, **g): pass", "f has 7 parameters"),
    (laws.parameters, "a.py", "def f(a, /, b, c, d, e, *, f, g): pass", "f has 7 parameters"),
    (laws.parameters, "a.py", f"class C:\n def f(self, {SEVEN}): pass", "f has 7 parameters"),
    (laws.parameters, "a.py", f"class C:\n def f(self, {SIX}): pass", ""),
    (laws.parameters, "a.py", f"def public({NINE}): pass", "public has 9 parameters, at most 8"),
    (laws.parameters, "a.py", f"def public({SEVEN}): pass", ""),
    (laws.parameters, "a.py", f"class public:\n def __init__(self, {SEVEN}): pass", ""),
    (laws.parameters, "a.py", f"@cz.epilogue(shapes=s)\ndef f({SEVEN}): pass", ""),
    (laws.parameters, "cadenza/library/blocks.py", f"def f({NINE}): pass", ""),
    (laws.parameters, "cadenza/library/blockstore.py", f"def f({NINE}): pass", "f has 9"),
    (laws.telling_name, "cadenza/core/utils.py", "", "'utils' says nothing"),
    (laws.telling_name, "tests/helper/a.py", "", "'helper' says nothing"),
    (laws.telling_name, "docs/cache_manager.md", "", "'manager' says nothing"),
    (laws.telling_name, "cadenza/core/commonality.py", "", ""),
    (laws.module_docstring, "a.py", "import os", "no module docstring"),
    (laws.module_docstring, "a.py", LONG_DOCSTRING, "docstring of 16 lines"),
    (laws.module_docstring, "a.py", '"""What it is."""', ""),
    (laws.public_docstrings, "a.py", "def f(): pass", "a.py:1: f has no docstring"),
    (laws.public_docstrings, "a.py", "class C: pass", "C has no docstring"),
    (laws.public_docstrings, "a.py", "def _f(): pass\ndef g():\n  'What.'", ""),
    (laws.foreign_text, "a.md", "\nsee /ho" + "me/someone/x", "a.md:2: /ho" + "me/"),
    (laws.foreign_text, "a.md", "cp /wo" + "rk/main/a .", "/wo" + "rk/"),
    (laws.foreign_text, "a.md", "https://py" + "pi.org/simple", "py" + "pi.org"),
    (laws.foreign_text, "a.md", "~/.cache/cadenza, home/a, art/wo" + "rk/b", ""),
    (laws.skip_reasons, "a.py", "@pytest.mark.skip\ndef test(): pass", "mark.skip without"),
    (laws.skip_reasons, "a.py", "@pytest.mark.skipif(x, reason='')\ndef f(): pass", "skipif"),
    (laws.skip_reasons, "a.py", "@pytest.mark.xfail(strict=True)\ndef f(): pass", "mark.xfail"),
    (laws.skip_reasons, "a.py", "def test(): pytest.skip()", "pytest.skip without"),
    (laws.skip_reasons, "a.py", "pytest.skip('needs a GPU')", ""),
    (laws.skip_reasons, "a.py", "mark = pytest.mark.skipif(x, reason='needs a GPU')", ""),
    (laws.silencing_reasons, "a.py", "x = 1  # type: ignore[misc]", "without a reason"),
    (laws.silencing_reasons, "a.py", "x = 1  # no" + "qa: E501", "without a reason"),
    (laws.silencing_reasons, "a.py", "x = 1  # no" + "qa because it is long", "without a reason"),
    (laws.silencing_reasons, "a.py", "# fmt: off", "a.py:1: # fmt: off without a reason"),
    (laws.silencing_reasons, "a.py", "x = 1  # type: ignore[misc]  # stubs lack it", ""),
    (laws.silencing_reasons, "a.py", "# fmt: off (a table reads by columns)", ""),
    (laws.silencing_reasons, "a.py", "s = '# no" + "qa'", ""),
]


@pytest.mark.parametrize(("law", "path", "source", "said"), CASES)
def test_a_law_catches_what_breaks_it_and_nothing_else(law, path, source, said):
    if law is laws.parameters:
        found = law(path, source, frozenset({"public"}))
    else:
        found = law(path, source)
    assert bool(found) == bool(said), found
    assert said in "\n".join(found)


def test_lengths_are_judged_as_a_whole():
    assert laws.typical_length([8] * 9 + [40]) == []
    assert laws.typical_length([9] * 10) == ["the median function has 9 lines"]
    assert laws.typical_length([3] * 8 + [26] * 2) == ["2 of 10 functions have 26 lines or more"]


@pytest.mark.slow
def test_the_import_probe_sees_questions_and_packages():
    assert "asked torch.cuda.is_available" in import_report("torch.cuda.is_available()")
    assert import_report("import colorsys", ("colorsys",)) == "imported colorsys"
