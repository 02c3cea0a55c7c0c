"""`cz.ops.accumulate_weight_gradient`: what it adds to what, in which dtype, what it refuses."""

import pytest
import torch
from programs import assert_close, error_of
from torch.nn import functional as F

from cadenza.core.errors import ProgramError
from cadenza.library.accumulate import accumulate_weight_gradient

SINGLE, BRAIN, HALF = torch.float32, torch.bfloat16, torch.float16
PAIRS = [
    (SINGLE, SINGLE), (SINGLE, BRAIN), (BRAIN, SINGLE), (BRAIN, BRAIN), (SINGLE, HALF),
]  # fmt: skip


def operands(dtype, shape=(3, 40)):
    return torch.randn(*shape, 12).to(dtype), torch.randn(*shape, 15).to(dtype)


@pytest.mark.parametrize(("kept", "dtype"), PAIRS, ids=str)
def test_the_sum_is_rounded_once_a_call(kept, dtype):
    x, dy = operands(dtype)
    gradient = torch.randn(15, 12).to(kept)
    flat = [t.flatten(0, 1).double() for t in (dy, x)]
    oracle = gradient.double() + flat[0].T @ flat[1]
    single = (gradient.float() + flat[0].float().T @ flat[1].float()).to(kept)
    before, place = gradient._version, gradient.data_ptr()
    assert accumulate_weight_gradient(gradient, x, dy) is gradient
    assert (gradient._version, gradient.data_ptr()) == (before + 1, place)
    assert_close(gradient, oracle, single)


def test_it_is_what_autograd_accumulates():
    x, dy = operands(torch.float64)
    weight = torch.randn(15, 12, dtype=torch.float64, requires_grad=True)
    gradient = torch.zeros(15, 12, dtype=torch.float64)
    for _ in range(3):
        F.linear(x, weight).backward(dy)
        accumulate_weight_gradient(gradient, x, dy)
    torch.testing.assert_close(gradient, weight.grad)


def test_a_float32_gradient_keeps_what_a_bfloat16_one_loses():
    gradients = {d: torch.zeros(15, 12, dtype=d) for d in (torch.float32, torch.bfloat16)}
    oracle = torch.zeros(15, 12, dtype=torch.float64)
    for _ in range(64):
        x, dy = operands(torch.bfloat16, (16,))
        oracle += dy.double().T @ x.double()
        for gradient in gradients.values():
            accumulate_weight_gradient(gradient, x, dy)
    errors = {d: error_of(g, oracle) / oracle.norm().item() for d, g in gradients.items()}
    assert errors[torch.float32] < 1e-6
    assert errors[torch.bfloat16] > 1e-3


def test_nothing_is_recorded_and_no_operand_is_changed():
    x, dy = (t.requires_grad_() for t in operands(torch.float32))
    versions = x._version, dy._version
    gradient = accumulate_weight_gradient(torch.zeros(15, 12), x, dy)
    assert not gradient.requires_grad
    assert (x._version, dy._version) == versions


def test_a_gradient_of_a_parameter_and_no_tokens():
    weight = torch.nn.Parameter(torch.randn(15, 12))
    weight.grad = torch.ones(15, 12)
    accumulate_weight_gradient(weight.grad, torch.randn(0, 12), torch.randn(0, 15))
    assert torch.equal(weight.grad, torch.ones(15, 12))


def test_it_is_an_operation_that_torch_knows_to_mutate():
    x, dy = operands(torch.bfloat16)
    operation = torch.ops.cadenza.accumulate_weight_gradient.default
    torch.library.opcheck(operation, (torch.zeros(15, 12), x, dy))

    def step(gradient, x, dy):
        return accumulate_weight_gradient(gradient, x, dy) * 2.0

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    eager, graph = torch.zeros(15, 12), torch.zeros(15, 12)
    torch.testing.assert_close(compiled(graph, x, dy), step(eager, x, dy))
    torch.testing.assert_close(graph, eager)


X, DY = torch.randn(4, 12), torch.randn(4, 15)
WRONG = [
    ((torch.zeros(12, 15), X, DY), r"gradient \[12, 15\]"),
    ((torch.zeros(15, 12), X[:3], DY), r"x \[3, 12\]"),
    ((torch.zeros(15, 12), X.double(), DY), "one floating dtype"),
    ((torch.zeros(15, 12, dtype=torch.float16), X, DY), "gradient of torch.float16"),
    ((torch.zeros(15, 12), X.long(), DY.long()), "one floating dtype"),
    ((torch.zeros(15, 12, requires_grad=True), X, DY), "requires a gradient"),
]


@pytest.mark.parametrize(("given", "said"), WRONG)
def test_what_does_not_fit_is_refused(given, said):
    with pytest.raises(ProgramError, match=said):
        accumulate_weight_gradient(*given)
