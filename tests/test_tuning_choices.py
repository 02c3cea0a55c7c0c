"""The choice among candidates: by times in turns, and of those that are near by themselves.

Workers are pretended where they would launch.
"""

import json
import logging
from functools import partial

import pytest
from tuning_place import (
    HOPPER,
    FakeGPU,
    Pretended,
    chosen,
    library,
    place,
    plans,
    settled,
    stages,
)

from cadenza.backends.triton.compiled import Report
from cadenza.backends.triton.configuration import Configuration, Strip
from cadenza.backends.triton.tuning import choices, contests, records, timing
from cadenza.backends.triton.tuning.recipes import ProductCall
from cadenza.backends.triton.tuning.worker import Compile, Measure
from cadenza.backends.triton.tuning.workers import Hangs
from cadenza.core.errors import BackEndError

pytestmark = pytest.mark.usefixtures(place.__name__)


def test_the_fastest_is_chosen_and_kept(monkeypatch):
    workers = Pretended(stages)
    found = chosen(monkeypatch, workers)
    assert {(c.stages, c.library) for c in found} == {(3, False)}
    assert workers.measured == 2
    assert len(records.read()) == 2
    assert chosen(monkeypatch, workers) == found
    monkeypatch.setattr(choices, "_decided", {})  # as in another process
    assert chosen(monkeypatch, workers) == found
    assert workers.measured == 2


def test_the_library_may_win(monkeypatch):
    assert all(choice.library for choice in chosen(monkeypatch, Pretended(library)))


def thrifty(calls):
    """By itself the library is fastest, then plain tiles."""
    if isinstance(calls[0], ProductCall):
        return 5.0
    return 6.0 if calls[0].options["num_warps"] == 8 else 7.0


def near(calls):
    """In turns pingpong is fastest, and the library too slow to go on."""
    if isinstance(calls[0], ProductCall):
        return 9.0
    return 7.0 if calls[0].options["num_warps"] == 8 else 6.5


def test_of_those_that_are_near_one_that_is_much_faster_by_itself_is_chosen(monkeypatch):
    found = chosen(monkeypatch, Pretended(near, alone=thrifty))
    assert {(c.pingpong, c.library) for c in found} == {(False, False)}
    for entry in records.read().values():
        assert len(entry["alone"]) < len(entry["microseconds"])
        assert set(entry["alone"].values()) == {6.0, 7.0}
        assert "library" not in entry["alone"]


@pytest.mark.parametrize("slope", [1e-3, 0.05, 0.2])
def test_a_little_less_time_by_itself_does_not_make_up_for_more_in_turns(monkeypatch, slope):
    """Times by themselves scatter more than what they differ by here."""
    found = chosen(monkeypatch, Pretended(near, alone=lambda calls: 6.0 - slope * near(calls)))
    assert {(c.pingpong, c.library) for c in found} == {(True, False)}
    assert all(len(entry["alone"]) > 1 for entry in records.read().values())


class HangsAlone(Pretended):
    """Workers that hang where candidates run by themselves."""

    def ask(self, task, seconds, kind, hear=None):
        """No answer to that."""
        if isinstance(task, Measure) and task.alone:
            raise Hangs("no answer in time", None)
        return super().ask(task, seconds, kind, hear)


def test_where_none_is_timed_by_itself_turns_decide(monkeypatch):
    found = chosen(monkeypatch, HangsAlone(near))
    assert {(c.pingpong, c.library) for c in found} == {(True, False)}
    assert not any("alone" in entry for entry in records.read().values())


def test_one_of_a_kind_goes_on(monkeypatch):
    """Candidates of one template and tile take the same energy: their order in turns holds."""
    kinds = [
        Configuration(128, 128, 64),
        Configuration(128, 128, 64, group=4),
        Configuration(library=True),
    ]
    assert choices._finalists(kinds, [2.0, 1.9, 2.1]) == [1, 2]
    assert choices._finalists(kinds, [2.0, 1.9, 2.5]) == [1]
    assert choices._finalists(kinds, ["spilled", "spilled", 2.5]) == [2]
    tiles = [Configuration(size, 128) for size in (8, 16, 32, 64, 128)]
    assert choices._finalists(tiles, [2.3, 2.25, 2.2, 2.1, 2.0]) == [1, 2, 3, 4], "the fastest"
    pairs = [Configuration(size, 128, pingpong=True) for size in (64, 128, 192, 256)]
    given = [*pairs, Configuration(128, 128), Configuration(256, 128)]
    times = [2.0, 2.01, 2.02, 2.03, 2.25, 2.26]
    assert choices._finalists(given, times) == [0, 1, 2, 3], "energy makes up no eighth"
    times[4] = 2.1
    assert choices._finalists(given, times) == [0, 1, 2, 4], "one of each template"
    assert choices._finalists([Strip(BM=8), Strip(BM=4)], [2.0, 1.9]) == [1]


@pytest.mark.parametrize("milliseconds", [0.02, 0.3, 0.9, 1.9, 2.1, 5.5, 12.5, 18.0, 40.0, 95.0])
def test_a_kernel_is_measured_for_a_second_at_most(monkeypatch, milliseconds):
    """Ten candidates by a GPU's own clock; those that go on are fewer where calls are long."""
    gpu = FakeGPU(monkeypatch)
    tiles = [Configuration(8 * (n + 1), 128) for n in range(10)]
    runs = {n: partial(gpu.call, (1 + n / 100) * milliseconds) for n in range(10)}
    turns = timing.timed(runs, choices.OF_KERNEL["first"])
    assert turns == pytest.approx({n: 1e3 * (1 + n / 100) * milliseconds for n in runs})
    took = gpu.now / 1e3
    assert took <= timing.spent(turns.values(), choices.OF_KERNEL["first"]) + 1e-3
    left = choices.IN_ALL["first"] - timing.spent(turns.values(), choices.OF_KERNEL["first"])
    most = int(left / choices.BY_ITSELF["first"])
    finalists = choices._finalists(tiles, [*turns.values()], most)
    assert len(finalists) >= (4 if milliseconds < 2 else 2 if milliseconds < 20 else 1)
    if len(finalists) > 1:
        kept = {n: runs[n] for n in finalists}
        timing.timed_alone(kept, choices.BY_ITSELF["first"] * len(kept))
    assert gpu.now <= 1000.0


def test_full_measures_again_what_was_measured_in_short(monkeypatch):
    workers = Pretended(stages)
    chosen(monkeypatch, workers)
    monkeypatch.setattr(choices, "_decided", {})
    monkeypatch.setenv("CADENZA_TUNE", "full")
    chosen(monkeypatch, workers)
    assert workers.measured == 4
    assert all(entry["full"] for entry in records.read().values())


def test_what_hangs_is_out(monkeypatch):
    found = chosen(monkeypatch, Pretended(stages, hanging=[4]))  # pingpong has 4 warps
    assert all(choice.warps == 8 for choice in found)
    times = [t for entry in records.read().values() for t in entry["microseconds"].values()]
    assert "no answer in time" in times


@pytest.mark.parametrize("report", [Report(255, 500, 1000), Report(200, 0, 10**6)])
def test_what_spills_or_does_not_fit_is_out(monkeypatch, caplog, report):
    with caplog.at_level(logging.WARNING, "cadenza"):
        found = chosen(monkeypatch, Pretended(stages, report=report))
    assert not any(isinstance(choice, Configuration) and choice.pingpong for choice in found)


def test_nobody_finishes(monkeypatch, caplog):
    with caplog.at_level(logging.WARNING, "cadenza"):
        found = chosen(monkeypatch, Pretended(lambda calls: "out of memory"))
    plan, text = plans("llama-mlp")[0]
    defaults = [c.choices[0] for c in contests.contests_of(plan, text, settled(plan), False)]
    assert found == defaults
    assert "none of its candidates runs" in caplog.text
    assert records.read() == {}


def test_a_failure_of_measuring_costs_no_result(monkeypatch, caplog):
    def fails(*given):
        raise RuntimeError("planted")

    monkeypatch.setattr(choices, "contests_of", fails)
    with caplog.at_level(logging.ERROR, "cadenza"):
        found = chosen(monkeypatch, Pretended(stages))
    assert found == [None, None]
    assert "planted" in caplog.text


def test_off_measures_nothing(monkeypatch):
    monkeypatch.setenv("CADENZA_TUNE", "off")
    assert chosen(monkeypatch, Pretended(stages)) is None


def test_an_unknown_word(monkeypatch):
    monkeypatch.setenv("CADENZA_TUNE", "on")
    with pytest.raises(BackEndError, match="one of off, first, full"):
        chosen(monkeypatch, Pretended(stages))


def test_it_tells_of_each_kernel(monkeypatch):
    heard = []
    with choices.telling(lambda *given: heard.append(given)):
        chosen(monkeypatch, Pretended(stages))
    assert [given[:2] for given in heard] == [(1, 2), (2, 2)]
    assert json.dumps(heard[0][3])


def test_what_is_compiled_ahead_is_for_the_calls_own_rows(monkeypatch):
    """Kernels compete at 1024 rows, which 16 divides: that is another binary."""
    workers, tasks = Pretended(stages), []
    ask = workers.ask
    monkeypatch.setattr(workers, "ask", lambda task, *rest: tasks.append(task) or ask(task, *rest))
    monkeypatch.setattr(choices, "WORKERS", workers)
    plan, text = plans("llama-mlp")[0]
    choices.choices(plan, text, settled(plan, rows=513))
    first, *_, ahead = (task for task in tasks if isinstance(task, Compile))
    assert all(1024 in call.arguments and 513 not in call.arguments for call in first.calls)
    assert all(513 in call.arguments and 1024 not in call.arguments for call in ahead.calls)


def test_choices_are_what_a_program_is_made_of(monkeypatch):
    from cadenza.backends.triton.program import Program

    monkeypatch.setattr(choices, "WORKERS", Pretended(stages))
    plan, text = plans("llama-mlp")[0]
    choose = choices.choices(plan, text, settled(plan))
    steps = Program(plan, choose, text, HOPPER).steps
    assert [s.configuration for s in steps] == [choose(k) for k in plan.kernels]
