"""Hugging Face's own Llama and Qwen 3 beside ours: names and shapes, logits, files both ways."""

import json

import pytest
import torch
from tiny_models import ROTARY, SIZES, each_family, each_tying, tiny, tiny_config

import cadenza as cz
from cadenza.library.models.hugging_face import fields_of

transformers = pytest.importorskip("transformers", reason="compares with transformers")
safetensors = pytest.importorskip("safetensors.torch", reason="reads what transformers wrote")

SIZED = {**cz.models.LLAMA3, **{f"Qwen {size}": c for size, c in cz.models.QWEN3.items()}}
LAYERS = 2  # all layers of a model are of the same shapes


def theirs(fields):
    """The model of transformers that a config.json describes."""
    config = transformers.AutoConfig.for_model(**fields)
    return transformers.AutoModelForCausalLM.from_config(config)


def logits(model, tokens):
    with torch.no_grad():
        found = model(tokens)
    return getattr(found, "logits", found)


def assert_same_logits(ours, own):
    """Logits in float32, within its rounding of large random weights."""
    tokens = torch.randint(SIZES["vocabulary"], (2, 40))
    found, expected = logits(ours, tokens), logits(own, tokens)
    assert (found - expected).norm() <= 5e-6 * expected.norm()


@pytest.mark.parametrize("size", SIZED)
def test_names_and_shapes_are_theirs(size):
    fields = fields_of(SIZED[size]) | {"num_hidden_layers": LAYERS}
    with torch.device("meta"):
        own = theirs(fields)
        ours = cz.models.Decoder(cz.models.hugging_face.config_of(fields))
    found, expected = (
        {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
        for model in (ours, own)
    )
    assert found == expected
    assert list(found) == list(expected)


@each_family
@each_tying
def test_logits_are_theirs(family, tied):
    ours = tiny(tiny_config(family, tied))
    own = theirs(fields_of(ours.config))
    own.load_state_dict(ours.state_dict())
    assert_same_logits(ours, own)


@each_family
@each_tying
@pytest.mark.parametrize("size", ["10MB", "20KB"])
@pytest.mark.slow
def test_what_they_write_is_read_and_written_back_as_it_was(tmp_path, family, tied, size):
    own = theirs(fields_of(tiny_config(family, tied)))
    own.load_state_dict(tiny(tiny_config(family, tied)).state_dict())
    own.save_pretrained(tmp_path / "theirs", max_shard_size=size)
    ours = cz.models.load(tmp_path / "theirs")
    assert ours.config == tiny_config(family, tied)
    assert_same_logits(ours, own)
    cz.models.save(ours, tmp_path / "ours", shard_bytes=10**7 if size == "10MB" else 20000)
    for path in (tmp_path / "ours").glob("*.safetensors"):
        own_file = safetensors.load_file(tmp_path / "theirs" / path.name)
        file = safetensors.load_file(path)
        assert file.keys() == own_file.keys()
        assert all(torch.equal(file[name], own_file[name]) for name in file)
    read = [json.loads((tmp_path / one / "config.json").read_text()) for one in ("theirs", "ours")]
    assert read[0] == read[1]


@each_family
@each_tying
@pytest.mark.parametrize("shard_bytes", [10**9, 20000])
def test_what_is_written_anew_is_read_by_them(tmp_path, family, tied, shard_bytes):
    ours = tiny(tiny_config(family, tied))
    cz.models.save(ours, tmp_path / "ours", shard_bytes=shard_bytes)
    own = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert own.config.tie_word_embeddings == tied
    for name, weight in own.state_dict().items():
        assert torch.equal(weight, ours.state_dict()[name]), name
    assert_same_logits(ours, own)
    assert ROTARY.scaling == "llama3"
