"""What `cz.accelerate` leaves alone because of what its owner put around it: one warning says so.

Also where nothing of that module is replaced then; of what is merely unknown no warning is given.
"""

import warnings

import pytest
import torch
from hf_models import (
    LAYERS,
    assert_near,
    batch,
    each_family,
    layers_of,
    outcome,
    pair,
    runs_programs,
)
from test_hf_left_alone import Lora, hooked, own_linear, quietly
from test_hf_training import one_process, sharded, whole
from torch import nn
from transformers.pytorch_utils import Conv1D

import cadenza as cz
from cadenza.integrations.hf.recognise import plan_of

HEAD = ("loss of labels, beside logits",)


@pytest.fixture(autouse=True)
def untold(monkeypatch):
    """Nothing has been warned of yet."""
    monkeypatch.setattr("cadenza.integrations.hf.plan._TOLD", set())


def projections(model):
    """The paths of a layer's projections."""
    form = plan_of(layers_of(model)[0]).form
    return {*form.projections, form.output, *form.up, form.down}


def told(model):
    """The report of a model, and what its only warning says of each module."""
    with pytest.warns(UserWarning, match="cz.accelerate leaves") as found:
        report = cz.accelerate(model)
    [warning] = found
    assert warning.filename == __file__
    start, _, reasons = str(warning.message).partition(": ")
    assert start == "cz.accelerate leaves to the model's own code"
    return report, dict(reason.split(" ", 1) for reason in reasons.split("; "))


def wrap_all(model, kind=Lora):
    """Wraps every projection of every layer."""
    torch.manual_seed(1)
    paths = sorted(projections(model))
    for layer in layers_of(model):
        for path in paths:
            owner, _, name = path.rpartition(".")
            setattr(layer.get_submodule(owner), name, kind(layer.get_submodule(path)))
    return model


@pytest.mark.slow
def test_a_model_with_every_projection_wrapped():
    model, twin = pair()
    paths = projections(model)
    for one in (model, twin):
        wrap_all(one)
    report, said = told(model)
    assert said == dict.fromkeys(paths, "is a test_hf_left_alone.Lora")
    assert [entry.replaced for entry in report.entries] == [()] * LAYERS + [HEAD]
    assert_near(outcome(model, **batch()), outcome(twin, **batch()))
    quietly(model)


@each_family
def test_adapters_of_all_linear_projections(family):
    peft = pytest.importorskip("peft", reason="tries its adapters")
    config = peft.LoraConfig(
        r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM",
        fan_in_fan_out=family == "gpt2",
    )  # fmt: skip
    model, twin = pair(family)
    paths, adapted = projections(model), []
    for one in (model, twin):
        torch.manual_seed(2)
        adapted.append(peft.get_peft_model(one, config))
    report, said = told(adapted[0])
    assert said == dict.fromkeys(paths, "is a peft.tuners.lora.layer.Linear")
    assert [entry.replaced for entry in report.entries] == [()] * LAYERS + [HEAD]
    assert_near(*map(gradients, adapted))
    quietly(adapted[0])


def gradients(model):
    """The loss of a model, and every gradient that there is."""
    loss = model(**batch()).loss
    loss.backward()
    named = ((name, weight.grad) for name, weight in model.named_parameters())
    return {"loss": loss.detach(), **{name: grad for name, grad in named if grad is not None}}


QUANTISED = "torch.ao.nn.quantized.dynamic.modules.linear.Linear"


def quantised(model):
    """The model with every Linear computed in eight bits."""
    quantization = pytest.importorskip("torch.ao.quantization", reason="quantises")
    if torch.backends.quantized.engine == "none":
        pytest.skip("PyTorch has no quantised products here")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return quantization.quantize_dynamic(model.eval(), {nn.Linear}, dtype=torch.qint8)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_quantised_model(family):
    model, twin = pair(family)
    paths = projections(model)
    model, twin = quantised(model), quantised(twin)
    report, said = told(model)
    head = {"lm_head": f"is wrapped, as a {QUANTISED}"}
    assert said == dict.fromkeys(paths, f"is a {QUANTISED}") | head
    assert report.replaced == ()
    assert torch.equal(model(**batch()).logits, twin(**batch()).logits)
    assert torch.equal(model(**batch()).loss, twin(**batch()).loss)
    quietly(model)


def test_a_quantised_head():
    """That of GPT-2, whose projections are no Linear; what stands before it is replaced."""
    model, twin = map(quantised, pair("gpt2"))
    report, said = told(model)
    assert said == {"lm_head": f"is wrapped, as a {QUANTISED}"}
    assert [entry.path for entry in report.left] == ["lm_head"]
    assert runs_programs(model, **batch())
    tokens = batch()["input_ids"]
    with torch.no_grad():
        hidden, expected = (one.transformer(tokens).last_hidden_state for one in (model, twin))
        assert torch.equal(model(tokens).logits, twin.lm_head(hidden))
    assert_near({"hidden": hidden}, {"hidden": expected})
    quietly(model)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Lora, "is wrapped, as a test_hf_left_alone.Lora"),
        (own_linear, "is wrapped, as a test_hf_left_alone.OwnLinear"),
        (hooked, "has hooks"),
    ],
)
def test_a_wrapped_or_watched_head(family, kind, reason):
    model, twin = pair(family, tie_word_embeddings=False)
    for one in (model, twin):
        torch.manual_seed(1)
        one.lm_head = kind(one.lm_head)
    report, said = told(model)
    assert said == {"lm_head": reason}
    assert [entry.path for entry in report.left] == ["lm_head"]
    assert_near(outcome(model, **batch()), outcome(twin, **batch()))
    quietly(model)


@pytest.mark.parametrize(
    ("family", "path"), [("llama", "model.norm"), ("gpt2", "transformer.ln_f")]
)
def test_a_watched_norm_behind_the_layers(family, path):
    model, twin = pair(family)
    for one in (model, twin):
        hooked(one.get_submodule(path))
    report, said = told(model)
    assert said == {path.rpartition(".")[2]: "has hooks"}
    assert [(entry.path, entry.left) for entry in report.left] == [(path, ("has hooks",))]
    assert_near(outcome(model, **batch()), outcome(twin, **batch()))


SHARD = "that is a DTensor of torch.float32: accelerate before it is sharded"


@each_family
def test_a_model_that_is_sharded_already(family):
    with one_process():
        model, twin = pair(family)
        paths = projections(model) | {"lm_head"}
        report, said = told(sharded(model))
        assert said.items() >= dict.fromkeys(paths, f"has a weight {SHARD}").items()
        assert all(reason.endswith(SHARD) for reason in said.values())
        assert report.replaced == ()
        found = whole(outcome(model, **batch()))
        quietly(model)
    expected = outcome(twin, **batch())
    assert all(torch.equal(found[name], value) for name, value in expected.items())


class Sealed(nn.Module):
    """A wrapper that tells nothing of what is inside."""

    def __init__(self, inside):
        super().__init__()
        self.inside = inside

    def forward(self, x):
        return self.inside(x)


SEALED = "is a test_hf_warned.Sealed, which doesn't tell its sizes (out_features, or a base_layer)"


@each_family
def test_wrappers_that_tell_no_sizes(family):
    """Of one projection, whose layer is left alone then, and of all."""
    model, twin = pair(family)
    path, paths = sorted(projections(model))[0], projections(model)
    owner, _, name = path.rpartition(".")
    for one in (model, twin):
        part = layers_of(one)[0].get_submodule(owner)
        setattr(part, name, Sealed(getattr(part, name)))
    report, said = told(model)
    assert said == {path: SEALED}
    assert [bool(entry.replaced) for entry in report.entries[:LAYERS]] == [False, True]
    assert report.entries[0].left == (f"{path} {SEALED}",)
    assert_near(outcome(model, **batch()), outcome(twin, **batch()))
    model, twin = (wrap_all(one, Sealed) for one in pair(family))
    report, said = told(model)
    assert said == dict.fromkeys(paths - {path}, SEALED), "one of them was told of before"
    assert [{*entry.left} for entry in report.entries[:LAYERS]] == [
        {f"{path} {SEALED}" for path in paths}
    ] * LAYERS
    assert_near(outcome(model, **batch()), outcome(twin, **batch()))
    quietly(model)


def test_each_reason_is_told_once():
    models = [wrap_all(pair()[0]) for _ in range(2)]
    told(models[0])
    models[1].lm_head = own_linear(models[1].lm_head)
    _, said = told(models[1])
    assert [*said] == ["lm_head"]


def test_what_is_unknown_gets_no_warning_whatever_is_around_it():
    model, twin = pair()
    for one in (model, twin):
        wrap_all(one)
        for layer in layers_of(one):
            layer.gate = nn.Dropout()
        one.lm_head = Conv1D(*one.lm_head.weight.shape)
    report = quietly(model)
    assert report.replaced == ()
    assert [len(entry.left) for entry in report.entries] == [1] * (LAYERS + 1)
    twin.load_state_dict(model.state_dict())
    assert torch.equal(model(**batch()).loss, twin(**batch()).loss)
