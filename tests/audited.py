"""What the tests of `cadenza audit` share: small decoders, launches by class, a model of one's own.

The functions at the end are targets of the command, as an author would write them.
"""

from dataclasses import replace
from functools import cache

import torch
from torch import nn
from torch.nn import functional as F

from cadenza.tools.audit.configs import decoder_of
from cadenza.tools.audit.fakes import fake
from cadenza.tools.audit.prediction import predict
from cadenza.tools.audit.rates import rates_of
from cadenza.tools.audit.subject import DecoderSubject

LLAMA = {
    "model_type": "llama", "vocab_size": 640, "hidden_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96,
}  # fmt: skip
BATCH, SEQUENCE = 2, 32
TOKENS = BATCH * SEQUENCE


def config(kind="llama", **changed):
    """A small configuration of a family."""
    if kind == "gpt2":
        small = {"vocab_size": 640, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64}
        return {"model_type": kind, **small, **changed}
    return {**LLAMA, "model_type": kind, "head_dim": 16, **changed}


def decoder(kind="llama", **changed):
    """The decoder of a small configuration."""
    return decoder_of(config(kind, **changed), kind)


def subject(kind="llama", **changed):
    """A small decoder on a batch."""
    return DecoderSubject(decoder(kind, **changed), BATCH, SEQUENCE)


@cache
def predicted():
    """The prediction of the small Llama, on an H100."""
    with fake():
        return predict(rates_of("h100", None, None, None), subject().before, subject().after)


def parts(model):
    """The parts of a model, by name, as `make` gives it on fake tensors."""
    return {part.name: part for part in model.parts()}


def each(step, kind=None):
    """The launches of forward and backward, all or those of a class."""
    found = [*step["forward"], *step["backward"]]
    return found if kind is None else [launch for launch in found if launch.kind == kind]


def flops(step, kind="products"):
    """The FLOPs of a class of work."""
    return sum(launch.flops for launch in each(step, kind))


def of_layers(found, layers):
    """A decoder of other layers, all alike."""
    return replace(found, windows=(None,) * layers)


# --- targets --------------------------------------------------------------------------------------


class Branch(nn.Module):
    """A layer that no decoder has."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Classifier(nn.Module):
    """Layers, then a head and its loss."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Branch() for _ in range(layers)), nn.Linear(32, 10)

    def forward(self, x, target):
        for block in self.blocks:
            x = block(x)
        return {"loss": F.cross_entropy(self.head(x.mean(1)), target)}


def classifier():
    return Classifier(), {"x": torch.randn(4, 8, 32), "target": torch.zeros(4, dtype=torch.long)}


def llama():
    from cadenza.library.models import LlamaConfig, StockLlama

    model = StockLlama(LlamaConfig(640, 64, 3, 4, 2, 96, SEQUENCE)).to(torch.bfloat16)
    tokens = torch.zeros(BATCH, SEQUENCE, dtype=torch.long)
    return model, (tokens, tokens)


def copied():
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2), torch.randn(2, 8, 32)


def failing():
    raise RuntimeError("no\nmodel")


def alone():
    return nn.Linear(8, 8)


def ill_fed():
    return Classifier(), torch.randn(4, 8, 32)
