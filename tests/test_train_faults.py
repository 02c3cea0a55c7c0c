"""Bad input to the command line: one line that names the cure, exit code 2, nothing lost."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cadenza import __version__
from cadenza.tools import atomic, loop
from cadenza.tools.checkpoint import FILE
from cadenza.tools.cli import main

ROOT = Path(__file__).resolve().parent.parent
SMALL = "--width 32 --layers 1 --feed-forward 48 --context 16 --batch 2".split()


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """The folder of a finished run of 3 steps."""
    folder = tmp_path_factory.mktemp("original") / "run"
    assert main(["train", "--out", str(folder), *SMALL, "--steps", "3"]) == 0
    return folder


@pytest.fixture
def run(original, tmp_path):
    """A copy of it, to spoil."""
    return shutil.copytree(original, tmp_path / "run")


@pytest.fixture
def refused(capsys, tmp_path, monkeypatch):
    """Runs a command that must be refused in one line, which it returns, without a new file."""
    monkeypatch.chdir(tmp_path)

    def command(*arguments):
        before = contents(tmp_path)
        capsys.readouterr()
        assert main(list(map(str, arguments))) == 2
        said = capsys.readouterr().err
        assert said.startswith("cadenza: ")
        assert said.endswith("\n")
        assert said.count("\n") == 1
        assert contents(tmp_path) == before
        return said

    return command


def contents(folder):
    """Every file below a folder, with its bytes."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    folders = [path for path in folder.rglob("*") if path.is_dir()]
    return {path: path.read_bytes() for path in files} | dict.fromkeys(folders)


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
        ("--learning-rate 0", "learning_rate is 0.0: choose a number above 0, as 3e-4"),
        ("--learning-rate inf", "learning_rate is inf: choose"),
        ("--learning-rate nan", "learning_rate is nan: choose"),
        ("--dtype float8", "unknown dtype 'float8': choose one of float32, float64, bfloat16"),
        ("--device abacus", "device 'abacus' is not usable ("),
        ("--device cuda:99", "device 'cuda:99' is not usable ("),
        ("--device meta", "device 'meta' is not usable ("),
        ("--batch 100000000000000", "not enough memory for these sizes: choose a smaller --batch"),
        ("--width 400000000000", "not enough memory for these sizes: choose a smaller --batch"),
        ("--resume", "--resume needs the folder of the run: add --out DIR"),
        ("--resume --compare --out x", "--compare starts afresh each time: leave --resume out"),
    ],
)
@pytest.mark.parametrize("command", ["train", "train --compare"])
def test_options_that_no_run_can_have(refused, command, options, said):
    if "--resume" in options and "--compare" in command:
        pytest.skip("has a line of its own")
    if "memory" in said and "--compare" in command:
        pytest.skip("found in the process that trains, see test_compare")
    small = [] if "--resume" in options else SMALL
    if "memory" in said:
        # The first batch is drawn after the folder was made, so give it one.
        Path("runs").mkdir()
    assert said in refused(*command.split(), *small, *options.split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("train --steps many", "'--steps'"),
        ("train --steps 1.5", "'--steps'"),
        ("train --steps", "--steps"),
        ("train --width wide", "'--width'"),
        ("train --stpes 10", "--stpes"),
        ("train again", "again"),
        ("trian", "trian"),
        ("--verbose", "--verbose"),
    ],
)
def test_a_command_line_that_cannot_be_read(refused, arguments, said):
    line = refused(*arguments.split())
    assert said in line
    assert "--help" in line


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


# Resuming


def test_resuming_where_there_is_nothing(refused, tmp_path):
    (tmp_path / "empty").mkdir()
    for name in ("empty", "missing"):
        line = refused("train", "--out", name, "--resume")
        assert f"{name} holds no checkpoint to resume: leave --resume out to start one" in line


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
    from cadenza.tools.checkpoint import Checkpoint, load_checkpoint, save_checkpoint

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
    line = refused("train", "--out", run, "--resume", "--width", "64", "--seed", "1", "--batch", "2")
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
    settings = json.loads((tmp_path / "run" / "metrics.json").read_text())["settings"]
    assert settings["text"] == str(tmp_path / "moved")


def test_fewer_steps_than_were_taken(refused, run):
    line = refused("train", "--out", run, "--resume", "--steps", "2")
    assert "--steps 2 lies behind the 3 steps already taken: choose 3 or more" in line


# While training


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(loop, "VALIDATE_EVERY", 2)
    options = [*SMALL, "--steps", "50", "--learning-rate", "1e38"]
    assert main(["train", "--out", str(tmp_path / "run"), *options]) == 2
    said = capsys.readouterr().err
    assert re.fullmatch(
        r"cadenza: the loss is \w+ at step \d+: choose a smaller --learning-rate\n", said
    )
    assert (tmp_path / "run" / FILE).is_file()


def test_a_back_end_that_does_not_exist(monkeypatch, capsys):
    from cadenza.core.errors import BackEndError

    def unknown(*_, **__):
        raise BackEndError("unknown back end 'abacus'\n  write: reference")

    monkeypatch.setattr("cadenza.tools.train.train", unknown)
    assert main(["train"]) == 2
    assert capsys.readouterr().err == "cadenza: unknown back end 'abacus' write: reference\n"


def test_a_fault_of_ours_is_not_taken_for_bad_input(monkeypatch):
    def broken(*_, **__):
        raise AssertionError("ours")

    monkeypatch.setattr("cadenza.tools.train.train", broken)
    with pytest.raises(AssertionError, match="ours"):
        main(["train"])


# The command line itself


def test_the_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"cadenza {__version__}\n"


def test_help_names_every_option_and_its_default(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["train", "--help"]) == 0
    said = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
    for option in ("--steps", "--text", "--out", "--resume", "--compare", "--key-value-heads"):
        assert option in said
    assert "query heads (default 4)" in said
    assert "steps in all (default 500, 50 to compare in float64)" in said


def test_without_a_command_it_lists_them(capsys):
    assert main([]) == 0
    assert "train" in capsys.readouterr().out


def test_help_imports_neither_torch_nor_matplotlib():
    probe = (
        "import sys; from cadenza.tools.cli import main; main(['train', '--help']);"
        "sys.exit(len({'torch', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", probe], cwd=ROOT, capture_output=True)
    assert done.returncode == 0, done.stderr
