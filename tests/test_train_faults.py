"""Bad input to `cadenza train`: one line that names the cure, exit code 2, nothing lost."""

import os
from math import inf
from pathlib import Path

import pytest
from safetensors.torch import load_file
from small_runs import SAMPLE_BYTES, SMALL, refusal

from cadenza.tools import loop
from cadenza.tools.checkpoint import FILE
from cadenza.tools.cli import main
from cadenza.tools.trainer import Trainer


@pytest.fixture(scope="module", autouse=True)
def _short_samples():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*SAMPLE_BYTES)
        yield


@pytest.fixture
def refused(capsys, tmp_path, monkeypatch):
    """Runs a command that must be refused in one line, which it returns, without a new file."""
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: refusal(capsys, tmp_path, arguments)


# Options


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--width 0", "width is 0, not a positive whole number: choose 1 or more"),
        ("--layers -1", "layers is -1, not a positive whole number: choose 1 or more"),
        ("--heads 0", "heads is 0, not a positive"),
        ("--key-value-heads 0", "key_value_heads is 0, not a positive"),
        ("--feed-forward 0", "feed_forward is 0, not a positive"),
        ("--context 0", "context is 0, not a positive"),
        ("--batch 0", "batch is 0, not a positive whole number: choose 1 or more"),
        ("--steps 0", "steps is 0, not a positive whole number: choose 1 or more"),
        ("--steps -5", "steps is -5, not a positive"),
        ("--width 30", "width 30 is not divisible by heads 4: choose width a multiple of 4, as 32"),
        ("--heads 3 --width 48", "heads 3 is not divisible by key_value_heads 2: choose heads a"),
        ("--width 36", "gives heads of 9 columns, which rotary embedding cannot halve: choose"),
        ("--learning-rate 0", "learning_rate is 0.0: choose one up to 1, as 3e-4"),
        ("--learning-rate 1.5", "learning_rate is 1.5: choose one up to 1, as 3e-4"),
        ("--learning-rate inf", "learning_rate is inf: choose"),
        ("--learning-rate nan", "learning_rate is nan: choose"),
        ("--dtype float8", "unknown dtype 'float8': choose one of float32, float64, bfloat16"),
        ("--device abacus", "device 'abacus' is not usable ("),
        ("--device abacus", "): take --device cpu or cuda"),
        ("--device cuda:99", "device 'cuda:99' is not usable ("),
        ("--device meta", "device 'meta' is not usable ("),
    ],
)
@pytest.mark.parametrize("command", ["train", "train --compare"])
def test_options_that_no_run_can_have(refused, command, options, said):
    assert said in refused(*command.split(), *SMALL, *options.split())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--resume", "--resume needs the folder of the run: add --out DIR"),
        ("--resume --compare --out x", "--compare starts afresh each time: leave --resume out"),
        ("--width 400000000000", "not enough memory for these sizes: choose a smaller --batch"),
    ],
)
def test_options_that_do_not_go_together(refused, options, said):
    assert said in refused("train", *options.split())


def test_a_batch_that_does_not_fit_in_memory(tmp_path, capsys):
    options = [*SMALL, "--batch", str(10**14)]
    assert main(["train", "--out", str(tmp_path / "run"), *options]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "not enough memory for these sizes: choose a smaller --batch" in said


# The text


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("missing", "--text {} cannot be read (No such file or directory): name a text file"),
        ("folder", "--text {} is not a file: name a file of text"),
        ("empty", "{} holds 0 bytes and a context of 16 needs 170: choose a longer --text or a"),
        ("tiny", "{} holds 169 bytes and a context of 16 needs 170: choose a longer --text"),
    ],
)
@pytest.mark.parametrize("command", ["train", "train --compare"])
def test_a_text_that_cannot_be_learnt(refused, tmp_path, command, name, said):
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty").touch()
    (tmp_path / "tiny").write_bytes(b"x" * 169)
    line = refused(*command.split(), *SMALL, "--text", name)
    assert said.format(tmp_path / name) in line


def test_the_shortest_text_that_does(tmp_path):
    (tmp_path / "text").write_bytes(b"x" * 170)
    options = [*SMALL, "--steps", "1", "--text", str(tmp_path / "text")]
    assert main(["train", "--out", str(tmp_path / "run"), *options]) == 0


def test_a_context_longer_than_the_default_text(refused):
    line = refused("train", *SMALL, "--context", "1000000")
    assert "the documentation of Python holds" in line
    assert "or a smaller --context" in line


# The folder


@pytest.mark.parametrize("out", ["file", "file/below"])
@pytest.mark.parametrize("command", ["train", "train --compare"])
def test_a_file_in_place_of_the_folder(refused, tmp_path, command, out):
    (tmp_path / "file").write_text("precious")
    line = refused(*command.split(), *SMALL, "--out", out)
    assert f"--out {out} is a file or lies below one: name a folder" in line


@pytest.fixture
def unwritable(tmp_path):
    """A folder in which this user can create nothing; for root, that is one of the kernel's."""
    if os.geteuid() == 0:
        yield Path("/proc/cadenza")
        return
    folder = tmp_path / "unwritable"
    folder.mkdir(mode=0o500)
    yield folder
    folder.chmod(0o700)


@pytest.mark.parametrize("command", ["train", "train --compare"])
def test_an_unwritable_folder(refused, unwritable, command):
    line = refused(*command.split(), *SMALL, "--out", unwritable)
    assert f"--out {unwritable} cannot be written (" in line
    assert "choose another folder" in line


@pytest.mark.parametrize("command", ["train", "train --compare"])
@pytest.mark.parametrize("name", [FILE, "metrics.json", "sample.txt", "loss.png", "compare.json"])
def test_a_folder_that_already_holds_a_run(refused, tmp_path, command, name):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).write_text("of an earlier run")
    line = refused(*command.split(), *SMALL, "--out", "run")
    assert f"--out run already holds {name}: add --resume to continue a run, or choose" in line


def test_a_folder_with_other_files_is_taken(tmp_path):
    (tmp_path / "notes").write_text("mine")
    assert main(["train", "--out", str(tmp_path), *SMALL, "--steps", "1"]) == 0
    assert (tmp_path / "notes").read_text() == "mine"


# While training


@pytest.mark.parametrize("bad", [2, 4])
def test_a_loss_that_is_not_finite_stops_the_run(tmp_path, monkeypatch, capsys, bad):
    exact = Trainer._loss
    monkeypatch.setattr(loop, "VALIDATE_EVERY", 2)
    monkeypatch.setattr(Trainer, "_loss", lambda *a: exact(*a) * (1 if a[0].step < bad else inf))
    run = tmp_path / "run"
    assert main(["train", "--out", str(run), *SMALL, "--steps", "9"]) == 2
    said = f"cadenza: the loss is inf after {bad} steps: choose a smaller --learning-rate\n"
    assert capsys.readouterr().err == said
    assert load_file(run / FILE)["history/training"].shape == (bad - 2,)
