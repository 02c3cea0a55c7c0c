"""`cadenza check`: what it finds in programs that are right, and in each that is wrong."""

import json
import sys
from pathlib import Path

import pytest
from small_runs import refusal
from terminals import STREAMS, as_usual

from cadenza.library.blocks import BUILT_IN
from cadenza.library.variants import LOSSES, VARIANTS
from cadenza.tools.check.run import judge
from cadenza.tools.check.subject import find_subjects
from cadenza.tools.cli import main

HEAD = """
import torch
import torch.nn.functional as F
import cadenza as cz
from cadenza import lang as L

"""
GOOD = """
@cz.epilogue(shapes={"x": "M K", "w": "2*P K", "rstd": "M 1"})
def gated(acc, rstd, slope=1.5):
    gate, up = L.split(acc * rstd)
    return gate * L.sigmoid(slope * gate) * up, L.row_sum(up**2)

def gated_reference(x, w, rstd, slope=1.5):
    gate, up = (F.linear(x, w) * rstd).chunk(2, -1)
    return gate * torch.sigmoid(slope * gate) * up, up.square().sum(1, keepdim=True)

@cz.block(shapes={"x": "M D", "w": "V D", "target": "M 1 int64", "mask": "M V bool"})
def picked(x, w, target, mask):
    z = L.where(mask, L.linear(x, w), -9.0)
    return {"loss": L.logsumexp(z, L.pick(z, target)), "largest": L.row_max(L.stored(z))}
"""
ROWS = [
    "traces", "typechecks", "value", "reference", "gradient of x", "gradient of w",
    "gradient of rstd", "ragged rows", "odd widths", "forward", "backward", "fuses", "compiles",
    "agrees on a GPU",
]  # fmt: skip


@pytest.fixture
def file(tmp_path, monkeypatch):
    """Writes an author's file, as `mine.py` in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)  # that of another test

    def write(text: str) -> Path:
        (tmp_path / "mine.py").write_text(HEAD + text)
        return tmp_path / "mine.py"

    return write


@pytest.fixture
def checked(capsys):
    """Runs `cadenza check --json` with these words, compiling nothing: the code and the data."""

    def run(line: str, *more: str) -> tuple[int, dict]:
        code = main(["check", *line.split(), "--json", "--gpu", "none", *more])
        return code, json.loads(capsys.readouterr().out)

    return run


def failures(data):
    """By check, what was found and the cure, of all that fails."""
    return {
        f["check"]: (f["figure"], f["cure"])
        for program in data["programs"]
        for f in program["findings"]
        if f["holds"] is False
    }


# --- what is right --------------------------------------------------------------------------------


def test_all_holds_of_a_file_with_two_programs(file, checked):
    file(GOOD)
    code, data = checked("mine.py")
    assert code == 0
    assert data["holds"]
    gated, picked = data["programs"]
    assert [f["check"] for f in gated["findings"]] == ROWS
    assert [f["check"] for f in picked["findings"]] == [r for r in ROWS if r[-4:] not in (
        "ence", "rstd")]  # fmt: skip
    found = {f["check"]: f for f in gated["findings"]}
    assert found["typechecks"]["figure"] == (
        "x [M, 64], w [64, 64], rstd [M, 1] -> 0: bfloat16[M, 32], 1: float32[M, 1]"
    )
    assert found["odd widths"]["figure"] == "K=37, P=29"
    assert "1 product; stores" in found["forward"]["figure"]
    assert ": 1.00 x the least" in found["forward"]["figure"]
    assert "B1 makes operands of products from what comes in" in found["backward"]["figure"]
    assert found["compiles"]["holds"] is None
    assert all(not f["cure"] for f in found.values())


def test_kernels_are_listed_with_their_bytes(file, checked):
    file(GOOD)
    _, data = checked("mine.py:gated", "--size", "M=1000,K=64,P=32")
    forward, *_ = data["programs"][0]["kernels"]
    # what is stored: y and the raw product in bfloat16; x, w, rstd read, and the sums left
    stored = 2 * 1000 * (32 + 64)
    read = 2 * (1000 * 64 + 64 * 64 + 1000)
    assert forward == {
        "name": "F1", "kind": "product", "stored": stored, "moved": stored + read + 4 * 1000,
        "flops": 2 * 1000 * 64 * 64,
    }  # fmt: skip


def test_a_program_of_a_file_or_of_a_module_by_name(file, checked):
    file(GOOD)
    for target in ("mine.py:gated", "mine:gated"):
        code, data = checked(target)
        assert code == 0
        assert [p["name"] for p in data["programs"]] == ["gated"]
        assert [f["check"] for f in data["programs"][0]["findings"]] == ROWS


def test_programs_that_a_file_imports_are_not_its_own(file, checked):
    file("from cadenza.library.blocks import llama_mlp\n" + GOOD)
    _, data = checked("mine.py")
    assert [p["name"] for p in data["programs"]] == ["gated", "picked"]


def test_sizes_that_are_given_hold_everywhere(file, checked):
    file(GOOD)
    _, data = checked("mine.py:gated --size K=8 --size P=5,M=64")
    found = {f["check"]: f["figure"] for f in data["programs"][0]["findings"]}
    assert found["typechecks"].startswith("x [M, 8], w [10, 8]")
    assert data["programs"][0]["kernels"][0]["flops"] == 2 * 64 * 10 * 8


@pytest.mark.parametrize("name", ["llama-mlp", "lm-head", "linear-dropout"])
def test_built_in_blocks_hold(checked, name):
    code, data = checked(name)
    assert code == 0, failures(data)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*BUILT_IN, *VARIANTS, *LOSSES])
def test_every_built_in_block_holds(name):
    (subject,), _ = find_subjects(name, {}, "bfloat16")
    judgement = judge(subject, [])
    assert judgement.holds, [f for f in judgement.findings if f.holds is False]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_other_dtypes(file, checked, dtype):
    file(GOOD)
    code, data = checked(f"mine.py:gated --dtype {dtype}")
    assert code == 0
    assert dtype in data["programs"][0]["findings"][2]["figure"]


def test_a_sum_over_groups_beside_the_product_fuses_backward_too(file, checked):
    file(
        '@cz.epilogue(shapes={"x": "M D", "w": "N D"})\ndef f(acc):\n'
        "    return acc, L.group_max(L.abs(acc), 32), L.group_sum(acc**2, 32)"
    )
    code, data = checked("mine.py")
    assert code == 0, failures(data)


# --- what is wrong --------------------------------------------------------------------------------

X = 'shapes={"x": "M D", "w": "N D"}'
EPILOGUE = f"@cz.epilogue({X})\ndef f(acc):\n    "
PAIRS = '@cz.epilogue(shapes={"x": "M D", "w": "N*3 D"})\ndef f(acc):\n    '


def referenced(ours: str, theirs: str) -> str:
    """An epilogue, and a reference beside it."""
    return f"{EPILOGUE}return {ours}\n\ndef f_reference(x, w):\n    acc = x @ w.T\n    {theirs}\n"


WRONG = {
    "nothing yet": (
        EPILOGUE + "raise NotImplementedError",
        "traces", "mine.py:9: not written yet", "write the body of f"),
    "not declared": (
        "@cz.block\ndef f(x):\n    return x * 2.0",
        "traces", "mine.py:7: no declared shapes", "write @cz.block(shapes={'x': 'M D'}), each"),
    "not declared, of an epilogue": (
        "@cz.epilogue\ndef f(acc, bias, cap=2.0):\n    return L.softcap(acc + bias, cap)",
        "traces", "mine.py:7: no declared shapes",
        "write @cz.epilogue(shapes={'x': 'M D', 'w': 'N D', 'bias': ...}), each 'M N', 'M 1'"),
    "an operation of torch": (
        EPILOGUE + "return torch.sin(acc)",
        "traces", "mine.py:9: unknown operation torch.sin", "a composition of"),
    "what another has not written": (
        EPILOGUE + "return acc * __import__('random').SystemRandom().getstate()",
        "traces", "mine.py:9: NotImplementedError: System entropy", "on symbols"),
    "an exception": (
        EPILOGUE + "return acc / (1 // 0)",
        "traces", "mine.py:9: ZeroDivisionError: ", "on symbols"),
    "another number of parts": (
        EPILOGUE + "a, b, c = L.split(acc)\n    return a",
        "traces", "mine.py:9: ValueError: not enough values", "L.columns(x, start, stop)"),
    "a name that is nowhere": (
        EPILOGUE + "return acc + biass",
        "traces", "mine.py:9: NameError: name 'biass'", "a parameter of the function"),
    "an argument that the language lacks": (
        EPILOGUE + "return L.row_max(acc, dim=-1)",
        "traces", "mine.py:9: TypeError: row_max()", "L.row_max(x)"),
    "an argument that another function lacks": (
        EPILOGUE + "return sorted([], acc)",
        "traces", "mine.py:9: TypeError: sorted", "on symbols"),
    "a product that does not fit": (
        '@cz.epilogue(shapes={"x": "M D", "w": "D N"})\ndef f(acc):\n    return acc',
        "typechecks", "mine.py:7: matmul of x [M, 64] and w [64, 96]", "w [N, K]"),
    "an exception further in": (
        "def halved(x):\n    return x[\n        0]\n" + EPILOGUE + "return halved(acc)",
        "traces", "mine.py:8: a traced value has no indexing", "L.columns(x, start, stop)"),
    "types": (
        '@cz.epilogue(shapes={"x": "M D", "w": "3*9 D"})\ndef f(acc):\n    return L.split(acc)',
        "typechecks", "mine.py:9: split of [M, 27]", "columns = outer * 2 * inner"),
    "not finite": (
        EPILOGUE + "return L.log(acc)",
        "value", "output 0 is not finite in float64", "L.maximum(x, 1e-6)"),
    "not finite backward": (
        EPILOGUE + "return L.sqrt(L.abs(L.tanh(acc * 1e6) ** 2 - 1.0))",
        "gradient of x", "not finite in float64", "add an eps"),
    "found again": (
        EPILOGUE + "return L.row_sum(L.where(acc == L.row_max(acc), 1.0, 0.0))",
        "value", "in bfloat16", "L.stored(x) first"),
    "another formula": (
        referenced("L.rms_norm(acc, None, 1e-5)", "return F.rms_norm(acc, (96,), None, 1e-4)"),
        "reference", "output 0 is ", "compare the formula with f_reference's"),
    "another gradient": (
        referenced("L.softcap(acc, 3.0)", "return acc + (3 * torch.tanh(acc / 3) - acc).detach()"),
        "reference", "gradient of x is ", "compare the formula"),
    "another shape": (
        referenced("L.row_sum(acc)", "return acc.sum(1)"),
        "reference", "output 0 is [16, 1], f_reference's [16]", "with keepdim=True"),
    "another structure": (
        referenced("L.row_sum(acc)", "return acc, acc.sum(1, keepdim=True)"),
        "reference", "1 outputs, 2 of f_reference", "in its structure"),
    "a reference that fails": (
        referenced("acc", "return nothing"),
        "reference", "f_reference raises NameError", "def f_reference(x, w): the call's own"),
    "groups of no power of two": (
        PAIRS + "return acc * L.repeat(L.group_max(acc, 3), 3)",
        "fuses", "F1 is left to torch: groups of 3 columns: not a power of two", "a power of two"),
    "rows of two kinds": (
        '@cz.block(shapes={"a": "M D", "b": "C D"})\ndef f(a, b):\n'
        "    a, b = (v * L.rsqrt(L.row_sum(v**2)) for v in (a, b))\n"
        "    return L.linear(a, b)",
        "fuses", "F1 is left to torch: matrices of different numbers of rows", "a program of its"),
    "large sizes": (
        EPILOGUE + "return L.columns(acc, 0, 48) * L.columns(acc, 48, min(acc.shape[1], 97))",
        "kernels", "mul of [M, 48] and [M, 49]", "--size NAME=NUMBER"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_fails_and_says_what_to_change(file, checked, name):
    text, check, figure, cure = WRONG[name]
    file(text)
    code, data = checked("mine.py")
    found = failures(data)
    assert code == 1
    assert check in found, found
    assert figure in found[check][0]
    assert cure in found[check][1]
    assert not data["holds"]


def test_what_is_not_finite_is_said_once(file, checked):
    file(EPILOGUE + "return L.log(acc)")
    code, data = checked("mine.py")
    assert code == 1
    assert list(failures(data)) == ["value"]
    found = {f["check"]: f for f in data["programs"][0]["findings"]}
    assert found["gradient of w"]["holds"] is None
    assert found["gradient of w"]["figure"] == "an output is not finite, so no differences"


def test_what_passes_the_range_of_fp16_fails(file, checked):
    file(EPILOGUE + "return L.exp(acc) * 3e4, acc")
    assert checked("mine.py --dtype bfloat16")[0] == 0
    code, data = checked("mine.py --dtype float16")
    assert code == 1
    assert "output 0 is not finite in float16" in failures(data)["value"][0]
    assert "scale before storing" in failures(data)["value"][1]


def test_what_a_rounding_program_has_no_differences_of(file, checked):
    file(EPILOGUE + "return L.cast(acc, 'bfloat16') * acc, L.where(acc > 0.0, 1.0, 0.0)")
    code, data = checked("mine.py")
    assert code == 0, failures(data)
    found = {f["check"]: f["figure"] for f in data["programs"][0]["findings"]}
    assert "it rounds, so no differences" in found["gradient of x"]


def test_a_gradient_that_never_comes_is_said(file, checked):
    file('@cz.epilogue(shapes={"x": "M D", "w": "N D", "t": "M 1"})\ndef f(acc, t):\n'
         "    return L.where(acc > t, acc, 0.0)")  # fmt: skip
    code, data = checked("mine.py")
    assert code == 0, failures(data)
    found = {f["check"]: f["figure"] for f in data["programs"][0]["findings"]}
    assert found["gradient of t"] == "zero: no output depends on it but by comparisons"


def test_one_program_that_fails_fails_the_file(file, checked):
    file(GOOD + EPILOGUE + "return L.log(acc)")
    code, data = checked("mine.py")
    assert code == 1
    assert [p["holds"] for p in data["programs"]] == [True, True, False]


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("lama", "unknown target 'lama': a built-in block, FILE.py, FILE.py:function or module"),
        ("none.py", "there is no file none.py"),
        ("none.py:gated", "there is no file none.py"),
        ("mine.py:nothing", "mine.py has no block or epilogue 'nothing': it has gated, picked"),
        ("empty.py", "empty.py has no program: write @cz.epilogue or @cz.block above a function"),
        ("broken.py", "broken.py cannot be imported: SyntaxError"),
        ("mine.py --size Q=3", "--size Q=3: mine.py has no such size; it has M, K, P, D, V"),
        ("mine.py --size K", "'K' is no size"),
        ("mine.py --gpu abacus", "unknown --gpu 'abacus': one of h100, h200, a100"),
        ("mine.py --dtype int8", "unknown --dtype 'int8': one of bfloat16, float16, float32"),
        ("llama --size Q=3", "llama has no size 'Q'"),
        ("llama --watch", "--watch needs a file, and llama is built in: name FILE.py"),
        ("headed.py", "parameter heads has no shape and no default: add --size heads=NUMBER"),
        ("headed.py", "NUMBER, or for a tensor 'heads' to shapes="),
        ("misread.py", "operands; found: 'x': 'M, D'; expected: two sizes, a space between"),
        ("", "'target'"),
    ],
)
def test_bad_input_is_one_line_and_code_2(file, tmp_path, capsys, line, said):
    file(GOOD)
    (tmp_path / "empty.py").write_text("x = 1\n")
    (tmp_path / "broken.py").write_text("def f(:\n")
    headed = '@cz.block(shapes={"x": "M D"})\ndef f(x, heads):\n    return x * heads'
    (tmp_path / "headed.py").write_text(HEAD + headed)
    misread = '@cz.block(shapes={"x": "M, D"})\ndef f(x):\n    return x'
    (tmp_path / "misread.py").write_text(HEAD + misread)
    assert said in refusal(capsys, tmp_path, ["check", *line.split()])


# --- the table ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stream", "coloured"), STREAMS)
def test_colour_only_on_a_terminal(monkeypatch, file, stream, coloured):
    as_usual(monkeypatch)
    file(GOOD + EPILOGUE + "raise NotImplementedError")
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, stream())
    assert main(["check", "mine.py", "--gpu", "none"]) == 1
    printed = sys.stdout.getvalue()
    for words in ("gated: all holds", "f: does not hold", "FAILS", "not written yet", "change: "):
        assert words in printed
    assert ("\x1b" in printed) == coloured
