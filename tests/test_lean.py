"""linear_cross_entropy(lean=True): by chunks of the vocabulary, equal to torch at float64.

Four products, never more than a chunk's columns of logits, no gradient beside the results.
"""

import functools

import pytest
import torch
import torch._dynamo.testing
from programs import assert_close
from test_cross_entropy import REDUCTIONS, TERMS, case, products, results, stock
from torch.nn import functional as F

import cadenza as cz
from cadenza.core.errors import CadenzaError

lean = functools.partial(cz.ops.linear_cross_entropy, lean=True)
__all__ = ["products"]  # the fixture


@pytest.mark.parametrize("chunk", [1, 7, 22, 23, 24, None])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_equals_torch_at_float64(reduction, chunk):
    x, w, target = case()
    actual = results(lean, x, w, target, reduction=reduction, chunk=chunk)
    expected = results(stock, x, w, target, reduction=reduction)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_error_is_at_most_twice_torch(reduction, dtype):
    x, w, target = case(dtype=dtype, rows=129)
    actual = results(lean, x, w, target, reduction=reduction, chunk=7)
    own = results(stock, x, w, target, reduction=reduction)
    oracle = results(stock, x.double(), w.double(), target, reduction=reduction)
    for value, exact, by_torch in zip(actual, oracle, own, strict=True):
        assert_close(value, exact, by_torch)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("rows", [0, 6])
def test_05_nothing_that_counts(reduction, rows):
    x, w, target = case(rows=rows)
    target.fill_(-100)
    actual = results(lean, x, w, target, reduction=reduction)
    expected = results(stock, x, w, target, reduction=reduction)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)
    assert not actual[1].isnan().any()
    assert not actual[2].isnan().any()


def test_a_common_offset_of_the_logits_changes_nothing():
    """Of whole numbers, so that no product rounds whatever its order."""
    _, _, target = case()
    x, w = torch.randint(-2, 3, (37, 11)).float(), torch.randint(-2, 3, (23, 11)).float()
    shifted = torch.cat((x, torch.ones(37, 1)), 1)
    lifted = torch.cat((w, 2.0**20 * torch.ones(23, 1)), 1)
    expected = F.cross_entropy(F.linear(x, w).double(), target, reduction="none")
    actual = lean(shifted, lifted, target, reduction="none", chunk=5)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-6, atol=1e-6)


def test_classes_outside_of_the_vocabulary_raise():
    x, w, target = case()
    target[1] = 23
    with pytest.raises(IndexError, match=r"target 23 is outside of \[0, 23\)"):
        lean(x, w, target)


def test_four_products_over_a_chunk_of_columns(products):
    x, w, target = case(rows=40)
    lean(x, w, target, chunk=8).backward()
    assert len(products) == 4 * 3
    logits = [columns for rows, columns in products if rows == 40 and columns != 11]
    assert logits == [8, 8, 7, 8, 8, 7]


@pytest.mark.parametrize("frozen", ["x", "w", "both"])
def test_a_frozen_operand_costs_no_product(frozen, products):
    x, w, target = case(rows=8)
    x.requires_grad_(frozen == "w")
    w.requires_grad_(frozen == "x")
    loss = lean(x, w, target)
    if loss.requires_grad:
        loss.backward()
    assert len(products) == (1 if frozen == "both" else 3)
    assert (x.grad is None, w.grad is None) == (frozen != "w", frozen != "x")


def test_nothing_as_large_as_a_weight_is_kept():
    x, w, target = case(rows=8)
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: sizes.append((t.data_ptr(), t.numel())) or t, lambda t: t
    ):
        lean(x, w, target)
    own = {x.data_ptr(), w.data_ptr()}
    assert max(count for pointer, count in sizes if pointer not in own) <= 8


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_second_backward_is_equal_and_double_backward_raises(reduction):
    x, w, target = case()
    loss = lean(x, w, target, reduction=reduction).sum()
    first = torch.autograd.grad(loss, (x, w), retain_graph=True)
    second = torch.autograd.grad(loss, (x, w), create_graph=True)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
    with pytest.raises(CadenzaError, match="can be differentiated once"):
        (second[0].sum() + second[1].sum()).backward()


@pytest.mark.slow
def test_torch_compile_without_recompiling_when_rows_change():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lean, fullgraph=True, backend=counter)
    for rows in (5, 6, 23, 40):
        x, w, target = case(rows=rows)
        actual = results(compiled, x, w, target, chunk=8)
        for a, b in zip(actual, results(stock, x, w, target), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert counter.frame_count <= 2


def test_autocast_is_that_of_linear():
    x, w, target = case(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        actual = results(lean, x, w, target, chunk=8)
        own = results(stock, x, w, target)
    oracle = results(stock, x.double(), w.double(), target)
    assert [v.dtype for v in actual] == [torch.float32] * 3
    for value, exact, by_torch in zip(actual, oracle, own, strict=True):
        assert_close(value, exact, by_torch)


def test_opcheck():
    x, w, target = case(rows=6)
    call = cz.library.cross_entropy._call(("x", "w", "target"), TERMS, None)
    torch.library.opcheck(torch.ops.cadenza.cross_entropy_lean.default, ([x, w, target], call, 4))
