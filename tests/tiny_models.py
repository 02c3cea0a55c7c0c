"""Whole models small enough for a test, whose norms do something, and runs that train them."""

import pytest
import torch

import cadenza as cz
from cadenza.tools.cli import main
from cadenza.tools.runs import fresh_settings

FAMILIES = ["llama", "qwen3"]
# Heads together are wider than the model, as in some Qwen 3; bytes are tokens, and a few more.
SIZES = {
    "vocabulary": 300, "width": 32, "layers": 2, "heads": 4, "key_value_heads": 2,
    "feed_forward": 48, "head_dim": 16, "context": 64,
}  # fmt: skip
ROTARY = cz.ops.Rotary(16, 500000.0, "llama3", 8.0, original_context=32)

OPTIONS = ["--device", "cpu", "--context", "16", "--batch", "4"]

each_family = pytest.mark.parametrize("family", FAMILIES)
each_tying = pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])


def tiny_config(family="llama", tied=True, **sizes):
    """A configuration of few numbers, with everything in it that the published ones have."""
    given = {"rotary": ROTARY, **SIZES, **sizes}
    return cz.models.DecoderConfig(family=family, tied=tied, **given)


def tiny(config=None, dtype=torch.float32):
    """A model of large random weights, the same at every call."""
    torch.manual_seed(3)
    model = cz.models.Decoder(config or tiny_config())
    for weight in model.parameters():
        if weight.dim() == 1:
            weight.data.uniform_(0.5, 1.5)
        else:
            weight.data.mul_(5)
    return model.to(dtype)


def twins(config=None, dtype=torch.float32):
    """A model, and its stock twin with the same weights."""
    ours = tiny(config, dtype)
    stock = cz.models.StockDecoder(ours.config).to(dtype)
    stock.load_state_dict(ours.state_dict())
    return ours, stock


def tokens_and_targets(batch=2, length=13):
    """Tokens, and targets of which a few don't count."""
    tokens, targets = torch.randint(300, (2, batch, length)).unbind(0)
    targets[0, :3] = -100
    return tokens, targets


def gradients(model, *inputs, **options):
    """The loss, and every gradient by name."""
    model.zero_grad()
    loss = model(*inputs, **options)
    loss.backward()
    return loss, {name: weight.grad.clone() for name, weight in model.named_parameters()}


def train(out, init, *more):
    """Runs the command in this process on a checkpoint; its exit code."""
    return main(["train", "--out", str(out), "--init", str(init), *OPTIONS, *map(str, more)])


def settings_of(init, **options):
    """Settings of a run on a checkpoint, as the command makes them."""
    given = {"init": str(init), "device": "cpu", "context": 16, "batch": 4}
    return fresh_settings(given | options)
