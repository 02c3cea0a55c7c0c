"""Weights of one product in one storage: no copy in a step, and no number is changed by it.

Modules of `cz.nn` are held to their own selves with weights apart, bit for bit.
"""

import math

import pytest
import torch
from joint_weights import (
    COLUMNS,
    COPYING,
    FEED_FORWARD,
    WIDTH,
    Copies,
    apart,
    given,
    joint,
    layer,
    step,
    together,
)
from stock_layers import MAKES
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import cadenza as cz
from cadenza.library.weights import is_one_stretch, joined


def test_shapes_of_this_file_tell_weights_from_the_rest():
    shapes = [tuple(w.shape) for w in layer("qwen2").parameters() if w.dim() == 2]
    assert min(rows for rows, _ in shapes) >= 12
    assert math.prod(given()[0].shape[:2]) < 12


# --- copies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", MAKES)
def test_a_training_step_copies_no_weight_and_no_gradient_of_one(make):
    module, inputs = layer(make), given(make)
    for _ in range(2):  # the second adds to gradients that are there
        with Copies() as copies:
            step(module, *inputs)
        assert copies.found == []


def test_apart_weights_are_copied_together_and_that_is_seen():
    module, inputs = apart(layer()), given()
    with Copies() as copies:
        step(module, *inputs)
    forward = [(COLUMNS, WIDTH), (2 * FEED_FORWARD, WIDTH)]
    assert copies.found == forward + forward[::-1]  # backward keeps no copy, and makes it again


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpointed_layer_copies_no_weight_either(use_reentrant):
    module, inputs = layer(), given()
    expected = step(module, *inputs)
    gradients = {name: weight.grad for name, weight in module.named_parameters()}
    module.zero_grad()
    with Copies() as copies:
        found = step(lambda *i: checkpoint(module, *i, use_reentrant=use_reentrant), *inputs)
    assert copies.found == []
    assert torch.equal(found, expected)
    for name, weight in module.named_parameters():
        assert torch.equal(weight.grad, gradients[name]), name


def test_gradients_are_parts_of_one_without_a_copy():
    """As eager calls make them, where nobody watches the operations."""
    module = layer()
    step(module, *given())
    for group in joint(module):
        gradients = [weight.grad for weight in group]
        assert is_one_stretch(gradients)
        assert gradients[0].untyped_storage().nbytes() == sum(g.nbytes for g in gradients)


def modules():
    """Each module of `cz.nn` that has a weight matrix, and what it is called with."""
    x, target = torch.randn(2, 5, WIDTH), torch.randint(0, 50, (2, 5))
    norm = cz.nn.RMSNorm(WIDTH)
    return {
        "layer": (layer(), given()),
        "biases": (layer("gpt2"), given("gpt2")),
        "feed-forward": (cz.nn.FeedForward(WIDTH, FEED_FORWARD, bias=True), (x,)),
        "linear": (cz.nn.Linear(WIDTH, FEED_FORWARD, activation="swiglu", norm=norm), (x,)),
        "loss of each token": (cz.nn.LinearCrossEntropy(WIDTH, 50, reduction="none"), (x, target)),
    }


@pytest.mark.parametrize("name", ["layer", "biases", "feed-forward", "linear"])
def test_programs_copy_no_weight_inside_either(name):
    module, inputs = modules()[name]
    assert copied_within(module, inputs) == []


def test_what_is_copied_inside_of_an_operation_is_seen():
    module, inputs = modules()["loss of each token"]  # it adds gradients up chunk by chunk
    assert (50, WIDTH) in copied_within(module, inputs)


def copied_within(module, inputs):
    """The shapes of weights that torch's profiler sees copied, within operations too."""
    shapes = {tuple(weight.shape) for weight in module.parameters() if weight.dim() == 2}
    for group in joint(module):
        if group and group[0].dim() == 2:
            shapes.add((sum(weight.shape[0] for weight in group), group[0].shape[1]))
    shapes |= {shape[::-1] for shape in shapes}
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        found = module(*inputs)
        (found[0] if isinstance(found, tuple) else found).sum().backward()
    return [
        tuple(event.input_shapes[0])
        for event in seen.events()
        if event.name.removeprefix("aten::") in COPYING
        for shape in event.input_shapes[:1]
        if any(shape) and isinstance(shape[0], int) and tuple(shape) in shapes
    ]


def test_biases_are_not_copied_either():
    module = layer("qwen2")
    group = [
        module.self_attn.q_proj.bias,
        module.self_attn.k_proj.bias,
        module.self_attn.v_proj.bias,
    ]
    assert is_one_stretch(group)
    whole = joined(group)
    assert whole.data_ptr() == group[0].data_ptr()
    assert torch.equal(whole, torch.cat(group))


# --- the same numbers -----------------------------------------------------------------------------

OPTIMIZERS = {
    "sgd": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9, foreach=False),
    "adamw": lambda weights: torch.optim.AdamW(weights, lr=1e-2, foreach=True),
    "fused": lambda weights: torch.optim.AdamW(weights, lr=1e-2, fused=True),
}


def trained(module, optimizer, dtype):
    """A module after steps with clipped gradients, of two parts each."""
    torch.manual_seed(2)
    steps = optimizer(module.parameters())
    for _ in range(3):
        for _ in range(2):
            step(module, *given("qwen2", dtype))
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        steps.step()
        steps.zero_grad(set_to_none=False)
    return module


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_of_optimizers_are_those_of_weights_apart_bit_by_bit(name, dtype):
    found = trained(layer("qwen2", dtype), OPTIMIZERS[name], dtype)
    assert together(found)
    expected = trained(apart(layer("qwen2", dtype)), OPTIMIZERS[name], dtype).state_dict()
    for key, value in found.state_dict().items():
        assert torch.equal(value, expected[key]), key
    start = layer("qwen2", dtype).mlp.up_proj.weight
    assert not torch.equal(found.mlp.up_proj.weight, start)


def test_some_frozen_weights_of_several_get_no_gradient():
    module, other = layer(), apart(layer())
    for one in (module, other):
        one.mlp.gate_proj.requires_grad_(False)
        one.self_attn.requires_grad_(False)
        torch.manual_seed(1)
        step(one, *given())
    for (name, weight), expected in zip(module.named_parameters(), other.parameters(), strict=True):
        assert (weight.grad is None) == (expected.grad is None) == (not weight.requires_grad), name
        assert weight.grad is None or torch.equal(weight.grad, expected.grad), name


def test_without_gradients_the_whole_needs_none():
    group = joint(layer())[0]
    with torch.no_grad():
        assert not joined(group).requires_grad
    with torch.inference_mode():
        assert torch.equal(joined(group), torch.cat(group))


def test_rows_of_one_and_odd_strides_are_right():
    whole = torch.arange(12.0)
    first = torch.as_strided(whole, (1, 4), (1, 1))  # one row, so its stride means nothing
    parts = [first, whole[4:].view(2, 4)]
    assert is_one_stretch(parts)
    assert torch.equal(joined(parts), whole.view(3, 4))


@pytest.mark.parametrize(
    "parts",
    [
        lambda w: [w[:2], w[3:5]],  # a gap
        lambda w: [w[2:4], w[:2]],  # the other way around
        lambda w: [w[:2], w[2:4].clone()],
        lambda w: [w[:, :4], w[:, 4:]],
        lambda w: [w[:2].t(), w[2:4].t()],
        lambda w: [w[:2], w[2:4].view(torch.int32)],
        lambda w: [w[:1].view(2, 4), w[1:3]],  # another width
    ],
    ids=["gap", "order", "storages", "columns", "transposed", "dtype", "width"],
)
def test_what_is_no_stretch_is_copied(parts):
    assert not is_one_stretch(parts(torch.randn(6, 8)))


# --- tracing and transforms -----------------------------------------------------------------------


def joined_of(*parts):
    return joined(parts)


TRACERS = {
    "jit": lambda *parts: torch.jit.trace(joined_of, parts, check_trace=False),
    "make_fx": lambda *parts: make_fx(joined_of)(*parts),
    "fake": lambda *parts: make_fx(joined_of, tracing_mode="fake")(*parts),
    "symbolic": lambda *parts: make_fx(joined_of, tracing_mode="symbolic")(*parts),
    "before dispatch": lambda *parts: make_fx(joined_of, pre_dispatch=True)(*parts),
    "functional": lambda *parts: make_fx(torch.func.functionalize(joined_of))(*parts),
    "symbolic_trace": lambda *parts: torch.fx.symbolic_trace(lambda a, b, c: joined_of(a, b, c)),
    "export": lambda *parts: torch.export.export(Whole(), parts, strict=False).module(),
}


class Whole(nn.Module):
    """Three weights as one."""

    def forward(self, a, b, c):
        return joined([a, b, c])


@pytest.mark.parametrize("name", TRACERS)
def test_a_trace_does_not_keep_where_weights_lie(name):
    group = [weight.detach() for weight in joint(layer())[0]]
    assert is_one_stretch(group)
    trace = TRACERS[name](*group)
    others = [torch.randn_like(weight) for weight in group]
    assert torch.equal(trace(*others), torch.cat(others))


def test_a_transform_is_of_every_part():
    group = [weight.detach() for weight in joint(layer())[0]]
    tangents = [torch.randn_like(weight) for weight in group]
    mapped = torch.func.vmap(joined_of)(*(w[None] for w in group))
    assert torch.equal(mapped[0], torch.cat(group))
    _, found = torch.func.jvp(joined_of, tuple(group), tuple(tangents))
    assert torch.equal(found, torch.cat(tangents))
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(*both) for both in zip(group, tangents, strict=True)]
        assert is_one_stretch(duals)
        assert torch.equal(forward_ad.unpack_dual(joined(duals)).tangent, torch.cat(tangents))


def test_numbers_that_are_not_there_are_joined_so():
    group = joint(layer())[0]
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert joined(group).shape == (COLUMNS, WIDTH)


@pytest.mark.slow
def test_a_compiled_backward_joins_weights_again():
    """Forward in eager mode, backward captured: where its parts lie is of that one call."""
    module, other, inputs = layer(), layer(), given()
    step(other, *inputs)
    for change in (lambda m: m, apart):
        change(module).zero_grad()
        stream, squares = module(*inputs)
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            (stream.square().sum() + squares.sum()).backward()
        for weight, expected in zip(module.parameters(), other.parameters(), strict=True):
            assert torch.equal(weight.grad, expected.grad)
