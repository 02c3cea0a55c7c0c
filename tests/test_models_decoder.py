"""`cz.models.Decoder` beside its stock twin, and what a model must stand in training."""

import copy
from dataclasses import replace

import pytest
import torch
from tiny_models import (
    FAMILIES,
    each_family,
    each_tying,
    gradients,
    tiny,
    tiny_config,
    tokens_and_targets,
    twins,
)

import cadenza as cz
from cadenza.core.errors import ProgramError
from cadenza.library.models.decoder import initialise
from cadenza.library.models.sizes import build


def assert_same_gradients(ours, stock, tolerance):
    assert list(ours) == list(stock)
    for name, gradient in ours.items():
        error, size = (gradient - stock[name]).norm(), stock[name].norm()
        assert error <= tolerance * size + 1e-15, f"{name}: {error} of {size}"


@each_family
@each_tying
def test_logits_loss_and_gradients_equal_the_twin(family, tied):
    ours, stock = twins(tiny_config(family, tied), torch.float64)
    tokens, targets = tokens_and_targets()
    torch.testing.assert_close(ours(tokens), stock(tokens), rtol=1e-10, atol=1e-10)
    loss, actual = gradients(ours, tokens, targets)
    expected_loss, expected = gradients(stock, tokens, targets)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=1e-12)
    assert_same_gradients(actual, expected, 1e-10)


@each_family
@pytest.mark.slow
def test_bfloat16_errs_at_most_twice_as_much_as_the_twin(family):
    ours, stock = (model.bfloat16() for model in twins(tiny_config(family)))
    exact = copy.deepcopy(stock).double()
    batch = tokens_and_targets(4, 32)
    (_, oracle), (_, actual), (_, own) = (gradients(m, *batch) for m in (exact, ours, stock))
    error, unit = (
        sum((g[n].double() - oracle[n]).square().sum().item() for n in oracle) ** 0.5
        for g in (actual, own)
    )
    assert error <= 2 * unit


@each_family
def test_autocast_trains_float32_weights_as_well_as_the_twin_does(family):
    ours, stock = twins(tiny_config(family))
    found = []
    batch = tokens_and_targets(4, 32)
    _, exact = gradients(copy.deepcopy(stock).double(), *batch)
    for model in (ours, stock):
        with torch.autocast("cpu", torch.bfloat16):
            loss, grads = gradients(model, *batch)
        assert loss.dtype == torch.float32
        assert {gradient.dtype for gradient in grads.values()} == {torch.float32}
        found.append(sum((grads[n] - exact[n]).square().sum().item() for n in exact) ** 0.5)
    assert found[0] <= 2 * found[1]


def test_a_rotary_embedding_of_a_part_of_each_head():
    config = tiny_config()
    part = tiny_config(head_dim=24)
    ours, stock = twins(part, torch.float64)
    assert part.rotary.columns == config.head_dim < part.head_dim
    tokens, _ = tokens_and_targets()
    torch.testing.assert_close(ours(tokens), stock(tokens), rtol=1e-10, atol=1e-10)


@each_family
def test_packed_sequences_are_as_if_each_were_alone(family):
    model = tiny(tiny_config(family), torch.float64)
    tokens = torch.randint(300, (2, 10))
    ends = torch.tensor([0, 4, 13, 20])
    packed = model(tokens, cumulative_lengths=ends).flatten(0, 1)
    for start, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        alone = model(tokens.flatten()[None, start:end])[0]
        torch.testing.assert_close(packed[start:end], alone, rtol=1e-10, atol=1e-10)


def test_options_of_the_loss_reach_it():
    model = tiny()
    tokens, targets = tokens_and_targets()
    rows = model(tokens, targets, reduction="none")
    assert rows.shape == targets.shape
    total = model(tokens, targets, reduction="sum")
    torch.testing.assert_close(rows.sum(), total)
    part = model(tokens, targets, num_items_in_batch=100)
    torch.testing.assert_close(part, total / 100)
    with pytest.raises((ProgramError, TypeError), match="reduce"):
        model(tokens, targets, reduce_loss=True)


@each_family
def test_checkpointed_layers_change_no_bit_and_keep_less(family):
    model, batch = tiny(tiny_config(family, layers=3)), tokens_and_targets()

    def kept():
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: sizes.append(t.nbytes) or t, lambda t: t
        ):
            model(*batch)
        return sum(sizes)

    loss, expected = gradients(model, *batch)
    usual = kept()
    cz.models.checkpoint_layers(model)
    again, actual = gradients(model, *batch)
    assert torch.equal(loss, again)
    for name, gradient in actual.items():
        assert torch.equal(gradient, expected[name]), name
    assert kept() < usual / 2
    copied, _ = gradients(copy.deepcopy(model), *batch)
    assert torch.equal(copied, loss)


def test_a_tied_weight_is_one_parameter_that_gets_both_gradients():
    tied, untied = tiny(tiny_config(tied=True)), tiny(tiny_config(tied=False))
    untied.load_state_dict(tied.state_dict())
    batch = tokens_and_targets()
    _, both = gradients(tied, *batch)
    _, apart = gradients(untied, *batch)
    assert "lm_head.weight" not in both
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    name = "model.embed_tokens.weight"
    torch.testing.assert_close(both[name], apart[name] + apart["lm_head.weight"])


def test_moving_and_copying_keep_weights_tied():
    for model in (copy.deepcopy(tiny()), tiny().to(torch.float64), tiny().bfloat16()):
        assert model.lm_head.weight is model.model.embed_tokens.weight
    state = tiny().state_dict()
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= set(state)


@pytest.mark.slow
def test_torch_compile_takes_the_whole_model_without_graph_breaks():
    model = tiny(tiny_config("qwen3", layers=1))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    batch = tokens_and_targets()
    loss, expected = gradients(model, *batch)
    model.zero_grad()
    again = compiled(*batch)
    again.backward()
    torch.testing.assert_close(again, loss)
    assert_same_gradients({n: w.grad for n, w in model.named_parameters()}, expected, 1e-6)


def test_tokens_beyond_the_context_are_refused():
    for model in twins():
        with pytest.raises(ValueError, match="65 tokens don't fit in a context of 64"):
            model(torch.zeros(1, 65, dtype=torch.int64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_dtypes_of_logits_and_loss(dtype):
    tokens, targets = tokens_and_targets()
    for model in twins(dtype=dtype):
        assert model(tokens).dtype == dtype
        assert model(tokens, targets).dtype == torch.promote_types(dtype, torch.float32)


# New weights


def test_weights_start_normal_with_deviation_002_and_norms_at_one():
    model = cz.models.Decoder(tiny_config("qwen3", width=256, feed_forward=512))
    for name, weight in model.named_parameters():
        if weight.dim() == 1:
            assert torch.equal(weight, torch.ones_like(weight)), name
        else:
            assert weight.std().item() == pytest.approx(0.02, rel=0.05), name
            assert abs(weight.mean().item()) < 0.002, name


@each_family
def test_both_kinds_are_built_with_the_same_weights_in_any_dtype(family):
    made = []
    for kind, dtype in (("Decoder", None), ("StockDecoder", torch.float64)):
        torch.manual_seed(5)
        model = build(getattr(cz.models, kind), tiny_config(family), dtype=dtype, drawn_on="cpu")
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert {weight.dtype for weight in model.parameters()} == {dtype or torch.float32}
        made.append(model.state_dict())
    assert list(made[0]) == list(made[1])
    for name, weight in made[0].items():
        assert torch.equal(weight, made[1][name].float()), name
    torch.manual_seed(6)
    initialise(model)
    assert not torch.equal(model.lm_head.weight, made[0]["lm_head.weight"])


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"family": "mamba"}, "no family 'mamba': choose one of llama, qwen3, or build"),
        ({"layers": 0}, "layers is 0, not a positive whole number: choose 1 or more"),
        ({"vocabulary": 1.5}, "vocabulary is 1.5, not a positive whole number"),
        ({"key_value_heads": 3}, "heads 4 is not divisible by key_value_heads 3: choose heads"),
        ({"head_dim": 8}, r"rotary embedding of 16 columns in heads of 8: choose Rotary\(8"),
        ({"eps": 0.0}, "eps 0.0 must be positive: choose a value above 0"),
    ],
)
def test_sizes_that_do_not_fit_name_the_cure(sizes, said):
    with pytest.raises(ValueError, match=said):
        tiny_config(**sizes)


def test_heads_that_are_rotated_in_part_are_not_written_as_another_model(tmp_path):
    """Hugging Face's would rotate them whole, whatever its config.json said."""
    model = cz.models.Decoder(replace(tiny_config(), rotary=cz.ops.Rotary(8)))
    with pytest.raises(
        cz.models.CheckpointError, match=r"8 columns in heads of \d+, where a .* rotates whole"
    ):
        cz.models.save(model, tmp_path / "model")
    assert not [*tmp_path.iterdir()]


def test_checkpointing_of_what_has_no_layers_names_the_cure():
    with pytest.raises(TypeError, match=r"of a Linear: give a model with layers at model\.layers"):
        cz.models.checkpoint_layers(torch.nn.Linear(2, 2))


def test_options_of_a_loss_without_targets_are_refused():
    """As somebody gives them who comes from another library."""
    model, tokens = cz.models.Decoder(tiny_config()), torch.zeros(1, 4, dtype=torch.int64)
    for name, value in (("labels", tokens), ("attention_mask", tokens), ("reduction", "sum")):
        with pytest.raises(TypeError, match=f"{name} without targets: .* give targets"):
            model(tokens, **{name: value})
    with pytest.raises(TypeError, match="attention_mask"):
        model(tokens, tokens, attention_mask=tokens)


def test_every_family_has_an_architecture_of_layers():
    assert set(FAMILIES) == set(cz.models.decoder_config.FAMILIES)
    for family in FAMILIES:
        cz.nn.Architecture.named(family)
