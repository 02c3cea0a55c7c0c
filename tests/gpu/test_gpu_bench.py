"""The suites of `cadenza bench` about whole models on a GPU, at small sizes."""

import json

import pytest

from cadenza.tools.cli import main

pytest.importorskip("transformers", reason="models of transformers are measured")
pytestmark = pytest.mark.gpu
SIZES = "B=2,S=512,layers=2,D=256,F=512,H=4,KV=2,HD=64,V=4096"


def bench(folder, suite, *more, sizes=SIZES):
    """The records of a suite's short run on the GPU, by variant."""
    arguments = ["bench", suite, "--size", sizes, "--device", "cuda", "--seconds", "0.05"]
    assert main([*arguments, "--out", str(folder), *more]) == 0
    found = json.loads((folder / f"{suite}.json").read_text())["records"]
    return {one["variant"]: one for one in found}


@pytest.mark.parametrize("pattern", ["1b", "8b-width-checkpointed"])
def test_steps_of_all_variants(tmp_path, place, pattern):
    found = bench(tmp_path, "model", f"--only={pattern}")
    for variant in ("ours", "ours-compile", "compile", "eager"):
        assert "failed" not in found[variant]
        assert found[variant]["us"] > 0
        assert found[variant]["peak_bytes"] > 0


def test_errors_are_those_of_the_stock_model(tmp_path, place):
    found = bench(tmp_path, "model-accuracy")
    for name, error in found["eager"]["errors"].items():
        assert found["ours"]["errors"][name] < 1.5 * error


def test_trainings_are_inside_the_spread(tmp_path, place):
    found = bench(tmp_path, "model-loss", sizes=f"{SIZES},steps=20")
    assert len(found["ours"]["losses"]) == 20
    assert found["ours"]["inside"]
