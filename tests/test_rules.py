"""Simplification: every rule fires on its own example, keeps the value, and fires nowhere else.

Rules only ever remove work: derived programs never grow, whichever rule is switched off. The
engine under the rules is held to the same examples in `test_rewrite`.
"""

import pytest
import torch
from graphs import LLAMA, LLAMA_CONSTANTS, llama_block, program, run, values

from cadenza.core import lang as L
from cadenza.core import rules
from cadenza.core.ir import Graph, verify
from cadenza.core.ops import Op
from cadenza.core.pipeline import differentiate_program
from cadenza.core.rewrite import rewrite_graph
from cadenza.core.rules import SIMPLIFY, simplify
from cadenza.core.text import show
from cadenza.core.vjp import differentiate

X, Y, Z = "x M 6 float64", "y M 6 float64", "z M 6 float64"
ROW = "r 1 6 float64"
COLUMN = "c M 1 float64"


def zeros(x, columns):
    """The constant that derivatives surround values with."""
    return x.builder.constant(0.0, 1, columns)


def cast(x, dtype="bfloat16"):
    return L.cast(x, dtype)


def joined(a, b, inner=3):
    return L.join(a, b, inner)


# A rule, a function with its operands, and what the function's value prints as once only this
# rule has been applied.
EXAMPLES = [
    ("x + 0 = x", lambda x: x + 0.0, [X], "x"),
    ("x + 0 = x", lambda x: x + zeros(x, 6), [X], "x"),
    ("0 + x = x", lambda x: 0.0 + x, [X], "x"),
    ("x - 0 = x", lambda x: x - 0.0, [X], "x"),
    ("0 - x = -x", lambda x: 0.0 - x, [X], "-x"),
    ("x * 1 = x", lambda x: x * 1.0, [X], "x"),
    ("1 * x = x", lambda x: 1 * x, [X], "x"),
    ("x / 1 = x", lambda x: x / 1, [X], "x"),
    ("x ** 1 = x", lambda x: x**1, [X], "x"),
    ("x ** 0 = 1", lambda x: x**0 + x, [X], "constant(1.0, rows='M', columns=6) + x"),
    ("-(-x) = x", lambda x: -(+(-x)), [X], "x"),
    ("x + (-y) = x - y", lambda x, y: x + (-y), [X, Y], "x - y"),
    ("(-x) + y = y - x", lambda x, y: -x + y, [X, Y], "y - x"),
    ("x - (-y) = x + y", lambda x, y: x - (-y), [X, Y], "x + y"),
    ("x + (-y) * z = x - y * z", lambda x, y, z: x + (-y) * z, [X, Y, Z], "x - y * z"),
    ("constants fold", lambda x: x * (zeros(x, 6) + 2.5),
     [X], "x * constant(2.5, rows=1, columns=6)"),
    ("constants fold", lambda x: x * -L.maximum(2.0 - x.builder.constant(1.5), 0.25),
     [X], "x * -maximum(0.5, 0.25)"),
    ("cast(cast(x, d), d) = cast(x, d)", lambda x: cast(cast(x)), [X], "cast(x, dtype='bfloat16')"),
    ("cast(input, its dtype) = input", lambda x: cast(x, "float64"), [X], "x"),
    ("x.T.T = x", lambda x, r: x * r.T.T, [X, ROW], "x * r"),
    ("split(join(a, b), 0) = a", lambda x, y: L.split(joined(x, y), 3)[0], [X, Y], "x"),
    ("split(join(a, b), 1) = b", lambda x, y: L.split(joined(x, y), 3)[1], [X, Y], "y"),
    ("join of both parts = x", lambda x: joined(*L.split(x)), [X], "x"),
    ("join + join = join of sums", lambda x, y: joined(x, zeros(x, 6)) + joined(zeros(x, 6), y),
     [X, Y], "join(x + {0}, {0} + y, inner=3)"),
    ("column @ row = column * row", lambda c, r: c @ r, [COLUMN, ROW], "c * r"),
    ("column @ row = column * row", lambda c, v: L.linear(c, v), [COLUMN, "v 6 1 float64"],
     "c * transpose(v)"),
    ("column @ row = column * row", lambda r, s: L.matmul(r, s, transpose_a=True),
     [ROW, "s 1 4 float64"], "transpose(r) * s"),
    ("trivial columns", lambda x: L.columns(x, 0, 6), [X], "x"),
    ("trivial columns", lambda x: L.repeat(x, 1), [X], "x"),
    ("trivial columns", lambda x: L.tile(x, 1), [X], "x"),
    ("trivial columns", lambda x: L.group_sum(x, 1), [X], "x"),
    ("trivial columns", lambda x: L.group_max(x, 1), [X], "x"),
    ("trivial columns", lambda c: L.row_sum(c), [COLUMN], "c"),
    ("trivial columns", lambda c: L.row_max(c), [COLUMN], "c"),
    ("trivial columns", lambda x: L.concat(x), [X], "x"),
    ("columns of columns", lambda x: L.columns(L.columns(x, 1, 5), 2, 4),
     [X], "columns(x, start=3, stop=5)"),
    ("columns of concat", lambda x, y: L.columns(L.concat(x, y), 6, 12), [X, Y], "y"),
    ("concat + concat = concat of sums",
     lambda x, y: L.concat(x, zeros(x, 6)) + L.concat(zeros(x, 6), y),
     [X, Y], "concat(x + {0}, {0} + y)"),
    ("concat + concat = concat of sums",
     lambda x, c: L.concat(x, zeros(x, 6)) + L.concat(zeros(x, 11), c),
     [X, COLUMN], "concat(x + {0}, {0:5} + {0:5}, {0:1} + c)"),
]  # fmt: skip


def with_zeros(text: str) -> str:
    """The text with {0} and {0:n} written out as zeros of six or n columns."""
    text = text.replace("{0}", "{0:6}").replace("{0:1}", "0.0")
    return text.replace("{0:", "constant(0.0, rows=1, columns=").replace("}", ")")


def returned(graph: Graph) -> str:
    """What a graph of one expression returns."""
    _, line, *_ = show(graph).splitlines()
    return line.removeprefix("    return ").removeprefix("    v1 = ")


def assert_same_values(before: Graph, after: Graph) -> None:
    tensors = values(before)
    for a, b in zip(run(before, tensors), run(after, tensors), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-14, atol=1e-14)


def test_every_rule_has_an_example():
    assert {rule for rule, *_ in EXAMPLES} == set(SIMPLIFY)


@pytest.mark.parametrize(("rule", "function", "operands", "text"), EXAMPLES)
def test_a_rule_fires_and_keeps_the_value(rule, function, operands, text):
    before = program(function, *operands)
    after = verify(rewrite_graph(before, [SIMPLIFY[rule]]))
    assert returned(after) == with_zeros(text) != returned(before)
    assert_same_values(before, after)


@pytest.mark.parametrize(("rule", "function", "operands", "text"), EXAMPLES)
def test_only_the_rule_itself_needs_to_fire(rule, function, operands, text):
    before = program(function, *operands)
    others = [r for name, r in SIMPLIFY.items() if name != rule]
    assert_same_values(before, verify(rewrite_graph(before, others)))
    assert_same_values(before, verify(simplify(before)))


# What looks like an example and is none: no rule may change these at all.
NEAR_MISSES = {
    "0 of more columns": (lambda c: c + zeros(c, 6), [COLUMN]),
    "0 of more rows": (lambda r: r + r.builder.constant(0.0, "M", 1), [ROW]),
    "1 of more columns": (lambda c: c * c.builder.constant(1.0, 1, 6), [COLUMN]),
    "an almost 0": (lambda x: x + 5e-324, [X]),
    "0 times x, which may be infinite": (lambda x: 0.0 * x, [X]),
    "1 / x": (lambda x: 1.0 / x, [X]),
    "x - x, which may be infinite": (lambda x: x - x, [X]),
    "a condition + 0 is a number": (lambda x: (x > 0.0) + 0.0, [X]),
    "a condition ** 1 is a number": (lambda x: (x > 0.0) ** 1, [X]),
    "an index * 1 is a number": (lambda x, i: x * (i * 1.0), [X, "i M 1 int64"]),
    "the sum of one condition": (lambda c: L.row_sum(c > 0.0), [COLUMN]),
    "another dtype of an input": (lambda x: cast(x), [X]),
    "a cast of a computed value": (lambda x: cast(-x, "float64"), [X]),
    "two casts": (lambda x: cast(cast(x, "float16"), "bfloat16"), [X]),
    "split with another inner": (lambda x, y: L.split(joined(x, y, 3), 2)[0], [X, Y]),
    "join of swapped parts": (lambda x: joined(*L.split(x)[::-1]), [X]),
    "join of parts of two values": (lambda x, y: joined(L.split(x)[0], L.split(y)[1]), [X, Y]),
    "join of parts with another inner": (lambda x: joined(*L.split(x, 1)), [X]),
    "joins with two inners": (lambda x, y: joined(x, y, 3) + joined(y, x, 2), [X, Y]),
    "a wider first part": (
        lambda x, c: L.split(L.join(c, L.columns(x, 0, 1), 1), 1)[0] * x, [X, "c 1 1 float64"]),
    "columns across a cut": (lambda x, y: L.columns(L.concat(x, y), 3, 9), [X, Y]),
    "columns within a part": (lambda x, y: L.columns(L.concat(x, y), 6, 9), [X, Y]),
    "a part with fewer rows": (lambda x, r: L.columns(L.concat(r, x), 0, 6) * x, [X, ROW]),
    "a cut inside of a value": (
        lambda x, y: L.concat(x, zeros(x, 2)) + L.concat(zeros(x, 1), y, zeros(x, 1)), [X, Y]),
    "a sum with one column": (
        lambda x, c: L.concat(c > 0.0) + L.concat(zeros(x, 2), x), [X, COLUMN]),
    "a product over two columns": (lambda x, w: x @ w, ["x M 2 float64", "w 2 6 float64"]),
    "a product over all rows": (lambda c, x: L.matmul(c, x, transpose_a=True), [COLUMN, X]),
    "some columns": (lambda x: L.columns(x, 0, 5), [X]),
    "two repetitions": (lambda x: L.repeat(x, 2), [X]),
    "a transpose": (lambda r, c: r.T * r, [ROW, "c 6 1 float64"]),
}  # fmt: skip


@pytest.mark.parametrize("case", NEAR_MISSES)
def test_no_rule_fires_where_it_must_not(case):
    function, operands = NEAR_MISSES[case]
    before = program(function, *operands)
    assert show(simplify(before)) == show(before)


def layer_norm_gelu(x, r, b, w, v):
    h = L.linear(L.layer_norm(x, r, b), w)
    return L.linear(L.gelu(h, "tanh"), v), h


def heads(x, q, cos, sin):
    y = L.qk_norm(x, q, 2, heads=2)
    return L.rope(y, cos, sin, 2, heads=2, interleaved=True)


def partial_rope(x, cos, sin):
    return L.rope(x, cos, sin, 6, rotary_dim=4, heads=2)


def ties(x, y):
    return L.maximum(L.row_max(x), L.minimum(x, y)), L.column_max(x * y), L.group_max(x, 2)


def cross_entropy(x, w, index):
    logits = L.softcap(L.linear(x, w), 30.0)
    return L.logsumexp(logits) - L.pick(logits, index)


def casts(x, w):
    return L.linear(cast(x, "float32"), w), L.dropout(x, 0.25, 7), x**3 / (x**2 + 1.0)


PROGRAMS = {
    "llama": (llama_block, [f"{text} float64" for text in LLAMA], LLAMA_CONSTANTS),
    "layer_norm_gelu": (layer_norm_gelu,
                        [X, ROW, "b 1 6 float64", "w 8 6 float64", "v 6 8 float64"], {}),
    "heads": (heads, [X, "q 1 2 float64", "cos M 1 float64", "sin M 1 float64"], {}),
    "partial_rope": (partial_rope, ["x M 18 float64", "cos M 2 float64", "sin M 2 float64"], {}),
    "ties": (ties, [X, Y], {}),
    "cross_entropy": (cross_entropy, [X, "w 4 6 float64", "index M 1 int64"], {}),
    "casts": (casts, [X, "w 4 6"], {}),
}  # fmt: skip


def traced(name: str) -> Graph:
    function, operands, constants = PROGRAMS[name]
    return program(function, *operands, **constants)


def gradient_graph(graph: Graph) -> Graph:
    """All gradients as derived, before any rule: what the rules have to clean up."""
    wanted = [i for i in graph.inputs if i.type.kind == "real"]
    adjoints = [
        o.builder.make(Op.INPUT, (), {"name": f"d_{k}", "dtype": "float64", "rows": o.type.rows,
                                      "columns": o.type.columns, "kind": "real"})
        for k, o in enumerate(graph.outputs)
    ]  # fmt: skip
    found = differentiate(list(zip(graph.outputs, adjoints, strict=True)), wanted)
    labels = tuple(i.attributes["name"] for i in found)
    return verify(Graph("f", (*graph.inputs, *adjoints), tuple(found.values()), labels, "dict"))


@pytest.mark.parametrize("name", PROGRAMS)
def test_derived_programs_shrink_and_then_stay(name):
    before = gradient_graph(traced(name))
    after = verify(simplify(before))
    assert len(after.nodes()) <= len(before.nodes())
    again = simplify(after)
    assert all(a is b for a, b in zip(again.outputs, after.outputs, strict=True))
    assert_same_values(before, after)


def test_rules_remove_a_twentieth_of_derived_programs():
    before = [gradient_graph(traced(name)) for name in PROGRAMS]
    nodes = [sum(len(g.nodes()) for g in graphs) for graphs in (before, map(simplify, before))]
    assert nodes[1] < 0.95 * nodes[0]


# Sums of joins and concatenations count on these to take the zeros away.
ZEROS = ("x + 0 = x", "0 + x = x", "constants fold")


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_rule_alone_adds_a_node(name):
    before = gradient_graph(traced(name))
    for rule in SIMPLIFY.values():
        after = rewrite_graph(before, [*(SIMPLIFY[zero] for zero in ZEROS), rule])
        assert len(after.nodes()) <= len(before.nodes())


def outputs_and_gradients(name: str) -> list[torch.Tensor]:
    """What forward returns, and the gradients of all inputs for adjoints of ones."""
    graph = traced(name)
    pair = differentiate_program(simplify(graph), [i.attributes["name"] for i in graph.inputs])
    torch.manual_seed(1)
    tensors = dict(zip((i.attributes["name"] for i in graph.inputs), values(graph), strict=True))
    results = run(pair.forward, list(tensors.values()))
    given = [results[v] if isinstance(v, int) else tensors[v] for v in pair.values]
    ones = [torch.ones_like(results[p]) for p in pair.adjoints]
    return [*results[: pair.outputs], *run(pair.backward, [*given, *ones])]


def fired(name: str, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The rules that fire on a program and on its derivative."""
    found = set()

    def watched(title, rule):
        def watch(node):
            made = rule(node)
            found.update([title] if made is not None else [])
            return made

        return watch

    with monkeypatch.context() as patch:
        patch.setattr(rules, "SIMPLIFY", {t: watched(t, r) for t, r in SIMPLIFY.items()})
        outputs_and_gradients(name)
    return found


def test_derivatives_need_these_rules(monkeypatch):
    found = set().union(*(fired(name, monkeypatch) for name in PROGRAMS))
    assert found >= {"0 + x = x", "x ** 1 = x", "x + (-y) * z = x - y * z", "columns of concat",
                     "join + join = join of sums", "concat + concat = concat of sums"}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_switching_a_rule_off_changes_no_value(name, monkeypatch):
    expected = outputs_and_gradients(name)
    for rule in fired(name, monkeypatch):
        kept = {other: r for other, r in SIMPLIFY.items() if other != rule}
        monkeypatch.setattr(rules, "SIMPLIFY", kept)
        found = outputs_and_gradients(name)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, msg=f"without {rule}")
