"""The ways a model is called: generation, masks, positions, outputs, checkpoints, precisions."""

import collections
import functools
import sys

import pytest
import torch
from hf_models import (
    CLASSES,
    assert_as_good,
    assert_near,
    batch,
    each_family,
    layers_of,
    llama_and_slow_others,
    outcome,
    pair,
    runs_programs,
)
from transformers.cache_utils import DynamicCache

import cadenza as cz
from cadenza.integrations.hf import layer as hf_layer
from cadenza.integrations.hf.layer import DECODED, ROWS, STEP
from cadenza.integrations.hf.plan import Plan
from cadenza.integrations.hf.run import Run

REENTRANT = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not"])


def accelerated_pair(family="llama", dtype=torch.float32, **options):
    model, twin = pair(family, dtype, **options)
    cz.accelerate(model)
    return model, twin


def padded(side):
    """A batch with padding on one side, which has no labels."""
    given = batch()
    mask = torch.ones_like(given["input_ids"])
    columns = slice(0, 7) if side == "left" else slice(33, 40)
    mask[1, columns] = 0
    labels = given["labels"].masked_fill(mask == 0, -100)
    return {**given, "labels": labels, "attention_mask": mask}


@pytest.mark.slow
@pytest.mark.parametrize("side", ["left", "right"])
@each_family
def test_padding(family, side):
    model, twin = accelerated_pair(family)
    found, expected = (outcome(one, **padded(side)) for one in (model, twin))
    seen = padded(side)["attention_mask"].bool()
    for values in (found, expected):
        values["logits"] = values["logits"][seen]
    assert_near(found, expected)


@pytest.mark.slow
@each_family
def test_generation_is_the_twins(family):
    model, twin = accelerated_pair(family)
    prompt = batch(rows=3)["input_ids"]
    mask = torch.ones_like(prompt)
    mask[0, :9] = 0
    options = {"max_new_tokens": 8, "do_sample": False, "use_cache": True, "pad_token_id": 0}
    for given in ({}, {"attention_mask": mask}):
        found, expected = (one.eval().generate(prompt, **options, **given) for one in (model, twin))
        assert torch.equal(found, expected)


def test_decoding_a_few_rows_takes_the_models_own_path():
    model, twin = accelerated_pair()
    tokens = batch(1, ROWS - 1)["input_ids"]
    assert not runs_programs(model, input_ids=tokens)
    assert torch.equal(model(tokens).logits, twin(tokens).logits)
    assert runs_programs(model, input_ids=batch(1, ROWS)["input_ids"])
    for length in (1, 2, STEP):  # of a step, a token or several that are verified together
        few = batch(DECODED // length - 1, length)["input_ids"]
        assert not runs_programs(model, input_ids=few)
        assert torch.equal(model(few).logits, twin(few).logits)
        assert runs_programs(model, input_ids=batch(DECODED // length, length)["input_ids"])


def test_a_call_of_few_rows_looks_at_nothing_of_its_layers(monkeypatch):
    """The stock path with a wrapper around it is what most decoding takes."""
    model, _ = accelerated_pair()
    tokens = batch(2, 1)["input_ids"]
    asked, given, usable = [], Plan.given, hf_layer.usable
    monkeypatch.setattr(hf_layer, "usable", lambda *own: asked.append(own) or usable(*own))
    monkeypatch.setattr(Plan, "given", lambda *own: asked.append(own) or given(*own))
    with torch.no_grad():
        model(tokens)
        assert not asked
        model(batch()["input_ids"])
    assert asked


def empty_cache(family):
    """An argument: a cache that grows. Gemma makes a fixed one in some releases."""
    # GPT-2 can't be given an empty one in every release.
    return {} if family == "gpt2" else {"past_key_values": DynamicCache()}


def python_calls(function):
    """How many of Python's functions a call of a function calls."""
    found = collections.Counter()

    def heard(frame, event, argument):
        found[event] += 1

    before = sys.getprofile()
    sys.setprofile(heard)
    try:
        function()
    finally:
        sys.setprofile(before)
    return found["call"]


@each_family
def test_a_step_of_decoding_calls_hardly_more_of_python(family):
    """Python's time is most of such a step's; a wrapper and a look at its rows are what it takes.

    Two calls a layer and eight for a model: its own forward, its stack's, last norm's and head's,
    with a look at what each is given; GPT-2 hands it on by position, which takes the eighth.
    """
    model, twin = accelerated_pair(family)
    tokens, taken = batch(2, 1)["input_ids"], []
    for one in (model.eval(), twin.eval()):
        with torch.no_grad():
            cache = one(tokens, use_cache=True, **empty_cache(family)).past_key_values
            step = functools.partial(one, tokens, past_key_values=cache, use_cache=True)
            step()
            taken.append(python_calls(step))
    more = taken[0] - taken[1]
    assert 0 < more <= 2 * len(layers_of(model)) + 8


def heard_calls(kind, patch):
    """A list that gets an entry whenever a module of a class is called."""
    calls, own = [], kind.forward
    patch.setattr(kind, "forward", lambda *args, **kw: calls.append(1) or own(*args, **kw))
    return calls


@pytest.mark.parametrize("use", ["few", "checkpointed"])
def test_the_models_own_path_takes_a_layer_as_often_as_the_twins(use, monkeypatch):
    """Some releases wrap the forward of each class that is derived from a layer, ours too."""
    model, twin = accelerated_pair()
    tokens, counts = batch(2, 9), []
    for one in (model, twin):
        if use == "checkpointed":
            one.gradient_checkpointing_enable({"use_reentrant": False})
        with monkeypatch.context() as patch:
            calls = heard_calls(type(layers_of(one)[0].self_attn), patch)
            outcome(one, **tokens)
        counts.append(len(calls))
    assert counts == [4, 4] if use == "checkpointed" else counts == [2, 2]


def test_a_forward_that_a_class_gets_later_is_taken(monkeypatch):
    model, twin = accelerated_pair()
    tokens = batch(2, 9)["input_ids"]
    before = model(tokens).logits
    kind = type(layers_of(twin)[0])
    own = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x, **given: own(self, 2 * x, **given))
    found, expected = model(tokens).logits, twin(tokens).logits
    assert torch.equal(found, expected)
    assert not torch.equal(found, before)


def test_a_prompt_with_a_cache_and_tokens_after_it():
    model, twin = accelerated_pair()
    tokens = batch(2, 100)["input_ids"]
    found, expected = [], []
    for one, results in ((model, found), (twin, expected)):
        one.eval()
        with torch.no_grad():
            first = one(tokens[:, :60], use_cache=True)
            results += [
                first.logits,
                one(tokens[:, 60:], past_key_values=first.past_key_values).logits,
            ]
    for ours, stock in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, stock, rtol=1e-4, atol=1e-5)


def watched(cache):
    """Notes, in the order of layers, whether what a cache is given has gaps in memory."""
    if not hasattr(cache, "update"):
        pytest.skip("this release hands the model's cache on as tuples")
    seen, update = [], cache.update

    def noted(keys, values, *args, **options):
        seen.append((keys.is_contiguous(), values.is_contiguous()))
        return update(keys, values, *args, **options)

    cache.update = noted
    return seen


@each_family
def test_a_cache_is_given_tokens_as_the_twins_is(family):
    """Where many sequences are decoded at a time, which programs do."""
    model, twin = accelerated_pair(family)
    tokens = batch(DECODED, 5)["input_ids"]
    found = {}
    with torch.no_grad():
        for one in (model, twin):
            cache = one.eval()(tokens[:, :4], use_cache=True, **empty_cache(family)).past_key_values
            seen = watched(cache)
            assert runs_programs(one, input_ids=tokens[:, :1]) == (one is model)
            logits = one(tokens[:, 4:], past_key_values=cache, use_cache=True).logits
            found[one] = seen, logits
    (seen, logits), (expected, reference) = found[model], found[twin]
    assert len(seen) == len(expected) > 0
    assert all(a >= b for ours, stock in zip(seen, expected, strict=True)
               for a, b in zip(ours, stock, strict=True)), (seen, expected)  # fmt: skip
    torch.testing.assert_close(logits, reference, rtol=1e-4, atol=1e-5)


@llama_and_slow_others
def test_position_ids_and_packed_sequences(family):
    model, twin = accelerated_pair(family)
    positions = torch.cat((torch.arange(25), torch.arange(15)))[None].expand(2, -1)
    given = {**batch(), "position_ids": positions}
    assert_near(outcome(model, **given), outcome(twin, **given))
    assert not torch.equal(model(**given).logits, model(**batch()).logits)


def test_embeddings_as_input():
    model, twin = accelerated_pair()
    embedded = twin.model.embed_tokens(batch()["input_ids"]).detach()
    given = {"inputs_embeds": embedded, "labels": batch()["labels"]}
    found, expected = (one(**given) for one in (model, twin))
    assert_near({"logits": found.logits}, {"logits": expected.logits})


@each_family
@pytest.mark.slow
def test_hidden_states_and_attention_are_the_twins(family):
    model, twin = accelerated_pair(family, attn_implementation="eager")
    tokens = batch()["input_ids"]
    found, expected = (
        one(tokens, output_hidden_states=True, output_attentions=True) for one in (model, twin)
    )
    assert len(found.hidden_states) == len(expected.hidden_states) == 3
    assert len(found.attentions) == len(expected.attentions) == 2
    for name in ("hidden_states", "attentions"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name))
    assert runs_programs(model, **batch()), "asking once must not switch programs off"
    assert_near(outcome(model, **batch()), outcome(twin, **batch()))


def test_hidden_states_alone():
    model, twin = accelerated_pair()
    found, expected = (one(**batch(), output_hidden_states=True) for one in (model, twin))
    for ours, stock in zip(found.hidden_states, expected.hidden_states, strict=True):
        torch.testing.assert_close(ours, stock, rtol=1e-4, atol=1e-4)


def test_tuples():
    model, twin = accelerated_pair()
    found, expected = (one(**batch(), return_dict=False) for one in (model, twin))
    assert len(found) == len(expected)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-4)
    cz.accelerate(model, logits=False)
    assert len(model(**batch(), return_dict=False)) == len(expected) - 1


@pytest.mark.slow
@REENTRANT
@each_family
def test_checkpointing(family, reentrant, monkeypatch):
    model, _ = accelerated_pair(family)
    plain = outcome(model, **batch())
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    calls = counted(layers_of(model)[0], monkeypatch)
    found = outcome(model, **batch())
    assert calls == [1, 1], "the layer was not called again in backward"
    assert all(torch.equal(found[name], value) for name, value in plain.items())


def counted(layer, monkeypatch):
    """A list that gets an entry whenever programs run for the layer."""
    calls, original = [], Run.__call__

    @functools.wraps(original)
    def heard(self, *args, **kwargs):
        calls.extend([1] * (self.layer is layer))
        return original(self, *args, **kwargs)

    monkeypatch.setattr(Run, "__call__", heard)
    return calls


@pytest.mark.slow
@each_family
def test_autocast(family):
    model, twin = accelerated_pair(family)
    oracle = outcome(pair(family)[1].double(), **batch())
    with torch.autocast("cpu", torch.bfloat16):
        ours, stock = outcome(model, **batch()), outcome(twin, **batch())
    assert_as_good(ours, stock, oracle, torch.bfloat16)


@pytest.mark.slow
@each_family
def test_scaled_gradients_in_fp16(family):
    model, twin = accelerated_pair(family)
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in range(2)]
    found = []
    for one, scaler in zip((model, twin), scalers, strict=True):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        with torch.autocast("cpu", torch.float16):
            loss = one(**batch()).loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        found.append({name: weight.grad for name, weight in one.named_parameters()})
        scaler.step(optimizer)
        scaler.update()
    assert_near(found[0], found[1], 2e-2)
    assert scalers[0].get_scale() == scalers[1].get_scale()


@pytest.mark.parametrize("number", [37, torch.tensor(37), torch.tensor([37.0])], ids=str)
def test_the_number_of_items_of_all_steps(number):
    model, twin = accelerated_pair()
    given = {**batch(), "num_items_in_batch": number}
    found, expected = model(**given).loss, twin(**given).loss.reshape(())
    torch.testing.assert_close(found, expected)


def test_steps_of_accumulation_equal_one():
    model, _ = accelerated_pair()
    whole = outcome(model, **batch(4, 20))
    model.zero_grad()
    given = batch(4, 20)
    number = (given["labels"][:, 1:] != -100).sum()
    for row in range(4):
        step = {name: value[row : row + 1] for name, value in given.items()}
        model(**step, num_items_in_batch=number).loss.backward()
    found = {name: weight.grad for name, weight in model.named_parameters()}
    assert_near(found, {name: whole[name] for name in found}, 1e-5)


def test_labels_that_none_count():
    model, _ = accelerated_pair()
    labels = torch.full_like(batch()["labels"], -100)
    loss = model(batch()["input_ids"], labels=labels, num_items_in_batch=torch.tensor(0)).loss
    loss.backward()
    assert loss == 0
    assert all(weight.grad.isfinite().all() for weight in model.parameters())


def test_logits_when_they_are_asked_away():
    model, twin = accelerated_pair()
    expected = twin(**batch()).loss
    cases = ((True, True, True), (False, False, False), ("evaluation", False, True))
    for logits, training, evaluation in cases:
        cz.accelerate(model, logits=logits)
        for mode, present in ((True, training), (False, evaluation)):
            found = model.train(mode)(**batch())
            assert (found.logits is not None) == present
            assert list(found.keys()) == (["loss", "logits"] if present else ["loss"])
            torch.testing.assert_close(found.loss, expected)
            assert model(batch()["input_ids"]).logits.shape == (2, 40, CLASSES)
    assert model(batch(1, 9)["input_ids"]).logits.shape == (1, 9, CLASSES)


def test_some_of_the_logits():
    model, twin = accelerated_pair()
    found, expected = (one(batch()["input_ids"], logits_to_keep=3).logits for one in (model, twin))
    assert found.shape == (2, 3, CLASSES)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["phi3", "gpt2"])
def test_dropout_in_training_only(family):
    rates = {"resid_pdrop": 0.25}
    model, twin = accelerated_pair(family, **rates)
    torch.manual_seed(0)
    first, second = model(**batch()).logits, model(**batch()).logits
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    assert torch.equal(model(**batch()).logits, first)
    found, expected = (one.eval()(**batch()).logits for one in (model, twin))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
