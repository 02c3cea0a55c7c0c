"""Faults of values and gradients that users of other libraries met, by numbers of
docs/reliability.md: what a cache takes for the same, two consumers of a residual, far rows, order.

Where a whole suite already holds a number, docs/reliability.md names it.
"""

import itertools
import math
import random
from pathlib import Path

import pytest
import torch
from block_operands import cast, operands
from programs import assert_same
from stock_layers import MAKES
from test_blocks import with_gradients
from test_layers import outcome, pair, tables_of
from triton_plans import Bounds, interpreted, quiet

import cadenza as cz
from cadenza import lang as L
from cadenza.core.storage import dtypes_of
from cadenza.library.blocks import BUILT_IN
from cadenza.library.specialize import BY_DIGEST

PAST = 2**31
TWO_OUTPUTS = sorted(set(BUILT_IN) - {"llama-mlp", "lm-head", "norm-qkv"})


# --- what a call is found again by ----------------------------------------------------------------


def scaled(x, w, *, c):
    """A program whose numbers depend on each bit of its constant."""
    return L.linear(x, w) * c, x / c


CALLS = list(
    itertools.product(
        (0.0, -0.0, 0, 1, True, 1.0, -1.0, math.nan, math.inf),
        (torch.float32, torch.bfloat16, torch.float64),
        ("grad", "no grad", "autocast"),
    )
)


def called(program, x, w, call):
    """The outputs of one call of a program, and the gradient of w."""
    constant, dtype, mode = call
    x, w = x.to(dtype), w.to(dtype).requires_grad_()
    half = torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast")
    with half, torch.set_grad_enabled(mode != "no grad"):
        y, z = program(x, w, c=constant)
    gradients = torch.autograd.grad(y.sum(), w) if mode != "no grad" else ()
    return [t.detach() for t in (y, z, *gradients)]


def identical(first, second):
    """Whether tensors agree in dtype and in every bit but those of NaN."""
    same_bits = torch.equal(first.nan_to_num(7.0), second.nan_to_num(7.0))
    same_signs = torch.equal(torch.signbit(first)[~first.isnan()],
                             torch.signbit(second)[~second.isnan()])  # fmt: skip
    return first.dtype == second.dtype and same_bits and same_signs


def test_11_no_call_is_taken_for_another():
    """By one program in any order, each call gives what it gives by a program of its own."""
    x, w = torch.randn(5, 8), torch.randn(6, 8)
    known, calls = cz.block(scaled), 2 * CALLS
    random.Random(0).shuffle(calls)
    for call in calls:
        found, expected = called(known, x, w, call), called(cz.block(scaled), x, w, call)
        assert all(map(identical, found, expected)), call


def test_11_a_call_with_nan_is_found_again():
    program, x, w = cz.block(scaled), torch.randn(5, 8), torch.randn(6, 8)
    for _ in range(3):
        program(x, w, c=math.nan)
    assert len(program.calls._known) == 1


# --- two consumers of a residual ------------------------------------------------------------------


@pytest.mark.parametrize("name", TWO_OUTPUTS)
def test_12_a_stream_with_two_consumers_gets_the_sum(name):
    """Of either output alone, and of both; x itself has a third consumer beside the block."""
    arguments = with_gradients(cast(operands(name, 9), torch.float64))
    leaves = [v for v in arguments.values() if isinstance(v, torch.Tensor) and v.requires_grad]
    stream, qkv = BUILT_IN[name](**arguments)
    weights = [torch.randn_like(v) for v in (stream, qkv, arguments["x"])]
    parts = [(v * g).sum() for v, g in zip((stream, qkv, arguments["x"]), weights, strict=True)]
    alone = [gradients_of_all(part, leaves) for part in parts]
    together = gradients_of_all(sum(parts), leaves)
    for found, *each in zip(together, *alone, strict=True):
        torch.testing.assert_close(found, sum(each), rtol=1e-10, atol=1e-10)


def gradients_of_all(loss, leaves):
    return torch.autograd.grad(loss, leaves, retain_graph=True, materialize_grads=True)


@pytest.mark.parametrize("make", MAKES)
def test_12_a_layers_stream_feeds_the_next_layer_and_another_loss(make):
    (first, first_twin), (second, second_twin) = pair(make), pair(make)
    x = torch.randn(1, 4, 16, dtype=torch.float64, requires_grad=True)
    tables = tables_of(make, 1, 4)
    stream, squares = first(x, None, *(tables or ()))
    found = torch.cat((stream, second(stream, squares, *(tables or ()))[0]))
    between = first_twin(x, tables)
    expected = torch.cat((between, second_twin(between, tables)))
    both = torch.nn.ModuleList((first, second)), torch.nn.ModuleList((first_twin, second_twin))
    ours, stock = outcome(found, both[0], x), outcome(expected, both[1], x)
    assert_same(dict(sorted(ours.items())), dict(sorted(stock.items())), floor=100.0)


# --- far rows -------------------------------------------------------------------------------------


@cz.block
def gated_residual(x, w, r):
    """A product whose epilogue reads a matrix, and a sum that a kernel without a product takes."""
    return r + L.silu(L.linear(x, w)), L.row_sum(r)


@interpreted
@quiet
@pytest.mark.parametrize("stride", [PAST + 64, 2**29 + 64], ids=["a stride", "a product"])
@pytest.mark.parametrize("name", ["x", "w", "r"])
def test_16_rows_further_apart_than_2_to_the_31_elements(name, stride, monkeypatch):
    """As on a GPU, kernels compute addresses in the width that their text says."""
    Bounds(monkeypatch)
    rows = PAST // stride + 3
    given = {"x": torch.randn(rows, 16), "w": torch.randn(rows, 16), "r": torch.randn(rows, rows)}
    given = {n: v.half() for n, v in given.items()}
    expected = gated_residual(**given, backend="triton")
    given[name] = far(given[name], stride)
    found = gated_residual(**given, backend="triton")
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def far(tensor, stride):
    """The same matrix, of rows gigabytes apart: memory that is never touched costs nothing."""
    try:
        base = torch.empty(tensor.shape[0] * stride, dtype=tensor.dtype)
    except RuntimeError as error:
        pytest.skip(f"needs 13 GB of addresses: {error}")
    return base.as_strided(tensor.shape, (stride, 1)).copy_(tensor)


# --- order ----------------------------------------------------------------------------------------


def test_23_no_kernel_adds_in_an_order_of_chance():
    folder = Path(cz.backends.__file__).parent
    texts = {path.name: path.read_text(encoding="utf-8") for path in folder.rglob("*.py")}
    assert len(texts) > 20
    assert [name for name, text in texts.items() if "atomic_" in text] == []


# --- autocast -------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.slow
def test_27_a_layer_under_autocast_has_the_dtypes_of_its_twin(make):
    layer, twin = (module.float() for module in pair(make))
    x = torch.randn(2, 5, 16, requires_grad=True)
    tables = tables_of(make, 2, 5)
    tables = None if tables is None else [table.float() for table in tables]
    with torch.autocast("cpu", torch.bfloat16):
        stream, expected = layer(x, None, *(tables or ()))[0], twin(x, tables)
    assert stream.dtype == expected.dtype
    for module, y in ((layer, stream), (twin, expected)):
        y.sum().backward()
        assert {weight.grad.dtype for weight in module.parameters()} == {torch.float32}
    error, size = (stream - expected).detach().norm(), expected.detach().norm()
    assert 0 < error <= 2.0**-6 * size


def test_27_no_product_runs_in_float32_in_silence():
    """Each product of new programs, forward and backward, loads what autocast asks for."""
    known = set(BY_DIGEST)
    layer = cz.nn.DecoderLayer(22, 2, 1, 26, head_dim=6)  # sizes that no other test has
    angles = torch.randn(1, 4, 3)
    with torch.autocast("cpu", torch.bfloat16):
        stream, _ = layer(torch.randn(1, 4, 22), None, angles.cos(), angles.sin())
        for lean in (False, True):
            cz.ops.linear_cross_entropy(
                stream, torch.randn(13, 22), torch.ones(1, 4).long(), lean=lean
            ).backward(retain_graph=True)
    pairs = [one.pair for digest, one in BY_DIGEST.items() if digest not in known]
    plans = [p for pair in pairs for p in (pair.forward_plan, pair.backward_plan) if p]
    found = [dtype for plan in plans for dtype in dtypes_of_products(plan)]
    assert len(found) >= 30
    assert set(found) == {"bfloat16"}


def dtypes_of_products(plan):
    """The dtype in which each operand of each product is stored."""
    stored = dtypes_of(plan.graph)
    products = [kernel.product for kernel in plan.kernels if kernel.product is not None]
    return [stored[operand] for product in products for operand in product.inputs]
