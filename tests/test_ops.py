"""The closed set: every operation has a row in every table, and its type rule does what it says.

The tables are the meaning, the plain form, the derivatives, the printed form and the cases of the
tests; removing any row is found. Types are shown by example, accepted and refused. Last, where a
program rounds: once, at what is stored.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from case_functions import FUNCTIONS
from case_operations import OPERATIONS
from programs import check_digest, check_round_trip, check_rounding, double_copies

import cadenza as cz
from cadenza import lang as L
from cadenza.backends.meaning import LEAVES, MEANING, PLAIN
from cadenza.core.ops import BOOLEAN, INTEGER, MANY, Op, Type, TypeRuleError
from cadenza.core.vjp import DERIVATIVES

CASES = {case.name: case for case in [*OPERATIONS, *FUNCTIONS]}
NEVER_RUN = {Op.INPUT}  # what a call hands over
NOT_PLAIN = NEVER_RUN | {Op.CONSTANT}  # a number of Python
Table = Mapping[Op, Any]


def examples() -> dict[Op, str]:
    """For each operation the name of a case that uses it."""
    found = {}
    for name, case in CASES.items():
        found |= {node.op: name for node in case.program().graph(**case.tensors(3)).nodes()}
    return found


def table_faults(
    meaning: Table, leaves: Table, plain: Table, derivatives: Table, cases: Table
) -> list[str]:
    """One line for each row that is missing from a table or does not fit its operation."""
    faults = []
    for op in Op:
        if op not in NEVER_RUN and (op in meaning) == (op in leaves):
            faults.append(f"{op.label} has no meaning, or two")
        if op not in NOT_PLAIN and op not in plain:
            faults.append(f"{op.label} has no plain form")
        if op not in derivatives:
            faults.append(f"{op.label} has no row of derivatives")
        elif op.arity != MANY and len(derivatives[op]) != op.arity:
            faults.append(f"{op.label} has {len(derivatives[op])} derivatives of {op.arity}")
        if op not in cases:
            faults.append(f"{op.label} has no case")
        if op in meaning:
            faults += calling_faults(op, meaning[op])
        faults += [f for row in derivatives.get(op, ()) if row for f in row_faults(op, row)]
    return faults


def calling_faults(op: Op, function: Any) -> list[str]:
    """Whether a meaning takes as many values as the operation has, and its attributes."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # a function in C that tells nothing of itself
        return []
    try:
        signature.bind(*range(max(op.arity, 1)), **dict.fromkeys(op.attributes))
    except TypeError as error:
        return [f"the meaning of {op.label}: {error}"]
    return []


def row_faults(op: Op, row: Any) -> list[str]:
    """Whether a derivative takes the adjoint, the result and every argument."""
    try:
        inspect.signature(row).bind(*range(2 + max(op.arity, 1)))
    except TypeError as error:
        return [f"a derivative of {op.label}: {error}"]
    return []


TABLES = {
    "meaning": MEANING,
    "leaves": LEAVES,
    "plain": PLAIN,
    "derivatives": DERIVATIVES,
    "cases": examples(),
}


def test_every_operation_has_a_row_in_every_table():
    assert table_faults(**TABLES) == []
    assert not set(MEANING) & set(LEAVES)


@pytest.mark.parametrize("name", TABLES)
def test_a_missing_row_is_found(name):
    for op in TABLES[name]:
        broken = {k: v for k, v in TABLES[name].items() if k is not op}
        faults = table_faults(**{**TABLES, name: broken})
        inherited = name == "plain" and op in NOT_PLAIN
        assert any(fault.startswith(op.label) for fault in faults) or inherited, op


def test_a_row_that_does_not_fit_is_found():
    wrong = {
        "derivatives": DERIVATIVES | {Op.TANH: (None, None)},
        "meaning": MEANING | {Op.CAST: lambda x: x},
    }
    for name, table in wrong.items():
        assert len(table_faults(**{**TABLES, name: table})) == 1
    narrow = DERIVATIVES | {Op.TANH: (lambda g, y: g,)}
    assert len(table_faults(**{**TABLES, "derivatives": narrow})) == 1


@pytest.mark.parametrize("op", Op, ids=lambda op: op.label)
def test_labels_groups_and_attributes(op):
    assert op.group in ("leaf", "elementwise", "columns", "reduction", "vector", "product")
    assert op.label.isidentifier()
    assert len(set(op.attributes)) == len(op.attributes)


# --- printed form ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_print_then_parse_is_the_identity(name):
    program, operands = CASES[name].program(), double_copies(CASES[name].tensors(3))
    for graph in (program.graph(**operands), program.backward_graph(**operands)):
        check_round_trip(graph)
        check_digest(graph)


# --- types ----------------------------------------------------------------------------------------

X, COLUMN, ROW, SCALAR, WEIGHT = (Type(*s) for s in (("M", 6), ("M", 1), (1, 6), (1, 1), (4, 6)))
MASK, INDEX = Type("M", 6, BOOLEAN), Type("M", 1, INTEGER)
FLAT = {"rows": 1, "columns": 1}
PLAIN_PRODUCT = {"transpose_a": False, "transpose_b": False}
BINARY = (Op.ADD, Op.SUB, Op.MUL, Op.DIV, Op.MAXIMUM, Op.MINIMUM)
UNARY = (Op.NEG, Op.ABS, Op.EXP, Op.LOG, Op.SQRT, Op.RSQRT, Op.SIGMOID, Op.TANH, Op.ERF)

ACCEPTED = [
    (Op.INPUT, (), {"name": "x", "dtype": "int64", "kind": INTEGER} | FLAT, Type(1, 1, INTEGER)),
    (Op.CONSTANT, (), {"value": 0.5, "rows": "M", "columns": 6}, X),
    (Op.CONSTANT, (), {"value": 7} | FLAT, Type(1, 1, INTEGER)),
    (Op.COLUMN_INDEX, (), {"rows": 1, "columns": 6}, Type(1, 6, INTEGER)),
    (Op.ROW_INDEX, (), {"rows": "M", "columns": 1}, INDEX),
    (Op.RANDOM, (Type(1, 1, INTEGER),), {"rows": "M", "columns": 6}, X),
    *[(op, pair, {}, X) for op in BINARY
      for pair in ((X, X), (X, ROW), (COLUMN, X), (COLUMN, ROW))],
    *[(op, (SCALAR, COLUMN), {}, COLUMN) for op in BINARY],
    *[(op, (v,), {}, v) for op in UNARY for v in (X, COLUMN, ROW, SCALAR, WEIGHT)],
    (Op.ADD, (INDEX, X), {}, X),
    (Op.POWER, (X,), {"exponent": -3}, X),
    (Op.COMPARE, (X, COLUMN), {"relation": "<="}, MASK),
    (Op.WHERE, (MASK, COLUMN, ROW), {}, X),
    (Op.WHERE, (Type("M", 1, BOOLEAN), ROW, SCALAR), {}, X),
    (Op.CAST, (X,), {"dtype": "float8_e4m3fn"}, X),
    (Op.SPLIT, (X,), {"part": 1, "inner": 3}, Type("M", 3)),
    (Op.SPLIT, (X,), {"part": 0, "inner": 1}, Type("M", 3)),
    (Op.JOIN, (X, ROW), {"inner": 2}, Type("M", 12)),
    (Op.COLUMNS, (X,), {"start": 0, "stop": 6}, X),
    (Op.COLUMNS, (X,), {"start": 5, "stop": 6}, COLUMN),
    (Op.CONCAT, (X, COLUMN, ROW), {}, Type("M", 13)),
    (Op.CONCAT, (WEIGHT,), {}, WEIGHT),
    (Op.REPEAT, (X,), {"times": 2}, Type("M", 12)),
    (Op.TILE, (ROW,), {"times": 3}, Type(1, 18)),
    *[(op, (X,), {}, COLUMN) for op in (Op.ROW_SUM, Op.ROW_MAX, Op.ROW_VARIANCE)],
    *[(Op.LOGSUMEXP, (X, shift), {}, COLUMN) for shift in (COLUMN, SCALAR)],
    *[(op, (X,), {}, ROW) for op in (Op.COLUMN_SUM, Op.COLUMN_MAX)],
    *[(op, (X,), {"size": 3}, Type("M", 2)) for op in (Op.GROUP_SUM, Op.GROUP_MAX)],
    (Op.TRANSPOSE, (ROW,), {}, Type(6, 1)),
    (Op.TRANSPOSE, (Type(4, 1),), {}, Type(1, 4)),
    (Op.MATMUL, (X, WEIGHT), PLAIN_PRODUCT | {"transpose_b": True}, Type("M", 4)),
    (Op.MATMUL, (X, X), PLAIN_PRODUCT | {"transpose_a": True}, Type(6, 6)),
    (Op.MATMUL, (X, Type(6, 1)), PLAIN_PRODUCT, COLUMN),
]  # fmt: skip

REFUSED = [
    *[(op, (X, Type("M", 5)), {}, "6 and 5") for op in BINARY],
    *[(op, (X, Type(3, 6)), {}, "M and 3") for op in BINARY],
    *[(op, (X,), {}, "1 values") for op in BINARY],
    *[(op, (X, X), {}, "2 values") for op in UNARY],
    (Op.CONCAT, (), {}, "0 values"),
    (Op.CONCAT, (X, WEIGHT), {}, "M and 4"),
    (Op.POWER, (X,), {"exponent": 0.5}, "exponent 0.5"),
    (Op.POWER, (X,), {"exponent": True}, "exponent True"),
    (Op.COMPARE, (X, X), {"relation": ">"}, "'>'"),
    (Op.COMPARE, (X, Type("M", 5)), {"relation": "<"}, "6 and 5"),
    (Op.WHERE, (X, X, X), {}, "real condition"),
    (Op.WHERE, (INDEX, X, X), {}, "integer condition"),
    (Op.WHERE, (MASK, X, Type("M", 5)), {}, "6 and 5"),
    (Op.CAST, (X,), {"dtype": "float31"}, "'float31'"),
    (Op.CAST, (X,), {"dtype": "int64"}, "'int64'"),
    (Op.RANDOM, (SCALAR,), {"rows": "M", "columns": 6}, "real seed"),
    (Op.RANDOM, (INDEX,), {"rows": "M", "columns": 6}, "[M, 1]"),
    *[(Op.SPLIT, (X,), {"part": 0, "inner": n}, f"inner={n!r}") for n in (0, -1, 2, 6, 1.5, None)],
    (Op.SPLIT, (X,), {"part": 2, "inner": 3}, "part 2"),
    (Op.SPLIT, (Type(1, "M"),), {"part": 0, "inner": 3}, "size M"),
    (Op.JOIN, (X, Type("M", 5)), {"inner": 1}, "[M, 5]"),
    (Op.JOIN, (X, WEIGHT), {"inner": 6}, "M and 4"),
    *[(Op.JOIN, (X, X), {"inner": n}, f"inner={n!r}") for n in (0, 4, 12, 0.5)],
    *[(Op.COLUMNS, (X,), {"start": a, "stop": b}, f"range {a}:{b}")
      for a, b in ((-1, 3), (0, 7), (3, 3), (4, 2), (0.0, 3), (0, 3.0))],
    *[(op, (X,), {"times": n}, f"times={n!r}")
      for op in (Op.REPEAT, Op.TILE) for n in (0, -1, 1.5, None)],
    *[(op, (X,), {"size": n}, f"groups of {n!r}")
      for op in (Op.GROUP_SUM, Op.GROUP_MAX) for n in (0, 4, 12, -2, 1.5)],
    (Op.LOGSUMEXP, (X, ROW), {}, "[1, 6]"),
    (Op.LOGSUMEXP, (X, Type(3, 1)), {}, "M and 3"),
    (Op.TRANSPOSE, (X,), {}, "a matrix [M, 6]"),
    (Op.TRANSPOSE, (COLUMN,), {}, "size M"),
    (Op.MATMUL, (X, WEIGHT), PLAIN_PRODUCT, "[M, 6] @ [4, 6]"),
    (Op.MATMUL, (X, X), PLAIN_PRODUCT, "[M, 6] @ [M, 6]"),
    (Op.MATMUL, (WEIGHT, X), PLAIN_PRODUCT | {"transpose_b": True}, "size M"),
]  # fmt: skip


@pytest.mark.parametrize(("op", "types", "attributes", "expected"), ACCEPTED)
def test_accepted_types(op, types, attributes, expected):
    assert op.infer(types, attributes) == expected
    assert tuple(attributes) == op.attributes or set(attributes) == set(op.attributes)


@pytest.mark.parametrize(("op", "types", "attributes", "found"), REFUSED)
def test_refused_types(op, types, attributes, found):
    with pytest.raises(TypeRuleError) as error:
        op.infer(types, attributes)
    assert found in error.value.found
    assert error.value.expected


def test_every_operation_is_accepted_somewhere():
    assert {op for op, *_ in ACCEPTED} == set(Op)
    shown = {op for op, *_ in REFUSED}
    leaves_and_total = {Op.INPUT, Op.CONSTANT, Op.COLUMN_INDEX, Op.ROW_INDEX}
    total = {op for op in Op if op.arity == 1 and not op.attributes} - {Op.TRANSPOSE}
    assert set(Op) - shown <= leaves_and_total | total


# --- rounding -------------------------------------------------------------------------------------


def stored(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Numbers of the compute type after one rounding."""
    return value.to(dtype).to(value.dtype)


# A program over x, y [M, 6] and w [4, 6], and the same in the compute type, given the dtype.
ROUNDED = {
    "an output, once": (lambda x, y, w: (x * y) * x, lambda x, y, w, d: (x * y) * x),
    "a computed operand of a product": (
        lambda x, y, w: L.linear(x * y, w),
        lambda x, y, w, d: stored(x * y, d) @ w.T,
    ),
    "no accumulator": (lambda x, y, w: L.linear(x, w) / 3.0, lambda x, y, w, d: x @ w.T / 3.0),
    "no statistic": (
        lambda x, y, w: x * L.row_sum(x * y),
        lambda x, y, w, d: x * (x * y).sum(1, keepdim=True),
    ),
    "a cast": (
        lambda x, y, w: L.cast(x * y, "bfloat16") * y,
        lambda x, y, w, d: stored(x * y, torch.bfloat16) * y,
    ),
    "what is stored on purpose": (
        lambda x, y, w: L.stored(L.linear(x, w)) / 3.0,
        lambda x, y, w, d: stored(x @ w.T, d) / 3.0,
    ),
    "both operands": (
        lambda x, y, w: L.matmul(x * y, x - y, transpose_a=True),
        lambda x, y, w, d: stored(x * y, d).T @ stored(x - y, d),
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", ROUNDED)
def test_where_a_program_rounds(name, dtype):
    program, expected = ROUNDED[name]
    check_rounding(cz.block(program, shapes={"x": "M 6", "y": "M 6", "w": "4 6"}), expected, dtype)
