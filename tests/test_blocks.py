"""Every built-in block against float64 autograd of `plain`, central differences and stock torch.

Rows of 0, 1, 127 and 129; in float32, bfloat16 and float16 the error stays within twice torch's
own at that dtype, for every output and gradient.
"""

import pytest
import torch
from block_operands import FROZEN, OPERANDS, cast, operands
from programs import assert_close, check_program, gradients_of, labelled
from torch.nn import functional as F

from cadenza.library.blocks import BUILT_IN

NAMES = sorted(BUILT_IN)


def test_every_built_in_block_has_operands_here():
    assert set(OPERANDS) == set(BUILT_IN)


@pytest.mark.parametrize("rows", [0, 1, 127, 129])
@pytest.mark.parametrize("name", NAMES)
def test_block_equals_plain_and_its_differences(name, rows):
    check_program(BUILT_IN[name], **operands(name, rows))


def with_gradients(arguments):
    return {
        name: value.clone().requires_grad_()
        if isinstance(value, torch.Tensor) and value.is_floating_point() and name not in FROZEN
        else value
        for name, value in arguments.items()
    }


def results(function, arguments, upstream):
    """Outputs and gradients of one call, by name."""
    arguments = with_gradients(arguments)
    outputs = labelled(function(**arguments))
    given = {n: g.to(outputs[n].dtype) for n, g in upstream.items()}
    gradients = gradients_of(outputs, arguments, given)
    return outputs | {f"d {name}": g for name, g in gradients.items()}


HALF = pytest.param(torch.float16, marks=pytest.mark.slow)
DTYPES = [torch.float32, torch.bfloat16, HALF]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_error_is_at_most_twice_torch_in_the_same_dtype(name, dtype):
    block, arguments = BUILT_IN[name], cast(operands(name, 33), dtype)
    outputs = labelled(block(**arguments))
    upstream = {n: torch.randn_like(y) for n, y in outputs.items()}
    actual = results(block, arguments, upstream)
    torch_result = results(block.plain, arguments, upstream)
    wide = {n: g.double() for n, g in upstream.items()}
    oracle = results(block.plain, cast(arguments, torch.float64), wide)
    for label, value in actual.items():
        assert_close(value, oracle[label], torch_result[label].to(value.dtype))


def test_llama_block_in_stock_torch():
    arguments = cast(operands("llama", 17), torch.float64)
    a = type("Arguments", (), arguments)
    x = a.x + F.linear(a.y, a.wo)
    gate, up = F.linear(F.rms_norm(x, x.shape[1:], a.norm, 1e-5), a.w_gate_up).chunk(2, -1)
    x = x + F.linear(F.silu(gate) * up, a.w_down)
    qkv = F.linear(F.rms_norm(x, x.shape[1:], a.next_norm, 1e-5), a.w_qkv)
    heads = qkv.unflatten(-1, (-1, a.head_dim))
    turned = torch.view_as_complex(torch.stack(heads.chunk(2, -1), -1).contiguous())
    turned = torch.view_as_real(turned * torch.complex(a.cos, a.sin)[:, None])
    rotated = torch.cat((turned[..., 0], turned[..., 1]), -1)
    expected = torch.cat((rotated[:, : a.heads], heads[:, a.heads :]), 1).flatten(1)
    stream, actual = BUILT_IN["llama"](**arguments)
    torch.testing.assert_close(stream, x, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_gpt2_block_in_stock_torch():
    arguments = cast(operands("gpt2", 17), torch.float64)
    a = type("Arguments", (), arguments)
    x = a.x + F.linear(a.y, a.wo, a.bo)
    h = F.layer_norm(x, x.shape[1:], a.norm, a.norm_bias)
    x = x + F.linear(F.gelu(F.linear(h, a.w_up, a.b_up), approximate="tanh"), a.w_down, a.b_down)
    h = F.layer_norm(x, x.shape[1:], a.next_norm, a.next_norm_bias)
    stream, qkv = BUILT_IN["gpt2"](**arguments)
    torch.testing.assert_close(stream, x, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(qkv, F.linear(h, a.w_qkv, a.b_qkv), rtol=1e-12, atol=1e-12)


def test_residual_with_two_consumers_sums_both_gradients():
    arguments = with_gradients(cast(operands("llama", 9), torch.float64))
    stream, qkv = BUILT_IN["llama"](**arguments)
    both = torch.autograd.grad(stream.sum() + qkv.sum(), arguments["x"], retain_graph=True)[0]
    one = torch.autograd.grad(stream.sum(), arguments["x"], retain_graph=True)[0]
    other = torch.autograd.grad(qkv.sum(), arguments["x"])[0]
    torch.testing.assert_close(both, one + other)


def test_targets_outside_of_the_vocabulary_give_nan_for_their_row_alone():
    arguments = operands("lm-head", 9)
    arguments["target"][:3] = torch.tensor([-1, 21, 20])
    loss = BUILT_IN["lm-head"](**arguments)[:, 0]
    assert loss.isnan().tolist() == [True, True] + [False] * 7
