"""Whole models on a GPU: values against the stock twin, the command, weights there and back."""

import copy
from dataclasses import replace

import pytest
import torch
from calls import BRAIN, SINGLE, launches
from small_runs import metrics
from tiny_models import ROTARY, each_family, gradients, tiny, tiny_config

import cadenza as cz
from cadenza.tools.cli import main
from cadenza.tools.corpus import corpus_of
from cadenza.tools.runs import fresh_settings
from cadenza.tools.trainer import Trainer, build_model

pytestmark = pytest.mark.gpu
ALIGNED = {
    "width": 256, "heads": 4, "feed_forward": 384, "head_dim": 64, "vocabulary": 640,
    "rotary": replace(ROTARY, columns=64),
}  # fmt: skip
CLOSE = 1e-2  # of a loss: attention may sum in another order from run to run


def norm_of_error(found, exact):
    """The norm of all gradients' errors."""
    return sum((found[n].double() - exact[n]).square().sum().item() for n in exact) ** 0.5


@pytest.mark.interpreted
@each_family
@pytest.mark.parametrize("dtype", [BRAIN, SINGLE, "mixed"], ids=str)
def test_gradients_are_as_good_as_the_twins(family, dtype, place):
    place.allows(BRAIN if dtype == "mixed" else dtype)
    mixed = dtype == "mixed"
    ours = tiny(tiny_config(family, **({} if place.interpreted else ALIGNED)))
    ours = ours.to(place.device, SINGLE if mixed else dtype)
    stock = cz.models.StockDecoder(ours.config).to(place.device, ours.lm_head.weight.dtype)
    stock.load_state_dict(ours.state_dict())
    tokens = torch.randint(ours.config.vocabulary, (2, place.rows(33)), device=place.device)
    loss, exact = gradients(copy.deepcopy(stock).double(), tokens, tokens)
    errors = []
    for model in (ours, stock):
        with torch.autocast(place.device.type, BRAIN, enabled=mixed), launches() as made:
            own, found = gradients(model, tokens, tokens)
        assert bool(len(made)) == (model is ours)
        assert own.item() == pytest.approx(loss.item(), rel=2e-2)
        errors.append(norm_of_error(found, exact))
    unit = 2.0**-23 * norm_of_error({n: torch.zeros_like(g) for n, g in exact.items()}, exact)
    assert errors[0] <= 2 * errors[1] + unit


def test_checkpointing_needs_less_memory_and_changes_no_bit(place):
    model = cz.models.Decoder(tiny_config(layers=8, context=4096, **ALIGNED))
    model = model.to(place.device, BRAIN)
    tokens = torch.randint(640, (2, 4096), device=place.device)
    losses, peaks = [], []
    for _ in range(2):
        gradients(model, tokens, tokens)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        losses.append(gradients(model, tokens, tokens)[0].item())
        peaks.append(torch.cuda.max_memory_allocated() - before)
        cz.models.checkpoint_layers(model)
    assert losses[0] == losses[1]
    assert peaks[1] < 0.6 * peaks[0]


@pytest.fixture
def start(tmp_path):
    """The folder of a model to start from."""
    cz.models.save(tiny(tiny_config("qwen3", **ALIGNED)), tmp_path / "start")
    return tmp_path / "start"


@pytest.mark.usefixtures("short_samples", "place")
@pytest.mark.parametrize("options", ["", "--dtype bfloat16", "--accumulate 2 --checkpointing"])
def test_the_command_trains_and_resumes_a_whole_model(options, start, tmp_path):
    def train(name, *more):
        out = ["train", "--out", str(tmp_path / name)]
        return main([*out, *map(str, more)])

    given = ["--init", start, "--context", 32, *options.split()]
    assert train("whole", "--steps", 8, *given) == 0
    assert train("parts", "--steps", 4, *given) == 0
    assert train("parts", "--steps", 8, "--resume") == 0
    whole, parts = (metrics(tmp_path / name) for name in ("whole", "parts"))
    assert whole["settings"]["device"] == "cuda"
    assert parts["training"] == pytest.approx(whole["training"], rel=CLOSE)
    assert whole["training"][-1] < whole["training"][0]
    assert cz.models.load(tmp_path / "whole" / "model").config == tiny_config("qwen3", **ALIGNED)


def test_training_follows_the_cpu(start, place):
    found = {}
    for device in (str(place.device), "cpu"):
        given = {"init": str(start), "device": device, "context": 32, "precision": "full"}
        settings = fresh_settings(given)
        trainer = Trainer(build_model("cadenza", settings), settings, corpus_of(settings))
        assert trainer.optimizer.defaults["fused"] is (True if device != "cpu" else None)
        found[device] = [trainer.train_step() for _ in range(10)]
    first, second = found.values()
    assert first == pytest.approx(second, rel=1e-4)


def test_new_weights_are_those_of_the_cpu(place, monkeypatch):
    monkeypatch.setitem(cz.models.QWEN3, "0.6B", tiny_config("qwen3", **ALIGNED))
    given = {"model": "qwen3-0.6b"}
    made = [
        build_model(kind, fresh_settings(given | {"device": device})).state_dict()
        for kind, device in (("cadenza", str(place.device)), ("stock", "cpu"))
    ]
    for name, weight in made[0].items():
        assert weight.device == place.device
        assert torch.equal(weight.cpu(), made[1][name]), name


@pytest.mark.parametrize("dtype", [None, BRAIN], ids=str)
def test_weights_go_to_the_gpu_and_back_unchanged(dtype, place, start, tmp_path):
    model = cz.models.load(start, device=place.device, dtype=dtype)
    assert {weight.device for weight in model.parameters()} == {place.device}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    cz.models.save(model, tmp_path / "again", shard_bytes=10**5)
    again, before = cz.models.load(tmp_path / "again"), cz.models.load(start, dtype=dtype)
    for name, weight in before.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight), name
