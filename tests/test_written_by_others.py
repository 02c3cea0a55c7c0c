"""Checkpoints that other libraries write of models whose weights share storages are whole.

They take tensors of one storage for one weight under several names. Each writes and reads a model
of ours as it does the untouched twin.
"""

import dataclasses

import pytest
import torch
from hf_models import batch, each_family, pair, runs_programs

import cadenza as cz

safetensors = pytest.importorskip("safetensors.torch", reason="writes models")
hub = pytest.importorskip("huggingface_hub", reason="writes models")


def by_safetensors(model, folder):
    """A file of `save_model`."""
    safetensors.save_model(model, str(folder / "model.safetensors"))


def by_hub(model, folder):
    """A file of `save_torch_model`."""
    hub.save_torch_model(model, str(folder))


def by_accelerate(model, folder):
    """A file of `Accelerator.save_model`."""
    accelerate = pytest.importorskip("accelerate", reason="writes models")
    accelerate.Accelerator(cpu=True).save_model(model, str(folder))


WRITERS = [by_safetensors, by_hub, by_accelerate]


def written(write, model, folder):
    """What a library wrote of a model, by name."""
    folder.mkdir()
    write(model, folder)
    return safetensors.load_file(folder / "model.safetensors")


def assert_equal(found, expected):
    """The same names and numbers."""
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def forget(model):
    """Every parameter is 0."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()


@each_family
@pytest.mark.parametrize("write", WRITERS)
def test_an_accelerated_model_is_written_as_its_twin(write, family, tmp_path):
    model, twin = pair(family)
    cz.accelerate(model)
    expected = written(write, twin, tmp_path / "twin")
    assert_equal(written(write, model, tmp_path / "model"), expected)
    forget(model)
    safetensors.load_model(model, str(tmp_path / "twin" / "model.safetensors"))
    assert_equal(model.state_dict(), twin.state_dict())
    assert runs_programs(model, **batch())


def test_a_state_that_accelerate_saves_is_restored(tmp_path):
    accelerate = pytest.importorskip("accelerate", reason="saves states")
    model, twin = pair()
    cz.accelerate(model)
    accelerator = accelerate.Accelerator(cpu=True)
    prepared = accelerator.prepare(model)
    accelerator.save_state(str(tmp_path))
    forget(prepared)
    accelerator.load_state(str(tmp_path))
    assert_equal(model.state_dict(), twin.state_dict())


@pytest.mark.parametrize("write", WRITERS)
def test_a_decoder_is_written_as_its_stock_twin(write, tmp_path):
    config = dataclasses.replace(
        cz.models.QWEN3["0.6B"], vocabulary=61, width=24, layers=2, heads=4, key_value_heads=2,
        head_dim=6, feed_forward=40, context=16, rotary=cz.ops.Rotary(6), tied=False,
    )  # fmt: skip
    model, twin = cz.models.Decoder(config), cz.models.StockDecoder(config)
    twin.load_state_dict(model.state_dict())
    expected = written(write, twin, tmp_path / "twin")
    assert_equal(written(write, model, tmp_path / "model"), expected)
    forget(model)
    safetensors.load_model(model, str(tmp_path / "twin" / "model.safetensors"))
    assert_equal(model.state_dict(), twin.state_dict())


def test_tensors_of_a_state_dict_are_those_of_the_model():
    """As in every state_dict: written to, they change the model."""
    model, _ = pair()
    cz.accelerate(model)
    state = model.state_dict()
    places = [tensor.untyped_storage().data_ptr() for tensor in state.values()]
    assert len({*places}) == len(places)
    for name, weight in model.named_parameters():
        assert state[name].data_ptr() == weight.data_ptr(), name
    state["model.layers.0.self_attn.v_proj.weight"].fill_(3.0)
    assert (model.model.layers[0].self_attn.v_proj.weight == 3.0).all()
    kept = model.state_dict(keep_vars=True)
    assert all(kept[name] is weight for name, weight in model.named_parameters())
