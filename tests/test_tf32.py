"""tf32 is allowed by any of torch's switches, and each can be asked after any was set."""

import pytest
import torch
from triton_plans import interpreted

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
