"""Gradients that are added to a sum where they are computed, in place.

By the reference back end, and by kernels in Triton's interpreter: templates, and torch's product
with a kernel behind it.
"""

import pytest
import torch
from triton_plans import interpreted, quiet

from cadenza.backends import reference
from cadenza.backends.triton.configuration import Configuration
from cadenza.backends.triton.executable import Executable
from cadenza.backends.triton.fallbacks import LibraryProduct
from cadenza.backends.triton.launches import ProductLaunch
from cadenza.backends.triton.memory import Memory
from cadenza.core import lang as L
from cadenza.core.pipeline import Sums, compile_program
from cadenza.core.plan_text import show_plans
from cadenza.core.trace import Operand, Signature

ROWS, WIDTH, COLUMNS = 11, 8, 6
LIBRARY = Configuration(library=True)
SMALL = Configuration(BM=16, BN=16, BK=16, warps=4, stages=2)


def gelu_of_linear(x, w):
    """A product with something behind it."""
    return L.gelu(L.linear(x, w))


def pair(dtype="float32"):
    """Its plans, with the gradient of w added to a sum."""
    operands = Operand("x", "M", WIDTH, dtype), Operand("w", COLUMNS, WIDTH, dtype)
    sums = Sums(added=frozenset("w"))
    return compile_program(gelu_of_linear, Signature(operands, ()), needed=["x", "w"], sums=sums)


def given(made, dtype=torch.float32):
    """Backward's inputs but for the sum, which come from forward and random numbers."""
    named = {"x": torch.randn(ROWS, WIDTH), "w": torch.randn(COLUMNS, WIDTH)}
    named = {name: value.to(dtype) for name, value in named.items()}
    inputs = [named[i.attributes["name"]] for i in made.forward.inputs]
    results = reference.Executable(made.forward_plan)(inputs, ROWS)
    values = [results[v] if isinstance(v, int) else named[v] for v in made.values]
    return [*values, torch.randn(ROWS, COLUMNS).to(dtype)]


def test_a_sum_is_one_more_input_of_the_kernel_that_multiplies():
    made = pair("bfloat16")
    assert made.added == ("w",)
    assert [i.attributes["name"] for i in made.backward.inputs][-1] == "sum_w"
    total, gradient = made.backward.inputs[-1], made.backward.outputs[made.gradients.index("w")]
    [kernel] = [k for k in made.backward_plan.kernels if total in set(k.loads)]
    assert kernel.product is not None
    assert gradient in set(kernel.stores)
    assert "float32[6, 8] = sum_w + " in show_plans(made)


def test_without_a_gradient_there_is_no_sum():
    operands = Operand("x", "M", WIDTH, "float32"), Operand("w", COLUMNS, WIDTH, "float32")
    sums = Sums(added=frozenset("w"))
    made = compile_program(gelu_of_linear, Signature(operands, ()), needed=["x"], sums=sums)
    assert made.added == ()
    assert "sum_w" not in show_plans(made)


def check(made, run, dtype=torch.float32):
    """Twice into one sum: it holds both gradients, and other outputs are new."""
    inputs, total = given(made, dtype), torch.randn(COLUMNS, WIDTH)
    place = made.gradients.index("w")
    alone = reference.Executable(made.backward_plan)([*inputs, torch.zeros_like(total)], ROWS)
    expected = total + 2 * alone[place]
    for _ in range(2):
        found = run([*inputs, total], ROWS, {place: total})
        assert found[place] is total
    torch.testing.assert_close(total, expected, rtol=2e-6, atol=1e-5)
    other = 1 - place
    torch.testing.assert_close(found[other], alone[other], rtol=1e-2, atol=1e-2)
    assert found[other].data_ptr() not in {t.data_ptr() for t in inputs}


def test_the_reference_back_end_adds_in_place():
    made = pair()
    from cadenza.backends import compile_plan

    check(made, compile_plan(made.backward_plan, "reference", lambda: None))


@interpreted
@quiet
@pytest.mark.parametrize("cut", [SMALL, LIBRARY], ids=["template", "library"])
def test_kernels_add_in_place(cut, monkeypatch):
    made, empty = pair(), Memory.empty
    allocated = []

    def noted(memory, shape, dtype):
        allocated.append((tuple(shape), dtype))
        return empty(memory, shape, dtype)

    monkeypatch.setattr(Memory, "empty", noted)
    executable = Executable(made.backward_plan, lambda kernel: cut)
    check(made, executable)
    # A library's product needs memory, in each of two calls; a template adds where the sum is.
    products = allocated.count(((COLUMNS, WIDTH), torch.float32))
    assert products == (2 if cut is LIBRARY else 0)
    kind = LibraryProduct if cut is LIBRARY else ProductLaunch
    assert any(isinstance(step, kind) for step in executable.program.steps)


@interpreted
@quiet
def test_a_wide_sum_of_narrow_products():
    made = pair("float16")
    check(made, Executable(made.backward_plan, lambda kernel: SMALL), torch.float16)
