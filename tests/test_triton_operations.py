"""Every operation and every structure in emitted kernels, in Triton's interpreter.

Each has a small program, run over several tiles; a new operation fails until it has an example.
What is compared with the reference back end is also checked for memory: see `triton_plans`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from case_functions import FUNCTIONS
from case_operations import OPERATIONS
from cases import tensor
from triton_plans import (
    SMALL,
    check,
    configured,
    cz_program,
    interpreted,
    outcome,
    quiet,
    spread,
    trials,
    turned,
)

from cadenza import lang as L
from cadenza.backends.random import uniform
from cadenza.core.ops import Op

pytestmark = [interpreted, quiet]
CASES = {case.name: case for case in [*OPERATIONS, *FUNCTIONS]}
WIDE = "M 150"  # two strips of a pointwise kernel, five tiles of a product


class Example(NamedTuple):
    """A program, its operands as in `cases`, and why steps of it are not a template's."""

    function: Callable[..., Any]
    operands: dict[str, str]
    reasons: tuple[str, ...] = ()


def pointwise(function: Callable[..., Any], x: str = "", y: str = "") -> Example:
    """An example of operands without a product."""
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    contents = {"x": x, "y": y}
    return Example(function, {n: f"{WIDE} {contents[n]}".strip() for n in names})


EXAMPLES = {
    Op.INPUT: Example(lambda x, c: (x, c), {"x": "M 7", "c": "M 1"}),
    Op.CONSTANT: pointwise(lambda x: L.where(x < 0.25, 0.5, -1.5)),
    Op.COLUMN_INDEX: pointwise(lambda x: x * L.column_index(x)),
    Op.ROW_INDEX: pointwise(lambda x: x * L.row_index(x)),
    Op.RANDOM: pointwise(lambda x: x * L.random(x, 5)),
    Op.ADD: pointwise(lambda x, y: x + y),
    Op.SUB: pointwise(lambda x, y: x - y),
    Op.MUL: pointwise(lambda x, y: x * y),
    Op.DIV: pointwise(lambda x, y: x / y, y="apart"),
    Op.NEG: pointwise(lambda x: -x),
    Op.POWER: pointwise(lambda x: tuple(x**k for k in range(-3, 5)), "apart"),
    Op.ABS: pointwise(lambda x: L.abs(x)),
    Op.MAXIMUM: pointwise(lambda x, y: L.maximum(x, y)),
    Op.MINIMUM: pointwise(lambda x, y: L.minimum(x, y)),
    Op.EXP: pointwise(L.exp),
    Op.LOG: pointwise(L.log, "positive"),
    Op.SQRT: pointwise(L.sqrt, "positive"),
    Op.RSQRT: pointwise(L.rsqrt, "positive"),
    Op.SIGMOID: pointwise(L.sigmoid),
    Op.TANH: pointwise(L.tanh),
    Op.ERF: pointwise(L.erf),
    Op.COMPARE: pointwise(lambda x, y: (x < y, x <= y, x > y, x >= 0.5, L.where(x != y, x, 0.0))),
    Op.WHERE: pointwise(lambda x, y: L.where(x < y, 2.0 * x, y)),
    Op.CAST: pointwise(lambda x: tuple(L.cast(x, d) for d in ("float32", "float16", "float64"))),
    Op.SPLIT: pointwise(lambda x: L.split(x)[0] * L.split(x)[1] + L.split(x, 5)[1]),
    Op.JOIN: pointwise(lambda x, y: (L.join(x, y), L.join(x, y, 1), L.join(x, y, 3))),
    Op.COLUMNS: pointwise(lambda x: L.columns(x, 3, 140) * L.columns(x, 0, 137)),
    Op.CONCAT: pointwise(lambda x, y: L.concat(x, L.columns(y, 0, 3), y)),
    Op.REPEAT: pointwise(lambda x: L.repeat(x, 3)),
    Op.TILE: pointwise(lambda x: L.tile(x, 3)),
    Op.ROW_SUM: pointwise(lambda x: (L.row_sum(x), x * L.row_sum(x))),
    Op.ROW_MAX: pointwise(lambda x: (L.row_max(x), x * L.row_max(x))),
    Op.ROW_VARIANCE: pointwise(lambda x: (L.row_variance(x), x * L.row_variance(x))),
    Op.LOGSUMEXP: pointwise(lambda x: (L.logsumexp(x), x - L.logsumexp(x))),
    Op.COLUMN_SUM: pointwise(lambda x: L.column_sum(x)),
    Op.COLUMN_MAX: pointwise(lambda x: L.column_max(x)),
    Op.GROUP_SUM: Example(lambda x: (L.group_sum(x, 4), x * L.repeat(L.group_sum(x, 4), 4)),
                          {"x": "M 148"}),
    Op.GROUP_MAX: Example(lambda x: (L.group_max(x, 4), x * L.repeat(L.group_max(x, 4), 4)),
                          {"x": "M 148"}),
    Op.TRANSPOSE: Example(lambda x, w: x * w.T, {"x": "M 70", "w": "70 1"}),
    Op.MATMUL: Example(lambda x, w, v: (L.linear(x, w), x @ v), {"x": "M 20", "w": "70 20",
                                                                 "v": "20 33"}),
}  # fmt: skip

ON_PRODUCTS = {
    "activation": lambda p: L.silu(p) * L.tanh(p) + L.erf(p),
    "number of row and column": lambda p: p * L.column_index(p) - L.row_index(p),
    "halves": lambda p: L.swiglu(p),
    "halves by halves": lambda p: L.join(*(L.split(p)[k] * L.split(p)[1 - k] for k in (0, 1))),
    "interleaved": lambda p: L.join(L.split(p, 1)[1], -L.split(p, 1)[0], 1),
    "pairs at 4": lambda p: L.join(L.split(p, 4)[1], -L.split(p, 4)[0], 4),
    "pairs at 12": lambda p: L.join(L.split(p, 12)[1], -L.split(p, 12)[0], 12),
    "joined": lambda p: L.join(p, 2.0 * p),
    "joined pairs": lambda p: L.join(p, 2.0 * p, 2),
    "some columns": lambda p: L.columns(p, 0, 50) * 2.0,
    "groups": lambda p: p * L.rsqrt(L.repeat(L.group_sum(p * p, 8), 8) + 0.5),
    "groups stored": lambda p: (L.group_sum(p, 4), L.group_max(p, 4)),
    "row sums": lambda p: (p, L.row_sum(p), L.row_max(p)),
    "row moments": lambda p: (p, L.row_variance(p), L.logsumexp(p)),
    "column sums": lambda p: (p, L.column_sum(p), L.column_max(p)),
    "sums of halves": lambda p: (L.row_sum(L.swiglu(p)), L.row_variance(L.swiglu(p)),
                                 L.column_sum(L.swiglu(p)), L.logsumexp(L.swiglu(p))),
    "sums of pairs": lambda p: tuple(f(L.join(L.split(p, 4)[1], p_0(p), 4)) for f in REDUCTIONS),
    "pick": lambda p, t: (L.pick(p, t), L.logsumexp(p, L.pick(p, t))),
}  # fmt: skip
REDUCTIONS = (L.row_sum, L.row_max, L.row_variance, L.logsumexp, L.column_sum, L.column_max)
SPECIAL = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1.0, -2.5, 1e-30, 3e38, 88.0]


def p_0(p: Any) -> Any:
    """The first of each four columns of eight."""
    return L.split(p, 4)[0]


def tensors(example: Example, rows: int) -> dict[str, torch.Tensor]:
    """Random operands of an example."""
    return {n: tensor(text, rows, torch.float32) for n, text in example.operands.items()}


def reasons_of(example: Example, rows: int, backward: bool = False, **options: Any) -> set[str]:
    """Runs an example; why its steps are not those of a template."""
    program, given = cz_program(example.function), tensors(example, rows)
    found = [check(trial, **options) for trial in trials(program, given, backward)]
    return {reason for each in found for reason in each.reasons}


def test_every_operation_has_an_example():
    assert set(EXAMPLES) == set(Op)


@pytest.mark.parametrize("op", EXAMPLES, ids=lambda op: op.label)
def test_operations_in_kernels_without_a_product(op):
    example = EXAMPLES[op]
    given = tensors(example, 37)
    graphs = [t.plan.graph for t in trials(cz_program(example.function), given, False)]
    assert op in {node.op for graph in graphs for node in graph.nodes()}
    assert reasons_of(example, 37) == set(example.reasons)
    reasons_of(example, 1, place=spread)


OTHER_CUT = pytest.param({"BN": 32}, marks=pytest.mark.slow)


@pytest.mark.parametrize("cut", [OTHER_CUT, {"BN": 64, "BK": 32, "parts": 4}])
@pytest.mark.parametrize("name", ON_PRODUCTS)
def test_structures_in_epilogues(name, cut):
    function = ON_PRODUCTS[name]
    operands = {"x": "M 20", "w": "72 20"} | ({"t": "M 1 index 72"} if name == "pick" else {})
    program = (
        (lambda x, w, t: function(L.linear(x, w), t))
        if name == "pick"
        else (lambda x, w: function(L.linear(x, w)))
    )
    assert not reasons_of(Example(program, operands), 19, cut=configured(**cut))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.slow
def test_cases_forward_and_backward(name):
    for trial in trials(CASES[name].program(), CASES[name].tensors(5, torch.float32)):
        check(trial)


def test_infinities_and_nan_go_through():
    x = torch.tensor(SPECIAL).repeat(len(SPECIAL), 1)
    functions = [op.label for op in (Op.EXP, Op.ABS, Op.SQRT, Op.LOG, Op.SIGMOID, Op.TANH, Op.ERF)]

    def special(x, y):
        unary = [getattr(L, name)(x) for name in functions]
        both = [L.maximum(x, y), L.minimum(x, y), x + y, x * y, x < y, x == y, L.where(x < y, x, y)]
        rows = [L.row_max(x), L.row_sum(x), L.logsumexp(x), L.column_max(y), L.row_max(y)]
        return *unary, *both, *rows

    (trial,) = trials(cz_program(special), {"x": x, "y": x.T.contiguous()}, backward=False)
    check(trial)


@pytest.mark.parametrize("held", [False, True])
def test_infinite_rows_have_their_logarithm(held):
    x = torch.randn(5, 300)
    x[0], x[1, 7], x[2, 100], x[3, :290] = -torch.inf, torch.inf, torch.nan, -torch.inf
    function = (lambda x: L.logsumexp(x) + 0.0 * x) if held else L.logsumexp
    (trial,) = trials(cz_program(function), {"x": x}, backward=False)
    check(trial)


@pytest.mark.parametrize("kind", ["strips", "held", "epilogue"])
def test_a_variance_far_from_zero_is_exact(kind):
    x, w = torch.randn(9, 150) + 1e4, torch.eye(150)
    functions = {
        "strips": lambda x, w: L.row_variance(x),
        "held": lambda x, w: (L.row_variance(x), x * L.row_variance(x)),
        "epilogue": lambda x, w: L.row_variance(x @ w),
    }
    program = cz_program(functions[kind])
    (trial,) = trials(program, {"x": x, "w": w}, backward=False)
    found = outcome(trial, configured(BN=32, parts=2)).outputs[0]
    expected = x.double().var(1, correction=0, keepdim=True)
    # The mean of a tile is off by half a unit of rounding, of 1e4 a thousandth.
    assert ((found - expected).abs() < 5e-4 * expected).all()


@pytest.mark.parametrize("seed", [0, -1, 2**32 + 7, -(2**63), 2**63 - 1])
def test_random_numbers_agree_bit_for_bit(seed):
    x = torch.ones(37, 150)
    constant = cz_program(lambda x: x * L.random(x, seed))
    given = cz_program(lambda x, s: x * L.random(x, s))
    for program, operands in ((constant, {}), (given, {"s": torch.tensor([[seed]])})):
        (trial,) = trials(program, {"x": x, **operands}, backward=False)
        (found,) = outcome(trial).outputs
        assert torch.equal(found, uniform(seed, 37, 150, x))


def test_whole_numbers_of_64_bits_are_compared_as_such():
    t = torch.tensor([[3], [2**32 + 3], [-1], [2**40]])
    program = cz_program(lambda x, t: (L.pick(x, t), t == 2**40, L.where(t != 3, x, 0.0)))
    (trial,) = trials(program, {"x": torch.randn(4, 9), "t": t}, backward=False)
    check(trial)


def test_vectors_of_vectors_are_read_from_other_columns():
    def program(x, r, c):
        sums = L.column_sum(x)
        rolled = L.concat(L.columns(sums, 3, 8), L.columns(sums, 0, 3))
        return rolled, L.columns(sums, 2, 6) * L.columns(r, 0, 4), L.repeat(sums, 2) + L.tile(r, 2)

    given = {"x": torch.randn(70, 8), "r": torch.randn(1, 8), "c": torch.randn(70, 1)}
    for trial in trials(cz_program(program), given):
        check(trial)


@pytest.mark.parametrize("place", [turned, spread])
def test_operands_of_products_lie_in_any_way(place):
    program = cz_program(lambda x, w, y: L.silu(L.linear(x, w) + y))
    given = {"x": torch.randn(37, 20), "w": torch.randn(33, 20), "y": torch.randn(37, 33)}
    for trial in trials(program, given):
        check(trial, place=place)


def test_matrices_of_many_rows_leave_a_partial_a_program():
    (trial,) = trials(cz_program(lambda x: (L.column_sum(x), L.column_max(x))),
                      {"x": torch.randn(1300, 9)}, backward=False)  # fmt: skip
    check(trial, cut=SMALL)


def test_constants_are_outputs():
    def program(x, w):
        return x**0, L.row_sum(x**0), L.column_sum(x) ** 0, (x @ w) ** 0, L.row_sum(w) ** 0

    given = {"x": torch.randn(37, 9), "w": torch.randn(9, 40)}
    for trial in trials(cz_program(program), given):
        check(trial)
