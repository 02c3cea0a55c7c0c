"""tf32 is allowed by any of torch's switches, and each can be asked after any was set."""

import pytest
import torch
from triton_plans import interpreted, quiet

from cadenza import block
from cadenza import lang as L
from cadenza.backends.triton.target import tf32_allowed

MATMUL = torch.backends.cuda.matmul
SWITCHES = {
    "of products": lambda on: setattr(MATMUL, "fp32_precision", "tf32" if on else "ieee"),
    "of all": lambda on: setattr(torch.backends, "fp32_precision", "tf32" if on else "ieee"),
    "older": lambda on: setattr(MATMUL, "allow_tf32", on),
    "by words": lambda on: torch.set_float32_matmul_precision("high" if on else "highest"),
}
by_products = pytest.mark.parametrize("switch", [SWITCHES["of products"]], indirect=True)
BITS = {
    "NaN": 0x7FC00000, "NaN of arithmetic": 0x7FFFFFFF, "negative NaN": -1,
    "infinity": 0x7F800000, "minus infinity": 0xFF800000 - 2**32, "most": 0x7F7FE000,
}  # fmt: skip


@pytest.fixture(params=SWITCHES.values(), ids=SWITCHES)
def switch(request):
    """One of the switches; all are as they were afterwards."""
    products, all_of_it = MATMUL.fp32_precision, torch.backends.fp32_precision
    yield request.param
    torch.set_float32_matmul_precision("highest")
    torch.backends.fp32_precision, MATMUL.fp32_precision = all_of_it, products


@pytest.mark.parametrize("on", [True, False])
def test_each_switch_is_heard(switch, on):
    switch(not on)
    switch(on)
    assert tf32_allowed() is on


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_program_runs_whichever_was_set(switch, dtype):
    x, w = torch.ones(5, 8, dtype=dtype), torch.ones(4, 8, dtype=dtype)
    scaled = block(lambda x, w: L.linear(x, w) * 0.5)
    for on in (True, False):
        switch(on)
        assert torch.equal(scaled(x, w, backend="triton"), torch.full((5, 4), 4.0, dtype=dtype))


def nearest(x):
    """The nearest numbers with 11 binary digits, which tf32 has."""
    digits, exponent = torch.frexp(x.double())
    return torch.ldexp(torch.round(digits * 2**11) / 2**11, exponent)


@interpreted
@by_products
def test_factors_are_the_nearest_of_tf32(switch):
    """A GPU cuts what digits it has no room for, and products of such are too small."""
    switch(True)
    x, w = torch.rand(5, 200) - 0.25, torch.rand(4, 200) - 0.25
    scaled = block(lambda x, w: L.linear(x, w) * 1.0)
    found = scaled(x, w, backend="triton")
    torch.testing.assert_close(found.double(), nearest(x) @ nearest(w).T, rtol=1e-6, atol=1e-6)
    assert not torch.allclose(found.double(), x.double() @ w.double().T, rtol=1e-6, atol=1e-6)


@quiet
@interpreted
@by_products
@pytest.mark.parametrize("bits", BITS.values(), ids=BITS)
def test_no_number_becomes_another(switch, bits):
    switch(True)
    x, w = torch.zeros(3, 16), torch.ones(4, 16)
    x[1, 2] = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    found = block(lambda x, w: L.linear(x, w) * 1.0)(x, w, backend="triton")
    torch.testing.assert_close(found, x @ w.T, rtol=2e-3, atol=0, equal_nan=True)
