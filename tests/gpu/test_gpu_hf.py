"""Accelerated models of Hugging Face on a GPU, beside their untouched twins."""

import copy

import pytest
import torch
from calls import BRAIN, HALF, SINGLE, check_same, launches
from hf_models import (
    assert_as_good,
    batch,
    each_family,
    outcome,
    outcome_with_losses,
    pair,
    wider,
)

import cadenza as cz
from cadenza.backends.triton.tuning import records
from cadenza.integrations.hf.weights import joined
from cadenza.library import attention_choice

pytestmark = pytest.mark.gpu
LENGTH = 129


def accelerated_pair(place, family, dtype, **changes):
    """A model on the device and its twin; tiny where kernels are interpreted."""
    changes = {**({} if place.interpreted else wider(family)), **changes}
    model, twin = (one.to(place.device) for one in pair(family, dtype, **changes))
    cz.accelerate(model)
    return model, twin


@pytest.mark.interpreted
@each_family
@pytest.mark.parametrize("dtype", [BRAIN, SINGLE], ids=str)
def test_families_are_as_good_as_their_twins(family, dtype, place):
    place.allows(dtype)
    model, twin = accelerated_pair(place, family, dtype)
    length = 40 if place.interpreted else LENGTH
    given = [batch(2, length, place.device, seed) for seed in range(1 if place.interpreted else 6)]
    exact = outcome_with_losses(copy.deepcopy(twin).double(), given)
    with launches() as made:
        ours = outcome_with_losses(model, given)
    assert len(made), "nothing ran by Triton"
    assert_as_good(ours, outcome_with_losses(twin, given), exact, dtype)


@each_family
def test_autocast_is_as_good_as_the_twins(family, place):
    model, twin = accelerated_pair(place, family, SINGLE)
    given = [batch(2, LENGTH, place.device, seed) for seed in range(6)]
    exact = outcome_with_losses(copy.deepcopy(twin).double(), given)
    with torch.autocast("cuda", BRAIN):
        ours, stock = outcome_with_losses(model, given), outcome_with_losses(twin, given)
    assert_as_good(ours, stock, exact, BRAIN)


def trained(model, place, half=True, length=LENGTH):
    """The changes of every parameter by ten steps, and the losses of all steps.

    Parameters of float32 in autocast: bfloat16 ones would lose most of such a change. Not by Adam,
    whose first steps go by a gradient's sign alone: a rounding of one near 0 turns it around.
    """
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), []
    for seed in range(10):
        optimizer.zero_grad()
        with torch.autocast(place.device.type, BRAIN, enabled=half):
            losses.append(model(**batch(2, length, place.device, seed)).loss)
        losses[-1].backward()
        optimizer.step()
    changes = {name: weight.detach() - before[name] for name, weight in model.named_parameters()}
    return {"losses": torch.stack(losses).detach(), **changes}


@each_family
def test_ten_steps_are_as_good_as_the_twins(family, place):
    model, twin = accelerated_pair(place, family, SINGLE)
    exact = trained(copy.deepcopy(twin).double(), place, half=False)
    with launches() as made:
        ours = trained(model, place)
    assert len(made), "nothing ran by Triton"
    assert_as_good(ours, trained(twin, place), exact, BRAIN)


@each_family
def test_scaled_gradients_in_fp16_are_as_good_as_the_twins(family, place):
    model, twin = accelerated_pair(place, family, SINGLE)
    given = batch(2, LENGTH, place.device)
    exact = outcome(copy.deepcopy(twin).double(), **given)
    found = []
    for one in (model, twin):
        scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        with torch.autocast("cuda", HALF):
            loss = one(**given).loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        gradients = {name: weight.grad.clone() for name, weight in one.named_parameters()}
        found.append({"loss": loss.detach(), **gradients})
        before = one.lm_head.weight.detach().clone()
        scaler.step(optimizer)
        assert not torch.equal(one.lm_head.weight, before), "the step was left out: an infinity"
    expected = {name: exact[name] for name in found[0]}
    assert_as_good(*found, expected, HALF)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not"])
def test_28_checkpointing_changes_no_bit(reentrant, place):
    model, _ = accelerated_pair(place, "llama", BRAIN)
    given = batch(2, LENGTH, place.device)
    plain = outcome(model, **given)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    check_same(outcome(model, **given), plain, "checkpointed")


@each_family
def test_compiled_in_one_graph(family, place):
    """Losses of several batches, logits and every gradient."""
    model, twin = accelerated_pair(place, family, BRAIN)
    given = [batch(2, LENGTH, place.device, seed) for seed in range(6)]
    exact = outcome_with_losses(copy.deepcopy(twin).double(), given)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True)
    with launches() as made:
        ours = outcome_with_losses(compiled, given)
    assert len(made), "nothing ran by Triton"
    found = {name.removeprefix("_orig_mod."): value for name, value in ours.items()}
    assert_as_good(found, outcome_with_losses(twin, given), exact, BRAIN)


@pytest.mark.parametrize("family", ["llama", "phi3", "gpt2"])
def test_attention_runs_on_the_kernel_that_was_measured(family, place, monkeypatch, tmp_path):
    monkeypatch.setenv("CADENZA_CACHE", str(tmp_path))
    for name in ("_decided", "_entries", "_planned"):
        monkeypatch.setattr(attention_choice, name, {})
    model, twin = accelerated_pair(place, family, BRAIN)
    given = batch(2, LENGTH, place.device)
    exact = outcome(copy.deepcopy(twin).double(), **given)
    stock = outcome(twin, **given)
    assert not records.read(attention_choice.TABLE)
    monkeypatch.setattr(attention_choice, "_mode", lambda: "first")  # kernels of programs stay
    for _ in range(2):
        assert_as_good(outcome(model, **given), stock, exact, BRAIN)
    [entry] = records.read(attention_choice.TABLE).values()
    assert (entry["batch"], entry["length"]) == (2, 256)


def test_generation_takes_the_path_of_the_twin(place):
    model, twin = accelerated_pair(place, "llama", SINGLE)
    prompt = batch(1, 20, place.device)["input_ids"]
    options = {"max_new_tokens": 8, "do_sample": False, "use_cache": True, "pad_token_id": 0}
    with launches() as made:
        found = model.eval().generate(prompt, **options)
    assert not len(made)
    assert torch.equal(found, twin.eval().generate(prompt, **options))


@pytest.mark.alone
@pytest.mark.parametrize("logits", [True, False])
def test_a_step_needs_no_more_memory_than_the_twins(logits, place):
    sizes = {"vocab_size": 32000, "num_hidden_layers": 4, "hidden_size": 1024}
    model, twin = accelerated_pair(
        place, "llama", BRAIN, **sizes, intermediate_size=2816, head_dim=128
    )
    cz.accelerate(model, logits=logits)
    given, peaks = batch(4, 1024, place.device), []
    for one in (model, twin):
        for _ in range(2):
            one.zero_grad(set_to_none=True)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            one(**given).loss.backward()
            peak = torch.cuda.max_memory_allocated() - before
        peaks.append(peak)
    assert peaks[0] <= peaks[1]


def test_weights_of_one_product_are_not_copied(place):
    model, _ = accelerated_pair(place, "llama", BRAIN)
    layer = model.model.layers[0]
    before = torch.cuda.memory_allocated()

    whole = joined([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight])
    assert torch.cuda.memory_allocated() == before
    assert whole.data_ptr() == layer.mlp.gate_proj.weight.data_ptr()
