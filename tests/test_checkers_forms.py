"""The checks of text and of running are checked: each fault planted here makes one of them raise.

A printed form that leaves something out; an executor that is slightly wrong, swaps operands or
rounds elsewhere; results that are less accurate than torch's.
"""

import random
from types import SimpleNamespace

import pytest
import torch
from cases import case
from planted import (
    REFUSED,
    ROWS,
    against_oracle,
    against_plain,
    fails,
    forget,
    using,
)
from programs import assert_close, check_digest, check_round_trip, check_rounding
from random_programs import LIMIT, written
from test_ops import ROUNDED
from test_random_programs import check_exact

import cadenza as cz
from cadenza.backends import reference
from cadenza.backends.meaning import LEAVES, MEANING
from cadenza.backends.steps import Steps
from cadenza.core import lang as L
from cadenza.core import text
from cadenza.core.ir import Graph
from cadenza.core.ops import Op


@pytest.fixture(autouse=True)
def nothing_compiled(monkeypatch):
    """Programs compiled elsewhere, without a fault, are out of reach."""
    forget(monkeypatch)


# --- printed form ---------------------------------------------------------------------------------

PRINTED = [
    pytest.param(op, name, id=f"{op.label}-{name}")
    for op in Op
    for name in op.attributes
    if op is not Op.INPUT
]
FIXED = {"relation": "<", "exponent": 2, "value": 0.5, "rows": 1, "columns": 1}


@pytest.mark.parametrize(("op", "name"), PRINTED)
def test_a_printed_form_without_an_attribute(monkeypatch, op, name):
    original = text.expression

    def forgetful(node, inputs):
        if node.op is not op:
            return original(node, inputs)
        attributes = node.attributes | {name: FIXED.get(name, 0)}
        shape = attributes if op is Op.CONSTANT else node.type._asdict()
        kind = node.type._replace(rows=shape["rows"], columns=shape["columns"])
        blind = SimpleNamespace(op=op, inputs=node.inputs, attributes=attributes, type=kind)
        return original(blind, inputs)

    chosen = constants() if op is Op.CONSTANT else using(op).program().graph(
        **using(op).tensors(ROWS)
    )  # fmt: skip
    check_digest(chosen)
    monkeypatch.setattr(text, "expression", forgetful)
    with pytest.raises(AssertionError):
        check_digest(chosen)


def constants() -> Graph:
    """A backward program with a matrix of ones times something."""
    x = torch.ones(ROWS, 7, dtype=torch.float64, requires_grad=True)
    return cz.block(lambda x: L.row_sum(L.row_sum(x) * 0.1)).backward_graph(x)


class NamelessPrinter(text._Printer):
    """Calls every input x."""

    def __init__(self, graph, names):
        super().__init__(graph, names)
        self.texts = dict.fromkeys(graph.inputs, text.Text("x"))


@pytest.mark.parametrize("part", ["dtype", "rows", "columns", "name"])
def test_a_header_without_a_part(monkeypatch, part):
    graph = using(Op.TANH).program().graph(**using(Op.TANH).tensors(ROWS))
    check_digest(graph)
    if part == "name":
        monkeypatch.setattr(text, "_Printer", NamelessPrinter)
    else:
        keys = {"dtype": "float32", "rows": 1, "columns": 1}
        monkeypatch.setattr(
            text,
            "_annotation",
            lambda node: "{dtype}[{rows}, {columns}]".format(
                **node.type._asdict() | {"dtype": node.attributes["dtype"]} | {part: keys[part]}
            ),
        )
    with pytest.raises(AssertionError):
        check_digest(graph)


@pytest.mark.parametrize(("op", "wrong"), [(Op.SUB, ("+", 1)), (Op.DIV, ("*", 2))])
def test_a_printed_form_with_another_operator(monkeypatch, op, wrong):
    graph = using(op).program().graph(**using(op).tensors(ROWS))
    check_round_trip(graph)
    monkeypatch.setitem(text.INFIX, op, wrong)
    with pytest.raises(AssertionError):
        check_round_trip(graph)


def test_a_printed_form_without_parentheses(monkeypatch):
    x = torch.ones(ROWS, 7)
    graph = cz.block(lambda x: (x - (x - 1.0)) * x).graph(x)
    check_round_trip(graph)
    monkeypatch.setattr(text.Text, "within", lambda self, binding: self.text)
    with pytest.raises(AssertionError):
        check_round_trip(graph)


# --- executor -------------------------------------------------------------------------------------


def slightly_wrong(function):
    """The result times 1.001, or the opposite of a condition."""

    def wrong(*values, **attributes):
        result = function(*values, **attributes)
        return ~result if result.dtype == torch.bool else result * 1.001 + 0.001

    return wrong


@pytest.mark.parametrize("op", MEANING, ids=lambda op: op.label)
def test_an_operation_slightly_wrong(monkeypatch, op):
    monkeypatch.setattr(reference, "TILE", None)  # partials have a meaning of their own
    forget(monkeypatch)
    monkeypatch.setitem(MEANING, op, slightly_wrong(MEANING[op]))
    for check in (against_plain, against_oracle):
        with pytest.raises(AssertionError):
            check(using(op))


@pytest.mark.parametrize("op", LEAVES, ids=lambda op: op.label)
def test_a_leaf_slightly_wrong(monkeypatch, op):
    monkeypatch.setitem(LEAVES, op, slightly_wrong(LEAVES[op]))
    chosen = case("columns", lambda x: L.columns(x, 0, 5), lambda x: x[:, :5])
    for check in (against_plain, against_oracle):
        with pytest.raises(AssertionError):
            check(chosen if op is Op.CONSTANT else using(op))


@pytest.mark.parametrize(
    "op", [Op.SUB, Op.DIV, Op.COMPARE, Op.WHERE, Op.JOIN, Op.CONCAT], ids=lambda op: op.label
)
def test_swapped_operands(monkeypatch, op):
    original = MEANING[op]

    def swapped(*values, **attributes):
        *first, a, b = values
        return original(*first, b, a, **attributes)

    monkeypatch.setitem(MEANING, op, swapped)
    for check in (against_plain, against_oracle):
        with pytest.raises(REFUSED):
            check(using(op))


@pytest.mark.parametrize("op", [Op.SUB, Op.MAXIMUM, Op.MATMUL])
def test_random_whole_numbers_find_one_unit(monkeypatch, op):
    numbers = random.Random(2)
    codes = [[[numbers.randrange(LIMIT) for _ in range(9)] for _ in range(8)] for _ in range(60)]
    recipes = [written(instructions, 4, 3, whole=True) for instructions in codes]
    assert not any(fails(check_exact, r) for r in recipes[:20])
    original = MEANING[op]
    forget(monkeypatch)
    monkeypatch.setitem(MEANING, op, lambda *v, **attributes: original(*v, **attributes) + 1)
    assert any(fails(check_exact, r) for r in recipes)


# --- rounding -------------------------------------------------------------------------------------


def check_all_rounding(dtype=torch.bfloat16) -> None:
    """The check of test_ops."""
    for program, expected in ROUNDED.values():
        shapes = {"x": "M 6", "y": "M 6", "w": "4 6"}
        check_rounding(cz.block(program, shapes=shapes), expected, dtype)


def test_an_executor_that_does_not_round(monkeypatch):
    check_all_rounding()
    monkeypatch.setattr(reference, "stored_as", lambda value, dtype: value)
    forget(monkeypatch)
    with pytest.raises(AssertionError):
        check_all_rounding()


def test_an_executor_that_rounds_everything(monkeypatch):
    original = Steps.step

    def rounded(self, node):
        step = original(self, node)

        def rounding_step(values, rows):
            value = step(values, rows)
            return value.bfloat16().to(value.dtype) if isinstance(value, torch.Tensor) else value

        return rounding_step

    monkeypatch.setattr(Steps, "step", rounded)
    forget(monkeypatch)
    with pytest.raises(AssertionError):
        check_all_rounding()


def test_a_cast_that_does_not_round(monkeypatch):
    monkeypatch.setitem(MEANING, Op.CAST, lambda x, dtype: x)
    with pytest.raises(AssertionError):
        check_all_rounding()


def test_the_tolerance_of_close():
    exact = torch.randn(100, 100, dtype=torch.float64)
    rounded = exact.bfloat16()
    assert_close(rounded, exact, rounded)
    assert_close(exact.float(), exact, exact.float())
    for wrong in (rounded * 1.02, rounded.float().add(0.02).bfloat16(), rounded.roll(1)):
        with pytest.raises(AssertionError):
            assert_close(wrong, exact, rounded)
    broken = rounded.clone()
    broken[0, 0] = torch.nan
    for wrong in (broken, rounded.float(), rounded[:1]):
        with pytest.raises(AssertionError):
            assert_close(wrong, exact, rounded)
