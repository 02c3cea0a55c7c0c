"""`cadenza train --compare`: what it measures, what it reports, and that it can fail."""

import json
import math
import re

import pytest
import torch
from small_runs import PNG, train

from cadenza.library.models import StockLlama
from cadenza.tools import compare, contender, trainer
from cadenza.tools.cli import main
from cadenza.tools.contender import Request, perturb
from cadenza.tools.memory import PeakMemory
from cadenza.tools.settings import Settings
from cadenza.tools.verdict import RESOLUTION, Drift, bounds, drift, relative

pytestmark = pytest.mark.slow

PARTS = ["cadenza", "stock", "perturbed"]


def in_this_process(request):
    """Answers a request without paying for a process; `main` sees it on standard input."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contender.sys.stdin, "read", request.to_json, raising=False)
        return contender.main()


@pytest.fixture
def quick(monkeypatch):
    """Comparisons in this process."""
    monkeypatch.setattr(compare, "launch", in_this_process)


def run(folder, *more):
    """Compares over 6 steps."""
    return train(folder, "--compare", "--steps", 6, *more)


def check_report(folder, said):
    """A report has every part, and the text says the same."""
    assert sorted(path.name for path in folder.iterdir()) == ["compare.json", "compare.png"]
    assert (folder / "compare.png").read_bytes().startswith(PNG)
    report = json.loads((folder / "compare.json").read_text())
    assert report["steps"] == 6
    assert list(report["contenders"]) == PARTS
    for part in report["contenders"].values():
        assert len(part["training"]) == 6
        assert [point["step"] for point in part["validation"]] == [0, 6]
        assert part["seconds_per_step"] > 0
    for part in ("cadenza", "perturbed"):
        largest = report["largest_differences"][part]
        numbers = f"training {largest['training']:.2e}, held out {largest['validation']:.2e}"
        assert f"largest relative difference, {part} from stock: {numbers}" in said
    timing = report["interleaved_seconds_per_step"]
    assert timing["ratio"] == pytest.approx(timing["cadenza"] / timing["stock"])
    assert f"ratio {timing['ratio']:.2f}" in said
    for part in PARTS:
        assert re.search(rf"{part} +\d\.\d{{4}} +\d+\.\d ms +-?\d+ MiB", said)
    return report


def test_a_comparison_reports_differences_time_and_memory(quick, tmp_path, capsys):
    code = run(tmp_path / "run")
    said = capsys.readouterr().out
    report = check_report(tmp_path / "run", said)
    first, second = report["bounds"]
    assert first["name"] == "ours from stock, first 500 steps"
    assert first["limit"] == 1e-4
    assert first["holds"]
    assert second["limit"] == 3
    assert code == (0 if report["passed"] else 1)
    assert said.count("pass: ") + said.count("FAIL: ") == 2


@pytest.mark.slow
def test_all_contenders_start_alike_and_see_the_same_batches(quick, tmp_path):
    run(tmp_path / "run", "--dtype", "float64")
    parts = json.loads((tmp_path / "run" / "compare.json").read_text())["contenders"]
    for losses in zip(*(parts[name]["training"] for name in PARTS), strict=True):
        assert max(losses) - min(losses) < 1e-12
    for held_out in zip(*(parts[name]["validation"] for name in PARTS), strict=True):
        assert max(x["loss"] for x in held_out) - min(x["loss"] for x in held_out) < 1e-12


def test_only_the_perturbed_twin_starts_from_other_weights():
    settings = Settings(width=32, layers=1, feed_forward=48)
    ours, stock, perturbed = (
        contender.trainer_of(part, settings).model.state_dict() for part in PARTS
    )
    for name, weight in stock.items():
        assert torch.equal(ours[name], weight), name
        assert (perturbed[name] != weight).all(), name
        torch.testing.assert_close(perturbed[name], weight, rtol=2e-7, atol=0.0)


@pytest.mark.slow
def test_float64_has_a_bound_of_its_own(quick, tmp_path, capsys):
    assert run(tmp_path / "run", "--dtype", "float64") == 0
    report = json.loads((tmp_path / "run" / "compare.json").read_text())
    (bound,) = report["bounds"]
    assert bound["name"] == "ours from stock, first 50 steps"
    assert bound["limit"] == 1e-9
    assert "pass: ours from stock" in capsys.readouterr().out


@pytest.mark.slow
def test_bfloat16_is_reported_without_bounds(quick, tmp_path):
    assert run(tmp_path / "run", "--dtype", "bfloat16") == 0
    assert json.loads((tmp_path / "run" / "compare.json").read_text())["bounds"] == []


@pytest.mark.parametrize(("dtype", "fault"), [("float32", 1e-3), ("float64", 1e-6)])
def test_a_model_that_is_off_by_a_thousandth_fails(
    quick, tmp_path, monkeypatch, capsys, dtype, fault
):
    class Wrong(StockLlama):
        """The twin with a gradient too large."""

        def forward(self, tokens, targets=None):
            """As the twin's."""
            return super().forward(tokens, targets) * (1 + fault)

    monkeypatch.setitem(trainer.MODELS, "cadenza", Wrong)
    assert run(tmp_path / "run", "--dtype", dtype) == 1
    assert "FAIL: ours from stock" in capsys.readouterr().out
    assert not json.loads((tmp_path / "run" / "compare.json").read_text())["passed"]


def test_a_part_that_fails_ends_the_comparison(tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "launch", lambda request: 2 * (request.part == "stock"))
    monkeypatch.setattr(compare.Path, "read_text", lambda _: "{}")
    assert run(tmp_path / "run") == 2
    assert not (tmp_path / "run").exists()


def test_a_part_without_memory_says_so(tmp_path, capsys):
    settings = Settings(width=4 * 10**11)
    assert in_this_process(Request("stock", settings, 1, str(tmp_path / "result"))) == 2
    said = capsys.readouterr().err
    assert said.startswith("cadenza: there is not enough memory")
    assert said.count("\n") == 1


def test_ctrl_c_ends_a_comparison_and_leaves_nothing(tmp_path, monkeypatch, capsys):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(compare, "launch", interrupted)
    assert run(tmp_path / "run") == 130
    assert "stopped; a comparison is not resumed, start it again" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


def test_steps_are_500_or_50_in_float64(monkeypatch, tmp_path):
    asked = []

    def observed(request):
        asked.append((request.part, request.steps, request.settings.dtype))
        return 1

    monkeypatch.setattr(compare, "launch", observed)
    for number, dtype in enumerate(("float32", "float64")):
        options = ["--out", str(tmp_path / str(number)), "--dtype", dtype]
        assert main(["train", "--compare", *options]) == 1
    assert asked == [("cadenza", 500, "float32"), ("cadenza", 50, "float64")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_perturbed_twin_is_one_unit_in_the_last_place_away(dtype):
    twins = [StockLlama(Settings(width=32, feed_forward=48).config()).to(dtype) for _ in range(3)]
    for twin in twins[1:]:
        twin.load_state_dict(twins[0].state_dict())
        perturb(twin, seed=1)
    far = torch.tensor(math.inf, dtype=dtype)
    for name, weight in twins[0].named_parameters():
        moved = twins[1].get_parameter(name)
        assert torch.equal(moved, twins[2].get_parameter(name))
        up, down = (torch.nextafter(weight, end.expand_as(weight)) for end in (far, -far))
        assert ((moved == up) | (moved == down)).all(), name
        assert 0.2 < (moved == up).double().mean() < 0.8, name


# The verdict


def result(*losses):
    """A contender's losses, held-out ones too."""
    held_out = [{"step": 0, "loss": losses[0]}, {"step": len(losses), "loss": losses[-1]}]
    return {"training": list(losses), "validation": held_out}


def test_drift_is_relative_to_stock_step_by_step():
    found = drift(result(2.0, 3.3, 4.0), result(2.0, 3.0, 5.0))
    assert found.training == pytest.approx([0.0, 0.1, 0.2])
    assert found.validation == pytest.approx({0: 0.0, 3: 0.2})
    assert found.largest() == pytest.approx(0.2)
    assert found.largest(2) == pytest.approx(0.1)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_far_and_fails(value):
    assert relative(value, 1.0) > 1e300
    assert relative(1.0, value) > 1e300
    near, far = Drift([0.0], {0: 0.0}), drift(result(1.0, value), result(1.0, 1.0))
    assert not any(bound.holds for bound in bounds("float32", far, near))
    json.dumps(far.training, allow_nan=False)


@pytest.mark.parametrize(
    ("ours", "perturbed", "hold"),
    [
        (0.9e-4, 0.4e-4, [True, True]),
        (1.1e-4, 1.0e-4, [False, True]),
        (0.9e-4, 0.2e-4, [True, False]),
        (2.9 * RESOLUTION, 0.0, [True, True]),
        (3.1 * RESOLUTION, 0.0, [True, False]),
    ],
)
def test_bounds_in_float32(ours, perturbed, hold):
    for kind in (lambda x: Drift([0.0, x], {0: 0.0}), lambda x: Drift([0.0], {1: x})):
        assert [bound.holds for bound in bounds("float32", kind(ours), kind(perturbed))] == hold


def test_bounds_look_at_the_steps_they_were_made_for():
    calm = Drift([0.0] * 600, {})
    late = Drift([1e-5] * 500 + [1.0] * 100, {550: 1.0})
    assert bounds("float32", late, calm)[0].holds
    assert not bounds("float32", Drift([0.0] * 499 + [1.0], {}), calm)[0].holds
    assert bounds("float64", Drift([0.0] * 50 + [1.0], {51: 1.0}), calm)[0].holds
    assert not bounds("float64", Drift([2e-9], {}), calm)[0].holds


# Processes


def test_peak_memory_sees_what_was_given_back():
    memory = PeakMemory(torch.device("cpu"))
    block = torch.ones(2**28, dtype=torch.uint8)
    del block
    assert memory.bytes() > 200 * 2**20


@pytest.mark.slow
def test_each_part_has_a_process_of_its_own(tmp_path, capfd):
    ballast = torch.ones(2**28, dtype=torch.uint8)
    code = run(tmp_path / "run")
    del ballast
    said = capfd.readouterr().out
    report = check_report(tmp_path / "run", said)
    assert code == (0 if report["passed"] else 1)
    for part in PARTS:
        assert re.search(rf"^{part} 6/6 ", said, re.MULTILINE)
        assert 0 < report["contenders"][part]["peak_bytes"] < 2**28


@pytest.mark.slow
def test_a_part_works_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = Settings(width=32, layers=1, feed_forward=48, context=16, batch=2)
    assert compare.measure("stock", settings, 2)["training"]
