"""What `cz.accelerate` leaves alone, and how it says so."""

import re
import types
import warnings

import pytest
import torch
from hf_models import assert_near, batch, layers_of, outcome, pair, runs_programs, small
from torch import nn

import cadenza as cz

TABLE = """\
module            class              replaced                                             left alone
----------------  -----------------  ---------------------------------------------------  ----------
model.layers.0-1  LlamaDecoderLayer  norm + QKV + rotary, attention output, feed-forward  -
model             LlamaModel         mask of plain causal batches                         -
model.norm        LlamaRMSNorm       norm                                                 -
lm_head           LlamaForCausalLM   loss of labels, beside logits                        -
2 of 2 layers have the weights of one product in one storage"""


class Lora(nn.Module):
    """A projection with a low-rank one beside it, as adapters wrap them."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.down = nn.Linear(base_layer.in_features, 2, bias=False)
        self.up = nn.Linear(2, base_layer.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.up(self.down(x))


class OwnLinear(nn.Linear):
    """A projection that computes something else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.5 * super().forward(x)


@pytest.fixture(autouse=True)
def untold(monkeypatch):
    """Nothing has been warned of yet."""
    monkeypatch.setattr("cadenza.integrations.hf.plan._TOLD", set())


def quietly(model, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return cz.accelerate(model, **options)


def warned(model, match):
    with pytest.warns(UserWarning, match=match) as found:
        report = cz.accelerate(model)
    assert len(found) == 1
    return report


def test_the_report_is_a_table():
    assert str(quietly(small())) == TABLE


PROJECTIONS = [
    ("self_attn.q_proj", ("attention output", "feed-forward")),
    ("self_attn.o_proj", ("norm + QKV + rotary", "feed-forward")),
    ("mlp.gate_proj", ("norm + QKV + rotary", "attention output")),
    ("mlp.down_proj", ("norm + QKV + rotary", "attention output")),
]


def wrapped_pair(path, kind, family="llama"):
    """A model and its twin, one projection of each layer wrapped alike."""
    models = pair(family)
    for model in models:
        torch.manual_seed(1)
        for layer in layers_of(model):
            owner, _, name = path.rpartition(".")
            setattr(layer.get_submodule(owner), name, kind(layer.get_submodule(path)))
    return models


def own_linear(linear):
    """The same weights in another class."""
    made = OwnLinear(linear.in_features, linear.out_features, bias=linear.bias is not None)
    made.load_state_dict(linear.state_dict())
    return made


@pytest.mark.parametrize("kind", [Lora, own_linear])
@pytest.mark.parametrize(("path", "replaced"), PROJECTIONS)
def test_a_wrapped_projection_is_left_alone_with_one_warning(path, replaced, kind):
    model, twin = wrapped_pair(path, kind)
    report = warned(model, f"{re.escape(path)} is a .*(Lora|OwnLinear)")
    assert report.entries[0].replaced == replaced
    assert_near(outcome(model, **batch()), outcome(twin, **batch()))
    quietly(model)


@pytest.mark.parametrize("family", ["gemma2", "olmo2", "phi3", "gpt2"])
@pytest.mark.parametrize("place", ["output", "down", "projections", "up"])
@pytest.mark.slow
def test_parts_of_every_form_are_left_alone_one_by_one(family, place):
    from cadenza.integrations.hf.recognise import plan_of

    given = getattr(plan_of(layers_of(small(family))[0]).form, place)
    path = given if isinstance(given, str) else given[0]
    kind = own_linear if family != "gpt2" else hooked
    model, twin = wrapped_pair(path, kind, family)
    report = warned(model, re.escape(path))
    assert len(report.entries[0].replaced) == 2
    assert_near(outcome(model, **batch()), outcome(twin, **batch()))


def hooked(module):
    module.register_forward_hook(lambda own, given, found: found * 0.5)
    return module


def test_what_is_wrapped_or_watched_afterwards_is_seen():
    model, twin = pair()
    quietly(model)
    for one in (model, twin):
        hooked(layers_of(one)[0].self_attn.q_proj)
        layers_of(one)[1].mlp.up_proj = own_linear(layers_of(one)[1].mlp.up_proj)
    with pytest.warns(UserWarning, match=r"cz.accelerate leaves to the model's own code") as found:
        assert_near(outcome(model, **batch()), outcome(twin, **batch()))
    said = sorted(str(one.message).partition(": ")[2] for one in found)
    assert said == ["mlp.up_proj is a test_hf_left_alone.OwnLinear", "self_attn.q_proj has hooks"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(**batch())


@pytest.mark.parametrize("path", ["self_attn", "mlp"])
def test_watchers_of_what_a_program_works_within_are_called(path):
    model, twin = pair()
    quietly(model)
    for one in (model, twin):
        hooked_first(layers_of(one)[0].get_submodule(path))
    assert_near(outcome(model, **batch()), outcome(twin, **batch()))


def hooked_first(module):
    def halved(own, given, found):
        return (found[0] * 0.5, *found[1:]) if isinstance(found, tuple) else found * 0.5

    module.register_forward_hook(halved)


def test_a_norm_that_is_watched():
    model, twin = pair("gemma2")
    for one in (model, twin):
        hooked(layers_of(one)[0].input_layernorm)
        hooked(layers_of(one)[0].post_feedforward_layernorm)
        hooked(layers_of(one)[1].post_attention_layernorm)
        hooked(layers_of(one)[1].pre_feedforward_layernorm)
    warned(model, "input_layernorm has hooks")
    assert_near(outcome(model, **batch()), outcome(twin, **batch()))


def test_a_watched_layer_is_accelerated_and_its_watchers_are_called():
    model, twin = pair()
    seen = []
    quietly(model)
    for one in (model, twin):
        layer = layers_of(one)[0]
        layer.register_forward_hook(lambda own, given, found: seen.append((given, found)))
        layer.register_full_backward_hook(lambda own, given, found: seen.append(found))
    assert_near(outcome(model, **batch()), outcome(twin, **batch()))
    assert len(seen) == 4
    assert runs_programs(model, **batch())


def test_who_watches_every_module_sees_them_all():
    model, twin = pair()
    quietly(model)
    seen = []
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda own, given, found: seen.append(type(own).__name__)
    )
    try:
        for one in (model, twin):
            one(batch()["input_ids"])
    finally:
        handle.remove()
    assert seen[: len(seen) // 2] == seen[len(seen) // 2 :]
    assert seen.count("Linear") == 2 * (2 * 7 + 1)


def test_33_an_unknown_layer_is_left_alone():
    model = small()
    layers_of(model)[0].gate = nn.Linear(64, 1)
    report = quietly(model)
    assert report.entries[0].replaced == ()
    assert report.entries[0].left[0].startswith("its parts are those of no layer that is known: ")
    assert report.entries[1].replaced != ()
    [stack] = [entry for entry in report.entries if entry.kind == "LlamaModel"]
    assert (stack.path, stack.replaced) == ("model", ())
    assert stack.left == ("mask of plain causal batches: some of its layers are left alone",)


CHANGES = {
    "another sum": lambda x, found: x + found,
    "a scale": lambda x, found: 2.0 * found,
    "nothing known": lambda x, found: torch.sin(x),
}


def changed(kind, change):
    """A class of layers of the same parts that computes something else."""

    def forward(self, x, *args, **kwargs):
        found = kind.forward(self, x, *args, **kwargs)
        if isinstance(found, tuple):
            return CHANGES[change](x, found[0]), *found[1:]
        return CHANGES[change](x, found)

    return type("OtherLayer", (kind,), {"forward": forward})


@pytest.mark.parametrize("change", CHANGES)
def test_a_layer_of_known_parts_that_computes_something_else_is_left_alone(change):
    model, twin = pair()
    other = changed(type(layers_of(model)[0]), change)
    for one in (model, twin):
        for layer in layers_of(one):
            layer.__class__ = other
    report = quietly(model)
    assert report.entries[0].replaced == ()
    assert "its code c" in report.entries[0].left[0]
    assert torch.equal(model(**batch()).logits, twin(**batch()).logits)


class Scaled(nn.Module):
    """A norm that is none of the known ones."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = norm.weight, norm.variance_epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / x.abs().mean(-1, keepdim=True) * self.weight


def test_other_norms_and_activations_are_left_alone():
    model = small()
    layer = layers_of(model)[0]
    layer.input_layernorm = Scaled(layer.input_layernorm)
    layers_of(model)[1].mlp.act_fn = nn.Softplus()
    said = [entry.left[0] for entry in quietly(model).entries[:2]]
    assert said == [
        "its norm Scaled is none that is known", "its activation Softplus is none that is known",
    ]  # fmt: skip


def test_norms_of_different_eps_are_left_alone():
    model = small()
    layers_of(model)[0].input_layernorm.variance_epsilon = 0.5
    assert quietly(model).entries[0].left[0].startswith("its norms differ: ")


def test_another_loss_is_left_alone():
    model = small()
    model.loss_function = lambda logits, labels, **kwargs: logits.sum()
    entry = quietly(model).entries[-1]
    assert entry.left == ("its loss is not the cross-entropy of the next token",)
    assert model(**batch()).loss == model(**batch()).logits.sum()


def test_a_loss_that_is_set_afterwards_is_seen():
    model = small()
    quietly(model, logits=False)
    model.loss_function = lambda logits, labels, **kwargs: logits.sum()
    found = model(**batch())
    assert found.loss == found.logits.sum()


def test_scaled_logits_are_left_alone():
    model = small()
    kind = type(model)

    def forward(self, *args, **kwargs):
        found = kind.forward(self, *args, **kwargs)
        found.logits = found.logits * 2
        return found

    model.__class__ = type("Scaled", (kind,), {"forward": forward})
    assert quietly(model).entries[-1].left == ("its logits are more than a product and a softcap",)


def test_a_forward_of_its_own_is_left_alone():
    model, twin = pair()
    layer = layers_of(model)[0]
    layer.forward = types.MethodType(type(layer).forward, layer)
    model.forward = types.MethodType(type(model).forward, model)
    report = quietly(model)
    assert report.entries[0].left == ("has a forward of its own",)
    assert report.entries[-1].left == ("has a forward of its own",)
    assert_near(outcome(model, **batch()), outcome(twin, **batch()))


def test_models_that_are_none_of_the_known_ones():
    assert (
        str(quietly(nn.Linear(3, 3))) == "nothing replaced: there is no list of layers, and no head"
    )
    report = quietly(nn.Sequential(nn.ModuleList([nn.Linear(3, 3)])))
    assert [(e.path, e.replaced) for e in report.entries] == [("0.0", ())]


def test_norms_of_another_dtype_than_the_stream_take_the_models_path():
    model, twin = pair("gemma2", torch.bfloat16)
    quietly(model)
    for one in (model, twin):
        for path, module in one.named_modules():
            if path.endswith("norm"):
                module.float()
    given = {"input_ids": batch()["input_ids"]}
    assert torch.equal(model(**given).logits, twin(**given).logits)
    assert not runs_programs(model, **given)


def test_arguments_that_are_none():
    with pytest.raises(ValueError, match="logits='always': choose True, False or 'evaluation'"):
        cz.accelerate(small(), logits="always")
    with pytest.raises(TypeError, match=r"cz.accelerate of a dict: give a torch.nn.Module"):
        cz.accelerate({})


def test_what_can_not_be_asked_for_its_sizes_is_left_alone():
    model = small()
    del layers_of(model)[1].self_attn.head_dim
    said = quietly(model).entries[1].left[0]
    assert said.startswith("its code can't be followed: AttributeError: ")


def test_an_activation_that_is_exchanged_afterwards_is_seen():
    model, twin = pair()
    quietly(model)
    for one in (model, twin):
        layers_of(one)[0].mlp.act_fn = nn.Softplus()
    with pytest.warns(UserWarning, match="mlp.act_fn is a torch.nn.*Softplus"):
        assert_near(outcome(model, **batch()), outcome(twin, **batch()))
    report = quietly(model)
    assert report.entries[0].replaced == ()
    layer = layers_of(model)[0]
    places = {weight.untyped_storage().data_ptr() for weight in layer.parameters()}
    assert len(places) == len([*layer.parameters()])
    assert type(layer) is type(layers_of(twin)[0])


def test_a_bias_that_one_of_several_projections_has_alone():
    model, twin = pair("qwen2")
    for one in (model, twin):
        for layer in layers_of(one):
            layer.self_attn.k_proj.bias = None
    report = quietly(model)
    assert report.entries[0].replaced == ()
    assert_near(outcome(model, **batch()), outcome(twin, **batch()))
