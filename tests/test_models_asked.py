"""What is asked of `cz.models.load` and `save` that can't be: one error that names the cure."""

import pytest
import torch
from tiny_models import tiny

import cadenza as cz

CONFIG = "config.json"


@pytest.fixture
def folder(tmp_path):
    cz.models.save(tiny(), tmp_path / "model")
    return tmp_path / "model"


ASKED = {
    "dtype by name": ({"dtype": "bfloat16"}, "'bfloat16' is none of weights: choose one of torch"),
    "whole numbers": ({"dtype": torch.int8}, "torch.int8 is none of weights: choose one of torch"),
    "device": ({"device": "cuda:99"}, r"'cuda:99' is not here \(.*: choose 'cpu'"),
    "no device": ({"device": "gpu"}, r"'gpu' is not here \(.*: choose 'cpu'"),
}


@pytest.mark.parametrize(("options", "said"), ASKED.values(), ids=ASKED)
def test_what_can_not_be_asked_of_loading(folder, options, said):
    with pytest.raises(cz.models.CheckpointError, match=said):
        cz.models.load(folder, **options)


def test_what_is_no_folder_of_a_checkpoint(folder):
    for place, said in ((None, "None is no folder: give the path"),
                        (folder / CONFIG, "is a file: give the folder that it is in")):  # fmt: skip
        with pytest.raises(cz.models.CheckpointError, match=said):
            cz.models.load(place)


def test_what_can_not_be_saved(folder, tmp_path):
    model = cz.models.load(folder)
    for one, options, said in (
        (torch.nn.Linear(2, 2), {}, "a Linear has no sizes .*: save a cz.models.Decoder"),
        (model, {"shard_bytes": "5GB"}, "'5GB' is no number of bytes: write shard_bytes=5"),
        (model, {"shard_bytes": 0}, "shard_bytes=0 is no number of bytes"),
    ):
        with pytest.raises(cz.models.CheckpointError, match=said):
            cz.models.save(one, tmp_path / "new", **options)
    assert not (tmp_path / "new").exists()
