"""`cadenza audit` on the command line: what it prints and writes, and what it refuses."""

import json
import time
from pathlib import Path

import pytest
from audited import LLAMA
from small_runs import refusal

from cadenza.tools.audit import run
from cadenza.tools.audit.counting import CLASSES
from cadenza.tools.audit.fakes import fake
from cadenza.tools.audit.options import AuditOptions
from cadenza.tools.audit.run import audit
from cadenza.tools.audit.savings import amounts, measured, predicted
from cadenza.tools.audit.subject import find_subject
from cadenza.tools.audit.trace import traced
from cadenza.tools.cli import main
from cadenza.tools.fault import Fault

TARGETS = Path(__file__).with_name("audited.py")
RECORD = TARGETS.parent.parent / "benchmarks" / "audit" / "llama3-8b.json"
WORDS = ("--batch", "2", "--sequence", "32", "--no-measure")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder to work in, with a configuration."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    return tmp_path


@pytest.fixture
def refused(capsys, folder):
    """Runs a command that must be refused in one line, which it returns, without a new file."""
    return lambda *arguments: refusal(capsys, folder, ("audit", *arguments))


def found(capsys, *arguments):
    """What the command prints as data."""
    assert main(["audit", *arguments, "--json", *WORDS]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_steps_are_predicted_within_15_percent_of_what_the_repository_has_measured():
    """Of four layers as wide as Llama-3-8B's, on an H200, eager, compiled and with Cadenza."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    sizes = {"layers": 4, "sequence": 8192, "batch": 2}
    prediction = audit("llama3-8b", AuditOptions(gpu="h200", measure=False, **sizes)).prediction
    assert {one["variant"] for one in record["measured"]} == set(prediction.variants)
    for one in record["measured"]:
        step = prediction.step(one["variant"], "bf16")
        assert 1e3 * step.total == pytest.approx(one["ms"], rel=0.15)


@pytest.mark.slow
def test_a_configuration_as_data_and_as_a_page(folder, capsys):
    words = ("--hours", "1000", "--price", "2.5", "--gpu", "h200", "--html", "page.html")
    data = found(capsys, str(folder), *words)
    assert data["gpu"] == "H200"
    assert set(data["step"]) == {"bf16", "fp8"}
    for times in data["step"].values():
        assert set(times) == {"eager", "compiled", "cadenza"}
        for one in times.values():
            assert one["ms"] == pytest.approx(sum(one["classes"].values()))
            assert set(one["classes"]) <= set(CLASSES)
    layer = data["parts"]["cadenza"][0]
    assert (layer["name"], layer["count"]) == ("layer", 3)
    kernels = [one for name in layer["kernels"] for one in layer["kernels"][name]]
    assert sum(one["us"] for one in kernels) == pytest.approx(1e3 * layer["times"]["bf16"]["ms"])
    saving = data["savings"]["bf16"]
    before, after = (data["step"]["bf16"][name]["ms"] for name in ("compiled", "cadenza"))
    assert saving["share"] == pytest.approx(1 - after / before)
    assert saving["hours"] == pytest.approx([1000 * saving[k] for k in ("share", "least", "most")])
    assert saving["money"] == pytest.approx([2.5 * hours for hours in saving["hours"]])
    assert saving["least"] < saving["share"] < saving["most"]
    assert "<svg" in (folder / "page.html").read_text(encoding="utf-8")


def test_a_model_of_ones_own_that_cadenza_does_not_know(folder, capsys):
    assert main(["audit", f"{TARGETS}:classifier", "--hours", "10", *WORDS]) == 0
    said = capsys.readouterr().out
    assert "layer, 3 × a step" in said
    assert "no cadenza: Cadenza recognises no layer of Classifier: Branch has no self_attn" in said
    assert "saves" not in said
    assert "fp32" in said


def test_a_model_of_ones_own_with_the_names_of_a_decoder(folder):
    target = find_subject(f"{TARGETS}:llama", 1, None)
    with fake():
        before, after = target.before().parts(), target.after().parts()
        products = [x for x in traced(after[0])["forward"] if x.kind == "products"]
        stock = [x for x in traced(before[0])["forward"] if x.kind == "products"]
    assert [part.count for part in before if part.is_layer] == [3]
    assert sum(part.count for part in after if part.is_layer) == 3
    assert sum(x.flops for x in products) == sum(x.flops for x in stock)
    assert not any(x.name.startswith("mm ") for x in products)


@pytest.mark.slow
def test_a_model_whose_layers_were_copied(folder):
    prediction = audit(f"{TARGETS}:copied", AuditOptions(measure=False)).prediction
    assert set(prediction.variants) == {"eager", "compiled"}
    assert prediction.layers == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("llama9-8b", "unknown target 'llama9-8b': one of llama3-1b"),
        ("config.json --gpu tpu", "unknown --gpu 'tpu': one of h100"),
        ("config.json --layers 4", "--layers 4: config.json has 1 to 3"),
        ("config.json --batch 0", "--batch 0: choose 1 or more"),
        ("config.json --sequence 1000000000000", "--sequence 1000000000000: choose at most 2147"),
        ("config.json --batch 99999999999999999999", "is no number of 64 bits"),
        (f"config.json --html {'a' * 5000}", "is longer than a file's name may be"),
        ("config.json --price 2", "--price needs --hours"),
        ("config.json --hours -1", "--hours -1: choose 0 or more"),
        ("config.json --spread 2", "--spread 2: choose a share"),
        ("config.json --computing 1.5", "--computing 1.5 is no share"),
        ("config.json --variants ours", "--variants 'ours': choose of eager"),
        ("config.json --steps 0", "--steps 0"),
        ("gpt2 --sequence 2048", "--sequence 2048: gpt2 has 1024 positions"),
        ("config.json --html .", "--html . is a folder: name a file"),
        ("config.json --html no/page.html", "lies in a folder that is not there"),
        (f"{TARGETS}:nothing", "has no function 'nothing'"),
        (f"{TARGETS}:failing", "failing fails: RuntimeError: no model"),
        (f"{TARGETS}:alone", "alone must return a module and a batch"),
        (f"{TARGETS}:ill_fed", "Classifier fails on its batch: TypeError"),
        (f"{TARGETS}:classifier --layers 1", "--layers is for sizes and configurations"),
        ("missing.py:function", "there is no file missing.py"),
    ],
)
def test_bad_input_is_one_line(refused, words, said):
    assert said in refused(*words.split(), "--no-measure")


def test_measuring_needs_a_gpu(refused, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "--measure needs a GPU" in refused("config.json", "--measure")


def test_a_page_that_cannot_be_written(folder, monkeypatch):
    def full(path, content):
        raise Fault(f"{path} cannot be written (no space): choose another --out")

    monkeypatch.setattr(run, "write_whole", full)
    with pytest.raises(Fault, match="another --html"):
        run._write(folder / "page.html", "text")


def test_savings_and_their_ranges():
    saving = predicted(0.1, 0.3)
    assert (saving.share, saving.least, saving.most) == pytest.approx((0.1, 0.07, 0.13))
    lost = predicted(-0.1, 0.3)
    assert lost.least < lost.share < lost.most < 0
    steps = measured((90.0, 100.0, 110.0), (80.0, 81.0, 88.0))
    assert (steps.share, steps.least, steps.most) == pytest.approx(
        (0.19, 1 - 88 / 90, 1 - 80 / 110)
    )
    assert "hours" not in amounts(saving, AuditOptions())


@pytest.mark.slow
def test_a_large_model_takes_less_than_a_minute(capsys):
    start = time.monotonic()
    assert main(["audit", "llama3-8b", "--no-measure"]) == 0
    assert time.monotonic() - start < 60
    assert "layer, 32 × a step" in capsys.readouterr().out
