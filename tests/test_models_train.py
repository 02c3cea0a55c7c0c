"""`cadenza train` on whole models, tiny ones: the options that they add, and what a run leaves."""

import json
import re
import shutil
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_runs import PNG, contents, metrics, refusal
from tiny_models import OPTIONS, settings_of, tiny, tiny_config, train

import cadenza as cz
from cadenza.library.models import checkpoint as published
from cadenza.tools import corpus, loop, runs, whole
from cadenza.tools.checkpoint import FILE, load_checkpoint
from cadenza.tools.cli import main
from cadenza.tools.corpus import corpus_of
from cadenza.tools.settings import SMALL, WHOLE, WHOLE_DEFAULTS, Settings
from cadenza.tools.trainer import Trainer, build_model

pytestmark = pytest.mark.usefixtures("short_samples")


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """The folder of a tiny Qwen 3."""
    folder = tmp_path_factory.mktemp("start") / "model"
    cz.models.save(tiny(tiny_config("qwen3")), folder)
    return folder


@pytest.fixture(scope="module")
def finished(start, short_samples, tmp_path_factory):
    """The folder of a finished run of 10 steps."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert train(folder, start, "--steps", 10) == 0
    return folder


def trainer_of(init, **options):
    """A trainer on a checkpoint, before its first step."""
    settings = settings_of(init, **options)
    return Trainer(build_model("cadenza", settings), settings, corpus_of(settings))


# A run


def test_a_run_writes_what_the_small_model_does_and_a_checkpoint_for_hugging_face(finished):
    names = [FILE, "loss.png", "metrics.json", "model", "sample.txt"]
    assert sorted(path.name for path in finished.iterdir()) == names
    assert (finished / "loss.png").read_bytes().startswith(PNG)
    assert (finished / FILE).stat().st_mode == (finished / "loss.png").stat().st_mode
    written = metrics(finished)
    assert written["steps"] == len(written["training"]) == 10
    assert [point["step"] for point in written["validation"]] == [0, 10]
    sizes = {name: written["settings"][name] for name in ("width", "layers", "heads")}
    assert sizes == {"width": 32, "layers": 2, "heads": 4}
    assert written["settings"]["model"] == "qwen3"


def test_the_exported_model_holds_the_trained_weights(finished, start):
    model, before = cz.models.load(finished / "model"), cz.models.load(start)
    trained = load_file(finished / FILE)
    for name, weight in model.named_parameters():
        assert torch.equal(weight, trained[name]), name
        assert not torch.equal(weight, before.get_parameter(name)), name
    assert "lm_head.weight" not in trained
    assert model.config == before.config


def test_a_run_starts_from_the_checkpoint_and_learns(start, tmp_path, capsys):
    assert train(tmp_path / "run", start, "--steps", 15, "--learning-rate", 0.02) == 0
    first, last = (point["loss"] for point in metrics(tmp_path / "run")["validation"])
    assert last < first - 1
    said = capsys.readouterr().out
    assert f"written for Hugging Face: {tmp_path / 'run' / 'model'}" in said
    assert " bytes to train on, " in said
    model = cz.models.load(start)
    windows = corpus_of(settings_of(start)).validation(16)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(windows[:, :-1].contiguous(), windows[:, 1:].contiguous())
    assert first == pytest.approx(loss.item(), rel=1e-5)


def test_a_named_model_starts_from_weights_that_the_seed_decides(tmp_path, monkeypatch):
    monkeypatch.setitem(cz.models.QWEN3, "0.6B", tiny_config("qwen3"))
    options = ["--model", "qwen3-0.6b", *OPTIONS, "--steps", "1"]
    assert main(["train", "--out", str(tmp_path / "run"), *options]) == 0
    settings = Settings(**metrics(tmp_path / "run")["settings"])
    assert settings.model == "qwen3-0.6b"
    ours, again, stock, other = (
        build_model(kind, replace(settings, seed=seed)).state_dict()
        for kind, seed in (("cadenza", 0), ("cadenza", 0), ("stock", 0), ("cadenza", 1))
    )
    for name, weight in ours.items():
        assert torch.equal(weight, again[name])
        assert torch.equal(weight, stock[name])
        assert weight.dim() == 1 or not torch.equal(weight, other[name])


def test_every_size_has_a_name():
    assert tuple(whole.named_sizes()) == WHOLE


def test_defaults_are_those_of_a_step_on_a_gpu():
    settings = whole.whole_settings({"model": "llama3-1b"})
    found = {name: getattr(settings, name) for name in WHOLE_DEFAULTS}
    assert found == WHOLE_DEFAULTS
    assert settings.context == 4096
    assert (settings.dtype, settings.arithmetic) == ("float32", "bfloat16")
    narrow = whole.whole_settings({"model": "llama3-1b", "dtype": "bfloat16"})
    assert (narrow.precision, narrow.arithmetic) == ("full", "bfloat16")
    assert Settings().model == SMALL


def test_a_checkpoint_of_a_published_size_has_its_name(tmp_path, monkeypatch):
    monkeypatch.setattr(published, "read_config", lambda _: cz.models.LLAMA3["3B"])
    assert settings_of(tmp_path).model == "llama3-3b"
    assert settings_of(tmp_path, model="llama3-3b").model == "llama3-3b"


def test_options_in_the_document_exist():
    text = (Path(__file__).resolve().parent.parent / "docs" / "models.md").read_text("utf-8")
    shown = set(re.findall(r"(?<![\w-])--([a-z][a-z-]+)", text))
    known = {one.name.replace("_", "-") for one in fields(Settings)}
    assert {"model", "init", "tokenizer", "precision", "accumulate", "checkpointing"} <= shown
    assert shown <= known | {"out", "resume", "steps", "compare"}
    assert all(f"`{name}`" in text for name in (WHOLE[0], WHOLE[-1]))


# Parts of a step, checkpointing, precision


def losses(trainer, steps=4):
    return [trainer.train_step() for _ in range(steps)]


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.slow
def test_a_step_in_parts_is_the_step(start, parts):
    exact = {"dtype": "float64", "learning_rate": 0.01}
    one, several = trainer_of(start, **exact), trainer_of(start, **exact, accumulate=parts)
    seen = []
    several.model.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    assert losses(several) == pytest.approx(losses(one), rel=1e-12)
    assert seen == [4 // parts] * 4 * parts
    for weight, twin in zip(one.model.parameters(), several.model.parameters(), strict=True):
        torch.testing.assert_close(weight, twin, rtol=1e-9, atol=1e-9)
    assert several.validate() == pytest.approx(one.validate(), rel=1e-12)
    assert max(seen) == 4 // parts


@pytest.mark.parametrize("precision", ["mixed", "full"])
def test_checkpointing_changes_no_bit(start, precision):
    made = [trainer_of(start, precision=precision, checkpointing=on) for on in (False, True)]
    runs_of = []
    for number, trainer in enumerate(made):
        attention = trainer.model.model.layers[0].self_attn
        attention.register_forward_hook(lambda *_, number=number: runs_of.append(number))
    assert losses(made[0]) == losses(made[1])
    assert (runs_of.count(0), runs_of.count(1)) == (4, 8), "each layer runs again in backward"
    for weight, twin in zip(*(trainer.model.parameters() for trainer in made), strict=True):
        assert torch.equal(weight, twin)


def test_the_small_model_takes_parts_and_checkpointing_too():
    sizes = {"width": 32, "layers": 1, "feed_forward": 48, "context": 16, "batch": 2}
    usual = Settings(**sizes, dtype="float64")
    parts = replace(usual, accumulate=2, checkpointing=True)
    expected, found = (
        losses(Trainer(build_model("cadenza", one), one, corpus_of(one))) for one in (usual, parts)
    )
    assert found == pytest.approx(expected, rel=1e-12)


def test_mixed_precision_computes_in_bfloat16_and_keeps_float32(start):
    mixed, full = trainer_of(start), trainer_of(start, precision="full")
    ours, exact = losses(mixed, 2), losses(full, 2)
    assert ours != exact
    assert ours == pytest.approx(exact, rel=2e-2)
    state = mixed.tensors()
    assert {tensor.dtype for name, tensor in state.items() if "history" not in name} == {
        torch.float32
    }


def test_narrow_weights_are_narrow_all_over(start):
    trainer = trainer_of(start, dtype="bfloat16")
    assert losses(trainer)[-1] > 0
    state = trainer.tensors()
    kinds = {t.dtype for n, t in state.items() if "history" not in n and "/step/" not in n}
    assert kinds == {torch.bfloat16}


# Going on


@pytest.mark.slow
def test_a_resumed_run_equals_an_unbroken_one_without_its_start(start, tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "VALIDATE_EVERY", 4)
    monkeypatch.setattr(corpus, "VALIDATION_WINDOWS", 4)
    moved = shutil.copytree(start, tmp_path / "start")
    weights = load_file(moved / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, moved / "model.safetensors", {"format": "pt"})
    assert train(tmp_path / "whole", moved, "--steps", 6, "--accumulate", 2) == 0
    assert train(tmp_path / "parts", moved, "--steps", 3, "--accumulate", 2) == 0
    shutil.rmtree(moved)
    assert main(["train", "--out", str(tmp_path / "parts"), "--resume", "--steps", "6"]) == 0
    for path in (tmp_path / "whole").rglob("*"):
        if path.is_file():
            twin = tmp_path / "parts" / path.relative_to(tmp_path / "whole")
            assert twin.read_bytes() == path.read_bytes(), path.name


@pytest.mark.slow
def test_what_somebody_puts_beside_a_model_stays_there(start, tmp_path):
    assert train(tmp_path / "run", start, "--steps", 1) == 0
    model = tmp_path / "run" / "model"
    (model / "tokenizer_config.json").write_text("{}")
    (model / "notes").mkdir()
    (model / "notes" / "why.txt").write_text("so")
    (model / "model-00001-of-00002.safetensors").write_bytes(b"of another size")
    before = (model / "model.safetensors").read_bytes()
    assert main(["train", "--out", str(tmp_path / "run"), "--resume", "--steps", "2"]) == 0
    assert (model / "tokenizer_config.json").read_text() == "{}"
    assert (model / "notes" / "why.txt").read_text() == "so"
    assert not (model / "model-00001-of-00002.safetensors").exists()
    assert (model / "model.safetensors").read_bytes() != before


def test_a_checkpoint_says_what_model_it_is_of(finished, start):
    checkpoint = load_checkpoint(finished)
    assert checkpoint.architecture == json.loads((start / "config.json").read_text())
    assert "optimizer/exp_avg/model.embed_tokens.weight" in checkpoint.tensors


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--precision full", "--precision full differs from mixed"),
        ("--accumulate 2", "--accumulate 2 differs from 1"),
        ("--checkpointing", "--checkpointing True differs from False"),
        ("--model llama3-1b", "--model llama3-1b differs from qwen3"),
        ("--init elsewhere", "elsewhere differs from"),
        ("--width 64", "--width 64 differs from 32"),
    ],
)
def test_options_that_contradict_the_checkpoint(finished, tmp_path, capsys, options, said):
    run = shutil.copytree(finished, tmp_path / "run")
    line = refusal(capsys, tmp_path, ["train", "--out", run, "--resume", *options.split()])
    assert said in line
    assert "leave that out, or start a new run with another --out" in line


def test_saving_takes_a_small_part_of_a_run_and_is_never_left_out_at_its_end(start, monkeypatch):
    trainer = trainer_of(start)
    run, now, taken = runs.Run(None, trainer, 10), [0.0], []

    def write():
        taken.append(now[0])
        now[0] += 3.0

    monkeypatch.setattr(run, "_write", write)
    monkeypatch.setattr(runs.time, "monotonic", lambda: now[0])
    run.save_when_due()
    for at in (10.0, 42.9, 43.1, 50.0):
        now[0] = at
        run.save_when_due()
    assert taken == [0.0, 43.1]
    run.save_last()
    assert taken == [0.0, 43.1]
    trainer.train_step()
    run.save_last()
    assert taken == [0.0, 43.1, 50.0]


def test_the_exported_model_is_replaced_by_the_next_one(finished, tmp_path):
    run = shutil.copytree(finished, tmp_path / "run")
    assert main(["train", "--out", str(run), "--resume", "--steps", "11"]) == 0
    before, after = (cz.models.load(one / "model") for one in (finished, run))
    assert not torch.equal(before.lm_head.weight, after.lm_head.weight)
    assert sorted(path.name for path in run.iterdir()) == [
        FILE, "loss.png", "metrics.json", "model", "sample.txt",
    ]  # fmt: skip


def test_an_export_that_fails_leaves_the_one_before(finished, tmp_path, monkeypatch, capsys):
    def full(*_):
        raise OSError(28, "No space left on device")

    run = shutil.copytree(finished, tmp_path / "run")
    before = contents(run / "model")
    monkeypatch.setattr(published, "save_file", full)
    assert main(["train", "--out", str(run), "--resume", "--steps", "11"]) == 2
    said = capsys.readouterr().err
    assert "No space left on device" in said
    assert "free space, then --resume" in said
    assert contents(run / "model") == before
    monkeypatch.undo()
    assert main(["train", "--out", str(run), "--resume"]) == 0
    assert cz.models.load(run / "model")


# Options that no run can have


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--model llama3-2b", "unknown model 'llama3-2b': choose one of small, llama3-1b, llama3"),
        ("--model qwen3", "unknown model 'qwen3': choose one of small"),
        ("--model llama3-1b --width 3", "a whole model has sizes of its own: leave out --width"),
        ("--model llama3-1b --layers 3 --heads 2", "leave out --layers, --heads"),
        ("--model llama3-1b --context 200000", "a context of 200000 is above llama3-1b's: choose"),
        ("--model llama3-1b --context 0", "context is 0, not a positive whole number: choose 1"),
        ("--model llama3-1b --device abacus", "device 'abacus' is not usable ("),
        ("--model small --init x", "--init holds a whole model, not the small one: leave --model"),
        ("--init nowhere", "nowhere holds no config.json: name the folder of a checkpoint"),
        ("--init start --model llama3-1b", "start holds another model than llama3-1b: leave --mod"),
        ("--init start --context 65", "a context of 65 is above qwen3's: choose 64"),
        ("--init start --precision half", "unknown precision 'half': choose one of full, mixed"),
        (
            "--init start --precision mixed --dtype bfloat16",
            "--precision mixed keeps weights in float32, not bfloat16: leave --dtype out, or add",
        ),
        ("--init start --accumulate 3", "accumulate is 3, which doesn't divide a batch of 4: choo"),
        ("--init start --accumulate 0", "accumulate is 0, which doesn't divide"),
        ("--tokenizer x.json", "--tokenizer belongs to whole models: leave it out, or choose --m"),
        ("--accumulate 3", "accumulate is 3, which doesn't divide a batch of 8"),
    ],
)
@pytest.mark.parametrize("command", ["train", "train --compare"])
def test_options_that_do_not_fit(tmp_path, monkeypatch, capsys, start, command, options, said):
    shutil.copytree(start, tmp_path / "start")
    monkeypatch.chdir(tmp_path)
    more = ["--device", "cpu"] if "--init start" in options else []
    assert said in refusal(capsys, tmp_path, [*command.split(), *options.split(), *more])


def test_weights_that_are_not_those_of_the_configuration(tmp_path, start, capsys):
    folder = shutil.copytree(start, tmp_path / "start")
    described = json.loads((folder / "config.json").read_text()) | {"intermediate_size": 64}
    (folder / "config.json").write_text(json.dumps(described))
    arguments = ["train", "--out", tmp_path / "run", "--init", folder, *OPTIONS]
    line = refusal(capsys, tmp_path, arguments)
    assert "--init: " in line
    assert "of another shape: model.layers.0.mlp.down_proj.weight [32, 48] instead of" in line


def test_a_vocabulary_below_256_cannot_learn_bytes(tmp_path, capsys):
    cz.models.save(tiny(tiny_config(vocabulary=97)), tmp_path / "start")
    arguments = ["train", "--out", tmp_path / "run", "--init", tmp_path / "start", *OPTIONS]
    line = refusal(capsys, tmp_path, arguments)
    assert "the tokenizer has 256 tokens, the model knows 97: name the --tokenizer of" in line
