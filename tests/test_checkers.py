"""The checks of gradients are checked: each fault planted here makes one of them raise.

A derivative off by 0.1 % or missing, for each argument of each operation, seen by every check and
by the random programs; broadcasting undone wrongly; gradients that depend on which are asked for.
Nothing planted may pass, and nothing sound may be refused.
"""

import functools

import pytest
import torch
from cases import Case, case
from planted import (
    GRADIENT_CHECKS,
    REFUSED,
    depends,
    fails,
    forget,
    random_recipes,
    shortest,
    using,
)
from random_programs import Recipe
from test_random_programs import check_recipe, check_subset

from cadenza.core import lang as L
from cadenza.core import vjp
from cadenza.core.ops import Op
from cadenza.core.vjp import DERIVATIVES


@pytest.fixture(autouse=True)
def nothing_compiled(monkeypatch):
    """Programs compiled elsewhere, without a fault, are out of reach."""
    forget(monkeypatch)


ARGUMENTS = [
    pytest.param(op, position, id=f"{op.label}-{position}")
    for op, rows in DERIVATIVES.items()
    for position, row in enumerate(rows)
    if row is not None
]


# --- derivatives ----------------------------------------------------------------------------------


def replace_row(monkeypatch, op, position, row):
    """Puts another derivative into the table."""
    rows = list(DERIVATIVES[op])
    rows[position] = row
    monkeypatch.setitem(DERIVATIVES, op, tuple(rows))


@pytest.mark.parametrize("check", GRADIENT_CHECKS)
@pytest.mark.parametrize(("op", "position"), ARGUMENTS)
def test_a_derivative_off_by_a_thousandth(monkeypatch, op, position, check):
    chosen, row = shortest(op, position), DERIVATIVES[op][position]
    check(chosen)
    replace_row(monkeypatch, op, position, lambda *values: 1.001 * row(*values))
    with pytest.raises(AssertionError):
        check(chosen)


@pytest.mark.parametrize("check", GRADIENT_CHECKS)
@pytest.mark.parametrize(("op", "position"), ARGUMENTS)
def test_a_missing_derivative(monkeypatch, op, position, check):
    chosen = beside_another_way(shortest(op, position))
    check(chosen)
    replace_row(monkeypatch, op, position, None)
    with pytest.raises(AssertionError):
        check(chosen)


def beside_another_way(chosen: Case) -> Case:
    """The case with another output, through which the first operand has a gradient in any case."""

    def with_first(function):
        @functools.wraps(chosen.function)
        def both(**operands):
            returned = function(**operands)
            first = next(iter(operands.values()))
            return (*(returned if isinstance(returned, tuple) else (returned,)), 2.0 * first)

        return both

    positional = with_first(chosen.expected)
    names = tuple(chosen.operands)
    return chosen._replace(
        function=with_first(chosen.function),
        oracle=lambda *values: positional(**dict(zip(names, values, strict=True))),
    )


@pytest.mark.parametrize("check", GRADIENT_CHECKS)
def test_a_part_of_a_concatenation_off_by_a_thousandth(monkeypatch, check):
    original = vjp._part_of_concat

    def wrong(position):
        return lambda *values: 1.001 * original(position)(*values)

    monkeypatch.setattr(vjp, "_part_of_concat", wrong)
    with pytest.raises(AssertionError):
        check(using(Op.CONCAT))


@pytest.mark.parametrize(("op", "position"), ARGUMENTS)
@pytest.mark.slow
def test_random_programs_find_a_derivative_off_by_a_thousandth(monkeypatch, op, position):
    row = DERIVATIVES[op][position]
    replace_row(monkeypatch, op, position, lambda *values: 1.001 * row(*values))
    assert any(fails(check_recipe, r) for r, g in random_recipes() if depends(g, op, position))


# --- broadcasting ---------------------------------------------------------------------------------

SPREAD = {
    "column": case("column", lambda x, c: x * c, lambda x, c: x * c, c="M 1"),
    "row": case("row", lambda x, r: x * r, lambda x, r: x * r, r="1 7"),
    "scalar": case("scalar", lambda x, s: x * s, lambda x, s: x * s, s="1 1"),
    "one number a row": case(
        "one a row", lambda x, c: L.row_sum(x + c), lambda x, c: (x + c).sum(1, True), c="M 1"
    ),
    "rows of a join": case(
        "rows of a join", lambda x, r: L.join(x, r), lambda x, r: torch.hstack([x, r + 0 * x]),
        r="1 7",
    ),
}  # fmt: skip
WRONG_AXIS = {
    "column": lambda g: L.row_sum(L.column_sum(g)),
    "row": lambda g: L.column_sum(L.row_sum(g)),
    "scalar": lambda g: L.column_max(L.row_sum(g)),
}


@pytest.mark.parametrize("name", SPREAD)
def test_broadcasting_undone_rightly(name):
    for check in GRADIENT_CHECKS:
        check(SPREAD[name])


@pytest.mark.parametrize("check", GRADIENT_CHECKS)
@pytest.mark.parametrize("name", SPREAD)
def test_broadcasting_not_undone(monkeypatch, name, check):
    monkeypatch.setattr(vjp, "unbroadcast", lambda g, full, shape: g)
    with pytest.raises(REFUSED):
        check(SPREAD[name])


@pytest.mark.parametrize("check", GRADIENT_CHECKS)
@pytest.mark.parametrize("name", WRONG_AXIS)
def test_a_sum_over_the_wrong_axis(monkeypatch, name, check):
    def unbroadcast(g, full, shape):
        return g if full[:2] == shape[:2] else WRONG_AXIS[name](g)

    monkeypatch.setattr(vjp, "unbroadcast", unbroadcast)
    with pytest.raises(AssertionError):
        check(SPREAD[name])


@pytest.mark.parametrize("check", GRADIENT_CHECKS)
def test_columns_that_an_adjoint_stands_for_are_forgotten(monkeypatch, check):
    original = vjp.unbroadcast

    def unbroadcast(g, full, shape):
        return g if g.type.columns == shape.columns == 1 else original(g, full, shape)

    monkeypatch.setattr(vjp, "unbroadcast", unbroadcast)
    with pytest.raises(AssertionError):
        check(SPREAD["one number a row"])


def test_a_gradient_that_depends_on_what_is_asked_for(monkeypatch):
    recipe = Recipe({"x": "M 4 unit", "y": "M 4 unit"}, ["v0 = L.tanh(x) * y"], "v0", 3, True)
    check_subset(recipe, ["x"])
    original = vjp._needed

    def needed(order, wanted):
        if len(wanted) == 1:
            tanh = DERIVATIVES[Op.TANH][0]
            replace_row(monkeypatch, Op.TANH, 0, lambda *values: 1.001 * tanh(*values))
        return original(order, wanted)

    monkeypatch.setattr(vjp, "_needed", needed)
    with pytest.raises(AssertionError):
        check_subset(recipe, ["x"])
