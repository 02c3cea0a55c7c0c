"""The suite `model-loss` at tiny sizes on a CPU, and what the suites of models refuse."""

import pytest
from small_runs import refusal
from test_bench_model import CPU, NARROW, bench, case, records

from cadenza.tools.bench import hugging_face, model_loss
from cadenza.tools.bench.case import Bench
from cadenza.tools.bench.measurement import Effort
from cadenza.tools.bench.model_loss import differences, order
from cadenza.tools.bench.tables import verdict

pytest.importorskip("transformers", reason="models of transformers are measured")
SHORT = NARROW.replace("B=2", "B=8") + ",steps=4"


@pytest.fixture
def text(tmp_path):
    """A text that is easy to learn."""
    file = tmp_path / "text"
    file.write_bytes(b"to be or not to be; " * 200)
    return file


@pytest.mark.slow
def test_three_trainings_and_their_spread(tmp_path, text, capsys):
    assert bench(tmp_path, "model-loss", "--text", str(text), sizes=SHORT) == 0
    found = records(tmp_path, "model-loss")
    ours, eager, other = (found["1b", name] for name in ("ours", "eager", "reordered"))
    assert [step for step, _ in ours["held_out"]] == [1, 2, 3, 4]
    assert len(ours["losses"]) == 4
    assert len({one["text"] for one in found.values()}) == 1
    # The same weights and the same first batch; then only what rounding makes of it.
    assert ours["losses"][0] == pytest.approx(eager["losses"][0], abs=1e-2)
    assert ours["losses"] == pytest.approx(eager["losses"], abs=3e-2)
    assert eager["losses"] != other["losses"]
    assert eager["losses"][-1] < eager["losses"][0]
    mine, spread = (farthest(one["held_out"], eager["held_out"]) for one in (ours, other))
    assert (ours["difference"], other["difference"]) == pytest.approx((mine, spread), abs=1e-6)
    assert spread > 0
    assert ours["inside"] is (mine <= spread)
    said = capsys.readouterr().out
    assert ("inside the spread" if mine <= spread else "OUTSIDE the spread") in said


def farthest(points, others):
    """How far losses of the same steps are apart at most."""
    assert [step for step, _ in points] == [step for step, _ in others]
    return max(abs(loss - other) for (_, loss), (_, other) in zip(points, others, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1.0, -1.0])
def test_a_model_that_learns_as_the_stock_one_does_is_inside(scale, monkeypatch, text):
    """And one that learns its way uphill is not."""

    def scaled(model):
        own = hugging_face.stock_loss(model)
        return lambda tokens: (1 - scale) * own(tokens).detach() + scale * own(tokens)

    monkeypatch.setitem(model_loss.LOSSES, "ours", scaled)
    given = Bench(CPU, ("ours", "eager", "reordered"), Effort(), print, str(text))
    ours, eager, other = model_loss.run(case(layers=1, B=8, steps=3), given)
    assert ours["inside"] is (scale > 0)
    assert (ours["difference"] > other["difference"]) is (scale < 0)
    assert (ours["held_out"] == eager["held_out"]) is (scale > 0)


def losses(*held_out):
    return {"held_out": [[step, loss] for step, loss in enumerate(held_out)]}


def test_a_difference_is_the_largest_from_the_stock_model():
    found = {"ours": losses(3.0, 2.5), "eager": losses(3.1, 2.0), "reordered": losses(3.0, 2.1)}
    assert dict(differences(found)) == {"ours": 0.5, "reordered": 0.1}
    assert dict(differences({**found, "eager": {"failed": "no"}})) == {}
    assert dict(differences({"ours": {"failed": "no"}, "eager": losses(1.0)})) == {}


@pytest.mark.parametrize(("inside", "where"), [(True, "inside"), (False, "OUTSIDE")])
def test_a_verdict_is_of_one_run(inside, where):
    ours = {"run": "first", "difference": 0.02, "inside": inside}
    found = {"ours": ours, "reordered": {"run": "first", "difference": 0.01}}
    said = f"ours is at most 0.0200 from eager, reordered 0.0100: {where} the spread"
    assert verdict(found) == said
    assert verdict({**found, "reordered": {"run": "second", "difference": 0.01}}) == ""
    assert verdict({"ours": {"run": "first", "failed": "no"}}) == ""


def test_a_training_that_breaks_down_is_no_figure(monkeypatch, text):
    monkeypatch.setattr(model_loss, "RATE", 1e30)
    given = Bench(CPU, ("eager",), Effort(), print, str(text))
    (eager,) = model_loss.run(case(layers=1, B=8, steps=3), given)
    assert eager["failed"] == "FloatingPointError: its loss is no number any more"


def test_another_order_has_the_same_batches():
    assert list(order(20, shuffled=False)) == list(range(20))
    assert list(order(20, shuffled=True)) != list(range(20))
    assert sorted(order(20, shuffled=True)) == list(range(20))


@pytest.mark.parametrize(
    ("suite", "more", "said"),
    [
        ("model-loss", "--text nowhere", "--text nowhere cannot be read"),
        ("model-loss", "--text there", "choose a longer --text"),
        ("model-loss", "--size V=99", "bytes are tokens, so V is 256 at least"),
        ("kernels", "--text there", "--text is for the suite model-loss"),
        ("model", "--size steps=3", "model has no size 'steps'"),
        ("model", "--only 2b", "'2b' is none of the patterns 1b, 8b-width"),
    ],
)
def test_a_question_that_cannot_be_answered(capsys, tmp_path, monkeypatch, suite, more, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").write_text("too short")
    assert said in refusal(capsys, tmp_path, ["bench", suite, *more.split(), "--device", "cpu"])
