"""Gradients of every operation and every function of the language.

Each case runs at float64 against autograd of `plain`, against the independent oracle of the case
and against central differences; with no row, one, 127 and 129, and odd column counts. Binary
operations run on every pair of shapes that broadcasts. Ties follow torch function by function.
"""

import itertools
import operator

import pytest
import torch
import torch.nn.functional as F
from case_functions import FUNCTIONS
from case_operations import OPERATIONS
from cases import Case, case
from programs import (
    assert_close,
    assert_same,
    check_against,
    check_direction,
    check_program,
    double_copies,
    gradients_of,
    labelled,
    upstream_of,
)

import cadenza as cz
from cadenza import lang as L
from cadenza.core.ops import Op

CASES = [*OPERATIONS, *FUNCTIONS]
ROWS = (0, 1, 127, 129)
BINARY = {
    "add": (operator.add, torch.add),
    "sub": (operator.sub, torch.sub),
    "mul": (operator.mul, torch.mul),
    "div": (operator.truediv, torch.div),
    "maximum": (L.maximum, torch.maximum),
    "minimum": (L.minimum, torch.minimum),
    "where": (lambda a, b: L.where(a < b, 2.0 * a, b), lambda a, b: torch.where(a < b, 2 * a, b)),
}
SHAPES = ("M 5", "M 1", "1 5", "1 1")


def named(cases: list[Case]) -> list[object]:
    """The cases as parameters with their names."""
    return [pytest.param(c, id=c.name) for c in cases]


def check_case(chosen: Case, row_counts: tuple[int, ...] = ROWS) -> None:
    """The check of this file: against plain, against the oracle, along a direction."""
    program = chosen.program()
    for rows in row_counts:
        operands = chosen.tensors(rows)
        check_against(program, program.plain, operands)
        check_against(program, chosen.expected, operands)
        if rows:
            check_direction(program, operands)


@pytest.mark.parametrize("chosen", named(CASES))
def test_value_and_gradients(chosen):
    check_case(chosen)


def test_every_function_and_operation_has_a_case():
    used = {name for c in CASES for name in c.function.__code__.co_names}
    used |= {c.function.__name__ for c in CASES}
    assert set(L.__all__) <= used, set(L.__all__) - used
    graphs = [c.program().graph(**c.tensors(3)) for c in CASES]
    assert {n.op for g in graphs for n in g.nodes()} == set(Op)


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16], ids=str
)
@pytest.mark.parametrize("chosen", named(CASES))
def test_no_less_accurate_than_torch(chosen, dtype):
    operands = chosen.tensors(129, dtype)
    program, leaves = chosen.program(), double_copies(operands)
    exact = labelled(chosen.expected(**leaves))
    upstream = {name: g.to(dtype) for name, g in upstream_of(exact).items()}
    expected = exact | gradients_of(exact, leaves, upstream)
    results = []
    for function in (program, program.plain):
        given = {n: v.requires_grad_() if v.is_floating_point() else v for n, v in operands.items()}
        outputs = labelled(function(**given))
        incoming = {n: g.to(outputs[n].dtype) for n, g in upstream.items()}
        results.append(outputs | gradients_of(outputs, given, incoming))
    for name, actual in results[0].items():
        assert_close(actual, expected[name], results[1][name].to(actual.dtype))


# --- broadcasting ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("a", "b"), list(itertools.product(SHAPES, SHAPES)))
@pytest.mark.parametrize("name", BINARY)
def test_broadcasting(name, a, b):
    ours, theirs = BINARY[name]
    apart = " apart" if name == "div" else ""
    check_case(
        case(
            name,
            lambda x, a, b: ours(a, b),
            lambda x, a, b: theirs(a, b),
            x="M 5",
            a=a + apart,
            b=b + apart,
        ),
        (1, 127),
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", BINARY)
def test_a_number_on_either_side(name, shape):
    ours, theirs = BINARY[name]
    number, other = torch.tensor(0.6, dtype=torch.float64), shape + " apart"
    right = lambda x, a: ours(a, 0.6), lambda x, a: theirs(a, number)
    left = lambda x, a: ours(0.6, a), lambda x, a: theirs(number, a)
    for pair in (right, left):
        check_case(case(name, *pair, x="M 5", a=other), (127,))


@pytest.mark.parametrize(("a", "b"), [("M 3", "1 3"), ("1 3", "M 3"), ("1 3", "1 3")])
def test_rows_broadcast_side_by_side(a, b):
    def expected(x, a, b):
        rows = torch.broadcast_shapes(a.shape, b.shape)[0]
        return torch.cat([a.expand(rows, 3), b.expand(rows, 3)], 1)

    operands = {"x": "M 5", "a": a, "b": b}
    check_case(case("concat", lambda x, a, b: L.concat(a, b), expected, **operands))
    check_case(case("join", lambda x, a, b: L.join(a, b), expected, **operands))


@pytest.mark.parametrize("shape", ["M 5", "M 1", "1 5", "1 1"])
def test_a_choice_spreads_its_condition(shape):
    check_case(
        case(
            "where",
            lambda x, c, b: L.where(c < 0.3, x, b),
            lambda x, c, b: torch.where(c < 0.3, x, b),
            x="M 5",
            c=shape,
            b="1 5",
        )
    )


def test_an_epilogue_is_checked_like_a_block():
    x, w, rstd = torch.randn(2, 3, 7), torch.randn(10, 7), torch.rand(2, 3, 1)
    program = cz.epilogue(lambda acc, rstd, scale: L.swiglu(acc * rstd) * scale)
    check_program(program, x, w, rstd=rstd, scale=0.7)
    check_program(program, x, w, rstd=rstd[..., :1], scale=-1.0)


# --- ties -----------------------------------------------------------------------------------------

TIES = [
    case("maximum", lambda x, y: L.maximum(x, y), torch.maximum),
    case("minimum", lambda x, y: L.minimum(x, y), torch.minimum),
    case("maximum of one", lambda x: L.maximum(x, x), lambda x: torch.maximum(x, x)),
    case(
        "maximum with 0", lambda x: L.maximum(0.0, x), lambda x: torch.maximum(x, x.new_zeros(()))
    ),
    case("minimum of a row", lambda x, y: L.minimum(x, y), torch.minimum, y="1 7"),
    case("abs", L.abs, torch.abs),
    case("relu", L.relu, F.relu),
    case("relu2", L.relu2, lambda x: F.relu(x) ** 2),
    case("reglu", L.reglu, lambda x: F.relu(x[:, :3]) * x[:, 3:], x="M 6"),
    case("row_max", L.row_max, lambda x: x.max(1, keepdim=True).values),
    case("column_max", L.column_max, lambda x: x.max(0, keepdim=True).values),
    case(
        "group_max",
        lambda x: L.group_max(x, 3),
        lambda x: x.unflatten(1, (3, 3)).max(2).values,
        x="M 9",
    ),
    case(
        "less", lambda x, y: L.where(x < y, 2.0 * x, y), lambda x, y: torch.where(x < y, 2 * x, y)
    ),
    case(
        "at most",
        lambda x, y: L.where(x <= y, 2.0 * x, y),
        lambda x, y: torch.where(x <= y, 2 * x, y),
    ),
]


@pytest.mark.parametrize("chosen", named(TIES))
def test_ties_follow_torch(chosen):
    program = chosen.program()
    for rows in (1, 3, 127):
        operands = {n: torch.randint_like(v, -1, 2) for n, v in chosen.tensors(rows).items()}
        check_against(program, program.plain, operands)
        check_against(program, chosen.expected, operands)


TIED = [
    (L.row_max, [[1.0, 2.0, 2.0], [2.0, 2.0, 2.0]], [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]),
    (L.column_max, [[1.0, 2.0], [1.0, 2.0], [0.0, 2.0]], [[1.0, 1.0], [0.0, 0.0], [0.0, 0.0]]),
    (lambda x: L.group_max(x, 2), [[3.0, 3.0, 0.0, 4.0]], [[1.0, 0.0, 0.0, 1.0]]),
    (lambda x: L.maximum(x, 1.0), [[0.0, 1.0, 2.0]], [[0.0, 0.5, 1.0]]),
    (lambda x: L.minimum(1.0, x), [[0.0, 1.0, 2.0]], [[1.0, 0.5, 0.0]]),
    (L.relu, [[-1.0, 0.0, 1.0]], [[0.0, 0.0, 1.0]]),
    (L.abs, [[-2.0, 0.0, 2.0]], [[-1.0, 0.0, 1.0]]),
]


@pytest.mark.parametrize(("function", "values", "gradient"), TIED)
def test_ties_as_written_down(function, values, gradient):
    x = torch.tensor(values, requires_grad=True)
    cz.block(function)(x).sum().backward()
    assert torch.equal(x.grad, torch.tensor(gradient))


# --- rounding to a dtype --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_cast_rounds_forward_and_lets_gradients_through(dtype):
    x = torch.randn(127, 7, dtype=torch.float64, requires_grad=True)
    program = cz.block(lambda x: L.cast(L.tanh(x), dtype))
    y = program(x)
    assert y.dtype == getattr(torch, dtype)
    assert torch.equal(y, torch.tanh(x).to(y.dtype))
    incoming = torch.randn_like(y)
    (gradient,) = torch.autograd.grad(y, x, incoming)
    slope = 1 - torch.tanh(x.detach()) ** 2
    assert_same({"x": gradient}, {"x": incoming.double() * slope})
