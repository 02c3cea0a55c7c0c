"""`cadenza explain`: what it prints, as data and in words, and what it refuses."""

import json
import sys

import pytest
from terminals import STREAMS, as_usual

from cadenza.tools.cli import main

OWN = """
import cadenza as cz
from cadenza import lang as L

WIDTH = 3

@cz.block(shapes={"x": "M D", "w": "2*P D", "b": "1 P"})
def gated(x, w, b, scale=2.0):
    return L.name(L.swiglu(L.linear(x, w)) * scale, "hidden") + b

@cz.epilogue(shapes={"x": "M K", "w": "N K", "bias": "1 N"})
def biased(acc, bias):
    return L.relu(acc + bias)

@cz.block
def undeclared(x):
    return x * 2.0

@cz.block(shapes={"x": "M D"})
def wrong(x):
    return L.columns(x, 0, 10**9)

@cz.block(shapes={"x": "M D"})
def headed(x, heads):
    return L.group_sum(x, heads)

@cz.epilogue(shapes={"x": "M D", "w": "D N"})
def turned(acc, N=24):
    return acc * N
"""


@pytest.fixture
def explained(capsys):
    """Runs `cadenza explain` with these words; what it printed."""

    def run(line: str) -> str:
        assert main(["explain", *line.split()]) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A folder with an author's file, as the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)  # that of another test
    (tmp_path / "mine.py").write_text(OWN)
    (tmp_path / "broken.py").write_text("import nothing_of_this_name")
    return tmp_path


def test_llama_shows_the_table(explained):
    said = explained("llama")
    for line in (
        "F1  acc1 = y @ wo.T  [M, 4096]",
        "    store   x1: bfloat16[M, 4096] = x + acc1",
        "    partial s1 = row_sum(x1**2)",
        "    store   v3: bfloat16[M, 28672] = acc2 * r1",
        "    finish  r1 = rsqrt(s1 / 4096.0 + 1e-05)",
        "forward: 4 products",
        "backward: 8 products, 1 pointwise kernel",
        "B1  pointwise",
        "    v3: bfloat16[M, 28672]  939.5 MB",
        "    1073.9 MB in all",
    ):
        assert line in said.splitlines()
    assert "def llama(" in said
    assert "def llama_backward(" in said
    assert "on H100 SXM" in said
    assert "989.4 TFLOP/s and 3.35 TB/s nominal; a roofline takes 660 and 3.02 sustained" in said
    assert "0.667 of the arithmetic, as measured on an H200" in said


def test_costs_stand_at_each_kernel_and_beside_the_unfused_program(explained):
    lines = explained("llama-mlp --gpu h200").splitlines()
    first = lines.index("F1  acc1 = x @ w_gate_up.T  [M, 28672]")
    assert lines[first + 1] == "    cost    3848.3 GFLOP, 1778.4 MB, 5831.4 us (compute)"
    totals = [line.split() for line in lines[-4:]]
    assert [t[:5] for t in totals] == [
        ["forward", "fused", "2", "5.772", "2.500"],
        ["forward", "unfused", "3", "5.772", "3.439"],
        ["backward", "fused", "4", "11.545", "5.939"],
        ["backward", "unfused", "5", "11.545", "6.409"],
    ]


def test_what_is_held_is_in_the_size_asked_for(explained):
    assert "acc1: bfloat16[M, 128]  0.3 MB" in explained("llama-mlp --size D=32,F=64 --size M=1000")


def test_frozen_operands_shrink_the_plan(explained):
    said = explained("llama --frozen wo,norm,w_gate_up,w_down --frozen next_norm,w_qkv")
    assert "backward: 4 products, 1 pointwise kernel" in said.splitlines()
    alone = explained("llama-mlp --frozen x,w_gate_up,w_down")
    assert "backward" not in alone.replace("saved for backward", "")


KERNEL = {"name", "kind", "product", "loads", "stores", "partials", "flops", "bytes", "roofline_us"}


@pytest.mark.parametrize("target", ["llama", "llama-mlp", "gpt2", "lm-head"])
def test_json_has_the_structure_that_is_promised(explained, target):
    found = json.loads(explained(f"{target} --json"))
    assert list(found) == ["forward", "backward", "saved", "unfused", "fused"]
    kernels = found["forward"] + found["backward"]
    assert all(set(kernel) == KERNEL for kernel in kernels)
    assert {k["kind"] for k in kernels} <= {"product", "pointwise", "vector"}
    assert all((k["product"] is None) == (k["kind"] == "pointwise") for k in kernels)
    assert all(set(value) == {"name", "shape", "bytes"} for value in found["saved"])
    for side in ("unfused", "fused"):
        assert set(found[side]) == {"flops", "bytes", "roofline_us"}
    for key in ("flops", "bytes"):
        assert found["fused"][key] == sum(k[key] for k in kernels)
    assert found["fused"]["bytes"] < found["unfused"]["bytes"]
    assert found["fused"]["roofline_us"] < found["unfused"]["roofline_us"]


def test_json_of_an_mlp_by_hand(explained):
    found = json.loads(explained("llama-mlp --json"))
    first = found["forward"][0]
    flops, size = 2 * 16384 * 28672 * 4096, 1778384896
    assert first == {
        "name": "F1", "kind": "product", "product": "x @ w_gate_up.T", "loads": [],
        "stores": ["v1", "acc1"], "partials": [], "flops": flops, "bytes": size,
        "roofline_us": pytest.approx(flops / (0.667 * 989.4e6), abs=1e-3),
    }  # fmt: skip
    assert found["saved"] == [{"name": "acc1", "shape": [16384, 28672], "bytes": 939524096}]


def test_json_lists_vectors_among_the_loads_and_vector_products_as_kernels(explained):
    found = json.loads(explained("gpt2 --json"))
    assert found["forward"][1]["loads"] == ["r1", "g1", "s2", "g2", "b_up"]
    vectors = [k for k in found["forward"] if k["kind"] == "vector"]
    assert [k["name"] for k in vectors] == ["FV1", "FV2", "FV3", "FV4"]
    assert vectors[0]["product"] == "norm @ w_up.T"
    assert vectors[0]["flops"] == 2 * 16384 * 4096


@pytest.mark.parametrize(
    ("value", "sentences"),
    [
        ("x1", ["is stored by F1: F3 loads it", "is saved for backward, 134.2 MB"]),
        ("x2", ["is stored by F3: it is an output"]),
        ("v1", ["is stored by F1: it is an operand of F2", "is not saved"]),
        ("v2", ["is stored by F2: it is an operand of F3", "is stored by B3",
                "is computed again in B3 from v3"]),
        ("acc1", ["is the product of F1"]),
        ("acc2", ["is the product of F2", "is not saved"]),
        ("v3", ["is stored by F2: backward is given it", "is saved for backward, 939.5 MB"]),
        ("r1", ["is finished from s1, so it exists only after F1",
                "left the operand of acc2 and scales the product in F2"]),
        ("s1", ["is a reduction: F1 leaves partials of it"]),
        ("norm", ["is an input of llama", "stays in an operand of acc2"]),
        ("t1", ["is computed inside F2", "is computed again in B3"]),
        ("d_x2", ["is the adjoint of an output", "is read as a matrix by B2"]),
        ("d_wo", ["is the product of B6", "is stored by B6: it is a gradient"]),
        ("r3", ["is finished from s3, so it exists only after B1", "is read as a vector by B2"]),
    ],
)  # fmt: skip
def test_why_a_value_is_where_it_is(explained, value, sentences):
    said = explained(f"llama --why {value}")
    assert all(line.startswith(f"{value} ") for line in said.splitlines())
    for sentence in sentences:
        assert f"{value} {sentence}" in said


def test_a_ready_factor_is_not_said_to_have_left(explained):
    assert "left" not in explained("llama --why norm")
    assert "stays" not in explained("llama --why r1")
    assert "g1 is a product with a vector, FV1" in explained("gpt2 --why g1")
    assert "holds whole rows and reduces it" not in explained("gpt2 --why s1")


def test_an_authors_own_block_and_epilogue(explained, own):
    said = explained("mine.py:gated --size D=16,P=8,M=64")
    assert "def gated(" in said
    assert "w: bfloat16[16, 16]" in said
    assert "hidden" in said
    assert "M = 64" in said
    said = explained("mine:biased --size K=16,N=8 --frozen w --dtype float32")
    assert "acc1 = x @ w.T  [M, 8]" in said
    assert "return  d_x, d_bias" in said
    assert "66.9 TFLOP/s" in said
    assert "hidden" in explained("mine.py:gated --size P=8 --why hidden")
    assert "acc1 = x @ w.T  [M, 4096]" in explained("mine.py:biased")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("lama", "unknown target 'lama': one of llama, llama-mlp"),
        ("mine.py:nothing", "no block or epilogue 'nothing': it has gated, biased"),
        ("mine.py:WIDTH", "no block or epilogue 'WIDTH'"),
        ("other.py:gated", "there is no file other.py"),
        ("no_such_module:gated", "cannot be imported: ModuleNotFoundError"),
        ("broken.py:gated", "cannot be imported: ModuleNotFoundError"),
        ("mine.py", "is a file, and one program is wanted: write mine.py:gated or mine.py:biased"),
        ("mine.py:undeclared", "declares no shapes: write @cz.block(shapes={'x': 'M D'}), each 'M"),
        ("mine.py:biased --size Q=3", "--size Q=3: mine.py:biased has no such size; it has M"),
        ("mine.py:turned", "mine.py:27: matmul of x [M, 4096] and w [4096, 24]; found: [M, 4096]"),
        ("mine.py:gated", "size P of operand w is not known: add --size P=NUMBER"),
        ("mine.py:headed", "parameter heads has no shape and no default: add --size heads=NUMBER"),
        ("mine.py:wrong", "columns"),
        ("llama --size D", "'D' is no size: write a name and a number up to 2147483647, as D=4096"),
        ("llama --size D=99999999999999999999", "is no size"),
        ("llama --size D=wide", "is no size"),
        ("llama --size D=0", "is no size"),
        ("llama --size Q=3", "llama has no size 'Q': it has M, D, F"),
        ("llama --size HD=7", "rope with cos and sin"),
        ("llama --gpu abacus", "unknown --gpu 'abacus': one of h100, h200"),
        ("llama --dtype int8", "unknown --dtype 'int8': one of bfloat16"),
        ("llama --frozen q", "--frozen 'q' is no operand: the operands are x, y, wo"),
        ("llama --why nope", "no value is called so; there are x, y"),
        ("llama --why x1 --json", "leave --json out"),
        ("", "'target'"),
    ],
)
def test_bad_input_is_one_line_and_code_2(capsys, own, line, said):
    assert main(["explain", *line.split()]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert said in printed.err
    assert printed.err.count("\n") == 1
    assert printed.err.startswith("cadenza: ")


@pytest.mark.parametrize(("stream", "coloured"), STREAMS)
def test_colour_only_on_a_terminal(monkeypatch, stream, coloured):
    as_usual(monkeypatch)
    monkeypatch.setattr(sys, "stdout", stream())
    assert main(["explain", "llama-mlp"]) == 0
    printed = sys.stdout.getvalue()
    assert ("\x1b[1m" in printed) == coloured, "what is stored is bold"
    assert ("\x1b" in printed) == coloured
