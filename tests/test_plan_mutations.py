"""Plans are held tightly: every fault planted in one is noticed.

In the plans of all built-in blocks a store, a load, a vector, a step or a partial is left out, the
operands of a product are swapped, a coefficient is changed by a thousandth, kernels change places.
Each time the verifier or the executor refuses, or values differ from those of the sound plan.
"""

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from planned import adjoints_of, call

from cadenza.backends.reference import Executable
from cadenza.core.errors import CadenzaError
from cadenza.core.ir import Node
from cadenza.core.ops import Op, TypeRuleError
from cadenza.core.plan import Kernel, Plan, verify_plan
from cadenza.library.blocks import BUILT_IN

pytestmark = pytest.mark.slow

Tensor = torch.Tensor
ROWS, TILE = 5, 3
REFUSED = (CadenzaError, KeyError, RuntimeError, TypeRuleError)
FIELDS = ("stores", "loads", "vectors", "reductions", "body")
both = pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
each = pytest.mark.parametrize("name", sorted(BUILT_IN))


class Sound(NamedTuple):
    """A plan as it should be, its inputs, and what it returns."""

    plan: Plan
    tensors: list[Tensor]
    results: list[Tensor]


@functools.cache
def sound(name: str, backward: bool) -> Sound:
    torch.manual_seed(0)
    made = call(name, ROWS)
    if name == "lm-head":
        made.tensors["target"][1] = -1  # NaN for its row; or its condition would always hold
    pair = made.pair()
    inputs = [made.tensors[i.attributes["name"]] for i in pair.forward.inputs]
    results = Executable(pair.forward_plan, TILE)(inputs, ROWS)
    if not backward:
        return Sound(pair.forward_plan, inputs, results)
    upstream = adjoints_of(pair.program, ROWS)
    given = [results[v] if isinstance(v, int) else made.tensors[v] for v in pair.values]
    given += [upstream[p] for p in pair.adjoints]
    return Sound(pair.backward_plan, given, Executable(pair.backward_plan, TILE)(given, ROWS))


def verdict(plan: Plan, case: Sound) -> str:
    """Who notices: the verifier, the executor, the values, or nobody ("")."""
    try:
        verify_plan(plan)
    except REFUSED:
        return "verifier"
    try:
        results = Executable(plan, TILE)(case.tensors, ROWS)
    except REFUSED:
        return "executor"
    close = all(
        a.shape == b.shape and torch.allclose(a, b, rtol=1e-10, atol=1e-12, equal_nan=True)
        for a, b in zip(results, case.results, strict=True)
    )
    return "" if close else "values"


def changed(plan: Plan, position: int, **fields: Any) -> Plan:
    """The plan with one kernel changed."""
    kernels = list(plan.kernels)
    kernels[position] = replace(kernels[position], **fields)
    return replace(plan, kernels=tuple(kernels))


@each
@both
def test_sound_plans_pass(name, backward):
    case = sound(name, backward)
    assert verdict(case.plan, case) == ""


@each
@both
@pytest.mark.parametrize("field", FIELDS)
def test_leaving_something_out_is_noticed(name, backward, field):
    case = sound(name, backward)
    for position, kernel in enumerate(case.plan.kernels):
        values = getattr(kernel, field)
        for place, value in enumerate(values):
            if field == "reductions" and finishes_for_itself(case.plan, kernel, value):
                continue
            kept = values[:place] + values[place + 1 :]
            found = verdict(changed(case.plan, position, **{field: kept}), case)
            assert found, f"kernel {position + 1} without {value!r} in its {field}"


def finishes_for_itself(plan: Plan, kernel: Kernel, reduction: Node) -> bool:
    """Whether a kernel that holds rows has finished a reduction that nothing else reads."""
    read = {v for other in plan.kernels for v in all_of(other.vectors)}
    crosses = reduction in read | all_of(plan.graph.outputs)
    return reduction in set(kernel.body) and not crosses


def all_of(vectors: Iterable[Node]) -> set[Node]:
    """Vectors and the vectors that they are made of."""
    found, pending = set[Node](), list(vectors)
    while pending:
        vector = pending.pop()
        found.add(vector)
        pending.extend(i for i in vector.inputs if not i.type.is_matrix)
    return found


@each
@both
def test_leaving_a_kernel_out_is_noticed(name, backward):
    case = sound(name, backward)
    for position in range(len(case.plan.kernels)):
        kept = case.plan.kernels[:position] + case.plan.kernels[position + 1 :]
        assert verdict(replace(case.plan, kernels=kept), case), f"without kernel {position + 1}"


@contextmanager
def altered(node: Node, **fields: Any) -> Iterator[None]:
    """A value with other inputs or attributes for a while."""
    before = {field: getattr(node, field) for field in fields}
    for field, value in fields.items():
        setattr(node, field, value)
    try:
        yield
    finally:
        for field, value in before.items():
            setattr(node, field, value)


def swapped(node: Node) -> dict[str, Any]:
    """The operands of a product in the other order, each transposed as it was."""
    turned = {f"transpose_{k}": node.attributes[f"transpose_{o}"] for k, o in ("ab", "ba")}
    return {"inputs": node.inputs[::-1], "attributes": turned}


@each
@both
def test_swapped_operands_are_noticed(name, backward):
    case = sound(name, backward)
    products = [k.product for k in case.plan.kernels if k.product is not None]
    for node in (*products, *case.plan.vector_products):
        with altered(node, **swapped(node)):
            assert verdict(case.plan, case), f"{node!r}, operands swapped"
        with altered(node, inputs=node.inputs[::-1]):
            assert verdict(case.plan, case), f"{node!r}, operands swapped but not transposition"
    assert verdict(case.plan, case) == "", "the plan is as it was"


@each
@both
def test_a_transposition_too_much_is_noticed(name, backward):
    case = sound(name, backward)
    for node in (k.product for k in case.plan.kernels if k.product is not None):
        for side in ("transpose_a", "transpose_b"):
            other = {**node.attributes, side: not node.attributes[side]}
            with altered(node, attributes=other):
                assert verdict(case.plan, case), f"{node!r} with another {side}"


def coefficients(plan: Plan) -> list[Node]:
    """The numbers that values are multiplied, divided or shifted by, or raised to."""
    found = dict[Node, None]()
    for node in plan.graph.nodes():
        if node.op in (Op.MUL, Op.DIV, Op.ADD, Op.SUB):
            found |= dict.fromkeys(i for i in node.inputs if i.op is Op.CONSTANT)
    return list(found)


@each
@both
def test_a_coefficient_off_by_a_thousandth_is_noticed(name, backward):
    case = sound(name, backward)
    numbers = coefficients(case.plan)
    for node in numbers:
        value = node.attributes["value"]
        with altered(node, attributes={**node.attributes, "value": value * 1.001 or 1e-3}):
            assert verdict(case.plan, case) == "values", f"{value} off by a thousandth"
    assert numbers or name == "llama-mlp"


@each
@both
def test_another_exponent_is_noticed(name, backward):
    case = sound(name, backward)
    for node in case.plan.graph.nodes():
        if node.op is Op.POWER:
            more = {"exponent": node.attributes["exponent"] + 1}
            with altered(node, attributes=more):
                assert verdict(case.plan, case) == "values", f"{node!r} to another power"


DIFFERENT = {Op.ADD: Op.SUB, Op.SUB: Op.ADD, Op.MUL: Op.ADD, Op.ROW_SUM: Op.ROW_MAX,
             Op.COLUMN_SUM: Op.COLUMN_MAX, Op.SIGMOID: Op.TANH, Op.RSQRT: Op.SQRT}  # fmt: skip


@each
@both
def test_another_operation_is_noticed(name, backward):
    case = sound(name, backward)
    nodes = case.plan.graph.nodes()
    for op in DIFFERENT:
        for node in [n for n in nodes if n.op is op][::3]:
            text = f"{node!r} as {DIFFERENT[node.op].label}"
            with altered(node, op=DIFFERENT[node.op]):
                assert verdict(case.plan, case), text


def leaves(kernel: Kernel) -> set[Node]:
    return {*kernel.stores, *kernel.reductions}


def reads(kernel: Kernel) -> set[Node]:
    """What a kernel needs of others: operands, loads, and all that its vectors are made of."""
    operands = kernel.product.inputs if kernel.product is not None else ()
    return {*operands, *kernel.loads} | all_of(kernel.vectors)


@each
@both
def test_kernels_in_another_order_are_noticed_where_it_matters(name, backward):
    case = sound(name, backward)
    kernels, noticed = case.plan.kernels, 0
    for first in range(len(kernels)):
        for second in range(first + 1, len(kernels)):
            order = list(kernels)
            order[first], order[second] = order[second], order[first]
            found = verdict(replace(case.plan, kernels=tuple(order)), case)
            direct = leaves(kernels[first]) & reads(kernels[second])
            assert not direct or found, f"kernels {first + 1} and {second + 1} swapped"
            assert found in ("", "verifier"), "what the verifier passes has the same values"
            noticed += bool(found)
    assert noticed or len(kernels) == 1
