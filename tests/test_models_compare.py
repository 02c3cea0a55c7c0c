"""`cadenza train --compare` on whole models, tiny ones, beside their stock twins."""

import json

import pytest
from tiny_models import settings_of, tiny, tiny_config, train

import cadenza as cz
from cadenza.tools import compare, contender, whole
from cadenza.tools.contender import Request
from cadenza.tools.trainer import MemoryFault

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """The folder of a tiny Qwen 3."""
    folder = tmp_path_factory.mktemp("start") / "model"
    cz.models.save(tiny(tiny_config("qwen3")), folder)
    return folder


def in_this_process(request):
    """Answers a request without paying for a process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contender.sys.stdin, "read", request.to_json, raising=False)
        return contender.main()


@pytest.fixture
def quick(monkeypatch):
    """Comparisons in this process, timed shortly."""
    monkeypatch.setattr(compare, "launch", in_this_process)
    monkeypatch.setattr(contender, "TIMED_ROUNDS", contender.WARMUP_ROUNDS + 1)


def report_of(folder):
    return json.loads((folder / "compare.json").read_text())


def test_a_comparison_in_float64_holds_its_bound(quick, tmp_path, capsys):
    cz.models.save(tiny(tiny_config("llama")), tmp_path / "start")
    options = ["--compare", "--steps", 3, "--dtype", "float64", "--accumulate", 2]
    assert train(tmp_path / "run", tmp_path / "start", *options) == 0
    report = report_of(tmp_path / "run")
    assert [bound["limit"] for bound in report["bounds"]] == [1e-9]
    assert report["passed"]
    assert report["interleaved_seconds_per_step"]["ratio"] > 0
    assert "pass: ours from stock" in capsys.readouterr().out


def test_a_comparison_in_float32_holds_its_bounds(quick, start, tmp_path):
    options = ["--compare", "--steps", 3, "--precision", "full", "--checkpointing"]
    assert train(tmp_path / "run", start, *options) == 0
    assert [bound["holds"] for bound in report_of(tmp_path / "run")["bounds"]] == [True, True]


def test_mixed_precision_is_reported_without_bounds(quick, start, tmp_path, capsys):
    assert train(tmp_path / "run", start, "--compare", "--steps", 2) == 0
    report = report_of(tmp_path / "run")
    assert report["bounds"] == []
    assert report["largest_differences"]["cadenza"]["training"] < 1e-2
    assert "2 steps in bfloat16" in capsys.readouterr().out


def test_a_model_that_is_off_by_a_millionth_fails(quick, start, tmp_path, monkeypatch):
    class Wrong(cz.models.StockDecoder):
        """The twin with a gradient too large."""

        def forward(self, tokens, targets=None):
            """As the twin's."""
            return super().forward(tokens, targets) * (1 + 1e-6)

    monkeypatch.setitem(whole.KINDS, "cadenza", Wrong)
    options = ["--compare", "--steps", 2, "--dtype", "float64"]
    assert train(tmp_path / "run", start, *options) == 1


def test_two_models_that_do_not_fit_together_are_not_timed_in_turn(
    start, tmp_path, monkeypatch, capsys
):
    def launch(request):
        if request.part == contender.TIMING:
            monkeypatch.setattr(contender, "trainer_of", refuse)
        return in_this_process(request)

    def refuse(*_):
        raise MemoryFault("not enough")

    monkeypatch.setattr(compare, "launch", launch)
    assert train(tmp_path / "run", start, "--compare", "--steps", 2) == 0
    assert report_of(tmp_path / "run")["interleaved_seconds_per_step"] == {}
    assert "taken in turn: cadenza and stock don't fit in memory toge" in capsys.readouterr().out


def test_a_contender_of_too_little_memory_still_says_so(start, tmp_path, monkeypatch, capsys):
    def refuse(*_):
        raise MemoryFault("not enough")

    monkeypatch.setattr(contender, "trainer_of", refuse)
    request = Request("stock", settings_of(start), 1, str(tmp_path / "result"))
    assert in_this_process(request) == 2
    assert capsys.readouterr().err == "cadenza: not enough\n"
