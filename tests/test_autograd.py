"""Programs under autograd: which gradients exist, what they cost, and how often they can be had.

Every subset of inputs that need a gradient, outputs that the loss leaves out, second and double
backward, hooks, accumulation, shared operands, mixed dtypes, tensors modified in place.
"""

import itertools

import pytest
import torch
from citizens import (
    CASES,
    RUN_BACKWARD,
    Calls,
    K,
    N,
    assert_as_good,
    gradients,
    mlp,
    norm_swiglu,
    same,
    summary,
    tensor,
    values,
    weighted,
)

from cadenza import block
from cadenza import lang as L
from cadenza.core.errors import CadenzaError

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def subsets(names):
    """Every choice of some of the names, the empty one too."""
    return itertools.chain.from_iterable(
        itertools.combinations(names, size) for size in range(len(names) + 1)
    )


def needing(operands, names):
    """The same operands as new leaves, of which only `names` need a gradient."""
    return {n: o.detach().requires_grad_(n in names) for n, o in operands.items()}


@pytest.fixture
def products(monkeypatch):
    """A list that grows by one with every matrix product."""
    ran, mm = [], torch.mm
    monkeypatch.setattr(torch, "mm", lambda *args: ran.append(None) or mm(*args))
    return ran


# --- which gradients are needed -------------------------------------------------------------------


@each_case
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_do_not_depend_on_what_needs_a_gradient(case, dtype):
    operands = case.operands((6,), dtype=dtype)
    outputs = values(case.call(operands))
    for subset in subsets([n for n, o in operands.items() if o.requires_grad]):
        assert same(values(case.call(needing(operands, subset))), outputs), subset


@each_case
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_every_subset_gives_the_gradients_of_the_full_set(case, dtype):
    operands = case.operands((6,), dtype=dtype)
    full = gradients(case.call(operands), operands)
    for subset in subsets(full):
        chosen = needing(operands, subset)
        outputs = case.call(chosen)
        if subset:
            weighted(outputs).backward()
        found = {n: o.grad for n, o in chosen.items() if o.grad is not None}
        assert same(found, {n: full[n] for n in subset}), subset


@each_case
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_subset_is_as_exact_as_torch(case, dtype):
    """Bit by bit they may differ: what is saved, and so rounded, follows from what is needed."""
    operands = case.operands((6,), dtype=dtype)
    wide = {n: o.detach().double() if o.requires_grad else o for n, o in operands.items()}
    wide = needing(wide, [n for n, o in operands.items() if o.requires_grad])
    stock = gradients(case.call(operands, case.program.plain), operands)
    oracle = gradients(case.call(wide, case.program.plain), wide)
    for subset in list(subsets(stock))[1:]:
        chosen = needing(operands, subset)
        found = gradients(case.call(chosen), chosen)
        kept = [{n: g[n] for n in subset} for g in (stock, oracle)]
        assert_as_good(found, *kept)


def test_every_subset_of_an_mlp_runs_only_its_products(products):
    operands = CASES["tuple"].operands((6,))
    for subset in subsets(operands):
        outputs = mlp(**needing(operands, subset))
        assert len(products) == 2
        products.clear()
        if subset:
            weighted(outputs).backward()
        through_hidden = bool({"x", "w_in", "bias"} & set(subset))
        own = [name for name in subset if name != "bias"]  # a column sum
        assert len(products) == len(own) + through_hidden, subset
        products.clear()


def test_an_input_of_no_consequence_for_the_needed_outputs_costs_nothing(products):
    operands = needing(CASES["tuple"].operands((6,)), ["w_out"])
    product, mean = mlp(**operands)
    assert product.requires_grad
    assert not mean.requires_grad
    product.sum().backward()
    assert len(products) == 2 + 1


def test_gradients_that_nobody_asks_for_now_may_be_asked_for_later():
    operands = CASES["tuple"].operands((6,))
    full = gradients(mlp(**operands), operands)
    loss = weighted(mlp(**operands))
    for name, expected in full.items():
        (found,) = torch.autograd.grad(loss, [operands[name]], retain_graph=True)
        assert same(found, expected)


def test_a_frozen_weight_may_thaw():
    operands = CASES["epilogue"].operands((6,))
    full = gradients(CASES["epilogue"].call(operands), operands)
    for needs in (False, True, False):
        operands["w"].requires_grad_(needs)
        found = gradients(CASES["epilogue"].call(operands), operands)
        assert same(found, {n: g for n, g in full.items() if n != "w" or needs})


# --- outputs --------------------------------------------------------------------------------------


def test_only_outputs_that_depend_on_a_needed_input_require_gradients():
    operands = CASES["dict"].operands((6,))
    for subset in subsets(["x", "w"]):
        outputs = summary(**needing(operands, subset))
        found = {name for name, output in outputs.items() if output.requires_grad}
        through_product = {"y", "picked", "total", "half"} if subset else set()
        assert found == through_product | ({"x"} if "x" in subset else set())


@pytest.mark.parametrize("name", ["y", "picked", "total", "half", "x"])
def test_outputs_that_the_loss_leaves_out_count_nothing(name):
    operands = CASES["dict"].operands((6,), dtype=torch.float64)
    output = summary(**operands)[name]
    plain = summary.plain(**operands)[name]
    leaves = [operands["x"], operands["w"]]
    incoming = torch.randn_like(output)
    ours = torch.autograd.grad(output, leaves, incoming)
    theirs = torch.autograd.grad(plain, leaves, incoming, materialize_grads=True)
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.allclose(mine, other, rtol=1e-12, atol=1e-12)


def test_whole_numbers_and_conditions_come_out_as_they_are():
    operands = CASES["dict"].operands((6,))
    outputs = summary(**operands)
    assert (outputs["mask"].dtype, outputs["index"].dtype) == (torch.bool, torch.int64)
    assert same(outputs["index"].reshape(-1), operands["index"])
    assert same(outputs["mask"], outputs["y"] > 0)


def test_an_input_that_is_returned_hands_on_its_gradient():
    @block
    def both(x):
        return x, L.exp(x)

    x = tensor(3, K)
    first, second = both(x)
    (gradient,) = torch.autograd.grad(first.sum() + second.sum(), x)
    assert torch.allclose(gradient, 1 + x.exp())


# --- backward again -------------------------------------------------------------------------------


@each_case
def test_a_second_backward_gives_the_same_gradients(case):
    operands = case.operands((6,))
    loss = weighted(case.call(operands))
    leaves = [o for o in operands.values() if o.requires_grad]
    first, second = (torch.autograd.grad(loss, leaves, retain_graph=True) for _ in range(2))
    assert same(first, second)


def test_a_second_backward_through_a_freed_graph_is_torchs_own_error():
    loss = weighted(mlp(**CASES["tuple"].operands((6,))))
    loss.backward()
    with pytest.raises(RuntimeError, match="Specify retain_graph=True"):
        loss.backward()


@pytest.mark.parametrize("frozen", [(), ("w",), ("rstd",), ("w", "rstd")], ids=str)
def test_a_double_backward_raises_and_names_the_cure(frozen):
    case = CASES["epilogue"]
    operands = case.operands((6,))
    operands = needing(operands, set(operands) - set(frozen))
    (gradient,) = torch.autograd.grad(case.call(operands).sum(), operands["x"], create_graph=True)
    penalty = gradient.square().sum() + operands["x"].sum()
    message = r"norm_swiglu can be differentiated once.*\n  write:    norm_swiglu\.plain\("
    with pytest.raises(CadenzaError, match=message):
        penalty.backward()


def test_create_graph_alone_changes_no_gradient():
    case = CASES["epilogue"]
    operands = case.operands((6,))
    leaves = list(operands.values())
    expected = torch.autograd.grad(case.call(operands).sum(), leaves)
    found = torch.autograd.grad(case.call(operands).sum(), leaves, create_graph=True)
    assert same([g.detach() for g in found], expected)


def test_plain_can_be_differentiated_twice():
    operands = CASES["epilogue"].operands((6,), dtype=torch.float64)
    arguments = [operands["x"], operands["w"], operands["rstd"]]

    def function(x, w, rstd):
        return norm_swiglu.plain(x, w, rstd=rstd)

    assert torch.autograd.gradgradcheck(function, arguments)


# --- tensors of all sorts -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["x", "w_in", "w_out"])
def test_a_tensor_that_backward_needs_must_not_be_written_first(name):
    operands = CASES["tuple"].operands((6,))
    loss = weighted(mlp(**operands))
    with torch.no_grad():
        operands[name].add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_tensor_that_backward_does_not_need_may_be_written():
    operands = CASES["tuple"].operands((6,))
    expected = gradients(mlp(**operands), operands)
    loss = weighted(mlp(**operands))
    with torch.no_grad():
        operands["bias"].add_(1.0)
    found = torch.autograd.grad(loss, list(operands.values()))
    assert same(list(found), list(expected.values()))


def test_an_output_that_backward_needs_must_not_be_written_first():
    @block
    def exponential(x):
        return L.exp(x)

    y = exponential(tensor(3, K))
    y.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("lead", [(6,), (2, 3), ()], ids=str)
@pytest.mark.parametrize("grad", [True, False])
def test_an_output_may_be_written(lead, grad):
    @block
    def product(x, w):
        return L.linear(x, w)

    x, w = tensor(*lead, K, grad=grad), tensor(N, K, grad=grad)
    y = product(x, w)
    expected = 2.0 * y.detach()
    assert same(y.mul_(2.0).detach(), expected)
    if grad:
        y.sum().backward()
        assert torch.allclose(x.grad, (2.0 * w.detach().sum(0)).expand_as(x))


def test_a_tensor_passed_twice_gets_the_sum():
    @block
    def doubled(x, y, w):
        return L.linear(x * y, w)

    @block
    def gram(x, w):
        return L.linear(x, w)

    x, w = tensor(5, K), tensor(N, K)
    first, second, whole = (x.detach().requires_grad_() for _ in range(3))
    weighted(doubled(x, x, w)).backward()
    weighted(doubled(first, second, w)).backward()
    assert same(x.grad, first.grad + second.grad)
    expected = gradients(whole @ whole.T, {"x": whole})
    assert torch.allclose(gradients(gram(whole, whole), {"x": whole})["x"], expected["x"])


def test_gradients_accumulate_over_calls():
    operands = CASES["tuple"].operands((6,))
    others = needing(CASES["tuple"].operands((9,)), operands) | {
        name: operands[name] for name in ("w_in", "bias", "w_out")
    }
    expected = [gradients(mlp(**o), o)["w_in"] for o in (operands, others)]
    for chosen in (operands, others):
        weighted(mlp(**chosen)).backward()
    assert same(operands["w_in"].grad, expected[0] + expected[1])


def test_hooks_on_inputs_and_outputs_fire_and_may_change_gradients():
    operands, fired = CASES["tuple"].operands((6,)), []
    expected = gradients(mlp(**operands), operands)
    y, mean = mlp(**operands)
    y.register_hook(lambda g: fired.append("output") or g * 2.0)
    mean.register_hook(lambda g: g * 2.0)
    operands["x"].register_hook(lambda g: fired.append("input") or g * 0.5)
    operands["w_in"].register_post_accumulate_grad_hook(lambda p: fired.append("accumulated"))
    weighted((y, mean)).backward()
    assert sorted(fired) == ["accumulated", "input", "output"]
    assert same(operands["x"].grad, expected["x"])
    assert same(operands["w_in"].grad, expected["w_in"] * 2.0)


@pytest.mark.parametrize("matrices", DTYPES, ids=str)
@pytest.mark.parametrize("vectors", DTYPES, ids=str)
def test_a_gradient_has_the_dtype_of_its_input(matrices, vectors):
    operands = CASES["epilogue"].operands((6,), dtype=matrices)
    operands["rstd"] = tensor(6, 1, dtype=vectors)
    with Calls() as calls:
        y = CASES["epilogue"].call(operands)
        gradients(y, operands)
    assert y.dtype == matrices
    (found,) = (result for called, _, result in calls.calls if called is RUN_BACKWARD)
    assert [g.dtype for g in found] == [o.dtype for o in operands.values()]
