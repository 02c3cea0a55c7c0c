"""Checkpoints of Hugging Face's form: what is read is written, and every mistake is named."""

import json
import os
from dataclasses import replace

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from tiny_models import each_family, each_tying, tiny, tiny_config, tokens_and_targets

import cadenza as cz
from cadenza.library.models import checkpoint
from cadenza.library.models.checkpoint import CONFIG, INDEX, SINGLE
from cadenza.library.models.hugging_face import config_of, fields_of

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
# The fields of meta-llama/Llama-3.2-1B and Qwen/Qwen3-0.6B that say what the models are.
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 128000, "eos_token_id": 128001, "head_dim": 64, "hidden_act": "silu",
    "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 8192,
    "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama",
    "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05, "rope_scaling": {
        "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3",
    }, "rope_theta": 500000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}  # fmt: skip
QWEN = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 3072,
    "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
    "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip


def contents(folder):
    """Every tensor of a folder by name: its dtype, shape and bytes."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            assert name not in found
            raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
            found[name] = (tensor.dtype, tuple(tensor.shape), raw)
    return found


def fields(folder):
    return json.loads((folder / CONFIG).read_text())


def rewrite(folder, **changes):
    (folder / CONFIG).write_text(json.dumps(fields(folder) | changes))


@pytest.fixture
def folder(tmp_path):
    """The checkpoint of a tied model in one file."""
    cz.models.save(tiny(), tmp_path / "model")
    return tmp_path / "model"


# What is read is what is written


@each_family
@each_tying
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shard_bytes", [10**9, 20000], ids=["single", "sharded"])
def test_a_round_trip_changes_nothing(tmp_path, family, tied, dtype, shard_bytes):
    first, second = tmp_path / "first", tmp_path / "second"
    cz.models.save(tiny(tiny_config(family, tied), dtype), first, shard_bytes=shard_bytes)
    rewrite(first, eos_token_id=[7, 8], of_another_program={"kept": 1})
    model = cz.models.load(first)
    cz.models.save(model, second, shard_bytes=shard_bytes)
    assert contents(second) == contents(first)
    assert {one[0] for one in contents(second).values()} == {dtype}
    assert fields(second) == fields(first)
    names = sorted(path.name for path in first.iterdir())
    assert sorted(path.name for path in second.iterdir()) == names
    assert (SINGLE in names) == (shard_bytes == 10**9)
    assert len({path.stat().st_mode for path in second.iterdir()}) == 1
    if INDEX in names:
        assert json.loads((second / INDEX).read_text()) == json.loads((first / INDEX).read_text())


def test_each_tensor_keeps_its_own_dtype(tmp_path):
    model = tiny(dtype=torch.bfloat16)
    model.model.norm.to(torch.float32)
    cz.models.save(model, tmp_path / "first")
    again = cz.models.load(tmp_path / "first")
    assert again.model.norm.weight.dtype == torch.float32
    assert again.lm_head.weight.dtype == torch.bfloat16
    cz.models.save(again, tmp_path / "second")
    assert contents(tmp_path / "second") == contents(tmp_path / "first")


def test_a_loaded_model_is_the_saved_one(folder):
    model, again = tiny(), cz.models.load(folder)
    assert again.config == model.config
    for name, weight in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight), name
    tokens, targets = tokens_and_targets()
    again(tokens, targets).backward()
    assert all(weight.grad is not None for weight in again.parameters())
    assert torch.equal(again(tokens), model(tokens))


def test_a_dtype_and_a_device_may_be_asked_for(folder, tmp_path):
    model = cz.models.load(folder, dtype=torch.bfloat16)
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    cz.models.save(model, tmp_path / "narrow")
    assert fields(tmp_path / "narrow")["torch_dtype"] == "bfloat16"
    assert cz.models.load(folder, device="meta").lm_head.weight.is_meta


def test_shards_are_filled_in_order_and_the_index_says_where_each_tensor_is(tmp_path):
    model = tiny(tiny_config(tied=False))
    cz.models.save(model, tmp_path / "model", shard_bytes=20000)
    index = json.loads((tmp_path / "model" / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(w.nbytes for w in model.state_dict().values())
    assert sorted(index["weight_map"]) == sorted(model.state_dict())
    files = sorted(set(index["weight_map"].values()))
    count = len(files)
    assert files == [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    sizes = []
    for file in files:
        tensors = load_file(tmp_path / "model" / file)
        assert set(tensors) == {n for n, place in index["weight_map"].items() if place == file}
        sizes.append(sum(tensor.nbytes for tensor in tensors.values()))
        assert sizes[-1] <= 20000 or len(tensors) == 1
        with safe_open(tmp_path / "model" / file, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}
    assert len(files) < len(model.state_dict())


def test_a_tied_head_is_written_only_where_it_was_read(folder, tmp_path):
    assert HEAD not in contents(folder)
    tensors = load_file(folder / SINGLE)
    save_file(tensors | {HEAD: tensors[EMBEDDING].clone()}, folder / SINGLE, {"format": "pt"})
    model = cz.models.load(folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    cz.models.save(model, tmp_path / "again")
    assert contents(tmp_path / "again") == contents(folder)


def test_files_are_read_one_after_another(tmp_path, monkeypatch):
    cz.models.save(tiny(tiny_config(tied=False)), tmp_path / "model", shard_bytes=20000)
    asked, read = [], checkpoint._read

    def observed(file, names, *rest):
        asked.append((file.name, sorted(names)))
        return read(file, names, *rest)

    monkeypatch.setattr(checkpoint, "_read", observed)
    cz.models.load(tmp_path / "model")
    files = sorted(path.name for path in (tmp_path / "model").glob("*.safetensors"))
    assert [file for file, _ in asked] == files
    assert sorted(n for _, names in asked for n in names) == sorted(contents(tmp_path / "model"))


# config.json


def test_the_published_fields_are_the_published_sizes():
    assert config_of(LLAMA) == cz.models.LLAMA3["1B"]
    assert config_of(QWEN) == cz.models.QWEN3["0.6B"]
    without = {n: value for n, value in LLAMA.items() if n not in ("model_type", "head_dim")}
    assert config_of(without) == cz.models.LLAMA3["1B"]


@pytest.mark.parametrize("name", ["rope_parameters", "rope_scaling"])
def test_both_forms_of_rotary_fields_are_read(name):
    rope = LLAMA["rope_scaling"]
    given = {n: v for n, v in LLAMA.items() if not n.startswith("rope_")}
    given |= {name: rope | {"rope_theta": 500000.0}}
    assert config_of(given) == cz.models.LLAMA3["1B"]


@pytest.mark.parametrize("family", ["LLAMA3", "QWEN3"])
def test_every_size_comes_back_from_its_own_fields(family):
    for config in getattr(cz.models, family).values():
        assert config_of(json.loads(json.dumps(fields_of(config)))) == config


def test_fields_follow_sizes_that_were_changed():
    config = config_of(LLAMA)
    assert fields_of(config) == LLAMA
    fewer = replace(config, layers=2)
    assert fields_of(fewer)["num_hidden_layers"] == 2
    assert config_of(fields_of(fewer)) == fewer
    other = replace(config, head_dim=128, rotary=cz.ops.Rotary(128, scaling="linear", factor=2.0))
    assert config_of(fields_of(other)) == other


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "mamba"}, "of a model of type 'mamba': choose a checkpoint of type llama"),
        ({"model_type": None, "architectures": None}, "of a model of type None"),
        ({"hidden_act": "gelu"}, "asks for hidden_act 'gelu', which cz.models has not"),
        ({"attention_bias": True}, "asks for attention_bias True"),
        ({"mlp_bias": True, "attention_dropout": 0.1}, "asks for mlp_bias True, attention_dropout"),
        ({"use_sliding_window": True}, "asks for use_sliding_window True"),
        ({"quantization_config": {"bits": 4}}, "asks for quantization_config {'bits': 4}"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "asks for layer_types"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn' is not supported"),
        ({"partial_rotary_factor": 0.5}, "of Hugging Face rotates whole heads: take Rotary"),
        ({"num_key_value_heads": 3}, "heads 4 is not divisible by key_value_heads 3"),
        ({"hidden_size": "many"}, "width is 'many', not a positive whole number"),
    ],
)
def test_a_model_that_is_none_of_ours(folder, changes, said):
    rewrite(folder, **changes)
    with pytest.raises(cz.models.CheckpointError, match=said) as caught:
        cz.models.load(folder)
    assert str(caught.value).startswith(f"{folder}: config.json")


def test_a_field_that_is_needed(folder):
    (folder / CONFIG).write_text(json.dumps({"model_type": "llama", "vocab_size": 3}))
    with pytest.raises(cz.models.CheckpointError, match="has no hidden_size: take the one publi"):
        cz.models.load(folder)


# Weights that don't fit


def spoil(folder, change):
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file(tensors, folder / SINGLE, {"format": "pt"})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop("model.norm.weight"), "missing: model.norm.weight: take both from one"),
        (lambda t: t.update({"extra": torch.zeros(1)}), "unexpected: extra: take"),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(31)}),
            "of another shape: model.norm.weight [31] instead of [32]: take",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(32, dtype=torch.int8)}),
            "of no floating-point dtype: model.norm.weight: take",
        ),
    ],
)
def test_weights_that_do_not_fit_are_named(folder, change, said):
    spoil(folder, change)
    with pytest.raises(cz.models.CheckpointError) as caught:
        cz.models.load(folder)
    assert said in str(caught.value)
    assert str(caught.value).startswith(f"{folder} doesn't hold the weights that its config.json")


def test_all_problems_are_named_at_once_and_many_are_counted(folder):
    def change(tensors):
        for name in [n for n in tensors if "layers.0" in n]:
            tensors[name.replace("layers.0", "layers.9")] = tensors.pop(name)

    spoil(folder, change)
    with pytest.raises(cz.models.CheckpointError) as caught:
        cz.models.load(folder)
    said = str(caught.value)
    assert "missing: model.layers.0.input_layernorm.weight, " in said
    assert "unexpected: model.layers.9.input_layernorm.weight, " in said
    assert said.count(" and 4 more") == 2
    assert "\n" not in said


def test_a_tied_head_that_differs_from_the_embedding(folder):
    spoil(folder, lambda t: t.update({HEAD: t[EMBEDDING] + 1}))
    with pytest.raises(cz.models.CheckpointError, match=r"lm_head.weight differs from model"):
        cz.models.load(folder)


def test_a_file_that_is_damaged(folder):
    path = folder / SINGLE
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(cz.models.CheckpointError, match="is damaged, or no safetensors: copy it"):
        cz.models.load(folder)


@pytest.fixture
def sharded(tmp_path):
    """A checkpoint in several files, and its index."""
    cz.models.save(tiny(), tmp_path / "model", shard_bytes=20000)
    return tmp_path / "model", json.loads((tmp_path / "model" / INDEX).read_text())


def test_a_shard_that_is_missing(sharded):
    folder, index = sharded
    lost = folder / index["weight_map"]["model.norm.weight"]
    lost.unlink()
    with pytest.raises(cz.models.CheckpointError, match=f"lacks {lost.name} of its index: copy"):
        cz.models.load(folder)


def test_a_tensor_in_two_shards(sharded):
    folder, index = sharded
    places = sorted(set(index["weight_map"].values()))
    tensors = load_file(folder / places[1])
    tensors[EMBEDDING] = torch.zeros(300, 32)
    save_file(tensors, folder / places[1])
    with pytest.raises(cz.models.CheckpointError, match=r"embed_tokens.weight stands in .* and"):
        cz.models.load(folder)


@pytest.mark.parametrize(
    "weight_map", [None, {}, {EMBEDDING: "../elsewhere.safetensors"}, {EMBEDDING: 3}]
)
def test_an_index_that_names_no_files_beside_itself(sharded, weight_map):
    folder, _ = sharded
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(cz.models.CheckpointError, match="names no files beside itself: copy it"):
        cz.models.load(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickled_weights_are_never_opened(folder, name):
    (folder / SINGLE).rename(folder / name)
    with pytest.raises(cz.models.CheckpointError, match=f"only {name}, which is pickled and could"):
        cz.models.load(folder)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "holds no config.json: name the folder of a checkpoint"),
        ("{", "is no JSON: copy it again"),
        ("[]", "holds no fields: copy it again"),
    ],
)
def test_a_folder_without_a_configuration(folder, content, said):
    (folder / CONFIG).unlink()
    if content is not None:
        (folder / CONFIG).write_text(content)
    with pytest.raises(cz.models.CheckpointError, match=said):
        cz.models.load(folder)


def test_a_folder_without_weights(folder):
    (folder / SINGLE).unlink()
    with pytest.raises(cz.models.CheckpointError, match=r"holds no model.safetensors and no"):
        cz.models.load(folder)


# Folders


def test_a_folder_that_holds_something_is_left_alone(folder):
    before = contents(folder)
    with pytest.raises(cz.models.CheckpointError, match="is no empty folder: choose a new one"):
        cz.models.save(tiny(tiny_config("qwen3")), folder)
    assert contents(folder) == before
    with pytest.raises(cz.models.CheckpointError, match="is no empty folder"):
        cz.models.save(tiny(), folder / CONFIG)


def test_an_empty_folder_is_taken_and_folders_above_are_made(tmp_path):
    (tmp_path / "empty").mkdir()
    cz.models.save(tiny(), tmp_path / "empty")
    cz.models.save(tiny(), tmp_path / "a" / "b")
    assert contents(tmp_path / "a" / "b") == contents(tmp_path / "empty")


FULL = OSError(28, "No space left on device")
REFUSED = r"model cannot be written \(.*No space left on device\): free space, or choose another"


@pytest.mark.parametrize(
    ("error", "met", "said"),
    [
        (FULL, cz.models.CheckpointError, REFUSED),
        (SafetensorError(str(FULL)), cz.models.CheckpointError, REFUSED),
        (KeyboardInterrupt("stop"), KeyboardInterrupt, "stop"),
    ],
)
def test_a_folder_is_there_whole_or_not_at_all(tmp_path, monkeypatch, error, met, said):
    taken, real = [], checkpoint.save_file

    def full(*given):
        taken.append(given)
        if len(taken) == 2:
            raise error
        real(*given)

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(met, match=said):
        cz.models.save(tiny(), tmp_path / "model", shard_bytes=20000)
    assert os.listdir(tmp_path) == []
