"""`cadenza train` on small models: what it learns from, what it writes, what it says."""

import io
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small_runs import PNG, SMALL, metrics, train

from cadenza.library.models import StockLlama
from cadenza.tools import loop
from cadenza.tools.checkpoint import FILE
from cadenza.tools.cli import main
from cadenza.tools.corpus import python_documentation, read_corpus
from cadenza.tools.generate import generate
from cadenza.tools.settings import Settings
from cadenza.tools.trainer import Trainer, build_model

pytestmark = pytest.mark.usefixtures("short_samples")


# The text


def test_the_default_text_is_the_documentation_of_python():
    corpus = read_corpus(None, 128)
    text = bytes(torch.cat([corpus.training, corpus.held_out]).tolist())
    assert text == python_documentation()
    assert len(text) > 200_000
    assert b'The "assert" statement' in text


def test_the_last_tenth_is_held_out_and_no_batch_reads_it(tmp_path):
    (tmp_path / "text").write_bytes(b"a" * 900 + b"z" * 100)
    corpus = read_corpus(str(tmp_path / "text"), 16)
    seen = torch.cat([corpus.batch(0, step, 64, 16) for step in range(50)])
    assert set(seen.flatten().tolist()) == {ord("a")}
    assert set(corpus.validation(16).flatten().tolist()) == {ord("z")}


def test_batches_reach_the_last_byte_to_train_on_and_all_before(tmp_path):
    (tmp_path / "text").write_bytes(bytes(range(200)))
    corpus = read_corpus(str(tmp_path / "text"), 9)
    seen = torch.cat([corpus.batch(0, step, 64, 9) for step in range(50)])
    assert set(seen.flatten().tolist()) == set(range(180))
    assert torch.equal(seen, seen[:, :1] + torch.arange(10))


def test_a_batch_depends_on_seed_and_step_alone():
    corpus = read_corpus(None, 32)
    first = corpus.batch(1, 5, 4, 32)
    torch.rand(3)
    assert torch.equal(first, read_corpus(None, 32).batch(1, 5, 4, 32))
    assert not torch.equal(first, corpus.batch(1, 6, 4, 32))
    assert not torch.equal(first, corpus.batch(2, 5, 4, 32))


def test_validation_windows_do_not_overlap(tmp_path):
    (tmp_path / "text").write_bytes(bytes(1350) + bytes(range(150)))
    windows = read_corpus(str(tmp_path / "text"), 14).validation(14)
    assert windows.shape == (10, 15)
    assert windows.flatten().tolist() == list(range(150))
    assert len(read_corpus(None, 128).validation(128)) == 32


# A run


def test_a_run_writes_checkpoint_metrics_plot_and_sample(finished):
    assert sorted(path.name for path in finished.iterdir()) == [
        FILE,
        "loss.png",
        "metrics.json",
        "sample.txt",
    ]
    assert (finished / "loss.png").read_bytes().startswith(PNG)
    written = metrics(finished)
    assert written["steps"] == len(written["training"]) == 10
    assert [point["step"] for point in written["validation"]] == [0, 10]
    assert written["settings"]["width"] == 32


def test_a_run_learns_and_reports(tmp_path, capsys):
    assert train(tmp_path / "run", "--steps", 30, "--learning-rate", 0.01) == 0
    before, after = (point["loss"] for point in metrics(tmp_path / "run")["validation"])
    assert after < before - 1
    said = capsys.readouterr().out
    assert f"run in {tmp_path / 'run'}" in said
    assert f"held-out loss {after:.4f} after 30 steps, {before:.4f} before the first" in said
    assert re.search(r"[\d,]+ tokens/s", said)
    assert f"sample:\n{(tmp_path / 'run' / 'sample.txt').read_text()}" in said


def test_losses_are_those_of_the_model_on_its_batches(finished):
    settings = Settings(**metrics(finished)["settings"])
    corpus = read_corpus(None, settings.context)
    model = build_model("cadenza", settings)
    batch = corpus.batch(settings.seed, 0, settings.batch, settings.context)
    loss = model(batch[:, :-1].contiguous(), batch[:, 1:].contiguous())
    windows = corpus.validation(settings.context)
    held_out = model(windows[:, :-1].contiguous(), windows[:, 1:].contiguous())
    assert metrics(finished)["training"][0] == pytest.approx(loss.item(), rel=1e-6)
    assert metrics(finished)["validation"][0]["loss"] == pytest.approx(held_out.item(), rel=1e-5)


def test_the_stock_twin_loads_the_weights_of_a_checkpoint(finished):
    settings = Settings(**metrics(finished)["settings"])
    twin = StockLlama(settings.config())
    tensors = load_file(finished / FILE)
    twin.load_state_dict({name: tensors[name] for name in twin.state_dict()})
    trainer = Trainer(twin, settings, read_corpus(None, settings.context))
    last = metrics(finished)["validation"][-1]["loss"]
    assert trainer.validate() == pytest.approx(last, rel=1e-5)


def test_without_out_a_new_folder_under_runs_is_printed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", *SMALL, "--steps", "1"]) == 0
    assert main(["train", *SMALL, "--steps", "1"]) == 0
    folders = sorted(path.relative_to(tmp_path) for path in (tmp_path / "runs").iterdir())
    printed = sorted(map(Path, re.findall(r"run in (\S+):", capsys.readouterr().out)))
    assert len(folders) == 2
    assert printed == folders


@pytest.mark.slow
def test_a_seed_decides_everything(finished, tmp_path):
    assert train(tmp_path / "same", "--steps", 10) == 0
    assert train(tmp_path / "other", "--steps", 10, "--seed", 1) == 0
    for name in (FILE, "metrics.json", "sample.txt"):
        assert (tmp_path / "same" / name).read_bytes() == (finished / name).read_bytes()
    assert metrics(tmp_path / "other")["training"] != metrics(finished)["training"]


def test_a_text_of_ones_own(tmp_path, monkeypatch):
    (tmp_path / "words").write_text("in the beginning was the word; " * 40)
    monkeypatch.chdir(tmp_path)
    assert train("run", "--steps", 1, "--text", "words") == 0
    monkeypatch.chdir(tmp_path.parent)
    assert train(tmp_path / "run", "--resume", "--steps", 2) == 0


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.slow
def test_other_dtypes_train_and_resume_bit_by_bit(tmp_path, dtype):
    assert train(tmp_path / "whole", "--steps", 2, "--dtype", dtype) == 0
    assert train(tmp_path / "parts", "--steps", 1, "--dtype", dtype) == 0
    assert train(tmp_path / "parts", "--steps", 2, "--resume") == 0
    assert (tmp_path / "whole" / FILE).read_bytes() == (tmp_path / "parts" / FILE).read_bytes()
    weight = load_file(tmp_path / "whole" / FILE)["lm_head.weight"]
    assert weight.dtype == getattr(torch, dtype)


# Progress


def test_away_from_a_terminal_progress_is_a_line_a_validation(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(loop, "VALIDATE_EVERY", 4)
    train(tmp_path / "run", "--steps", 10)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in lines] == ["0/10", "4/10", "8/10", "10/10"]
    shape = r"step 4/10  loss \d\.\d{4}  [\d,]+ tokens/s  0:\d\d left  held-out loss \d\.\d{4}"
    assert re.fullmatch(shape, lines[1])


def test_on_a_terminal_progress_is_a_bar_with_loss_speed_and_time_left(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    train(tmp_path / "run", "--steps", 10)
    said = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", capsys.readouterr().out)
    assert re.search(r"step ━+ 10/10 loss \d\.\d{4}  [\d,]+ tokens/s \d:\d\d:\d\d left", said)
    assert "step 10: held-out loss" in said


# Text of its own


class Recorder(torch.nn.Module):
    """Prefers byte 65, and writes down the windows it was shown."""

    def __init__(self, logits):
        super().__init__()
        self.logits = torch.nn.Parameter(logits)
        self.config = Settings(context=8).config()
        self.shown = []

    def forward(self, tokens):
        """Logits `[1, S, 256]`, the same at every position."""
        self.shown.append(tokens[0].tolist())
        return self.logits.expand(1, tokens.shape[1], 256)


def test_generation_slides_a_window_of_the_context():
    model = Recorder(torch.full((256,), -1e9).index_fill(0, torch.tensor([65]), 0.0))
    assert generate(model, b"xyz", 10, seed=0) == b"xyz" + b"A" * 10
    assert model.shown[0] == list(b"xyz")
    assert model.shown[5] == list(b"xyzAAAAA")
    assert model.shown[9] == list(b"AAAAAAAA")


@pytest.mark.slow
def test_generation_is_decided_by_its_seed_and_follows_the_chances():
    model = Recorder(torch.randn(256))
    drawn = generate(model, b"x", 4000, seed=3)
    assert drawn == generate(model, b"x", 4000, seed=3)
    assert drawn != generate(model, b"x", 4000, seed=4)
    chances = (model.logits.detach().double() / 0.8).softmax(0)
    counts = torch.bincount(torch.tensor(list(drawn[1:])), minlength=256) / 4000
    assert (counts - chances).abs().max() < 0.02


def test_a_sample_shows_no_control_characters(finished, tmp_path, monkeypatch):
    folder = shutil.copytree(finished, tmp_path / "run")
    monkeypatch.setattr("cadenza.tools.train.generate", lambda *_: b"a\x1b[2J\xff\tb\r\n\xc3\xa9")
    assert main(["train", "--out", str(folder), "--resume"]) == 0
    assert (folder / "sample.txt").read_bytes().decode() == "a�[2J�\tb�\né"


def test_a_sample_prints_on_a_terminal_that_lacks_its_characters(finished, tmp_path, monkeypatch):
    folder = shutil.copytree(finished, tmp_path / "run")
    monkeypatch.setattr("cadenza.tools.train.generate", lambda *_: b"caf\xc3\xa9")
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    assert main(["train", "--out", str(folder), "--resume"]) == 0
    terminal.flush()
    assert terminal.buffer.getvalue().endswith(b"sample:\ncaf?\n")
