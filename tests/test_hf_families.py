"""`cz.accelerate` beside the untouched twin, family by family: loss, logits, gradients, steps."""

import pytest
import torch
from hf_models import (
    FAMILIES,
    LAYERS,
    assert_as_good,
    assert_near,
    batch,
    each_family,
    layers_of,
    outcome,
    pair,
    runs_programs,
    small,
)

import cadenza as cz

PARTS = ("norm + QKV + rotary", "attention output", "feed-forward")


@each_family
def test_loss_logits_and_every_gradient_are_the_twins(family):
    model, twin = pair(family)
    cz.accelerate(model)
    assert_near(outcome(model, **batch()), outcome(twin, **batch()))


@each_family
def test_all_of_it_is_replaced(family):
    model, _ = pair(family)
    report = cz.accelerate(model)
    parts = ("norm + QKV", *PARTS[1:]) if family == "gpt2" else PARTS
    assert [entry.replaced for entry in report.entries[:LAYERS]] == [parts] * LAYERS
    assert [entry.replaced for entry in report.entries[LAYERS:]] == [
        ("mask of plain causal batches",), ("norm",), ("loss of labels, beside logits",),
    ]  # fmt: skip
    assert report.left == ()
    assert runs_programs(model, **batch())


def test_layers_of_both_kinds_of_attention_are_tried():
    """Gemma 3's have a rotary table each."""
    layers = layers_of(small("gemma3"))
    assert [layer.self_attn.is_sliding for layer in layers] == [True, False]


@pytest.mark.slow
@each_family
def test_ten_steps_of_adamw_are_the_twins(family):
    model, twin = pair(family)
    cz.accelerate(model)
    losses = []
    for one in (model, twin):
        optimizer = torch.optim.AdamW(one.parameters(), lr=1e-3)
        losses.append([])
        for _ in range(10):
            found = outcome(one, **batch())
            torch.nn.utils.clip_grad_norm_(one.parameters(), 1.0)
            optimizer.step()
            losses[-1].append(found["loss"])
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=0.0)
    assert losses[1][-1] < losses[1][0]


@pytest.mark.slow
@each_family
def test_bfloat16_errs_at_most_twice_as_much_as_the_twin(family):
    dtype = torch.bfloat16
    model, twin = pair(family, dtype)
    oracle = outcome(pair(family, dtype)[1].double(), **batch())
    cz.accelerate(model)
    ours, stock = outcome(model, **batch()), outcome(twin, **batch())
    assert_as_good(ours, stock, oracle, dtype)


@pytest.mark.slow
@each_family
def test_34_logits_in_evaluation_and_without_labels(family):
    model, twin = pair(family)
    cz.accelerate(model)
    given = batch()
    for one in (model, twin):
        one.eval()
    with torch.no_grad():
        found, expected = model(**given), twin(**given)
        bare = model(given["input_ids"])
    assert_near({"logits": found.logits}, {"logits": expected.logits})
    assert_near({"loss": found.loss}, {"loss": expected.loss})
    assert bare.loss is None
    assert torch.equal(bare.logits, found.logits)


def test_every_family_of_the_table_is_there():
    assert len(FAMILIES) == 9
