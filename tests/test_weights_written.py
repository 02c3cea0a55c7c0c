"""A weight that is written to between forward and backward: torch's error wherever backward takes
it, as in a stock module, and never a gradient of other numbers.
"""

import contextlib

import pytest
import torch
from hf_models import layers_of, runs_programs, small
from joint_weights import Copies, apart, given, joint, layer, together
from test_hf_left_alone import Lora

import cadenza as cz


def frozen_at(place):
    """Freezes one weight of each group that one product takes."""

    def freeze(module):
        for group in joint(module):
            if group:
                group[place].requires_grad_(False)
        return module

    return freeze


STATES = {
    "trained": lambda module: module,
    "frozen": lambda module: module.requires_grad_(False),
    "first frozen": frozen_at(0),
    "last frozen": frozen_at(-1),
    "apart": apart,
    "apart and frozen": lambda module: apart(module).requires_grad_(False),
}
CONTEXTS = {
    "eager": contextlib.nullcontext,
    "watched": Copies,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


def gradients(y, wanted, weight=None):
    """The gradients of y once a weight has other numbers; None where torch refuses."""
    if weight is not None:
        with torch.no_grad():
            weight.mul_(3.0)
    try:
        return torch.autograd.grad(y.float().square().sum(), wanted)
    except RuntimeError as error:
        if "modified by an inplace operation" in str(error):
            return None
        raise


def wanted_of(module, inputs, name):
    weights = [weight for weight in module.parameters() if weight.requires_grad]
    return [inputs[0]] if name == "x" else [inputs[0], *weights]


@pytest.mark.parametrize("wanted", [pytest.param("x", marks=pytest.mark.slow), "all"])
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("state", STATES)
def test_no_weight_of_a_layer_is_written_to_unseen(state, context, wanted):
    """With biases, which no gradient depends on: writing to them changes none."""
    inputs, expected = given("qwen2"), None
    for name in (None, *dict(layer("qwen2").named_parameters())):
        module = STATES[state](layer("qwen2"))
        assert together(module) == ("apart" not in state)
        with CONTEXTS[context]():
            y = module(*inputs)[0]
        weight = None if name is None else module.get_parameter(name)
        found = gradients(y, wanted_of(module, inputs, wanted), weight)
        expected = found if name is None else expected
        assert found is not None or weight is not None
        assert found is None or all(map(torch.equal, found, expected)), name
        if weight is not None and weight.dim() == 2:
            assert found is None, name


def test_a_weight_that_no_gradient_depends_on_may_be_written_to():
    inputs, found = given()[0].detach(), []
    for write in (False, True):
        module = cz.nn.FeedForward(inputs.shape[-1], 40)
        module.load_state_dict(layer().mlp.state_dict())
        weights = [module.gate_proj.weight, module.up_proj.weight]
        found.append(gradients(module(inputs), weights, weights[1] if write else None))
    assert all(map(torch.equal, *found))


SLOW_FAMILIES = [pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2", "gpt2")]


@pytest.mark.parametrize("base", ["frozen", "trained"])
@pytest.mark.parametrize("family", ["llama", *SLOW_FAMILIES])
@pytest.mark.slow
def test_no_weight_of_an_accelerated_model_is_written_to_unseen(family, base):
    """One projection is wrapped, and left alone with those beside it."""
    x = torch.randn(2, 40, 64, requires_grad=True)
    names, expected = [None, *dict(adapted(family, base).named_parameters())], None
    for name in names:
        model = adapted(family, base)
        weight = None if name is None else model.get_parameter(name)
        found = gradients(model(inputs_embeds=x, use_cache=False).last_hidden_state, [x], weight)
        expected = found if name is None else expected
        assert found is not None or weight is not None
        assert found is None or all(map(torch.equal, found, expected)), name
        if weight is not None and name.startswith(("layers.", "h.")) and weight.dim() == 2:
            assert found is None, name


def adapted(family, base):
    """An accelerated model without a head, with an adapter in its first layer."""
    model = small(family).base_model
    model.requires_grad_(base == "trained")
    if family != "gpt2":  # whose projections are no nn.Linear
        torch.manual_seed(1)
        attention = layers_of(model)[0].self_attn
        attention.k_proj = Lora(attention.k_proj)
    cz.accelerate(model)
    assert runs_programs(model, inputs_embeds=torch.randn(2, 40, 64))
    return model
