"""Numbers that arithmetic treats apart: zeros, infinities, and what overflows when it is squared.

A program may have any of them as a constant, wherever rules move factors out of products and
reductions. Held against the same function on tensors, by both back ends.
"""

import math

import pytest
import torch
from triton_plans import interpreted, quiet

from cadenza import block
from cadenza import lang as L

NUMBERS = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e39, 1e200, 1e308, 1e-40, 1e-50, 1e-200,
           5e-324, 2**40]  # fmt: skip
QUICK = (0.0, 1e200)
FUNCTIONS = {
    "a factor before a product": lambda x, w, r, c: L.linear(x * c, w),
    "a divisor before a product": lambda x, w, r, c: L.linear(x / c, w),
    "a divisor of a row times it": lambda x, w, r, c: L.linear(x / (r * c), w),
    "a number divided": lambda x, w, r, c: L.linear(x, w) * (c / r),
    "its square": lambda x, w, r, c: L.linear((x * c) ** 2, w),
    "a power below zero": lambda x, w, r, c: L.linear(x * (r * c) ** -2, w),
    "a factor behind a product": lambda x, w, r, c: L.linear(x, w) / c * r,
    "what a norm scales away": lambda x, w, r, c: L.linear(L.rms_norm(x * c, None), w),
    "a reduction of rows": lambda x, w, r, c: L.row_sum(L.linear(x, w) * c * r),
    "a reduction of columns": lambda x, w, r, c: L.column_sum(L.linear(x, w) * c * r),
    "a bound": lambda x, w, r, c: L.maximum(L.linear(x, w), c) * r,
    "an index": lambda x, w, r, c: L.linear(x, w) * (L.column_index(x) < c) * r,
    "a choice": lambda x, w, r, c: L.where(L.linear(x, w) > c, r, c),
}


def every_number(x, w, r):
    """Two epilogues, and a finish of rows, in which all of the numbers stand."""
    y, z = L.linear(x, w), L.linear(x, w * 2.0)
    for place, number in enumerate(NUMBERS):
        if place % 2:
            y = L.where(y > number, y / number, r)
        else:
            z = L.maximum(z * number, number)
    return y, L.linear(z * L.rsqrt(L.row_sum(z * z) / -0.0), w)


def results(function, number, tensors, **options):
    """Output and gradients of a program over x, w and r."""
    leaves = [t.clone().requires_grad_() for t in tensors]
    y = block(function)(*leaves, number, **options)
    found = torch.autograd.grad(y.sum(), leaves, allow_unused=True)
    return y.detach(), *(torch.zeros(()) if g is None else g for g in found)


def plain_results(function, number, tensors):
    """The same by the function on tensors."""
    leaves = [t.clone().requires_grad_() for t in tensors]
    y = block(function).plain(*leaves, number)
    found = torch.autograd.grad(y.sum(), leaves, allow_unused=True)
    return y.detach(), *(torch.zeros(()) if g is None else g for g in found)


def drawn(dtype):
    """x [6, 16], w [16, 16] and a column r [6, 1] above 1/2."""
    generator = torch.Generator().manual_seed(0)
    x, w, r = (torch.randn(*n, generator=generator) for n in [(6, 16), (16, 16), (6, 1)])
    return [t.to(dtype) for t in (x, w, r.abs() + 0.5)]


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
@pytest.mark.parametrize(
    "number",
    [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in NUMBERS],
    ids=str,
)
def test_by_the_reference(function, number):
    """In float64, where each is what it says; where plain is finite, the program is the same.

    An infinite factor may be moved: where plain's output is infinite or no number, the program's is
    either. Derivatives are held where plain's are finite, and some number comes out at all.
    """
    tensors = drawn(torch.float64)
    expected = plain_results(function, number, tensors)
    if expected[0].isnan().all():
        expected = expected[:1]
    actual = results(function, number, tensors)
    if number == 0 or not math.isfinite(number):  # a large one may overflow in plain's terms alone
        assert torch.equal(actual[0].isfinite(), expected[0].isfinite())
    for ours, theirs in zip(actual, expected, strict=False):
        held, tiny = theirs.isfinite(), torch.finfo(theirs.dtype).tiny
        torch.testing.assert_close(ours.expand_as(theirs)[held], theirs[held], rtol=1e-9, atol=tiny)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("backend", ["reference", pytest.param("triton", marks=interpreted)])
def test_whole_numbers_are_compared_as_such(dtype, backend):
    """2²⁴ + 1 is none of float32's, to which torch's own comparison would round."""

    def compared(x, target, bound):
        return {
            "below": x * (target < bound),
            "equal": x * (target == bound),
            "within": x * (target <= bound),
        }

    x = torch.ones(4, 2, dtype=dtype)
    target = torch.tensor([2**24 - 1, 2**24, 2**24 + 1, 2**24 + 2])[:, None]
    for bound in (2.0**24, 2.0**24 + 1, 2**24 + 1):
        found = block(compared)(x, target, bound, backend=backend)
        plain = block(compared).plain(x, target, bound)
        for name, truth in {
            "below": target < int(bound),
            "equal": target == int(bound),
            "within": target <= int(bound),
        }.items():
            assert torch.equal(found[name][:, :1] != 0, truth), name
            assert dtype == torch.float32 or torch.equal(plain[name], found[name])


@pytest.mark.parametrize("backend", ["reference", pytest.param("triton", marks=interpreted)])
def test_a_quotient_with_a_number_is_a_quotient(backend):
    """The reciprocal of 2⁻¹³⁰, by which torch would multiply, is infinite in float32."""

    def divided(x, numerator, divisor):
        return {"above": numerator / x, "below": x / divisor}

    x = torch.full((3, 2), 2.0**-130)
    found = block(divided)(x, 2.0**-30, 2.0**-130, backend=backend)
    assert torch.equal(found["above"], torch.full((3, 2), 2.0**100))
    assert torch.equal(found["below"], torch.ones(3, 2))


@pytest.mark.slow
@interpreted
@quiet
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
@pytest.mark.parametrize("number", NUMBERS, ids=str)
def test_triton_and_the_reference_agree(function, number):
    """In float32, where the largest are infinite and the smallest nothing."""
    tensors = drawn(torch.float32)
    expected = results(function, number, tensors, backend="reference")
    actual = results(function, number, tensors, backend="triton")
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5, equal_nan=True)
