"""The printed form: exact text, precedence, names, structures, round trips and the digest.

A graph prints as a function that Python itself could parse and that `parse` reads back to an
equal graph; `test_parse` holds the reader to what it must refuse.
"""

import dataclasses
import inspect
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from graphs import LLAMA, LLAMA_CONSTANTS, llama_block, program

from cadenza import lang as L
from cadenza.core.errors import ProgramError
from cadenza.core.ir import Graph, equal
from cadenza.core.parse import parse
from cadenza.core.pipeline import differentiate_program
from cadenza.core.text import digest, show

ROOT = Path(__file__).resolve().parent.parent


def norm_swiglu(x, w, rstd):
    """The epilogue of the README as a block: its product is written out."""
    gate, up = L.split(L.linear(x, w) * rstd)
    return L.silu(gate) * up


NORM_SWIGLU = ("x M 8", "w 12 8", "rstd M 1")

PRINTED = """\
def norm_swiglu(x: float32[M, 8], w: float32[12, 8], rstd: float32[M, 1]):
    acc1 = x @ w.T
    v1 = acc1 * rstd
    v2 = split(v1, part=0, inner=6)
    return v2 * sigmoid(v2) * split(v1, part=1, inner=6)
"""

PRINTED_LLAMA = """\
def llama_block(
    x: float32[M, 16],
    y: float32[M, 16],
    wo: float32[16, 16],
    norm: float32[1, 16],
    w_gate_up: float32[48, 16],
    w_down: float32[16, 24],
    next_norm: float32[1, 16],
    w_qkv: float32[32, 16],
    cos: float32[M, 2],
    sin: float32[M, 2],
):
    acc1 = y @ wo.T
    v1 = x + acc1
    acc2 = v1 * rsqrt(row_sum(v1**2) / 16.0 + 1e-05) * norm @ w_gate_up.T
    v2 = split(acc2, part=0, inner=24)
    acc3 = v2 * sigmoid(v2) * split(acc2, part=1, inner=24) @ w_down.T
    v3 = v1 + acc3
    acc4 = v3 * rsqrt(row_sum(v3**2) / 16.0 + 1e-05) * next_norm @ w_qkv.T
    v4 = columns(acc4, start=0, stop=24)
    v5 = split(v4, part=0, inner=2)
    v6 = tile(cos, times=6)
    v7 = split(v4, part=1, inner=2)
    v8 = tile(sin, times=6)
    v9 = concat(join(v5 * v6 - v7 * v8, v5 * v8 + v7 * v6, inner=2), \
columns(acc4, start=24, stop=32))
    return v3, v9
"""

PRINTED_GRADIENT = """\
def square_backward(x: float32[M, 2], d_0: float32[M, 2]):
    return {'x': d_0 * (2.0 * x)}
"""


def llama() -> Graph:
    return program(llama_block, *LLAMA, **LLAMA_CONSTANTS)


def square(x):
    return x**2


def assert_round_trip(graph: Graph) -> None:
    again = parse(show(graph))
    assert equal(graph, again)
    assert show(again) == show(graph)
    assert digest(again) == digest(graph)


@pytest.mark.parametrize(
    ("graph", "text"),
    [
        (program(norm_swiglu, *NORM_SWIGLU), PRINTED),
        (llama(), PRINTED_LLAMA),
        (differentiate_program(program(square, "x M 2"), ["x"]).backward, PRINTED_GRADIENT),
    ],
    ids=["norm_swiglu", "llama", "gradient"],
)
def test_programs_print_short_and_exactly(graph, text):
    assert show(graph) == text
    assert_round_trip(graph)


def test_every_program_of_a_pair_reads_back():
    names = [text.split()[0] for text in LLAMA]
    pair = differentiate_program(llama(), names)
    for graph in (pair.program, pair.forward, pair.backward):
        assert_round_trip(graph)


# Expressions of a, b, c, all [M, 4], with the text that they print as.
EXPRESSIONS = [
    (lambda a, b, c: a - (b - c), "a - (b - c)"),
    (lambda a, b, c: (a - b) - c, "a - b - c"),
    (lambda a, b, c: a + (b + c), "a + (b + c)"),
    (lambda a, b, c: (a * b) / c, "a * b / c"),
    (lambda a, b, c: a * (b / c), "a * (b / c)"),
    (lambda a, b, c: a / (b * c), "a / (b * c)"),
    (lambda a, b, c: (a / b) / c, "a / b / c"),
    (lambda a, b, c: (a + b) * c, "(a + b) * c"),
    (lambda a, b, c: a + b * c, "a + b * c"),
    (lambda a, b, c: -(a**2) * b / c, "-a**2 * b / c"),
    (lambda a, b, c: (-a) ** 2 * b / c, "(-a)**2 * b / c"),
    (lambda a, b, c: (a**2) ** 3 - b * c, "(a**2)**3 - b * c"),
    (lambda a, b, c: (a + b) ** 2 * c, "(a + b)**2 * c"),
    (lambda a, b, c: a**-2 * b * c, "a**-2 * b * c"),
    (lambda a, b, c: -(a * b) + c, "-(a * b) + c"),
    (lambda a, b, c: -a * b + c, "-a * b + c"),
    (lambda a, b, c: -(+(-a)) + b + c, "-(-a) + b + c"),
    (lambda a, b, c: a - -b + c, "a - -b + c"),
    (lambda a, b, c: -2.0 * a + b * c, "-2.0 * a + b * c"),
    (lambda a, b, c: a * -2.0 - -3 * (b + c), "a * -2.0 - -3.0 * (b + c)"),
    (lambda a, b, c: a - -2.0 * b + c, "a - -2.0 * b + c"),
    (lambda a, b, c: a * -0.0 + b * 5e-324 - c * 1e300, "a * -0.0 + b * 5e-324 - c * 1e+300"),
    (lambda a, b, c: a * math.inf + b - c, "a * constant('inf') + b - c"),
    (lambda a, b, c: L.where(a < b, -math.inf, c), "where(a < b, constant('-inf'), c)"),
    (lambda a, b, c: L.maximum(a, math.nan) + b * c, "maximum(a, constant('nan')) + b * c"),
    (lambda a, b, c: (a < b) * (b >= c) * 1, "(a < b) * (c <= b) * 1.0"),
    (lambda a, b, c: ((a < b) == (b <= c)) + 0, "((a < b) == (b <= c)) + 0.0"),
    (lambda a, b, c: L.where(a + b < b * c, a, -b), "where(a + b < b * c, a, -b)"),
    (lambda a, b, c: -(a != b) + c, "-(a != b) + c"),
    (lambda a, b, c: (a < b) ** 2 + c, "(a < b)**2 + c"),
    (lambda a, b, c: L.random(a, 7) + b + c, "random(7, rows='M', columns=4) + b + c"),
    (lambda a, b, c: L.random(a, -3) + b + c, "random(-3, rows='M', columns=4) + b + c"),
    (lambda a, b, c: L.random(a, 2**63) + b + c, f"random({2**63}, rows='M', columns=4) + b + c"),
    (lambda a, b, c: L.cast(a, "bfloat16") + b * c, "cast(a, dtype='bfloat16') + b * c"),
]


@pytest.mark.parametrize(("function", "text"), EXPRESSIONS, ids=[t for _, t in EXPRESSIONS])
def test_expressions_keep_their_order_and_no_parenthesis_more(function, text):
    graph = program(function, "a M 4", "b M 4", "c M 4")
    assert show(graph).splitlines()[1:] == [f"    return {text}"]
    assert_round_trip(graph)


# Products of a [M, 4], b [4, 4] and c [1, 4]: the lines before `return`.
PRODUCTS = [
    (lambda a, b, c: L.linear(a, b * c), ["acc1 = a @ (b * c).T"]),
    (lambda a, b, c: L.matmul(a * c, -b), ["acc1 = a * c @ -b"]),
    (lambda a, b, c: L.matmul(-a + c, b - c), ["acc1 = (-a + c) @ (b - c)"]),
    (lambda a, b, c: L.linear(a**2 * c, b**2), ["acc1 = a**2 * c @ (b**2).T"]),
    (lambda a, b, c: a @ (b @ (b * c)), ["acc1 = b @ (b * c)", "acc2 = a @ acc1"]),
    (lambda a, b, c: L.matmul(a, a + c, transpose_a=True) @ b,
     ["acc1 = a.T @ (a + c)", "acc2 = acc1 @ b"]),
    (lambda a, b, c: (c.T @ c) @ b, ["acc1 = transpose(c) @ c", "acc2 = acc1 @ b"]),
]  # fmt: skip


@pytest.mark.parametrize(("function", "lines"), PRODUCTS, ids=[t[-1] for _, t in PRODUCTS])
def test_products_have_a_line_of_their_own(function, lines):
    graph = program(function, "a M 4", "b 4 4", "c 1 4")
    assert [line.strip() for line in show(graph).splitlines()[1:-1]] == lines
    assert_round_trip(graph)


@pytest.mark.parametrize(
    ("value", "rows", "columns", "text"),
    [
        (0.0, 1, 4, "constant(0.0, rows=1, columns=4)"),
        (-1.5, "M", 1, "constant(-1.5, rows='M', columns=1)"),
        (math.inf, "M", 4, "constant('inf', rows='M', columns=4)"),
        (-math.inf, 1, 4, "constant('-inf', rows=1, columns=4)"),
        (math.nan, 1, 1, "constant('nan')"),
        (7, 1, 4, "constant(7, rows=1, columns=4)"),
        (7, 1, 1, "7"),
    ],
)
def test_constants_of_any_shape(value, rows, columns, text):
    graph = program(lambda x: x, "x M 4")
    (x,) = graph.inputs
    product = x * x.builder.constant(value, rows, columns)
    graph = dataclasses.replace(graph, outputs=(product,))
    assert show(graph).splitlines()[1] == f"    return x * {text}"
    assert_round_trip(graph)


@pytest.mark.parametrize(
    ("function", "returned"),
    [
        (lambda x: x, "x"),
        (lambda x: (x,), "x,"),
        (lambda x: (x, -x, x), "x, -x, x"),
        (lambda x: {"only": x}, "{'only': x}"),
        (lambda x: {"it's": x, 'a "b"\n': -x}, """{"it's": x, 'a "b"\\n': -x}"""),
    ],
)
def test_structures_of_outputs(function, returned):
    graph = program(function, "x M 4")
    assert show(graph).splitlines()[1:] == [f"    return {returned}"]
    assert_round_trip(graph)


# Functions of x and g, with the names that their lines get.
NAMES = [
    (lambda x, g: L.name(x + g, "x1") * 2.0, ["x1"]),
    (lambda x, g: L.name(L.name(x + g, "first"), "second") * 2.0, ["second"]),
    (lambda x, g: L.name(x + g, "h") * L.name(x - g, "h"), ["h", "h1"]),
    (lambda x, g: L.name(x + g, "g") * 2.0, ["g1"]),
    (lambda x, g: L.name(x + g, "x") * L.name(x - g, "x1"), ["x1", "x11"]),
    (lambda x, g: L.name(x + g, "v1") * L.exp(x - g) * L.log(x - g), ["v1", "v2"]),
    (lambda x, g: L.name(x * g, "v2") * L.exp(x - g) * L.log(x - g) / L.exp(x + g) * L.log(x + g),
     ["v2", "v1", "v3"]),
    (lambda x, g: L.linear(L.name(x * g, "acc1"), g), ["acc1", "acc2"]),
    (lambda x, g: L.name(x, "renamed") * g, []),
    (lambda x, g: L.name(x + g, "exp") * L.exp(x), ["exp"]),
]  # fmt: skip


@pytest.mark.parametrize(("function", "names"), NAMES)
def test_names_are_kept_and_made_unique(function, names):
    graph = program(function, "x M 4", "g 1 4")
    lines = [line.split(" = ") for line in show(graph).splitlines() if " = " in line]
    assert [line[0].strip() for line in lines] == names
    assert_round_trip(graph)


@pytest.mark.parametrize("label", ["lambda", "None", "not a name", "1st", "", "a.b", "a-b"])
def test_a_name_must_be_one_in_python(label):
    with pytest.raises(ProgramError, match="a value's name that is not a name in Python"):
        program(lambda x: L.name(-x, label), "x M 4")


def test_a_name_written_in_two_ways_is_the_one_that_python_reads():
    graph = program(lambda x: L.name(-x, "ﬁrst"), "x M 4")
    assert "    first = -x" in show(graph)
    assert_round_trip(graph)


# In a process of its own, and without torch: `cadenza` itself would import it.
PROCESS = """
import sys, types
package = types.ModuleType("cadenza")
package.__path__ = [sys.argv[1]]
sys.modules["cadenza"] = package
from cadenza.core import lang as L
from cadenza.core.ops import M
from cadenza.core.pipeline import compile_program
from cadenza.core.text import digest
from cadenza.core.trace import Operand, Signature
operands = [text.split() for text in sys.argv[2].split(",")]
operands = [Operand(n, M if r == M else int(r), int(c), "float32") for n, r, c in operands]
signature = Signature(tuple(operands), tuple(CONSTANTS.items()))
pair = compile_program(llama_block, signature, {}, {o.name for o in operands}, "llama_block")
assert "torch" not in sys.modules
print(digest(pair.program), digest(pair.forward), digest(pair.backward))
"""


def digests_elsewhere(hash_seed: str) -> str:
    text = PROCESS.replace("CONSTANTS", repr(LLAMA_CONSTANTS))
    text = text.replace("operands = [text", f"{inspect.getsource(llama_block)}\noperands = [text")
    command = [sys.executable, "-c", text, str(ROOT / "cadenza"), ",".join(LLAMA)]
    environment = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
def test_the_digest_is_the_same_in_every_process():
    pair = differentiate_program(llama(), [text.split()[0] for text in LLAMA])
    here = " ".join(digest(graph) for graph in (pair.program, pair.forward, pair.backward))
    assert digests_elsewhere("1") == digests_elsewhere("2") == here


DIGESTED = """\
def f(x: float32[M, 4], w: float32[6, 4], g: float32[1, 3]):
    acc1 = x @ w.T
    v1 = split(acc1, part=0, inner=3)
    named = v1 * 0.1 - cast(split(acc1, part=1, inner=3), dtype='bfloat16') * g
    return {'one': named, 'two': v1}
"""

# What to replace in DIGESTED, and by what; each gives another program.
CHANGES = [
    ("0.1", "0.10000000000000002"),
    ("part=1, inner=3", "part=1, inner=1"),
    ("part=0", "part=1"),
    ("dtype='bfloat16'", "dtype='float16'"),
    ("g: float32", "g: bfloat16"),
    ("x: float32[M, 4], w: float32[6, 4]", "x: float32[M, 5], w: float32[6, 5]"),
    ("g: float32[1, 3]", "g: float32[M, 3]"),
    ("x: float32[M", "x: float32[7"),
    ("g: float32[1, 3]):", "g: float32[1, 3], unused: float32[1, 1]):"),
    ("x: float32[M, 4], w: float32[6, 4]", "w: float32[6, 4], x: float32[M, 4]"),
    ("x", "h"),
    ("def f", "def g"),
    ("'two': v1", "'two': named"),
    ("{'one': named, 'two': v1}", "{'two': v1, 'one': named}"),
    ("'two'", "'three'"),
    ("{'one': named, 'two': v1}", "named, v1"),
    ("{'one': named, 'two': v1}", "{'one': named}"),
    (" - cast", " + cast"),
    (" * g", " / g"),
    ("v1 * 0.1", "0.1 * v1"),
    ("x @ w.T", "(x + 0.0) @ w.T"),
]


@pytest.mark.parametrize(("found", "written"), CHANGES)
def test_the_digest_changes_with_the_meaning(found, written):
    assert found in DIGESTED
    graph, other = parse(DIGESTED), parse(DIGESTED.replace(found, written))
    assert digest(graph) != digest(other)
    assert not equal(graph, other)


def test_the_digest_holds_a_value_and_its_tuple_apart():
    texts = ["    return x\n", "    return x,\n", "    return {'0': x}\n"]
    assert len({digest(parse(f"def f(x: float32[M, 4]):\n{text}")) for text in texts}) == 3


def test_the_digest_tells_zeros_and_kinds_of_numbers_apart():
    texts = ("0.0", "-0.0", "constant(0, rows=1, columns=1)", "constant(0.0, rows=1, columns=4)")
    line = "def f(x: float32[M, 4]):\n    return x + {}\n"
    assert len({digest(parse(line.format(text))) for text in texts}) == len(texts)


def test_the_digest_does_not_depend_on_what_else_the_builder_made():
    graph = parse(DIGESTED)
    before = digest(graph)
    assert [L.exp(i) * 3.0 for i in graph.inputs]
    assert digest(graph) == before
