"""Weights of one product on a GPU: where they lie, what a step copies, and that no bit changes."""

import copy

import pytest
import torch
from calls import BRAIN, SINGLE
from joint_weights import Copies, apart, together

import cadenza as cz

pytestmark = pytest.mark.gpu
WIDTH, ROWS = 256, 128  # the fewest rows that a weight has, those of keys


def layer(device, dtype=BRAIN):
    torch.manual_seed(4)
    made = cz.nn.DecoderLayer(WIDTH, 8, 4, 320, architecture="qwen2", head_dim=32)
    return made.to(device, dtype)


def given(device, dtype=BRAIN):
    """A layer's arguments, of more rows than a tile has."""
    torch.manual_seed(6)
    x = torch.randn(2, 150, WIDTH, device=device, dtype=dtype, requires_grad=True)
    angles = torch.randn(2, 150, 16, device=device)
    return x, None, angles.cos(), angles.sin()


def gradients(module, x, squares, *tables):
    """What the products of joined weights give, and every gradient: attention sums in any order."""
    module.zero_grad()
    qkv = module.self_attn.project(x, module.input_layernorm, cos=tables[0], sin=tables[1])
    y = module.mlp(x)
    (qkv.float().square().mean() + y.float().square().mean()).backward()
    named = dict(module.named_parameters())
    found = {name: weight.grad for name, weight in named.items() if weight.grad is not None}
    return found | {"qkv": qkv.detach(), "y": y.detach()}


def test_moved_weights_lie_together_and_a_step_copies_none(place):
    module = layer(place.device)
    assert together(module)
    assert together(copy.deepcopy(module))
    inputs = given(place.device)
    with Copies(WIDTH, ROWS) as copies:
        module(*inputs)[0].float().square().mean().backward()
    assert copies.found == []


@pytest.mark.parametrize("mixed", [False, True], ids=["bfloat16", "autocast"])
def test_gradients_are_those_of_weights_apart_bit_by_bit(mixed, place):
    dtype = SINGLE if mixed else BRAIN
    module, other = layer(place.device, dtype), apart(layer(place.device, dtype))
    inputs = given(place.device, dtype)
    with torch.autocast("cuda", BRAIN, enabled=mixed):
        found, expected = gradients(module, *inputs), gradients(other, *inputs)
    assert found.keys() == expected.keys()
    assert "self_attn.k_proj.weight" in found
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.alone
def test_forward_takes_no_memory_for_joining(place):
    module = cz.nn.FeedForward(2048, 8192).to(place.device, BRAIN)
    x, taken = torch.randn(16, 2048, device=place.device, dtype=BRAIN), []
    for one in (module, apart(copy.deepcopy(module))):
        one(x).sum().backward()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        one(x).sum()
        taken.append(torch.cuda.max_memory_allocated() - before)
    whole = 2 * 2 * 8192 * 2048
    assert taken[0] < 0.1 * whole
    assert taken[1] >= whole


@pytest.mark.parametrize("non_blocking", [False, True])
def test_weights_that_come_back_are_what_they_were(non_blocking, place):
    module = layer("cpu")
    expected = copy.deepcopy(module.state_dict())
    module.to(place.device)
    assert together(module)
    module.to("cpu", non_blocking=non_blocking)
    torch.cuda.synchronize()
    for name, value in module.state_dict().items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.alone
def test_backward_is_kept_no_copy_of_weights_apart(place):
    module = apart(cz.nn.FeedForward(2048, 8192).to(place.device, BRAIN))
    x = torch.randn(16, 2048, device=place.device, dtype=BRAIN, requires_grad=True)
    module(x).sum().backward()
    module.zero_grad()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    y = module(x)
    assert torch.cuda.memory_allocated() - before < 0.1 * 2 * 2 * 8192 * 2048
    y.sum().backward()


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("one", ["q_proj", "k_proj", "v_proj"])
def test_a_weight_that_is_written_to_before_backward_is_an_error(one, frozen, place):
    module = layer(place.device).requires_grad_(not frozen)
    inputs = given(place.device)
    y = module(*inputs)[0]
    with torch.no_grad():
        module.self_attn.get_submodule(one).weight.mul_(3.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y.float().square().sum(), inputs[0])
