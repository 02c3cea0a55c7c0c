"""Autocast, as torch.nn.functional.linear has it.

The dtypes of outputs and gradients are those of stock code under the same context, and values are
as exact; float64 is never cast; contexts nest; backward may run inside or outside.
"""

import pytest
import torch
from citizens import (
    CASES,
    K,
    N,
    assert_as_good,
    gradients,
    mlp,
    norm_swiglu,
    same,
    tensor,
    values,
    weighted,
)
from torch.nn import functional as F

from cadenza import block
from cadenza import lang as L
from cadenza.core.errors import ProgramError

HALVES = [torch.bfloat16, torch.float16]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
each_half = pytest.mark.parametrize("half", HALVES, ids=str)


def autocast(dtype, enabled=True):
    return torch.autocast("cpu", dtype=dtype, enabled=enabled)


@block
def product(x, w, bias):
    return L.linear(x, w, bias)


def stock_norm_swiglu(x, w, rstd):
    gate, up = (F.linear(x, w) * rstd).chunk(2, -1)
    return F.silu(gate) * up


def stock_mlp(x, w_in, bias, w_out):
    hidden = F.gelu(F.linear(x, w_in, bias))
    return x + F.linear(hidden, w_out), hidden.mean(-1, keepdim=True)


STOCK = {"epilogue": stock_norm_swiglu, "tuple": stock_mlp}


def doubles(operands):
    return {n: o.detach().double().requires_grad_() for n, o in operands.items()}


# --- dtypes ---------------------------------------------------------------------------------------


@each_half
@pytest.mark.parametrize("x_dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("w_dtype", DTYPES[:3], ids=str)
def test_a_product_has_the_dtypes_of_linear(half, x_dtype, w_dtype):
    x, w, bias = tensor(6, K, dtype=x_dtype), tensor(N, K, dtype=w_dtype), tensor(N, dtype=w_dtype)
    with autocast(half):
        ours, theirs = product(x, w, bias), F.linear(x, w, bias)
    assert ours.dtype == theirs.dtype == half
    for mine, other in zip(*(torch.autograd.grad(y.sum(), [x, w, bias]) for y in (ours, theirs)),
                           strict=True):  # fmt: skip
        assert mine.dtype == other.dtype


def test_float64_is_not_cast():
    operands = CASES["tuple"].operands((6,), dtype=torch.float64)
    expected = mlp(**operands)
    with autocast(torch.bfloat16):
        found = mlp(**operands)
        assert F.linear(operands["x"], operands["w_in"]).dtype == torch.float64
    assert same(found, expected)
    assert same(gradients(found, operands), gradients(expected, operands))


def test_float64_beside_float32_is_an_error_with_and_without():
    x, w, bias = tensor(6, K, dtype=torch.float64), tensor(N, K), tensor(N)
    for enabled in (True, False):
        with autocast(torch.bfloat16, enabled), pytest.raises(ProgramError, match="one dtype"):
            product(x, w, bias)


@each_half
def test_programs_without_a_product_are_left_alone(half):
    case = CASES["pointwise"]
    operands = case.operands((6,))
    expected = case.call(operands)
    with autocast(half):
        assert same(case.call(operands), expected)


@each_half
def test_float32_residuals_stay_float32(half):
    operands = CASES["tuple"].operands((6,))
    with autocast(half):
        y, mean = mlp(**operands)
        stock, _ = stock_mlp(**operands)
    assert y.dtype == stock.dtype == torch.float32
    assert mean.dtype == torch.float32


# --- values ---------------------------------------------------------------------------------------


@each_half
@pytest.mark.parametrize("name", STOCK)
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_values_and_gradients_are_as_exact_as_stock_code(half, name, dtype):
    case = CASES[name]
    operands = case.operands((64,), dtype=dtype)
    wide = doubles(operands)
    with autocast(half):
        ours, stock = case.call(operands), STOCK[name](**operands)
    oracle = case.call(wide, case.program.plain)
    for mine, other, exact in zip(*map(values, (ours, stock, oracle)), strict=True):
        assert_as_good(mine, other, exact)
    found = gradients(ours, operands)
    assert {n: g.dtype for n, g in found.items()} == dict.fromkeys(operands, dtype)
    assert_as_good(found, gradients(stock, operands), gradients(oracle, wide))


@each_half
def test_operands_of_products_are_rounded_and_no_others(half):
    operands = CASES["epilogue"].operands((6,))
    rounded = {n: o.detach().to(half).float() if n != "rstd" else o for n, o in operands.items()}
    expected = CASES["epilogue"].call(rounded)
    with autocast(half):
        assert same(CASES["epilogue"].call(operands), expected.to(half))


def test_master_weights_get_gradients_of_their_own_precision():
    """Not rounded to the product's dtype on their way back."""
    operands = CASES["epilogue"].operands((64,))
    with autocast(torch.bfloat16):
        y = CASES["epilogue"].call(operands)
    gradient = gradients(y, operands)["w"]
    assert gradient.dtype == torch.float32
    assert not same(gradient, gradient.bfloat16().float())


# --- contexts -------------------------------------------------------------------------------------


@each_half
def test_backward_is_the_same_inside_and_outside(half):
    operands = CASES["tuple"].operands((6,))
    with autocast(half):
        outputs = mlp(**operands)
        inside = gradients(mlp(**operands), operands)
    assert same(gradients(outputs, operands), inside)


def test_contexts_nest():
    operands = CASES["epilogue"].operands((6,))
    expected = CASES["epilogue"].call(operands)
    with autocast(torch.bfloat16):
        with autocast(torch.bfloat16, enabled=False):
            assert same(CASES["epilogue"].call(operands), expected)
        with autocast(torch.float16):
            assert CASES["epilogue"].call(operands).dtype == torch.float16
        assert CASES["epilogue"].call(operands).dtype == torch.bfloat16
    assert same(CASES["epilogue"].call(operands), expected)


def test_another_devices_autocast_does_not_count():
    operands = CASES["epilogue"].operands((6,))
    expected = CASES["epilogue"].call(operands)
    torch.set_autocast_enabled("cuda", True)
    try:
        assert same(CASES["epilogue"].call(operands), expected)
    finally:
        torch.set_autocast_enabled("cuda", False)


def test_meta_tensors_are_not_cast():
    operands = {n: o.to("meta") for n, o in CASES["epilogue"].operands((6,)).items()}
    with autocast(torch.bfloat16):
        assert CASES["epilogue"].call(operands).dtype == torch.float32


@each_half
def test_no_grad_and_frozen_weights_change_no_result(half):
    operands = CASES["tuple"].operands((6,))
    with autocast(half):
        expected = values(mlp(**operands))
        with torch.no_grad():
            assert same(values(mlp(**operands)), expected)
        operands["w_in"].requires_grad_(False)
        assert same(values(mlp(**operands)), expected)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_remembers_the_context(reentrant):
    operands = CASES["epilogue"].operands((6,))
    with autocast(torch.bfloat16):
        expected = gradients(CASES["epilogue"].call(operands), operands)
        y = torch.utils.checkpoint.checkpoint(
            lambda x, w, rstd: norm_swiglu(x, w, rstd=rstd),
            *operands.values(),
            use_reentrant=reentrant,
        )
    weighted(y).backward()
    assert same({n: o.grad for n, o in operands.items()}, expected)


# --- torch.compile --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("half", "inside"), [(torch.bfloat16, True), (torch.float16, False)], ids=str
)
def test_compiled_code_follows_the_context(half, inside):
    torch._dynamo.reset()
    operands = CASES["tuple"].operands((6,))

    def function(operands):
        if not inside:
            return mlp(**operands)
        with autocast(half):
            return mlp(**operands)

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    with autocast(half):
        expected = mlp(**operands)
        found = compiled(operands)
    assert same(found, expected)
    assert same(gradients(found, operands), gradients(expected, operands))
    if not inside:
        assert same(compiled(operands), mlp(**operands))
