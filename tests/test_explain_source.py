"""`cadenza explain --source`: the emitted modules, and what runs where there is none."""

import ast
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from terminals import STREAMS, as_usual

from cadenza.backends.triton.readable import readable, value_name
from cadenza.core.cost import GPUS
from cadenza.core.pipeline import compile_program
from cadenza.core.plan_text import PairText
from cadenza.library.blocks import BUILT_IN
from cadenza.tools.cli import main
from cadenza.tools.emitted import TARGETS, emitted
from cadenza.tools.target import find_target

ROOT = Path(__file__).resolve().parent.parent
OWN = """
import cadenza as cz
from cadenza import lang as L

@cz.block(shapes={"x": "M D", "w": "96 D"})
def grouped(x, w):
    y = L.linear(x, w)
    return y * L.repeat(L.group_sum(y, 24), 24)

@cz.block(shapes={"x": "M D", "w": "96 D"})
def paired(x, w):
    return L.split(L.split(L.linear(x, w), inner=8)[0], inner=2)[1]
"""


@pytest.fixture
def explained(capsys, tmp_path, monkeypatch):
    """Runs `cadenza explain` with these words; what it printed. `own.py` is in the folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CADENZA_CACHE", str(tmp_path / "cache"))
    (tmp_path / "own.py").write_text(OWN)

    def run(line: str) -> str:
        assert main(["explain", *line.split()]) == 0
        return capsys.readouterr().out

    return run


# --- what is printed ------------------------------------------------------------------------------


def test_one_kernel_is_printed_as_a_module_with_its_plan_as_header(explained, tmp_path):
    said = explained("llama --source F2")
    assert said.startswith(f"# F2: {tmp_path}/cache/kernels/F2_acc2_v1_w_gate_up_T")
    plan = explained("llama").partition("\nF2  ")[2].partition("\n\nF3")[0].splitlines()
    lines = [line[4:] for line in plan if line.startswith("    ") and "cost " not in line]
    assert ast.get_docstring(ast.parse(said)).splitlines() == [f"F2: {plan[0]}", "", *lines]
    assert "    v2 = v3_0 * tl.sigmoid(v3_0) * v3_1\n" in said
    assert not (tmp_path / "cache").exists(), "nothing is written"


def test_all_are_printed_in_order_and_read_as_python(explained):
    for line in ("llama-mlp --source", "llama-mlp --source --gpu h100"):
        said = explained(line)
        ast.parse(said)
        assert re.findall(r"^# (\w+): ", said, re.MULTILINE) == ["F1", "F2", "B1", "B2", "B3", "B4"]


def test_hoppers_template_is_printed_with_the_same_header(explained):
    """Of products, which it takes; a vector is the same."""
    for name, same in (("F1", False), ("B4", False), ("s1", True)):
        plain = explained(f"llama --source {name}")
        other = explained(f"llama --source {name} --template pingpong --gpu h200")
        assert (plain == other) is same
        assert ("@gluon.jit" in other) is not same
        assert ast.get_docstring(ast.parse(plain)) == ast.get_docstring(ast.parse(other))


def test_a_vector_has_a_name(explained):
    said = explained("llama --source r1")
    assert '"""r1: a vector\n\nfinish  r1 = rsqrt(s1 / 4096.0 + 1e-05)\n"""' in said


def test_tiles_are_those_of_the_gpu(explained):
    assert explained("llama-mlp --source F1") == explained("llama-mlp --gpu h200 --source F1")
    assert explained("llama-mlp --source F1") != explained("llama-mlp --gpu mi300x --source F1")
    assert set(TARGETS) == set(GPUS)


def test_json_has_the_sources(explained, tmp_path):
    found = json.loads(explained("llama-mlp --source --json"))
    assert [s["name"] for s in found["sources"]] == ["F1", "F2", "B1", "B2", "B3", "B4"]
    for source in found["sources"]:
        assert set(source) == {"name", "text", "path", "reason"}
        assert source["path"].startswith(str(tmp_path))
        assert source["reason"] is None
        ast.parse(source["text"])
    assert len(json.loads(explained("llama-mlp --json --source B2"))["sources"]) == 1
    assert "sources" not in json.loads(explained("llama-mlp --json"))


def test_a_vector_product_is_a_fixed_kernel(explained):
    said = explained("gpt2 --source FV1")
    assert (
        said == "# FV1: by the fixed kernel in cadenza/backends/triton/templates/vector_kernel.py\n"
    )
    assert (ROOT / said.split()[-1]).is_file()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("llama-mlp --source F9", "no kernel is called so; there are F1, F2, B1, B2, B3, B4"),
        ("llama-mlp --source F1 --why y", "two questions"),
        ("llama-mlp --source F1 --template fast", "one of plain, pingpong"),
        ("llama-mlp --template pingpong", "add --source"),
        ("llama-mlp --source F1 --template pingpong --gpu a100", "--gpu h100 or --gpu h200"),
    ],
)
def test_bad_input_is_one_line(capsys, line, said):
    assert main(["explain", *line.split()]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert said in printed.err
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize(("stream", "coloured"), STREAMS)
def test_colour_only_on_a_terminal(monkeypatch, stream, coloured):
    as_usual(monkeypatch)
    monkeypatch.setattr(sys, "stdout", stream())
    assert main(["explain", "llama-mlp", "--source", "F2"]) == 0
    assert ("\x1b" in sys.stdout.getvalue()) == coloured
    assert "def cadenza_F2_product(" in re.sub(r"\x1b\[[\d;]*m", "", sys.stdout.getvalue())


# --- what runs instead ----------------------------------------------------------------------------


def test_a_kernel_that_no_template_makes_says_why(explained):
    reason = "groups of 24 columns: not a power of two"
    line = f"    runs    by torch, step by step: {reason}"
    assert line in explained("own.py:grouped --size D=64").splitlines()
    said = explained("own.py:grouped --size D=64 --source F1")
    assert said == f"# F1: by torch, step by step: {reason}\n"
    found = json.loads(explained("own.py:grouped --size D=64 --source F1 --json"))["sources"]
    assert [(s["text"], s["path"]) for s in found] == [(None, None)]
    assert found[0]["reason"].endswith(reason)


def test_a_library_product_says_what_follows_it(explained):
    reason = "columns paired in two ways: [2, 8]"
    lines = explained("own.py:paired --size D=64").splitlines()
    assert f"    runs    the product by torch.mm: {reason}" in lines
    said = explained("own.py:paired --size D=64 --source F1")
    assert said.startswith(f"# F1: the product by torch.mm: {reason}\n")
    assert f"# F1: what follows the product, which is torch's: {reason}\n" in said
    assert '"""F1: acc1 = x @ w.T' in said


def test_built_in_blocks_have_nothing_to_say(explained):
    assert "runs    " not in explained("llama")


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
from cadenza.tools.cli import main
sys.exit(main(["explain", "gpt2", "--source"]))
"""


@pytest.mark.slow
def test_neither_triton_nor_a_gpu_is_needed():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRITON], cwd=ROOT, capture_output=True, encoding="utf-8"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("@triton.jit") > 20


# --- how it reads ---------------------------------------------------------------------------------


def functions(text):
    return [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]


def assigned(function):
    """How often each name is given a value, loops left out."""
    targets = [t for s in function.body if isinstance(s, ast.Assign) for t in s.targets]
    return Counter(n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name))


@pytest.mark.parametrize("gpu", ["h100", "a100"])
@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.slow
def test_emitted_modules_read_well(name, gpu):
    target = find_target(name)
    pair = compile_program(
        target.program.function, target.signature, needed=target.needed, name="block"
    )
    for step in emitted(PairText(pair), gpu):
        if step.text is None:
            continue
        header = ast.get_docstring(ast.parse(step.text))
        assert header.startswith(f"{step.name}: ")
        assert "\n\n" in header, "the plan's own words"
        definitions = step.text.partition("\nimport triton\n")[2]
        assert all(len(line) <= 100 for line in definitions.splitlines())
        assert not re.search(r"[ \t]$|// 1\b", definitions, re.MULTILINE)
        for line in re.findall(r"^ +(\w+ = .*[^(])$", definitions, re.MULTILINE):
            assert line == ast.unparse(ast.parse(line)), "brackets that say nothing"
        part = functions(step.text)[0]
        used = Counter(n.id for n in ast.walk(part) if isinstance(n, ast.Name))
        given = assigned(part)
        assert not [n for n in given if used[n] == given[n]], "a line that nothing needs"
        if part.name == "part":
            parameters = {a.arg for a in part.args.args}
            assert not [n for n, count in given.items() if count > 1 or n in parameters]


def test_arithmetic_goes_where_it_is_used():
    text = "def f(x, y):\n    e1 = (x + y)\n    e2 = (e1 * x)\n    z = (e2 - y)\n    return z\n"
    assert readable(text) == "def f(x, y):\n    z = (x + y) * x - y\n    return z\n"


@pytest.mark.parametrize(
    "line",
    [
        "e1 = device.load(x, rows, c, 4, b1)",  # memory is read where it was
        "e1 = tl.sum(x, 1)",
        "e1, e2 = device.moments(x)",
    ],
)
def test_what_is_no_arithmetic_stays(line):
    text = f"def f(x):\n    {line}\n    return e1\n"
    assert readable(text) == text


def test_a_value_used_twice_or_in_a_loop_stays():
    twice = "def f(x):\n    e1 = x * x\n    return e1 + e1\n"
    assert readable(twice) == twice
    loop = "def f(x):\n    e1 = x * x\n    for i in range(3):\n        g(e1)\n"
    assert readable(loop) == loop


def test_long_lines_end_where_brackets_let_them():
    names = ", ".join(f"argument_{n}" for n in range(12))
    folded = readable(f"def f():\n    x = g({names})\n    y = ({names.replace(',', ' +')})\n")
    assert ast.dump(ast.parse(folded)) == ast.dump(
        ast.parse(f"def f():\n    x = g({names})\n    y = ({names.replace(',', ' +')})\n")
    )
    assert max(map(len, folded.splitlines()[:5])) <= 100
    value = f"(f({names}) - x)[:, None]"
    assert ast.dump(ast.parse(readable(f"y = {value}"))) == ast.dump(ast.parse(f"y = {value}"))


@pytest.mark.parametrize("name", ["rows", "c", "acc", "x_in", "BM", "tl", "for", "g64", "k0", ""])
def test_names_of_templates_are_theirs(name):
    assert value_name(name, "") == ""
    assert value_name("x1", "0") == "x1_0"
    assert value_name("norm", "") == "norm"
