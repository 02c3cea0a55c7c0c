"""The reference back end as an executor of plans.

Partials over tiles of any size finish to the whole reduction; only what is stored, partials and
finished vectors cross kernels, and a plan that counts on anything else raises; values are rounded
where the plan stores them and nowhere else; inputs are left alone and memory is given back.
"""

import math
from dataclasses import replace

import pytest
import torch
from graphs import program
from planned import adjoints_of, call, execute, plain_results

from cadenza.backends import reference
from cadenza.backends.meaning import MEANING
from cadenza.backends.partials import COLUMNS, ROWS
from cadenza.backends.reference import Executable
from cadenza.core import lang as L
from cadenza.core.errors import VerificationError
from cadenza.core.ir import Node
from cadenza.core.ops import Op
from cadenza.core.pipeline import differentiate_program
from cadenza.core.plan import Kernel, Plan, verify_plan
from cadenza.core.rules import simplify
from cadenza.library.blocks import BUILT_IN

Tensor = torch.Tensor
TILES = (1, 3, 5, 64)
REDUCTIONS = [op for op in Op if op.group == "reduction" and op not in (Op.GROUP_SUM, Op.GROUP_MAX)]


# --- partials -------------------------------------------------------------------------------------


def by_tiles(op: Op, x: Tensor, tile: int, *others: Tensor) -> Tensor:
    if op in ROWS:
        return ROWS[op](x.split(tile, 1), *others)
    return COLUMNS[op](x.split(tile, 0), *others)


def shift_of(op: Op, x: Tensor) -> tuple[Tensor, ...]:
    return (torch.randn(x.shape[0], 1, dtype=x.dtype),) if op is Op.LOGSUMEXP else ()


def test_every_reduction_has_partials():
    assert set(REDUCTIONS) == {*ROWS, *COLUMNS}


@pytest.mark.parametrize("rows", [7, 0, 130])
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("op", REDUCTIONS, ids=lambda op: op.label)
def test_partials_finish_to_the_whole(op, tile, rows):
    for scale, offset in ((1.0, 0.0), (1.0, 1e4), (1e-3, 0.0), (300.0, -500.0)):
        x = torch.randn(rows, 17, dtype=torch.float64) * scale + offset
        others = shift_of(op, x)
        expected = MEANING[op](x, *others)
        found = by_tiles(op, x, tile, *others)
        assert found.shape == expected.shape
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("tile", TILES)
def test_a_variance_by_partials_keeps_its_digits_beside_a_large_mean(tile):
    x = torch.randn(64, 257) + 1e4
    exact = x.double().var(1, correction=0, keepdim=True)
    found = by_tiles(Op.ROW_VARIANCE, x, tile)
    worst = ((found - exact) / exact).abs().max().item()
    naive = (x**2).mean(1, keepdim=True) - x.mean(1, keepdim=True) ** 2
    assert worst < 3e-3, "a mean of 1e4 is rounded to 1e-3"
    assert ((naive - exact) / exact).abs().max().item() > 1, "the case is a hard one"


INF = math.inf
ROWS_OF_INFINITIES = [
    [-INF] * 7, [-INF] * 3 + [1.0] * 4, [2.0] + [-INF] * 6, [-INF] * 6 + [-800.0],
    [INF] + [0.0] * 6, [0.0] * 5 + [INF, -INF], [-INF] * 3 + [INF] + [800.0] * 3,
    [1.0, math.nan, *[0.0] * 5],
]  # fmt: skip


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("op", REDUCTIONS, ids=lambda op: op.label)
def test_partials_of_infinities_are_those_of_the_whole(op, tile):
    x = torch.tensor(ROWS_OF_INFINITIES, dtype=torch.float64)
    x = x.T.contiguous() if op in COLUMNS else x
    others = (torch.zeros(len(x), 1, dtype=x.dtype),) if op is Op.LOGSUMEXP else ()
    found, expected = by_tiles(op, x, tile, *others), MEANING[op](x, *others)
    torch.testing.assert_close(found, expected, equal_nan=True)


@pytest.mark.parametrize("tile", TILES)
def test_the_sum_of_exponentials_does_not_overflow(tile):
    x = torch.tensor([[3e4, -3e4, 3e4], [-3e4, -3e4, -3e4]])
    found = by_tiles(Op.LOGSUMEXP, x, tile, torch.zeros(2, 1))
    expected = torch.tensor([[3e4 + math.log(2.0)], [-3e4 + math.log(3.0)]])
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_blocks_do_not_depend_on_tiles(name):
    pair = call(name, 5).pair()
    for tile, rows in ((1, 5), (3, 1), (5, 0), (5, 7), (64, 5), (None, 5)):
        made = call(name, rows)
        upstream = adjoints_of(pair.program, rows)
        found = execute(pair, made.tensors, rows, upstream, tile)
        expected = plain_results(pair, made, upstream)
        for actual, oracle in zip(found, expected, strict=True):
            for label, value in actual.items():
                torch.testing.assert_close(value, oracle[label], rtol=1e-9, atol=1e-11)


# --- what may cross kernels -----------------------------------------------------------------------

X, W, V = "x M 4", "w 5 4", "v 3 5"


def normed(x, w, v):
    """Two products, a reduction between them, and a stream that goes on."""
    h = L.linear(x, w)
    y = L.linear(L.silu(h), v)
    return h + L.row_mean(y), y * L.rsqrt(L.row_sum(h**2) + 1.0)


def plan_of(function, *operands: str) -> Plan:
    return differentiate_program(simplify(program(function, *operands))).forward_plan


def tensors_of(plan: Plan, rows: int = 6) -> list[Tensor]:
    shapes = [[rows if size == "M" else size for size in i.shape] for i in plan.graph.inputs]
    dtypes = [getattr(torch, i.attributes["dtype"]) for i in plan.graph.inputs]
    return [torch.randn(s).to(d) for s, d in zip(shapes, dtypes, strict=True)]


def changed(plan: Plan, position: int, **fields: tuple[Node, ...]) -> Plan:
    """The plan with one kernel changed."""
    kernels = list(plan.kernels)
    kernels[position] = replace(kernels[position], **fields)
    return replace(plan, kernels=tuple(kernels))


def dropped(nodes: tuple[Node, ...], *gone: Node) -> tuple[Node, ...]:
    return tuple(n for n in nodes if all(n is not g for g in gone))


def assert_raises(plan: Plan, tensors: list[Tensor]) -> None:
    """Both the verifier and the executor refuse."""
    with pytest.raises(VerificationError):
        verify_plan(plan)
    with pytest.raises(KeyError):
        Executable(plan)(tensors, 6)


def kernels_of(plan: Plan) -> tuple[Kernel, ...]:
    Executable(plan)(tensors_of(plan), 6)  # sound as it is
    return plan.kernels


def test_an_operand_that_is_not_stored_raises():
    plan = plan_of(normed, X, W, V)
    first, second, *_ = kernels_of(plan)
    operand = second.product.inputs[0]
    broken = changed(plan, 0, stores=dropped(first.stores, operand))
    assert_raises(broken, tensors_of(plan))


def test_an_accumulator_of_another_kernel_raises():
    plan = plan_of(normed, X, W, V)
    first, second, *rest = kernels_of(plan)
    accumulator = first.product
    (user,) = [k for k in (second, *rest) if any(n is accumulator for n in k.loads)]
    position = plan.kernels.index(user)
    assert_raises(changed(plan, position, loads=dropped(user.loads, accumulator)), tensors_of(plan))


def test_a_matrix_that_is_loaded_before_it_is_stored_raises():
    plan = plan_of(normed, X, W, V)
    first, *_ = kernels_of(plan)
    broken = changed(plan, 0, stores=dropped(first.stores, first.product))
    assert_raises(broken, tensors_of(plan))


def test_an_unfinished_reduction_raises():
    plan = plan_of(normed, X, W, V)
    first, *_ = kernels_of(plan)
    assert first.reductions
    broken = changed(plan, 0, reductions=())
    assert_raises(broken, tensors_of(plan))
    with pytest.raises(KeyError, match="is not finished"):
        Executable(broken)(tensors_of(plan), 6)


def test_a_reduction_in_the_kernel_that_needs_it_raises():
    plan = plan_of(normed, X, W, V)
    first, *_ = kernels_of(plan)
    (reduction,) = first.reductions
    broken = changed(plan, 0, vectors=(*first.vectors, reduction))
    assert_raises(broken, tensors_of(plan))


def test_a_step_that_is_left_out_raises():
    plan = plan_of(normed, X, W, V)
    first, *_ = kernels_of(plan)
    for node in first.body:
        assert_raises(changed(plan, 0, body=dropped(first.body, node)), tensors_of(plan))


def test_an_output_that_is_not_stored_raises():
    plan = plan_of(lambda x, w: L.silu(L.linear(x, w)), X, W)
    broken = changed(plan, 0, stores=())
    assert_raises(broken, tensors_of(plan))


# --- rounding -------------------------------------------------------------------------------------


def bf16(*operands: str) -> list[str]:
    return [f"{text} bfloat16" for text in operands]


def test_a_reduction_sees_float32_in_its_kernel_and_the_stored_value_later():
    def twice(x, w, u):
        h = L.linear(x, w)
        g = L.linear(h, u)
        return h, L.row_sum(h), L.row_sum(h * g)

    plan = plan_of(twice, *bf16("x M 32", "w 48 32", "u 48 48"))
    x, w, u = tensors_of(plan)
    h, early, late = Executable(plan, tile=48)([x, w, u], 6)
    acc = x.float() @ w.float().T
    stored = acc.bfloat16()
    assert torch.equal(h, stored)
    assert torch.equal(early, acc.sum(1, keepdim=True))
    assert not torch.equal(early, stored.float().sum(1, keepdim=True))
    second = stored.float() @ u.float().T
    assert torch.equal(late, (stored.float() * second).sum(1, keepdim=True))
    assert not torch.equal(late, (acc * second).sum(1, keepdim=True))


def test_an_epilogue_is_rounded_once():
    def chain(x, w, z):
        return L.tanh(L.linear(x, w) * 3.0) + z * z

    plan = plan_of(chain, *bf16("x M 32", "w 48 32", "z M 48"))
    x, w, z = tensors_of(plan)
    (found,) = Executable(plan)([x, w, z], 6)
    exact = torch.tanh((x.float() @ w.float().T) * 3.0) + z.float() * z.float()
    assert torch.equal(found, exact.bfloat16())


def test_an_operand_is_rounded_where_it_is_stored():
    plan = plan_of(lambda x, w, v: L.linear(L.silu(L.linear(x, w)), v),
                   *bf16("x M 32", "w 48 32", "v 16 48"))  # fmt: skip
    x, w, v = tensors_of(plan)
    (found,) = Executable(plan)([x, w, v], 6)
    acc = x.float() @ w.float().T
    u = (acc * torch.sigmoid(acc)).bfloat16()
    assert torch.equal(found, (u.float() @ v.float().T).bfloat16())


def test_what_is_stored_besides_is_not_used_rounded():
    def gated(x, w, v):
        return L.linear(L.swiglu(L.linear(x, w)), v)

    graph = simplify(program(gated, *bf16("x M 32", "w 96 32", "v 16 48")))
    plain = differentiate_program(graph).forward_plan
    saving = differentiate_program(graph, ["x", "w", "v"]).forward_plan
    tensors = tensors_of(plain)
    assert len(saving.graph.outputs) == 2
    assert torch.equal(Executable(plain)(tensors, 6)[0], Executable(saving)(tensors, 6)[0])


def test_finished_vectors_are_never_rounded():
    def scaled(x, w):
        return L.linear(L.rms_norm(x, None), w), L.rsqrt(L.row_mean(x**2) + 1e-6)

    plan = plan_of(scaled, *bf16("x M 32", "w 16 32"))
    x, w = tensors_of(plan)
    _, r = Executable(plan)([x, w], 6)
    assert r.dtype == torch.float32
    torch.testing.assert_close(r, torch.rsqrt(x.float().pow(2).mean(1, keepdim=True) + 1e-6))


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_inputs_are_untouched_and_outputs_are_their_own(name, dtype):
    made = call(name, 6, dtype)
    pair = made.pair()
    forward = [made.tensors[i.attributes["name"]] for i in pair.forward.inputs]
    results = run_untouched(Executable(pair.forward_plan, 4), forward)
    named = dict(zip((i.attributes["name"] for i in pair.forward.inputs), forward, strict=True))
    upstream = adjoints_of(pair.program, 6, torch.float32)
    given = [results[v] if isinstance(v, int) else named[v] for v in pair.values]
    run_untouched(
        Executable(pair.backward_plan, 4), [*given, *(upstream[p] for p in pair.adjoints)]
    )


def run_untouched(executable: Executable, tensors: list[Tensor]) -> list[Tensor]:
    """Runs twice: equal bits, inputs as they were, no memory shared."""
    before = [t.clone() for t in tensors]
    first, second = executable(tensors, 6), executable(tensors, 6)
    for tensor, copy in zip(tensors, before, strict=True):
        assert torch.equal(tensor, copy)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
        assert a.is_contiguous()
    places = [t.untyped_storage().data_ptr() for t in (*tensors, *first, *second)]
    assert len(set(places)) == len(places)
    return first


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_stored_values_are_dropped_after_their_last_use(name, monkeypatch):
    made = call(name, 5)
    pair = made.pair()
    held: list[set[Node]] = []
    run = reference._KernelRun.run

    def watched(kernel, memory):
        held.append(set(memory.stored))
        run(kernel, memory)

    monkeypatch.setattr(reference._KernelRun, "run", watched)
    execute(pair, made.tensors, 5, adjoints_of(pair.program, 5))
    plans = [pair.forward_plan, pair.backward_plan]
    expected = [live for plan in plans for live in live_before(plan)]
    assert held == expected


def live_before(plan: Plan) -> list[set[Node]]:
    """By kernel, the inputs, the outputs stored so far, and what this or a later kernel reads."""
    needed = set(plan.graph.outputs) | {i for p in plan.vector_products for i in p.inputs}
    reads = [{*k.loads, *(k.product.inputs if k.product is not None else ())} for k in plan.kernels]
    found, stored = [], set()
    for position, kernel in enumerate(plan.kernels):
        later = needed.union(*reads[position:])
        found.append(set(plan.graph.inputs) | (stored & later))
        stored |= set(kernel.stores)
    return found


def test_a_reduction_that_a_kernel_finishes_is_one_number_for_all():
    def largest(x, w):
        h = L.layer_norm(x, None)
        return L.linear(h, w), L.row_max(h)

    signature = simplify(program(largest, "x M 7 float64", "w 3 7 float64"))
    pair = differentiate_program(signature, ["x"])
    for seed in range(20):
        torch.manual_seed(seed)
        x, w = torch.randn(5, 7).double(), torch.randn(3, 7).double()
        upstream = [torch.zeros(5, 3).double(), torch.ones(5, 1).double()]
        found = execute(pair, {"x": x, "w": w}, 5, upstream, tile=1).gradients["x"]
        leaf = x.clone().requires_grad_()
        expected = torch.autograd.grad(L.row_max(L.layer_norm(leaf, None)).sum(), leaf)[0]
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
