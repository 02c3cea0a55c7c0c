"""What an accelerated model keeps: parameters, state, copies, files; and what `revert` restores."""

import copy
import io
import pickle

import pytest
import torch
from hf_models import (
    batch,
    each_family,
    layers_of,
    outcome,
    pair,
    runs_programs,
    small,
    transformers,
)

import cadenza as cz
from cadenza.integrations.hf.weights import groups, is_one_stretch

SHARED = "2 of 2 layers have the weights of one product in one storage"


def described(model):
    """All that `revert` must give back: classes, attributes, and where parameters lie."""
    return [
        (path, type(module), sorted(module.__dict__), sorted(module._buffers))
        for path, module in model.named_modules()
    ]


def storages(model):
    """The storage of each parameter, and whether it is the parameter's alone."""
    return {
        name: (weight.untyped_storage().data_ptr(), weight.untyped_storage().nbytes())
        for name, weight in model.named_parameters()
    }


def is_shared(model):
    """Whether the weights of one product lie in one stretch, layer by layer."""
    layers = layers_of(model)
    return [is_one_stretch(own) for layer in layers for own in groups(layer, layer._cadenza)]


def assert_same_state(model, other):
    found, expected = model.state_dict(), other.state_dict()
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert found[name].shape == value.shape
        assert torch.equal(found[name], value), name


@each_family
def test_33_revert_gives_everything_back(family):
    model, twin = pair(family)
    before, places = described(model), list(model.parameters())
    cz.accelerate(model)
    assert_same_state(model, twin)
    assert all(a is b for a, b in zip(model.parameters(), places, strict=True))
    cz.revert(model)
    assert described(model) == before
    assert all(a is b for a, b in zip(model.parameters(), places, strict=True))
    assert_same_state(model, twin)
    sizes = [weight.numel() * 4 for weight in model.parameters()]
    assert [size for _, size in storages(model).values()] == sizes
    assert len({place for place, _ in storages(model).values()}) == len(sizes)
    found, expected = outcome(model, **batch()), outcome(twin, **batch())
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert not runs_programs(model, **batch())


def test_weights_of_one_product_share_storage_until_something_replaces_them():
    model, twin = pair()
    report = cz.accelerate(model)
    assert is_shared(model) == [True] * 4
    assert str(report).endswith(SHARED)
    model.load_state_dict(twin.state_dict())
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.to(torch.float64).to(torch.float32)
    assert is_shared(model) == [True] * 4
    model.load_state_dict(twin.state_dict(), assign=True)
    assert is_shared(model) == [False] * 4
    assert str(report).endswith(
        "0 of 2 layers have the weights of one product in one storage; the others' are copied "
        "together at each call"
    )
    assert torch.equal(model(**batch()).logits, _fresh()(**batch()).logits)
    assert str(cz.accelerate(model)).endswith(SHARED)
    assert is_shared(model) == [True] * 4


def _fresh():
    model = small()
    cz.accelerate(model)
    return model


def test_gradients_are_the_same_by_copies_and_by_one_storage():
    model, copied = _fresh(), copy.deepcopy(_fresh())
    assert is_shared(copied) == [True] * 4
    for weight in copied.parameters():
        weight.data = weight.data.clone()
    assert is_shared(copied) == [False] * 4
    found, expected = outcome(copied, **batch()), outcome(model, **batch())
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_biases_of_one_product_share_storage_too():
    model, twin = pair("qwen2")
    cz.accelerate(model)
    assert is_shared(model) == [True] * 6
    found, expected = outcome(model, **batch()), outcome(copy.deepcopy(model), **batch())
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    cz.revert(model)
    assert_same_state(model, twin)
    assert len({place for place, _ in storages(model).values()}) == len(storages(twin))


def test_weights_that_do_not_own_their_memory_stay_where_they_are():
    model = small()
    gate = layers_of(model)[0].mlp.gate_proj
    whole = torch.zeros(200, 64)
    whole[:96] = gate.weight.data
    gate.weight.data = whole[:96]
    cz.accelerate(model)
    assert is_shared(model) == [True, False, True, True]
    assert gate.weight.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def test_a_frozen_weight_of_several_gets_no_gradient():
    model, twin = pair()
    cz.accelerate(model)
    for one in (model, twin):
        layers_of(one)[0].mlp.gate_proj.requires_grad_(False)
        layers_of(one)[1].self_attn.requires_grad_(False)
        one(**batch()).loss.backward()
    for (name, found), expected in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert (found.grad is None) == (expected.grad is None), name


def test_32_state_loads_both_ways_and_strictly():
    model, twin = pair()
    cz.accelerate(model)
    other = small()
    for weight in other.parameters():
        weight.data.add_(1.0)
    model.load_state_dict(other.state_dict(), strict=True)
    assert_same_state(model, other)
    twin.load_state_dict(model.state_dict(), strict=True)
    assert_same_state(twin, other)


@pytest.mark.slow
def test_a_deep_copy_of_a_compiled_model_computes_with_its_own_weights():
    model = _fresh()
    model.compile(backend="eager")
    expected = model(**batch()).logits
    copied = copy.deepcopy(model)
    assert torch.equal(copied(**batch()).logits, expected)
    with torch.no_grad():
        for weight in copied.parameters():
            weight.zero_()
    assert not copied(**batch()).logits.any()
    assert torch.equal(model(**batch()).logits, expected)


def test_a_deep_copy_stays_accelerated_and_is_its_own():
    model = _fresh()
    copied = copy.deepcopy(model)
    assert torch.equal(copied(**batch()).logits, model(**batch()).logits)
    assert runs_programs(copied, **batch())
    with torch.no_grad():
        for weight in copied.parameters():
            weight.zero_()
    assert torch.equal(model(**batch()).logits, _fresh()(**batch()).logits)
    cz.revert(copied)
    assert runs_programs(model, **batch())
    assert not runs_programs(copied, **batch())


def test_a_pickle_holds_the_stock_model():
    model, twin = pair()
    cz.accelerate(model)
    assert_same_state(pickle.loads(pickle.dumps(model)), twin)
    file = io.BytesIO()
    torch.save(model, file)
    loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    assert [type(m) for m in loaded.modules()] == [type(m) for m in twin.modules()]
    assert torch.equal(loaded(**batch()).logits, twin(**batch()).logits)


def test_an_unpickled_model_shares_storage_once_it_is_accelerated():
    read = pickle.loads(pickle.dumps(_fresh()))
    cz.accelerate(read)
    assert is_shared(read) == [True] * 4
    cz.revert(read)
    assert [size for _, size in storages(read).values()] == [w.nbytes for w in read.parameters()]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_save_pretrained_and_from_pretrained(tmp_path, tied):
    model, twin = pair(tie_word_embeddings=tied)
    cz.accelerate(model)
    for one, folder in ((model, "ours"), (twin, "stock")):
        one.save_pretrained(tmp_path / folder)
    files = [
        {path.name: path.read_bytes() for path in (tmp_path / folder).iterdir()}
        for folder in ("ours", "stock")
    ]
    assert files[0] == files[1]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert type(loaded) is type(twin)
    assert_same_state(loaded, twin)
    report = cz.accelerate(loaded)
    assert report.left == ()


def test_tied_weights_stay_tied_and_get_both_gradients():
    model, twin = pair(tie_word_embeddings=True)
    cz.accelerate(model)
    found, expected = outcome(model, **batch()), outcome(twin, **batch())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    error = (found["model.embed_tokens.weight"] - expected["model.embed_tokens.weight"]).norm()
    assert error <= 3e-6 * expected["model.embed_tokens.weight"].norm()


def test_accelerating_twice_and_reverting_twice_change_nothing():
    model, twin = pair()
    first = cz.accelerate(model)
    assert cz.accelerate(model).entries == first.entries
    classes = [type(module) for module in model.modules()]
    cz.accelerate(model)
    assert [type(module) for module in model.modules()] == classes
    cz.revert(model)
    cz.revert(model)
    cz.revert(twin)
    assert described(model) == described(twin)


def test_a_class_that_was_derived_since_keeps_working_after_revert():
    model, twin = pair()
    cz.accelerate(model)
    layer = layers_of(model)[0]
    derived = type(type(layer).__name__, (type(layer),), {})
    layer.__class__ = derived
    assert runs_programs(model, **batch())
    cz.revert(model)
    assert type(layer) is derived
    assert torch.equal(model(**batch()).logits, twin(**batch()).logits)


def test_classes_keep_their_names_and_lineage():
    model, twin = pair()
    cz.accelerate(model)
    for ours, stock in zip(model.modules(), twin.modules(), strict=True):
        assert isinstance(ours, type(stock))
        assert str(type(ours)) == str(type(stock))
    assert repr(model) == repr(twin)


def test_a_model_without_numbers_yet():
    _, twin = pair()
    with torch.device("meta"):
        model = small()
    report = cz.accelerate(model)
    assert report.left == ()
    model.load_state_dict(twin.state_dict(), assign=True)
    model.model.rotary_emb = copy.deepcopy(twin.model.rotary_emb)
    assert runs_programs(model, **batch())
    torch.testing.assert_close(model(**batch()).loss, twin(**batch()).loss)
