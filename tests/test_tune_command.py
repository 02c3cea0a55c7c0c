"""`cadenza tune` as far as it goes without a GPU: its call, what it prints, what it refuses."""

import pytest
import torch
from rich.console import Console

from cadenza.tools import tune
from cadenza.tools.cli import main
from cadenza.tools.question import Sizes
from cadenza.tools.target import find_target

SMALL = ["M=9,D=32,F=64,H=4,KV=2,HD=8,V=50"]
ENTRY = {
    "microseconds": {"BM=128": 12.0, "library": 10.04, "BM=64": "it spills"}, "fastest": "library",
}  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_without_a_gpu_it_says_so(capsys):
    assert main(["tune", "llama", "--size", "M=64"]) == 2
    assert "none is usable here" in capsys.readouterr().err


def test_an_unknown_target(capsys):
    assert main(["tune", "lama"]) == 2
    assert "unknown target 'lama'" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["llama", "lm-head", "gpt2", "linear-gelu"])
def test_a_call_takes_every_gradient_that_is_asked_for(name, monkeypatch):
    target = find_target(name, SMALL, "float32", ["x"])
    found = []
    backward = torch.autograd.backward

    def noted(outputs, gradients, **options):
        backward(outputs, gradients, **options)
        found.append([o.shape for o in outputs])

    monkeypatch.setattr(torch.autograd, "backward", noted)
    tune.call(target, torch.device("cpu"))
    assert len(found) == 1
    assert "x" not in target.needed


def test_operands_are_random_and_weights_keep_the_size_of_products():
    generator = torch.Generator().manual_seed(0)
    target = find_target("llama-mlp", ["M=64,D=64,F=64"], "float32")
    made = {o.name: tune.drawn(o, target.rows, generator) for o in target.signature.operands}
    assert made["x"].shape == (64, 64)
    assert 0.9 < made["x"].std() < 1.1
    assert 0.1 < made["w_down"].std() < 0.15


@pytest.mark.parametrize(
    ("alone", "cells"),
    [
        ({}, ("BM=64", "11.0", "10.0")),
        # The default lost in turns, and did not go on.
        ({"BM=64": 12.0, "BM=32": 13.0}, ("BM=64", "11.0, 12.0 by itself", "10.0")),
        (
            {"BM=64": 12.0, "BM=128": 14.5},
            ("BM=64", "11.0, 12.0 by itself", "10.0, 14.5 by itself"),
        ),
    ],
)
def test_what_won_is_shown_with_both_of_its_times(alone, cells):
    turns = {"BM=128": 10.0, "BM=64": 11.0, "BM=32": 10.5}
    entry = {"microseconds": turns, "fastest": "BM=64", "alone": alone}
    assert tune._cells(entry) == cells


def test_what_was_measured_is_shown(monkeypatch, capsys):
    monkeypatch.setattr(tune, "has_triton", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = {"F1: acc1 = y @ wo.T": ENTRY, "F2: other": {}}
    monkeypatch.setattr(tune, "_measured", lambda target, device, console: found)
    monkeypatch.setenv("CADENZA_TUNE", "off")
    monkeypatch.setattr(tune, "Console", lambda: Console(width=200))
    assert tune.run_tune("llama", Sizes(size=["M=64"]), full=False) == 0
    said = capsys.readouterr().out
    row = next(line for line in said.splitlines() if "F1" in line)
    assert [part.strip() for part in row.strip("│ ").split("│")][1:] == ["library", "10.0", "12.0"]
    assert "none runs" in said


def test_nothing_to_measure(capsys):
    tune._show({}, "llama", Console(width=200))
    assert "was measured before, or is too small" in capsys.readouterr().out
