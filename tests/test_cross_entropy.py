"""linear_cross_entropy against float64 torch: every reduction, chunking, dtype and edge.

Memory: one chunk's logits at a time, counted by what is allocated. Numbers: dW adds up in float32,
confident rows keep their gradient, a common offset changes nothing.
"""

import pytest
import torch
import torch._dynamo.testing
from programs import assert_close
from torch.nn import functional as F

import cadenza as cz
from cadenza.core.errors import CadenzaError, ProgramError

linear_cross_entropy = cz.ops.linear_cross_entropy
REDUCTIONS = ["mean", "sum", "none"]
TERMS = (("ignore_index", -100), ("label_smoothing", 0.0), ("z_loss", 0.0), ("softcap", None))


def stock(x, w, target, **options):
    logits = F.linear(x, w)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide, target, **options)


def case(rows=37, width=11, classes=23, dtype=torch.float64):
    x = torch.randn(rows, width, dtype=dtype, requires_grad=True)
    w = torch.randn(classes, width, dtype=dtype, requires_grad=True)
    target = torch.randint(0, classes, (rows,))
    target[::5] = -100
    return x, w, target


def results(function, x, w, target, **options):
    """Loss and gradients for a random incoming gradient, the same for every function."""
    x, w = (v.detach().clone().requires_grad_() for v in (x, w))
    loss = function(x, w, target, **options)
    generator = torch.Generator().manual_seed(7)
    upstream = torch.randn(loss.shape, generator=generator, dtype=torch.float64).to(loss.dtype)
    return loss, *torch.autograd.grad(loss, (x, w), upstream)


@pytest.mark.parametrize("chunk", [1, 7, 36, 37, 38, None])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_equals_torch_at_float64(reduction, chunk):
    actual = results(linear_cross_entropy, *case(), reduction=reduction, chunk=chunk)
    expected = results(stock, *case_again(), reduction=reduction)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def case_again():
    torch.manual_seed(0)
    return case()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_error_is_at_most_twice_torch(reduction, dtype):
    x, w, target = case(dtype=dtype, rows=129)
    actual = results(linear_cross_entropy, x, w, target, reduction=reduction, chunk=40)
    own = results(stock, x, w, target, reduction=reduction)
    oracle = results(stock, x.double(), w.double(), target, reduction=reduction)
    for value, exact, by_torch in zip(actual, oracle, own, strict=True):
        assert_close(value, exact, by_torch)


def test_leading_dimensions_and_per_token_losses():
    x, w, target = case(rows=36)
    loss = linear_cross_entropy(
        x.view(3, 4, 3, 11), w, target.view(3, 4, 3), reduction="none", chunk=5
    )
    assert loss.shape == (3, 4, 3)
    torch.testing.assert_close(loss.flatten(), stock(x, w, target, reduction="none"))


def test_another_ignore_index():
    x, w, target = case()
    target[target < 0] = 4
    actual = results(linear_cross_entropy, x, w, target, ignore_index=4)
    expected = results(stock, x, w, target, ignore_index=4)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("rows", [0, 6])
def test_05_nothing_that_counts(reduction, rows):
    """Sum and rows are 0, the mean follows torch: NaN, with gradients of 0."""
    x, w, target = case(rows=rows)
    target.fill_(-100)
    actual = results(linear_cross_entropy, x, w, target, reduction=reduction)
    expected = results(stock, x, w, target, reduction=reduction)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)
    assert not actual[1].isnan().any()
    assert not actual[2].isnan().any()


def test_classes_outside_of_the_vocabulary_raise():
    x, w, target = case()
    for wrong in (-1, 23, 10**9):
        target[1] = wrong
        for reduction in REDUCTIONS:
            with pytest.raises(IndexError, match=rf"target {wrong} is outside of \[0, 23\)"):
                linear_cross_entropy(x, w, target, reduction=reduction)


def test_confident_rows_keep_their_gradient():
    """p - 1 is formed in float32, also where p rounds to 1 in the dtype of the logits."""
    target = torch.arange(8)
    w = torch.eye(8, dtype=torch.bfloat16, requires_grad=True)
    x = (12 * torch.eye(8)).to(torch.bfloat16).requires_grad_()
    actual = results(linear_cross_entropy, x, w, target, reduction="none")
    oracle = results(stock, x.double(), w.double(), target, reduction="none")
    own = results(stock, x, w, target, reduction="none")
    for value, exact, by_torch in zip(actual, oracle, own, strict=True):
        assert_close(value, exact, by_torch)
    assert (actual[1].diagonal() != 0).all()


def test_a_common_offset_of_the_logits_changes_nothing():
    x, w, target = case(dtype=torch.float32)
    ones = torch.ones(37, 1)
    shifted = torch.cat((x.detach(), ones), 1), torch.cat((w.detach(), 4096 * torch.ones(23, 1)), 1)
    rounded = F.linear(*shifted) - 4096  # what is left of the logits beside the offset
    expected = F.cross_entropy(rounded.double(), target, reduction="none")
    actual = linear_cross_entropy(*shifted, target, reduction="none")
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_weight_gradient_adds_up_in_float32():
    """2048 chunks of one row each: a sum in bfloat16 would stop growing at 256."""
    x = torch.ones(2048, 1, dtype=torch.bfloat16, requires_grad=True)
    w = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    target = torch.zeros(2048, dtype=torch.int64)
    linear_cross_entropy(x, w, target, reduction="sum", chunk=1).backward()
    torch.testing.assert_close(w.grad.float(), torch.tensor([[-1024.0], [1024.0]]))


@pytest.fixture
def products(monkeypatch):
    """The shapes of the products that run, in order."""
    shapes = []
    product = torch.mm

    def recorded(a, b):
        result = product(a, b)
        shapes.append(tuple(result.shape))
        return result

    monkeypatch.setattr(torch, "mm", recorded)
    return shapes


@pytest.mark.parametrize(("reduction", "count"), [("mean", 3), ("sum", 3), ("none", 4)])
def test_products_and_rows_of_logits_alive(reduction, count, products):
    x, w, target = case(rows=40)
    linear_cross_entropy(x, w, target, reduction=reduction, chunk=8).sum().backward()
    assert len(products) == count * 5
    assert {rows for rows, columns in products if columns == 23} == {8}


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_weights_of_tokens_cost_no_product(reduction, products):
    x, w, target = case(rows=40)
    weights = torch.rand(40, dtype=torch.float64, requires_grad=True)
    options = {"reduction": reduction, "token_weights": weights, "label_smoothing": 0.1}
    linear_cross_entropy(x, w, target, chunk=8, **options).backward()
    assert len(products) == 3 * 5


@pytest.mark.parametrize("frozen", ["x", "w", "both"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_frozen_operand_costs_no_product(reduction, frozen, products):
    x, w, target = case(rows=8)
    x.requires_grad_(frozen == "w")
    w.requires_grad_(frozen == "x")
    loss = linear_cross_entropy(x, w, target, reduction=reduction)
    if loss.requires_grad:
        loss.sum().backward()
    again = reduction == "none" and frozen != "both"
    assert len(products) == 1 + (frozen != "both") + again
    assert (x.grad is None, w.grad is None) == (frozen != "w", frozen != "x")


def test_no_grad_computes_no_gradient(products):
    with torch.no_grad():
        linear_cross_entropy(*case(rows=8))
    assert len(products) == 1


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_second_backward_is_equal_and_double_backward_raises(reduction):
    x, w, target = case()
    loss = linear_cross_entropy(x, w, target, reduction=reduction).sum()
    first = torch.autograd.grad(loss, (x, w), retain_graph=True)
    second = torch.autograd.grad(loss, (x, w), create_graph=True)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
    with pytest.raises(CadenzaError, match="can be differentiated once"):
        (second[0].sum() + second[1].sum()).backward()


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.slow
def test_torch_compile_without_recompiling_when_rows_change(reduction):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter)
    def loss_of(x, w, target):
        return linear_cross_entropy(x, w, target, reduction=reduction)

    for rows in (5, 6, 23, 40):
        x, w, target = case(rows=rows)
        actual = results(loss_of, x, w, target)
        expected = results(stock, x, w, target, reduction=reduction)
        for a, b in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert counter.frame_count <= 2


def test_autocast_is_that_of_linear():
    x, w, target = case(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        actual = results(linear_cross_entropy, x, w, target)
        own = results(stock, x, w, target)
    oracle = results(stock, x.double(), w.double(), target)
    assert [v.dtype for v in actual] == [torch.float32] * 3
    for value, exact, by_torch in zip(actual, oracle, own, strict=True):
        assert_close(value, exact, by_torch)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_opcheck(reduction):
    x, w, target = case(rows=6)
    call = cz.library.cross_entropy._call(("x", "w", "target"), TERMS, None)
    if reduction == "none":
        torch.library.opcheck(
            torch.ops.cadenza.cross_entropy_rows.default, ([x, w, target], call, 4)
        )
    else:
        torch.library.opcheck(
            torch.ops.cadenza.cross_entropy_sum.default, ([x, w, target], call, 4, 3)
        )


def test_arguments_that_do_not_fit():
    x, w, target = case()
    with pytest.raises(ProgramError, match="reduction='average'"):
        linear_cross_entropy(x, w, target, reduction="average")
    with pytest.raises(ProgramError, match=r"w \[23, 10\]"):
        linear_cross_entropy(x, w[:, :10], target)
    with pytest.raises(ProgramError, match=r"target \[36\]"):
        linear_cross_entropy(x, w, target[1:])
    with pytest.raises(ProgramError, match=r"target of torch\.float32"):
        linear_cross_entropy(x, w, target.float())
    with pytest.raises(ProgramError, match="one dtype"):
        linear_cross_entropy(x, w.float(), target)
    with pytest.raises(ProgramError, match="chunk=0"):
        linear_cross_entropy(x, w, target, chunk=0)
