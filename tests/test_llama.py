"""cadenza.models.Llama beside its stock twin: one state_dict, equal losses and gradients.

Also what a model must stand in training: torch.compile, autocast, checkpointed layers, frozen
parts, any batch and length; and how long its step may take.
"""

import statistics
import time

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import cadenza as cz
from cadenza.backends import reference
from cadenza.library.models import LlamaConfig, StockLlama

CONFIG = LlamaConfig(
    vocabulary=61, width=24, layers=2, heads=4, key_value_heads=2, feed_forward=40, context=16
)


def twins(config=CONFIG, dtype=torch.float64):
    torch.manual_seed(1)
    ours, stock = cz.models.Llama(config).to(dtype), StockLlama(config).to(dtype)
    stock.load_state_dict(ours.state_dict())
    return ours, stock


def tokens_and_targets(batch=3, length=16, vocabulary=61):
    tokens = torch.randint(0, vocabulary, (batch, length))
    targets = torch.randint(0, vocabulary, (batch, length))
    targets[0, :3] = -100
    return tokens, targets


def gradients(model, *inputs):
    model.zero_grad()
    loss = model(*inputs)
    loss.backward()
    return loss, {name: weight.grad for name, weight in model.named_parameters()}


def assert_same_gradients(ours, stock, tolerance):
    assert list(ours) == list(stock)
    for name, gradient in ours.items():
        error, size = (gradient - stock[name]).norm(), stock[name].norm()
        assert error <= tolerance * size + 1e-15, f"{name}: {error} of {size}"


def test_state_dicts_are_interchangeable():
    ours, stock = twins()
    theirs = stock.state_dict()
    assert {n: w.shape for n, w in ours.state_dict().items()} == {
        n: w.shape for n, w in theirs.items()
    }
    cz.models.Llama(CONFIG).double().load_state_dict(theirs)


@pytest.mark.parametrize(("batch", "length"), [(1, 1), (3, 16), (2, 7)])
def test_loss_logits_and_gradients_equal_the_twin(batch, length):
    ours, stock = twins()
    tokens, targets = tokens_and_targets(batch, length)
    targets[:, -1] = 5
    torch.testing.assert_close(ours(tokens), stock(tokens), rtol=1e-10, atol=1e-12)
    loss, actual = gradients(ours, tokens, targets)
    expected_loss, expected = gradients(stock, tokens, targets)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=1e-12)
    assert_same_gradients(actual, expected, 1e-10)


def test_float32_stays_within_rounding_of_the_twin():
    ours, stock = twins(dtype=torch.float32)
    batch = tokens_and_targets()
    loss, actual = gradients(ours, *batch)
    expected_loss, expected = gradients(stock, *batch)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected_loss, rtol=1e-6, atol=0)
    assert_same_gradients(actual, expected, 1e-5)


def test_bfloat16_errs_at_most_twice_as_much_as_the_twin():
    exact_ours, exact = twins()
    ours, stock = (model.bfloat16() for model in twins())
    for model in (exact_ours, exact):
        model.load_state_dict(ours.state_dict())
    batch = tokens_and_targets()
    (_, oracle), (_, actual), (_, own) = (gradients(m, *batch) for m in (exact, ours, stock))
    norms = [
        sum((g[n].double() - oracle[n]).square().sum().item() for n in oracle)
        for g in (actual, own)
    ]
    assert norms[0] <= 4 * norms[1]


def test_tokens_beyond_the_context_are_refused():
    ours, _ = twins()
    with pytest.raises(ValueError, match="17 tokens don't fit in a context of 16"):
        ours(torch.zeros(1, 17, dtype=torch.int64))


def test_frozen_embeddings_and_norms_cost_the_others_nothing():
    ours, stock = twins()
    for model in (ours, stock):
        model.model.embed_tokens.requires_grad_(False)
        model.model.norm.requires_grad_(False)
        model.lm_head.requires_grad_(False)
    batch = tokens_and_targets()
    _, actual = gradients(ours, *batch)
    _, expected = gradients(stock, *batch)
    frozen = {name for name, gradient in expected.items() if gradient is None}
    assert {name for name, gradient in actual.items() if gradient is None} == frozen
    trained = set(expected) - frozen
    assert_same_gradients(
        {n: actual[n] for n in sorted(trained)}, {n: expected[n] for n in sorted(trained)}, 1e-10
    )


class CheckpointedLayer(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, *inputs):
        return checkpoint(self.layer, *inputs, use_reentrant=False)


def test_checkpointed_layers_change_no_bit():
    ours, _ = twins(dtype=torch.float32)
    batch = tokens_and_targets()
    loss, expected = gradients(ours, *batch)
    expected = [gradient.clone() for gradient in expected.values()]
    ours.model.layers = torch.nn.ModuleList(map(CheckpointedLayer, ours.model.layers))
    again, actual = gradients(ours, *batch)
    assert torch.equal(loss, again)
    for a, b in zip(actual.values(), expected, strict=True):
        assert torch.equal(a, b)


def test_autocast_trains_float32_weights():
    ours, stock = twins(dtype=torch.float32)
    batch = tokens_and_targets()
    with torch.autocast("cpu", torch.bfloat16):
        loss, actual = gradients(ours, *batch)
        expected_loss, _ = gradients(stock, *batch)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-2, atol=0)
    assert {gradient.dtype for gradient in actual.values()} == {torch.float32}


@pytest.mark.slow
def test_torch_compile_whole_model_without_graph_breaks():
    ours, _ = twins(dtype=torch.float32)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    for batch in (3, 5):
        inputs = tokens_and_targets(batch)
        loss, expected = gradients(ours, *inputs)
        expected = {name: gradient.clone() for name, gradient in expected.items()}
        ours.zero_grad()
        again = compiled(*inputs)
        again.backward()
        torch.testing.assert_close(again, loss)
        assert_same_gradients({n: w.grad for n, w in ours.named_parameters()}, expected, 1e-6)


def step_seconds(model, batch):
    start = time.perf_counter()
    gradients(model, *batch)
    return time.perf_counter() - start


@pytest.mark.slow
def test_a_training_step_takes_at_most_one_and_a_half_times_the_twins(monkeypatch):
    """Interleaved, and the medians compared, so that the machine's moods fall on both."""
    monkeypatch.setattr(reference, "TILE", None)
    config = LlamaConfig(
        vocabulary=256, width=256, layers=4, heads=4, key_value_heads=2, feed_forward=704,
        context=128,
    )  # fmt: skip
    models, batch = twins(config, torch.float32), tokens_and_targets(8, 128, 256)
    seconds = [[step_seconds(model, batch) for model in models] for _ in range(14)][2:]
    ours, stock = (statistics.median(column) for column in zip(*seconds, strict=True))
    assert ours <= 1.5 * stock, f"{ours:.3f} s against {stock:.3f} s"
