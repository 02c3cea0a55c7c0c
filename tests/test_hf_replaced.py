"""Parts of an accelerated model that its owner exchanged, or took out, afterwards.

What stands there now is left alone, and nothing that one does with a model minds.
"""

import copy
import functools
import inspect
import pickle
import warnings

import pytest
import torch
from hf_models import (
    assert_near,
    batch,
    each_family,
    layers_of,
    outcome,
    pair,
    runs_programs,
    small,
)
from test_hf_left_alone import Lora, own_linear
from test_hf_state import assert_same_state, described, storages
from torch import nn

import cadenza as cz
from cadenza.integrations.hf import plan as plans
from cadenza.integrations.hf.acceleration import accelerated_layers
from cadenza.integrations.hf.plan import EPS, blocked
from cadenza.integrations.hf.recognise import plan_of
from cadenza.integrations.hf.replace import within_base
from cadenza.integrations.hf.weights import groups, is_one_stretch


class Alone(nn.Module):
    """A projection inside of something without weights of its own."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.inner = base

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.5 * self.inner(x)


class Attention(nn.Module):
    """Something in the place of attention."""

    is_sliding = False  # which Gemma 3's layers ask for in older releases

    def __init__(self, _: nn.Module) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.ones(64))

    def forward(self, hidden_states, *args, **kwargs):
        return hidden_states * self.mix, None


def layers_return_tuples():
    """Whether a layer gives its stream in a tuple, as in older releases."""
    layer = type(layers_of(pair("llama")[1])[0])
    return "uple" in str(inspect.signature(layer.forward).return_annotation)


LAYERS_RETURN_TUPLES = layers_return_tuples()


class Passing(nn.Module):
    """Something in the place of a layer."""

    def __init__(self, _: nn.Module) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(64))

    def forward(self, hidden_states, *args, **kwargs):
        found = hidden_states * self.gain
        return (found,) if LAYERS_RETURN_TUPLES else found


class Doubled(nn.Module):
    """Something in the place of a norm, of one width."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.weight = norm.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[-1] != 64:
            raise ValueError("not of this width")
        return 2.0 * x * self.weight


class OtherNorm(Doubled):
    """The same with what norms are known by, so that it is tried."""

    variance_epsilon = 1e-6


def fresh(module):
    """A module of the same class with parameters of its own."""
    made = copy.deepcopy(module)
    for weight in made.parameters():
        weight.data = torch.full_like(weight, 0.01)
    return made


def stock_copy(layer):
    """The layer as transformers makes it."""
    made = copy.deepcopy(layer)
    cz.revert(nn.ModuleList([made]))
    return made


def identity(_):
    return nn.Identity()


PROJECTIONS = [f"self_attn.{name}_proj" for name in "qkvo"]
PROJECTIONS += [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
NORMS = ["input_layernorm", "post_attention_layernorm"]
# What is replaced in a Llama's first layer, and what by.
INSIDE = [
    *((path, make) for path in PROJECTIONS for make in (Lora, own_linear, Alone, fresh)),
    *((path, make) for path in NORMS for make in (identity, Doubled, OtherNorm, fresh)),
    *(("mlp", make) for make in (identity, Alone, fresh)),
    *(("self_attn", make) for make in (Attention, fresh)),
    ("mlp.act_fn", identity),
]
OUTSIDE = [
    *((f"model.layers.{place}", make) for place in "01" for make in (stock_copy, Passing, fresh)),
    *(("model.norm", make) for make in (identity, Doubled, OtherNorm, fresh)),
    *(("lm_head", make) for make in (own_linear, Alone, fresh)),
    ("model.layers", lambda layers: nn.ModuleList([layers[1]])),
    ("model.layers", lambda layers: nn.ModuleList([layers[0], Passing(layers[1])])),
]
REPLACED = [*((f"model.layers.0.{path}", make) for path, make in INSIDE), *OUTSIDE]


def exchange(model, path, make):
    """Puts another module at a path, made of what is there."""
    owner, _, name = path.rpartition(".")
    torch.manual_seed(3)
    setattr(model.get_submodule(owner), name, make(model.get_submodule(path)))


def exchanged(path, make, family="llama"):
    """An accelerated model and its stock twin with the same part replaced, and the report."""
    model, twin = pair(family)
    report = cz.accelerate(model)
    for one in (model, twin):
        exchange(one, path, make)
    return model, twin, report


@pytest.fixture(autouse=True)
def _silently():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def assert_all_works(model, twin, report):
    """Every operation on a model, one after another; its call each time gives the twin's."""
    expected = outcome(twin, **batch())
    assert_near(outcome(model, **batch()), expected)
    assert "layers have the weights" in str(report) or "layers" not in str(report.notes[0])
    for moved in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_near(outcome(moved, **batch()), expected)
    again = copy.deepcopy(model).to(torch.float64).to(torch.float32)
    assert_near(outcome(again, **batch()), expected)
    assert str(cz.accelerate(again))
    assert_near(outcome(again, **batch()), expected)
    for one in (model, again):
        cz.revert(one)
        assert described(one) == described(twin)
        assert_same_state(one, twin)
        assert {name: size for name, (_, size) in storages(one).items()} == {
            name: weight.nbytes for name, weight in one.named_parameters()
        }
        assert len({place for place, _ in storages(one).values()}) == len([*one.parameters()])
        assert_near(outcome(one, **batch()), expected)


EACH = [
    pytest.param(path, make, id=f"{path}-{make.__name__}", marks=pytest.mark.slow if n % 8 else ())
    for n, (path, make) in enumerate(REPLACED)
]


@pytest.mark.parametrize(("path", "make"), EACH)
def test_every_operation_works_with_a_part_replaced(path, make):
    assert_all_works(*exchanged(path, make))


@pytest.mark.slow
@each_family
@pytest.mark.parametrize("name", ["mlp", "attention", "norm"])
def test_every_operation_works_in_every_family(family, name):
    form = plan_of(layers_of(small(family))[0]).form
    path, make = {
        "mlp": (form.feed_forward, identity),
        "attention": (form.attention, Attention),
        "norm": (next(filter(None, form.norms)), Alone),
    }[name]
    stem = "transformer.h.0" if family == "gpt2" else "model.layers.0"
    assert_all_works(*exchanged(f"{stem}.{path}", make, family))


def test_every_operation_works_with_a_layer_deleted():
    model, twin = pair()
    report = cz.accelerate(model)
    for one in (model, twin):
        del layers_of(one)[0]
    assert_all_works(model, twin, report)


LAYER = [*PROJECTIONS, *NORMS, "mlp", "self_attn", "mlp.act_fn"]
GONE = [*(f"model.layers.0.{path}" for path in LAYER), "model.norm", "model.layers", "lm_head"]


@pytest.mark.parametrize("path", GONE)
@pytest.mark.parametrize("how", ["None", "deleted"])
def test_what_is_gone_is_missed_by_the_models_own_code_alone(path, how):
    model, twin = pair()
    report = cz.accelerate(model)
    for one in (model, twin):
        owner, _, name = path.rpartition(".")
        module = one.get_submodule(owner)
        setattr(module, name, None) if how == "None" else delattr(module, name)
    with pytest.raises((TypeError, AttributeError)) as expected:
        twin(**batch())
    with pytest.raises(expected.type):
        model(**batch())
    assert str(report)
    for one in (model, copy.deepcopy(model).to(torch.float64).to(torch.float32)):
        cz.accelerate(one)
        cz.revert(one)
        assert described(one) == described(twin)
        assert_same_state(one, twin)


def test_the_rest_of_a_layer_stays_replaced_and_the_reason_is_known():
    model, _, report = exchanged("model.layers.0.mlp", identity)
    layer = layers_of(model)[0]
    identity_of_torch = f"is a {nn.Identity.__module__}.Identity"
    assert blocked(layer, layer._cadenza) == {"mlp": identity_of_torch}
    assert len(groups(layer, layer._cadenza)) == 1
    assert str(report).endswith("2 of 2 layers have the weights of one product in one storage")
    assert runs_programs(model, **batch())
    del layer.self_attn.v_proj
    assert blocked(layer, layer._cadenza, "queries") == {"self_attn.v_proj": "is not there"}


def test_what_is_replaced_is_warned_of(monkeypatch):
    monkeypatch.setattr("cadenza.integrations.hf.plan._TOLD", set())
    model, _, _ = exchanged("model.layers.0.mlp", identity)
    with pytest.warns(UserWarning, match="mlp is a torch.nn.*Identity"):
        model(**batch())


@pytest.mark.parametrize("path", ["self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj"])
def test_accelerating_again_puts_a_new_projection_beside_the_others(path):
    model, twin, _ = exchanged(f"model.layers.0.{path}", fresh)
    layer = layers_of(model)[0]
    assert [is_one_stretch(group) for group in groups(layer, layer._cadenza)].count(False) == 1
    cz.accelerate(model)
    found = [group for one in accelerated_layers(model) for group in groups(one, one._cadenza)]
    assert all(map(is_one_stretch, found))
    for group in found:
        assert group[0].untyped_storage().nbytes() == sum(weight.nbytes for weight in group)
    assert_near(outcome(model, **batch()), outcome(twin, **batch()))


def test_accelerating_again_parts_what_no_product_takes_together_any_more():
    model, _, _ = exchanged("model.layers.0.self_attn.q_proj", Lora)
    cz.accelerate(model)
    attention = layers_of(model)[0].self_attn
    for weight in (attention.q_proj.base_layer.weight, attention.k_proj.weight):
        assert weight.untyped_storage().nbytes() == weight.nbytes
    cz.revert(model)
    assert {size for _, size in storages(model).values()} == {
        weight.nbytes for weight in model.parameters()
    }


class Counting:
    """A forward that is no function, around one."""

    def __init__(self, function):
        self.__wrapped__, self.calls = function, 0

    def __get__(self, module, kind):
        return self if module is None else functools.partial(self, module)

    def __call__(self, module, x):
        self.calls += 1
        return self.__wrapped__(module, x)


def test_only_what_a_base_puts_around_every_forward_is_left_out():
    class Wrapping(torch.nn.Module):
        def __init_subclass__(cls):
            own = cls.forward

            @functools.wraps(own)
            def forward(self, x):
                return own(self, x)

            cls.forward = forward

    class Wrapped(Wrapping):
        def forward(self, x):
            return x

    class Counted(torch.nn.Module):
        forward = Counting(lambda self, x: x)

    class Decorated(torch.nn.Module):
        @torch.no_grad()
        def forward(self, x):
            return x

    assert within_base(Wrapped) == (Wrapped.forward, Wrapped.forward.__wrapped__)
    for kind in (Counted, Decorated):
        assert within_base(kind) == (kind.forward, kind.forward)


# --- numbers and weights that are changed ---------------------------------------------------------


def every_norm(model, change):
    """Changes the eps of a model's norms: of layers, of heads, the last one."""
    for path, module in model.named_modules():
        for name in EPS:
            if name in module.__dict__ and "orm" in type(module).__name__ and change in path:
                setattr(module, name, 0.3)


@pytest.mark.parametrize(
    ("family", "change"),
    [("llama", "layers.1.input"), ("llama", "layers.0.post"), ("qwen3", "q_norm"),
     ("gemma2", "pre_feedforward"), ("gpt2", "ln_"), ("llama", "model.norm")],
)  # fmt: skip
def test_another_eps_is_taken(family, change):
    model, twin = pair(family)
    cz.accelerate(model)
    before = model(**batch()).logits
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for one in (model, twin):
            every_norm(one, change)
        found, expected = (outcome(one, **batch()) for one in (model, twin))
    assert_near(found, expected)
    assert not torch.allclose(found["logits"], before, atol=1e-3)


@pytest.mark.parametrize(
    ("family", "owner", "name", "given"),
    [("llama", "mlp", "gate_proj", True), ("llama", "self_attn", "k_proj", True),
     ("qwen2", "self_attn", "q_proj", False), ("llama", "mlp", "down_proj", True)],
)  # fmt: skip
def test_a_bias_that_some_projections_get_or_lose_is_taken(family, owner, name, given, monkeypatch):
    monkeypatch.setattr(plans, "_TOLD", set())
    model, twin = pair(family)
    cz.accelerate(model)
    for one in (model, twin):
        projection = getattr(getattr(layers_of(one)[0], owner), name)
        bias = torch.linspace(-1, 1, projection.out_features)
        projection.bias = nn.Parameter(bias) if given else None
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found, expected = (outcome(one, **batch()) for one in (model, twin))
    assert_near(found, expected)
    assert runs_programs(model, **batch())
    partly = [str(w.message) for w in said if "has a bias, which others" in str(w.message)]
    assert len(partly) == (name != "down_proj")


def test_another_head_is_told_of(monkeypatch):
    monkeypatch.setattr(plans, "_TOLD", set())
    model, twin = pair("llama")
    cz.accelerate(model)
    for one in (model, twin):
        torch.manual_seed(3)
        one.resize_token_embeddings(140)
    with pytest.warns(UserWarning, match=r"lm_head is another one.*call that again"):
        found = outcome(model, **batch())
    assert_near(found, outcome(twin, **batch()))
    cz.accelerate(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(**batch())
