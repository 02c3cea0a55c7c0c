"""cadenza.nn modules: stock names and shapes, values and gradients, wrapping by PyTorch's tools."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import cadenza as cz

SIZES = {"width": 16, "heads": 4, "key_value_heads": 2, "feed_forward": 24}


def layer_inputs(batch=2, length=5, dtype=torch.float64):
    x = torch.randn(batch, length, 16, dtype=dtype, requires_grad=True)
    angles = torch.randn(batch, length, 2, dtype=dtype)
    return x, x.detach().square().sum(-1, keepdim=True), angles.cos(), angles.sin()


def test_feed_forward_is_swiglu():
    module = cz.nn.FeedForward(16, 24).double()
    x = torch.randn(3, 4, 16, dtype=torch.float64)
    expected = module.down_proj(F.silu(module.gate_proj(x)) * module.up_proj(x))
    torch.testing.assert_close(module(x), expected, rtol=1e-12, atol=1e-12)


def test_parameters_have_stock_names_and_shapes():
    layer = cz.nn.DecoderLayer(**SIZES)
    shapes = {name: tuple(weight.shape) for name, weight in layer.named_parameters()}
    assert shapes == {
        "self_attn.q_proj.weight": (16, 16),
        "self_attn.k_proj.weight": (8, 16),
        "self_attn.v_proj.weight": (8, 16),
        "self_attn.o_proj.weight": (16, 16),
        "mlp.gate_proj.weight": (24, 16),
        "mlp.up_proj.weight": (24, 16),
        "mlp.down_proj.weight": (16, 24),
        "input_layernorm.weight": (16,),
        "post_attention_layernorm.weight": (16,),
    }
    assert set(layer.state_dict()) == set(shapes)


def test_a_layer_hands_on_the_sums_of_squares_of_its_stream():
    layer = cz.nn.DecoderLayer(**SIZES).double()
    stream, squares = layer(*layer_inputs())
    torch.testing.assert_close(squares, stream.square().sum(-1, keepdim=True))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_a_layer_changes_no_bit(use_reentrant):
    layer, inputs = cz.nn.DecoderLayer(**SIZES), layer_inputs(dtype=torch.float32)
    gradients = []
    for run in (layer, lambda *given: checkpoint(layer, *given, use_reentrant=use_reentrant)):
        layer.zero_grad()
        stream, squares = run(*inputs)
        (stream.square().sum() + squares.sum()).backward()
        gradients.append([weight.grad.clone() for weight in layer.parameters()])
    for plain, again in zip(*gradients, strict=True):
        assert torch.equal(plain, again)


def test_deepcopy_and_load_state_dict():
    layer = cz.nn.DecoderLayer(**SIZES)
    copied, other = copy.deepcopy(layer), cz.nn.DecoderLayer(**SIZES)
    other.load_state_dict(layer.state_dict())
    inputs = layer_inputs(dtype=torch.float32)
    for twin in (copied, other):
        assert torch.equal(twin(*inputs)[0], layer(*inputs)[0])
    assert copied.mlp.up_proj.weight.data_ptr() != layer.mlp.up_proj.weight.data_ptr()


def test_frozen_projections_get_no_gradient():
    layer = cz.nn.DecoderLayer(**SIZES)
    layer.mlp.requires_grad_(False)
    layer(*layer_inputs(dtype=torch.float32))[0].sum().backward()
    assert all(weight.grad is None for weight in layer.mlp.parameters())
    assert layer.self_attn.o_proj.weight.grad is not None


def test_linear_cross_entropy_module():
    module = cz.nn.LinearCrossEntropy(16, 50, ignore_index=3, reduction="none").double()
    x = torch.randn(4, 7, 16, dtype=torch.float64)
    target = torch.randint(0, 50, (4, 7))
    logits = F.linear(x, module.weight).transpose(1, 2)
    expected = F.cross_entropy(logits, target, ignore_index=3, reduction="none")
    torch.testing.assert_close(module(x, target), expected)


def test_optimizer_steps_train_a_layer():
    layer = cz.nn.DecoderLayer(**SIZES)
    optimizer, inputs = (
        torch.optim.AdamW(layer.parameters(), lr=1e-2),
        layer_inputs(dtype=torch.float32),
    )
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = F.mse_loss(layer(*inputs)[0], torch.zeros_like(inputs[0]))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_everything_public_is_a_module_but_what_layers_are_described_by():
    public = {getattr(cz.nn, name) for name in cz.nn.__all__}
    assert {kind for kind in public if not issubclass(kind, nn.Module)} == {cz.nn.Architecture}
