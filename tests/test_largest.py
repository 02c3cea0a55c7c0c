"""The gradient of a largest value in 16 bits: it goes where torch's goes, and is never lost.

Forward takes the largest of unrounded sums; backward looks for it among what was stored, rounded.
"""

import pytest
import torch
from programs import assert_close, double_copies, gradients_of, labelled

import cadenza as cz
from cadenza import lang as L

DTYPES = [torch.bfloat16, torch.float16]


def row(acc, bias):
    return L.row_max(acc)


def row_of_a_sum(acc, bias):
    """Stored beside what else backward needs of the accumulator."""
    z = acc + bias
    return L.silu(acc), L.row_max(z), L.exp(acc)


def row_of_magnitudes(acc, bias):
    return L.row_max(L.abs(acc + bias))


def gated(acc, bias):
    u = L.swiglu(acc + bias)
    return u, L.row_max(u)


def column(acc, bias):
    return acc * 2.0, L.column_max(acc + bias)


def group(acc, bias):
    return acc * L.repeat(L.group_max(acc + bias, 4), 4)


def as_stored(acc, bias):
    z = L.stored(acc + bias)
    return L.row_max(z), L.tanh(acc)


FUNCTIONS = (row, row_of_a_sum, row_of_magnitudes, gated, column, group, as_stored)


def gradients(function, operands, upstream):
    leaves = {n: v.detach().clone().requires_grad_() for n, v in operands.items()}
    outputs = labelled(function(**leaves))
    given = {n: g.to(outputs[n].dtype) for n, g in upstream.items()}
    return gradients_of(outputs, leaves, given)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_its_gradient_is_as_good_as_torchs(function, dtype):
    program = cz.epilogue(function)
    operands = {
        "x": torch.randn(33, 24).to(dtype), "w": (torch.randn(16, 24) / 5).to(dtype),
        "bias": torch.randn(16).to(dtype),
    }  # fmt: skip
    exact = labelled(program.plain(**double_copies(operands)))
    upstream = {n: torch.randn_like(y) for n, y in exact.items()}
    wide = {n: v.double() for n, v in operands.items()}
    actual = gradients(program, operands, upstream)
    stock = gradients(program.plain, operands, upstream)
    oracle = gradients(program.plain, wide, upstream)
    for name, gradient in actual.items():
        assert_close(gradient, oracle[name], stock[name])


def test_what_rounding_does_not_see_is_not_stored_for_it():
    @cz.epilogue
    def gated(acc):
        gate, up = L.split(acc)
        return L.silu(gate) * up, L.row_max(L.abs(up))

    x, w = torch.randn(5, 8).bfloat16().requires_grad_(), torch.randn(16, 8).bfloat16()
    inputs = gated.backward_graph(x, w).inputs
    saved = [i for i in inputs if i.attributes["name"].startswith("saved") and i.type.is_matrix]
    assert [i.type.columns for i in saved] == [16], "the product alone"


def test_what_loses_gets_no_gradient_however_large_it_is():
    @cz.block
    def roots(x):
        return L.sqrt(L.maximum(x, 0.0)) + L.sqrt(-L.minimum(-x, 0.0))

    x = torch.tensor([[-1.0, 4.0]], dtype=torch.float64, requires_grad=True)
    for call in (roots, roots.plain):
        (gradient,) = torch.autograd.grad(call(x).sum(), x)
        assert gradient.tolist() == [[0.0, 0.5]]


def test_in_the_compute_type_nothing_is_rounded():
    program = cz.epilogue(row_of_a_sum)
    x, w, bias = (torch.randn(n, 8, requires_grad=True) for n in (5, 8, 1))
    backward = program.backward_graph(x, w, bias=bias)
    assert all(n.op.label != "cast" for n in backward.nodes())
