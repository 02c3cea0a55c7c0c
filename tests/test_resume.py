"""`cadenza train --resume`, Ctrl-C, and files that are there whole or not at all."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import load_file
from small_runs import PNG, SMALL, metrics, train

from cadenza.library.models import StockLlama
from cadenza.tools import atomic, loop
from cadenza.tools.checkpoint import FILE
from cadenza.tools.cli import main
from cadenza.tools.interrupt import interruptible
from cadenza.tools.settings import Settings

ROOT = Path(__file__).resolve().parent.parent


pytestmark = pytest.mark.usefixtures("short_samples")


@pytest.fixture(autouse=True)
def heard():
    """Ctrl-C is heard, also where the tests were started in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


# Going on


@pytest.mark.slow
def test_a_resumed_run_equals_an_unbroken_one_bit_by_bit(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "VALIDATE_EVERY", 4)
    assert train(tmp_path / "whole", "--steps", 14) == 0
    assert train(tmp_path / "parts", "--steps", 7) == 0
    assert [point["step"] for point in metrics(tmp_path / "parts")["validation"]] == [0, 4, 7]
    assert main(["train", "--out", str(tmp_path / "parts"), "--resume", "--steps", "14"]) == 0
    for name in (FILE, "metrics.json", "sample.txt", "loss.png"):
        whole, parts = (tmp_path / run / name for run in ("whole", "parts"))
        assert whole.read_bytes() == parts.read_bytes(), name


def test_a_checkpoint_holds_weights_moments_and_losses(finished):
    tensors = load_file(finished / FILE)
    weights = [name for name in tensors if "/" not in name]
    settings = Settings(**metrics(finished)["settings"])
    assert sorted(weights) == sorted(StockLlama(settings.config()).state_dict())
    assert tensors["history/training"].tolist() == metrics(finished)["training"]
    steps = [tensor.item() for name, tensor in tensors.items() if name.startswith("optimizer/step")]
    assert set(steps) == {10.0}
    with safe_open(finished / FILE, framework="pt") as file:
        assert json.loads(file.metadata()["cadenza"])["target"] == 10


def test_a_finished_run_resumes_to_its_own_end(finished, tmp_path):
    folder = shutil.copytree(finished, tmp_path / "run")
    (folder / "sample.txt").unlink()
    (folder / "loss.png").unlink()
    assert main(["train", "--out", str(folder), "--resume"]) == 0
    for path in finished.iterdir():
        assert (folder / path.name).read_bytes() == path.read_bytes(), path.name


def start_long_run(folder):
    """A run of a hundred thousand steps in a process of its own, once it has taken its first."""
    command = [sys.executable, "-m", "cadenza", "train", "--out", str(folder), *SMALL]
    process = subprocess.Popen(
        [*command, "--steps", "100000"], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    for line in process.stdout:
        if line.startswith("step 50/"):
            return process
    raise AssertionError(f"the run ended with exit code {process.wait()}")


@pytest.mark.slow
def test_ctrl_c_saves_and_prints_how_to_go_on(tmp_path):
    process = start_long_run(tmp_path / "run")
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    taken = int(re.search(r"stopped and saved after step (\d+); to go on:\n", said).group(1))
    assert taken >= 50
    python, *arguments = shlex.split(said.splitlines()[-1])
    assert (python, arguments[:2]) == (sys.executable, ["-m", "cadenza"])
    assert arguments[2:] == ["train", "--out", str(tmp_path / "run"), "--resume"]
    assert (tmp_path / "run" / "loss.png").read_bytes().startswith(PNG)
    assert main([*arguments[2:], "--steps", str(taken + 2)]) == 0
    assert train(tmp_path / "whole", "--steps", taken + 2) == 0
    whole, parts = (tmp_path / run / FILE for run in ("whole", "run"))
    assert whole.read_bytes() == parts.read_bytes()


@pytest.mark.slow
def test_a_killed_run_leaves_a_checkpoint_that_resumes(tmp_path):
    process = start_long_run(tmp_path / "run")
    process.kill()
    process.communicate()
    taken = metrics(tmp_path / "run")["steps"]
    options = ["--resume", "--steps", str(taken + 52)]
    assert main(["train", "--out", str(tmp_path / "run"), *options]) == 0


def interrupt(number):
    """Sends this process a signal."""
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_is_noted(number):
    with interruptible() as interruption:
        assert not interruption
        interrupt(number)
        assert interruption
        assert interruption.exit_code == 128 + number


def test_the_second_interruption_is_not_held_back():
    with interruptible():
        interrupt(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            interrupt(signal.SIGINT)


def test_an_interruption_after_the_training_is_not_held_back():
    with interruptible():
        pass
    with pytest.raises(KeyboardInterrupt):
        interrupt(signal.SIGINT)


def test_ctrl_c_after_the_training_says_how_to_go_on_too(tmp_path, monkeypatch, capsys):
    def impatient(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("cadenza.tools.train.generate", impatient)
    assert train(tmp_path / "run", "--steps", 2) == 130
    assert f"--out {tmp_path / 'run'} --resume\n" in capsys.readouterr().out
    monkeypatch.undo()
    assert main(["train", "--out", str(tmp_path / "run"), "--resume"]) == 0


@pytest.mark.parametrize("started", ["bin/cadenza", "elsewhere/cadenza"])
def test_the_line_to_go_on_is_how_the_program_was_started(tmp_path, monkeypatch, capsys, started):
    program = tmp_path / "bin" / "cadenza"
    program.parent.mkdir()
    program.touch(0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    monkeypatch.setattr(sys, "argv", [str(tmp_path / started)])
    monkeypatch.setattr("cadenza.tools.train.generate", lambda *_: interrupt(signal.SIGINT))
    assert train(tmp_path / "a run", "--steps", 1) == 130
    name = "cadenza" if started == "bin/cadenza" else str(tmp_path / started)
    line = f"{name} train --out '{tmp_path / 'a run'}' --resume"
    assert capsys.readouterr().out.splitlines()[-1] == line


# Files


KILL_WHILE_WRITING = """
import os, signal, sys
from pathlib import Path
from cadenza.tools import atomic
os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
atomic.write_whole(Path(sys.argv[1]), b"new" * 1000)
"""


def test_a_file_is_old_or_new_when_its_writer_is_killed(tmp_path):
    path = tmp_path / "file"
    atomic.write_whole(path, b"old")
    command = [sys.executable, "-c", KILL_WHILE_WRITING, str(path)]
    assert subprocess.run(command, cwd=ROOT).returncode == -signal.SIGKILL
    assert path.read_bytes() == b"old"
    atomic.write_whole(path, b"newer")
    assert path.read_bytes() == b"newer"
    assert list(tmp_path.iterdir()) == [path]


def test_an_interrupted_write_leaves_nothing_behind(tmp_path, monkeypatch):
    def interrupted(_):
        raise KeyboardInterrupt

    path = tmp_path / "file"
    atomic.write_whole(path, b"old")
    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        atomic.write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
