"""Constants that arithmetic treats apart, on a GPU: zeros, infinities, what overflows when squared.

Kernels by Triton give what the reference back end gives on the same device, infinite where that is
infinite and no number where that is none. Operands are small whole numbers, so products are exact.
"""

import pytest
import torch
from calls import BRAIN, HALF, launches
from test_numbers import FUNCTIONS, NUMBERS, every_number, results

from cadenza import block

pytestmark = [pytest.mark.gpu, pytest.mark.interpreted]


def whole(place, dtype):
    """x [129, 64], w [64, 64] and a column r above 0, of few whole numbers."""
    generator = torch.Generator().manual_seed(0)
    rows = place.rows(129)
    x, w = (torch.randint(-2, 3, n, generator=generator) for n in [(rows, 64), (64, 64)])
    r = torch.randint(1, 3, (rows, 1), generator=generator)
    return [t.to(place.device, dtype) for t in (x, w, r)]


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
@pytest.mark.parametrize("number", NUMBERS, ids=str)
def test_triton_and_the_reference_agree(function, number, place):
    tensors = whole(place, BRAIN)
    expected = results(function, number, tensors, backend="reference")
    with launches() as made:
        actual = results(function, number, tensors, backend="triton")
    assert len(made), "nothing ran by Triton"
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2**-6, atol=2**-6, equal_nan=True)


def test_a_quotient_with_a_number_is_a_quotient(place):
    """The reciprocal of 2⁻¹³⁰, by which torch would multiply, is infinite in float32."""

    def divided(x, numerator, divisor):
        return {"above": numerator / x, "below": x / divisor}

    x = torch.full((3, 2), 2.0**-130, device=place.device)
    for backend in ("reference", "triton"):
        found = block(divided)(x, 2.0**-30, 2.0**-130, backend=backend)
        torch.testing.assert_close(found["above"].cpu(), torch.full((3, 2), 2.0**100), msg=backend)
        torch.testing.assert_close(found["below"].cpu(), torch.ones(3, 2), msg=backend)


@pytest.mark.parametrize("dtype", [BRAIN, HALF], ids=str)
def test_every_number_in_one_epilogue(dtype, place):
    tensors = whole(place, dtype)
    expected, actual = (
        block(every_number)(*tensors, backend=name) for name in ("reference", "triton")
    )
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2**-6, atol=2**-6, equal_nan=True)
