"""Bad input to `cadenza train --resume`: one line that names the cure, nothing lost."""

import errno
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_runs import SMALL, contents, metrics, refusal, train

from cadenza.tools import atomic
from cadenza.tools.checkpoint import FILE, Checkpoint, load_checkpoint, save_checkpoint
from cadenza.tools.cli import main

pytestmark = pytest.mark.usefixtures("short_samples")


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """The folder of a finished run of 3 steps."""
    folder = tmp_path_factory.mktemp("original") / "run"
    assert train(folder, "--steps", 3) == 0
    return folder


@pytest.fixture
def run(original, tmp_path):
    """A copy of it, to spoil."""
    return shutil.copytree(original, tmp_path / "run")


@pytest.fixture
def refused(capsys, tmp_path, monkeypatch):
    """Runs a command that must be refused in one line, which it returns, without a new file."""
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: refusal(capsys, tmp_path, arguments)


def test_a_disk_that_fills_up_leaves_the_checkpoint_before(run, tmp_path, monkeypatch, capsys):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = contents(run)
    monkeypatch.setattr(atomic, "_write_through", full)
    assert main(["train", "--out", str(run), "--resume", "--steps", "5"]) == 2
    said = capsys.readouterr().err
    problem = "cannot be written (No space left on device): free space, or choose another --out"
    assert said == f"cadenza: {run / FILE} {problem}\n"
    assert contents(run) == before
    monkeypatch.undo()
    assert main(["train", "--out", str(run), "--resume", "--steps", "5"]) == 0


def test_resuming_where_there_is_nothing(refused, tmp_path):
    (tmp_path / "empty").mkdir()
    for name in ("empty", "missing"):
        line = refused("train", "--out", name, "--resume")
        assert f"{name} holds no checkpoint to resume: leave --resume out to start a run" in line


@pytest.mark.parametrize("left", [0, 4, 100, 5000, -1])
def test_a_truncated_checkpoint(refused, run, left):
    content = (run / FILE).read_bytes()
    (run / FILE).write_bytes(content[:left])
    line = refused("train", "--out", run, "--resume")
    assert f"{run / FILE} is damaged, or no checkpoint of this version: start a new run" in line


def test_a_checkpoint_with_one_bit_turned(refused, run):
    content = bytearray((run / FILE).read_bytes())
    content[-1000] ^= 1
    (run / FILE).write_bytes(content)
    assert "is damaged" in refused("train", "--out", run, "--resume")


@pytest.mark.parametrize("header", [None, {}, {"cadenza": "{}"}, {"cadenza": "not JSON"}])
def test_a_file_of_another_program(refused, run, header):
    save_file(load_file(run / FILE), run / FILE, header)
    assert "no checkpoint of this version" in refused("train", "--out", run, "--resume")


def rewrite(run, change, **settings):
    """Spoil a checkpoint's tensors or settings, with everything that guards them put right."""
    old = load_checkpoint(run)
    tensors = dict(old.tensors)
    change(tensors)
    made = type(old.settings)(**{**vars(old.settings), **settings})
    save_checkpoint(run, Checkpoint(made, old.target, old.text_digest, tensors))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda t: t.update({"lm_head.weight": torch.zeros(256, 31)}),
            "holds lm_head.weight as [256, 31], this model expects [256, 32]: start a new run",
        ),
        (
            lambda t: t.pop("model.norm.weight"),
            "holds model.norm.weight as nothing, this model expects [32]",
        ),
        (
            lambda t: t.update({"extra": torch.zeros(1)}),
            "holds extra as [1], this model expects nothing",
        ),
        (
            lambda t: t.update({"optimizer/exp_avg/lm_head.weight": torch.zeros(2)}),
            "holds optimizer/exp_avg/lm_head.weight as [2], this model expects [256, 32]",
        ),
        (lambda t: t.pop("history/training"), "holds history/training as nothing"),
    ],
)
def test_a_checkpoint_of_another_shape(refused, run, change, said):
    rewrite(run, change)
    assert said in refused("train", "--out", run, "--resume")


def test_a_checkpoint_whose_settings_do_not_fit_its_tensors(refused, run):
    rewrite(run, lambda tensors: None, width=64)
    assert "this model expects [" in refused("train", "--out", run, "--resume")


@pytest.mark.parametrize(
    ("option", "stored"),
    [
        ("--width 64", "32"),
        ("--layers 2", "1"),
        ("--heads 2", "4"),
        ("--key-value-heads 1", "2"),
        ("--feed-forward 64", "48"),
        ("--context 8", "16"),
        ("--batch 3", "2"),
        ("--learning-rate 0.1", "0.0003"),
        ("--seed 7", "0"),
        ("--dtype float64", "float32"),
        ("--device cuda", "cpu"),
    ],
)
def test_options_that_contradict_the_checkpoint(refused, run, option, stored):
    line = refused("train", "--out", run, "--resume", *option.split())
    assert f"{run} holds another run: {option} differs from {stored}: leave that out" in line


def test_every_contradiction_is_named(refused, run):
    options = "--width 64 --seed 1 --batch 2"
    line = refused("train", "--out", run, "--resume", *options.split())
    assert "--width 64 differs from 32; --seed 1 differs from 0: leave" in line


def test_options_that_agree_with_the_checkpoint(run):
    options = [*SMALL, "--steps", "4", "--seed", "0", "--dtype", "float32"]
    assert main(["train", "--out", str(run), "--resume", *options]) == 0


def test_another_text_than_that_of_the_checkpoint(refused, run, tmp_path):
    (tmp_path / "other").write_bytes(b"x" * 1000)
    line = refused("train", "--out", run, "--resume", "--text", "other")
    assert f"--text {tmp_path / 'other'} differs from the text that the checkpoint was" in line


def test_a_text_that_moved_is_the_same_text(tmp_path):
    (tmp_path / "text").write_bytes(b"words " * 100)
    options = ["train", "--out", str(tmp_path / "run"), "--text"]
    assert main([*options, str(tmp_path / "text"), *SMALL, "--steps", "1"]) == 0
    (tmp_path / "text").rename(tmp_path / "moved")
    assert main([*options, str(tmp_path / "moved"), "--resume", "--steps", "2"]) == 0
    assert metrics(tmp_path / "run")["settings"]["text"] == str(tmp_path / "moved")


def test_fewer_steps_than_were_taken(refused, run):
    line = refused("train", "--out", run, "--resume", "--steps", "2")
    assert "--steps 2 lies behind the 3 steps already taken: choose 3 or more" in line
