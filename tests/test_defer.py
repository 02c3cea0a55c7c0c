"""Deferral, rule by rule: each fires on its own example, keeps the value, and stops where it must.

Values are those of whole graphs at float64, before and after. Switching any rule off gives the same
values on every built-in block, and never a plan that moves fewer bytes. `d` in a backward example
is the adjoint; all that is made without it is forward's.
"""

from functools import partial

import pytest
import torch
from graphs import program, run, values
from hypothesis import given, settings
from hypothesis import strategies as st
from planned import (
    Results,
    adjoints_of,
    bytes_moved,
    call,
    execute,
    large_call,
    plain_results,
    products,
    verified,
)
from programs import check_program

import cadenza as cz
from cadenza.core import lang as L
from cadenza.core import pipeline
from cadenza.core.defer import (
    ABSORB,
    COLUMN_SUM,
    DEFER,
    MERGE,
    PULL,
    RANK_ONE,
    ROUNDED,
    RULES,
    defer,
)
from cadenza.core.ir import Graph, verify
from cadenza.core.rules import lower, simplify
from cadenza.core.text import show
from cadenza.library.blocks import BUILT_IN

X, W, V = "x M 6 float64", "w 6 4 float64", "v 4 5 float64"
G, C, R = "g 1 4 float64", "c M 1 float64", "r 1 6 float64"
D, U = "d M 5 float64", "u 5 6 float64"
FEWER = settings.default.max_examples // 5


def norm_factor(a):
    """A column that is finished after its matrix."""
    return L.rsqrt(L.row_sum(a**2) + 1.0)


def row_factor(a):
    """A row that is finished after its matrix."""
    return L.rsqrt(L.column_sum(a**2) + 1.0)


def positive(c):
    """A column that is never 0."""
    return L.rsqrt(c**2 + 1.0)


def before_and_after(function, operands, rules=RULES, stored=None) -> tuple[Graph, Graph]:
    """A program, and the same deferred; in backward where `stored` says what forward stores."""
    before = verify(simplify(verify(lower(program(function, *operands)))))
    options = {}
    if stored is not None:
        adjoints = [i for i in before.inputs if i.attributes["name"] == "d"]
        named = {n for n, label in before.names.items() if label in stored}
        options = {"backward": True, "ready": pipeline._Forward(adjoints)}
        options["stored"] = named | set(before.inputs)
    return before, verify(simplify(verify(defer(before, rules=rules, **options))))


def body(graph: Graph) -> list[str]:
    """The lines of a printed program after its head."""
    _, lines = show(graph).split("):\n", 1)
    return [line.strip() for line in lines.splitlines()]


def assert_same_values(before: Graph, after: Graph) -> None:
    tensors = values(before)
    for a, b in zip(run(before, tensors), run(after, tensors), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


# A rule, a function with its operands, what forward stores (None: the example is forward itself),
# and the last lines of the program that only this rule makes of it.
EXAMPLES = [
    (DEFER, lambda x, w, v: ((x @ w) * norm_factor(x @ w)) @ v, [X, W, V], None,
     ["acc2 = acc1 @ v", "return acc2 * rsqrt(row_sum(acc1**2) + 1.0)"]),
    (DEFER, lambda x, w, v, g: L.rms_norm(x @ w, g) @ v, [X, W, V, G], None,
     ["acc2 = acc1 * g @ v", "return acc2 * rsqrt(row_sum(acc1**2) / 4.0 + 1e-06)"]),
    (DEFER, lambda x, w, y: L.matmul(y, (x @ w) * norm_factor(x @ w), False, True),
     ["x 3 6 float64", W, "y M 4 float64"], None,
     ["acc2 = y @ acc1.T", "return acc2 * transpose(rsqrt(row_sum(acc1**2) + 1.0))"]),
    (DEFER, lambda x, w, y: L.matmul((x @ w) * row_factor(x @ w), y, True),
     [X, W, "y M 5 float64"], None,
     ["acc2 = acc1.T @ y", "return acc2 * transpose(rsqrt(column_sum(acc1**2) + 1.0))"]),
    (DEFER, lambda x, w, v: (x @ w * L.row_sum(L.column_sum(x @ w))) @ v, [X, W, V], None,
     ["acc2 = acc1 @ v", "return acc2 * row_sum(column_sum(acc1))"]),
    (DEFER, lambda d, x, u: (d * x * L.row_sum(d) + d * L.row_sum(d)) @ u,
     [D, "x M 5 float64", U], (), ["acc1 = (d * x + d) @ u", "return acc1 * row_sum(d)"]),
    (ABSORB, lambda d, x, r: L.matmul(d, x * r, True), [D, X, R], (),
     ["acc1 = d.T @ x", "return acc1 * r"]),
    (ABSORB, lambda d, x, r: L.matmul(d, L.name(L.silu(x), "k") * r, True), [D, X, R], ("k",),
     ["k = x * sigmoid(x)", "acc1 = d.T @ k", "return acc1 * r"]),
    (ABSORB, lambda d, u, c: (d * c) @ u, [D, U, C], (), ["acc1 = d @ u", "return acc1 * c"]),
    (COLUMN_SUM, lambda x, w, c: (x @ w, L.column_sum(x * c) @ w), [X, W, C], None,
     ["acc1 = x @ w", "return acc1, column_sum(acc1 * c)"]),
    (COLUMN_SUM, lambda x, w, c: ((x * positive(c)) @ w, L.column_sum(x) @ w * 2.0), [X, W, C],
     None, ["acc1 = x * v1 @ w", "return acc1, column_sum(acc1 / v1) * 2.0"]),
    (PULL, lambda x, c: L.row_sum(x * c * 3.0), [X, C], None, ["return c * row_sum(x) * 3.0"]),
    (PULL, lambda x, r: L.column_sum(-x * r / 4.0), [X, R], None,
     ["return r * column_sum(x) * -0.25"]),
    (PULL, lambda x: L.column_sum(x * L.column_sum(x)), [X], None, ["return column_sum(x)**2"]),
    (MERGE, lambda d, x, u: L.row_sum((d @ u) * x) + L.row_sum(d @ u), [D, X, U], (),
     ["acc1 = d @ u", "return row_sum(acc1 * x + acc1)"]),
    (ROUNDED, lambda d, x, c, m: (L.matmul(x, d * c, True), L.column_sum(d * c * m)),
     [D, X, C, "m M 1 float64"], (),
     ["acc1 = x.T @ v1", "return acc1, column_sum(cast(v1, dtype='float64') * m)"]),
]  # fmt: skip

# It leaves with the late factor of its operand, so it needs both rules.
LAYER_NORM = (lambda x, w, v, g, b: L.layer_norm(x @ w, g, b) @ v, [X, W, V, G, "b 1 4 float64"])


def test_every_rule_has_an_example():
    assert {rule for rule, *_ in EXAMPLES} | {RANK_ONE} == set(RULES)


@pytest.mark.parametrize(("rule", "function", "operands", "stored", "lines"), EXAMPLES)
def test_a_rule_fires_and_keeps_the_value(rule, function, operands, stored, lines):
    before, after = before_and_after(function, operands, [rule], stored)
    assert body(after)[-len(lines) :] == lines
    assert_same_values(before, after)
    assert products(after) <= products(before)


@pytest.mark.parametrize(("rule", "function", "operands", "stored", "lines"), EXAMPLES)
def test_without_its_rule_an_example_stays(rule, function, operands, stored, lines):
    others = [other for other in RULES if other != rule]
    before, after = before_and_after(function, operands, others, stored)
    assert body(after)[-len(lines) :] != lines
    assert_same_values(before, after)


def test_layer_norm_leaves_as_vector_products():
    before, after = before_and_after(*LAYER_NORM)
    assert body(after) == [
        "acc1 = x @ w", "acc2 = acc1 * g @ v", "v1 = rsqrt(row_variance(acc1) + 1e-05)",
        "acc3 = g @ v", "acc4 = b @ v",
        "return acc2 * v1 + acc3 * row_sum(acc1) * v1 * -0.25 + acc4",
    ]  # fmt: skip
    assert_same_values(before, after)
    for off in (RANK_ONE, DEFER):
        kept = [rule for rule in RULES if rule != off]
        before, after = before_and_after(*LAYER_NORM, kept)
        assert show(after) == show(before)


# What looks like an example and is none: a function, its operands, what forward stores.
NEAR_MISSES = {
    "a factor shared by some terms only": (
        lambda x, w, v: ((x @ w) * norm_factor(x @ w) + L.tanh(x @ w)) @ v, [X, W, V], None),
    "a factor to different powers": (
        lambda x, w, v: ((x @ w) * norm_factor(x @ w) ** 2 + L.tanh(x @ w) * norm_factor(x @ w)
                         + 1.0) @ v, [X, W, V], None),
    "a ready factor stays with its operand": (lambda x, w, v, c: (x @ w * c) @ v, [X, W, V, C],
                                              None),
    "a ready factor of an adjoint": (lambda d, u, c: (L.silu(d) * c) @ u, [D, U, C], ()),
    "a contracted late factor": (
        lambda x, w, v: ((x @ w) * row_factor(x @ w)) @ v, [X, W, V], None),
    "a contracted factor of the second operand": (
        lambda x, w, y: L.matmul(y, (x @ w) * norm_factor(x @ w), True),
        [X, W, "y M 5 float64"], None),
    "a stored value is an atom": (
        lambda y, x, w, v, b: (y + x @ w + b) @ v,
        ["y M 4 float64", X, W, V, "b 1 4 float64"], None),
    "a nonlinearity": (
        lambda x, w, v: L.silu((x @ w) * norm_factor(x @ w)) @ v, [X, W, V], None),
    "an operand of columns only": (
        lambda x, w, c: L.matmul(x @ w, c * norm_factor(x @ w), True), [X, W, C], None),
    "columns and rows, without a matrix": (
        lambda x, w, v, g: (norm_factor(x @ w) * g + g) @ v, [X, W, V, G], None),
    "forward's value that is not stored": (
        lambda d, x, r: L.matmul(d, L.silu(x) * r, True), [D, X, R], ()),
    "a contracted factor of forward's value": (
        lambda d, x, c: L.matmul(d, x * c, True), [D, X, C], ()),
    "a stored value with a contracted factor beside": (
        lambda d, x, r, c: L.matmul(d, x * r * c, True), [D, X, R, C], ()),
    "the other kind of factor": (lambda x, r: L.row_sum(x * r), [X, R], None),
    "the largest is not linear": (lambda x, c: L.row_max(x * c), [X, C], None),
    "the variance is not linear": (lambda x, c: L.row_variance(x * c), [X, C], None),
    "a sum of columns alone": (lambda x, c, r: L.row_sum(c * r), [X, C, R], None),
    "no such product is made": (lambda x, w, c: L.column_sum(x * c) @ w, [X, W, C], None),
    "a product with another weight": (
        lambda x, w, c, z: (x @ z, L.column_sum(x * c) @ w), [X, W, C, "z 6 4 float64"], None),
    "a product of another value": (
        lambda x, w, c: (L.tanh(x) @ w, L.column_sum(x * c) @ w), [X, W, C], None),
    "a product with another contracted factor": (
        lambda x, w, r: ((x * r) @ w, L.column_sum(x) @ w), [X, W, R], None),
    "a product of rows scaled by what may be 0": (
        lambda x, w, c: ((x * c) @ w, L.column_sum(x) @ w), [X, W, C], None),
    "a bias's gradient": (
        lambda d, x, c: (L.matmul(d * c, x, True), L.column_sum(d)), [D, X, C], ()),
    "the sum of an operand without a weight": (
        lambda d, x, c: (L.matmul(d * c, x, True), L.column_sum(d * c)), [D, X, C], ()),
    "sums of two kernels": (
        lambda d, x, u, z: L.row_sum((d @ u) * x) + L.row_sum((d @ z) * x),
        [D, X, U, "z 5 6 float64"], ()),
    "a sum of forward's": (
        lambda d, x, u: L.row_sum(x * x) + L.row_sum((d @ u) * x), [D, X, U], ()),
    "sums in forward": (
        lambda x, w: L.row_sum(x @ w) + L.row_sum(L.tanh(x @ w)), [X, W], None),
    "a sum of rows and one of columns": (
        lambda d, x, u: L.row_sum((d @ u) * x) + L.column_sum((d @ u) * x), [D, X, U], ()),
    "sums over other widths": (
        lambda d, x, u: L.row_sum(d) + L.row_sum((d @ u) * x), [D, X, U], ()),
}  # fmt: skip


@pytest.mark.parametrize("case", NEAR_MISSES)
def test_no_rule_fires_where_it_must_not(case):
    function, operands, stored = NEAR_MISSES[case]
    before, after = before_and_after(function, operands, RULES, stored)
    assert show(after) == show(before)


def test_the_variance_of_a_stored_sum_does_not_tear_it():
    def normed(y, x, w, v, b):
        return L.layer_norm(y + x @ w + b, None) @ v

    operands = ["y M 4 float64", X, W, V, "b 1 4 float64"]
    before, after = before_and_after(normed, operands)
    assert {"v1 = y + acc1 + b", "acc2 = v1 @ v"} <= set(body(after))
    assert_same_values(before, after)


# --- random operands ------------------------------------------------------------------------------

MATRICES = {"p": lambda x, w: x @ w, "t": lambda x, w: L.tanh(x @ w), "": None}
FACTORS = {
    "late column": lambda v: norm_factor(v["x"] @ v["w"]),
    "late row": lambda v: row_factor(v["x"] @ v["w"]),
    "late scalar": lambda v: L.row_sum(L.column_sum(L.tanh(v["x"] @ v["w"]))) * 0.1,
    "column": lambda v: v["c"], "row": lambda v: v["g"], "number": lambda v: -1.5,
    "power": lambda v: norm_factor(v["x"] @ v["w"]) ** 2,
    "quotient": lambda v: 1.0 / (norm_factor(v["x"] @ v["w"])),
}  # fmt: skip
terms = st.tuples(
    st.sampled_from(["p", "p", "t", ""]), st.lists(st.sampled_from(sorted(FACTORS)), max_size=3)
)


def operand_of(chosen, given):
    """A sum of terms, each a matrix or none times factors, as [M, 4]."""
    total = None
    for matrix, names in chosen:
        made = MATRICES[matrix]
        value = made(given["x"], given["w"]) if made else given["g"]
        for name in names:
            value = value * FACTORS[name](given)
        total = value if total is None else total + value
    return total + 0.0 * (given["x"] @ given["w"]) if total.shape[0] != "M" else total


@settings(max_examples=FEWER)
@given(
    chosen=st.lists(terms, min_size=1, max_size=3),
    late=st.lists(st.sampled_from(sorted(FACTORS)), max_size=2),
    side=st.sampled_from(["left", "across", "right"]),
    off=st.sampled_from(["", *RULES]),
)
def test_products_never_increase_and_keep_their_value(chosen, late, side, off):
    def random_operand(x, w, v, c, g, y):
        given = {"x": x, "w": w, "c": c, "g": g}
        a = operand_of(chosen, given)
        for name in late:
            a = a * FACTORS[name](given)
        if side == "left":
            return a @ v
        return L.matmul(a, y, True) if side == "across" else L.matmul(y, a, True)

    operands = [X, W, V, C, G, "y M 5 float64"]
    kept = [rule for rule in RULES if rule != off]
    before, after = before_and_after(random_operand, operands, kept)
    assert products(after) <= products(before)
    assert_same_values(before, after)


# --- rules switched off ---------------------------------------------------------------------------


def without(monkeypatch, *rules: str) -> None:
    """Switches rules off in both passes."""
    kept = [rule for rule in RULES if rule not in rules]
    monkeypatch.setattr(pipeline, "defer", partial(defer, rules=kept))


def assert_results(actual: Results, expected: Results) -> None:
    for found, oracle in zip(actual, expected, strict=True):
        assert list(found) == list(oracle)
        for name, value in found.items():
            torch.testing.assert_close(value, oracle[name], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", sorted(BUILT_IN))
@pytest.mark.slow
def test_switching_rules_off_changes_no_value(name, monkeypatch):
    made = call(name, 5)
    complete = made.pair()
    upstream = adjoints_of(complete.program, 5)
    expected = plain_results(complete, made, upstream)
    for rules in [(), *((rule,) for rule in RULES), RULES]:
        without(monkeypatch, *rules)
        pair = verified(made.pair())
        assert_results(execute(pair, made.tensors, 5, upstream, tile=3), expected)


@pytest.mark.parametrize("name", sorted(BUILT_IN))
@pytest.mark.slow
def test_switching_a_rule_off_never_moves_fewer_bytes(name, monkeypatch):
    made = large_call(name)
    moved = {}
    for off in ("", *RULES):
        without(monkeypatch, off)
        pair = made.pair()
        moved[off] = bytes_moved(pair.forward_plan, pair.backward_plan)
    fewer = {rule: (total - moved[""]) / 1e9 for rule, total in moved.items() if total < moved[""]}
    assert not fewer, f"GB more or less without the rule: {fewer}"


def test_each_rule_saves_bytes_or_reductions_somewhere(monkeypatch):
    made = {name: large_call(name) for name in ("llama", "gpt2")}

    def cost():
        pairs = [made[name].pair() for name in made]
        plans = [plan for pair in pairs for plan in (pair.forward_plan, pair.backward_plan)]
        nodes = sum(len(plan.graph.nodes()) for plan in plans)
        return bytes_moved(*plans), nodes

    complete = cost()
    for rule in (DEFER, ABSORB, RANK_ONE, COLUMN_SUM, MERGE):
        without(monkeypatch, rule)
        assert cost() > complete, rule


def test_rows_scaled_by_zero_keep_their_column_sums():
    """A mask is a column that no rule may divide by."""

    @cz.block
    def masked(x, w, mask):
        return (x * mask) @ w, L.column_sum(x) @ w

    x, w, mask = torch.randn(6, 4), torch.randn(4, 3), torch.tensor([0.0, 1, 0, 2, 0, 1])[:, None]
    check_program(masked, x, w, mask)
    assert masked(x, w, mask)[1].isfinite().all()
