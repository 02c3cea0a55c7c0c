"""How `cadenza bench` measures, by a stopwatch that only keeps the score."""

import gc
import statistics
from collections import Counter

import pytest
import torch

from cadenza.tools.bench import contest, measurement
from cadenza.tools.bench.measurement import (
    Effort,
    Entry,
    HostWatch,
    Stopwatch,
    gauge,
    measure,
    stopwatch,
)


class Score(Stopwatch):
    """Notes what it is asked; a call of a variant takes as long as `takes` says."""

    def __init__(self, takes):
        self.takes, self.log, self.current = takes, [], None

    def lead(self, seconds):
        self.log.append(("lead", seconds))

    def sample(self, entry, calls):
        for _ in range(calls):
            entry.call()
        name = self.current
        self.log.append(("sample", name, calls))
        return lambda: self.takes[name]

    def finish(self):
        self.log.append(("finish",))

    def calls(self, name):
        """A variant's only call."""

        def call():
            self.current = name
            self.log.append(("call", name))

        return [call]


def score(**takes):
    watch = Score(takes)
    return watch, {name: watch.calls(name) for name in takes}


def rounds_of(log):
    """What is noted between one finish and the next."""
    found = [[]]
    for one in log:
        if one == ("finish",):
            found.append([])
        else:
            found[-1].append(one)
    return [one for one in found if one]


def test_a_round_has_a_sample_of_each_behind_one_wait(monkeypatch):
    monkeypatch.setattr(measurement, "MOST_ROUNDS", 5)
    watch, variants = score(fast=1e-3, slow=4e-3, long=1.0)
    samples = measure(variants, Effort(1e-9), watch)
    assert samples == {"fast": [1e-3] * 5, "slow": [4e-3] * 5, "long": [1.0] * 5}
    for one in rounds_of(watch.log)[-5:]:
        assert one[0][0] == "lead"
        assert Counter(o[1] for o in one if o[0] == "sample") == {"fast": 1, "slow": 1, "long": 1}
        calls = Counter(o[1] for o in one if o[0] == "call")
        # 5 and 1 calls make a sample; one more goes before, but not before a long one.
        assert calls == {"fast": 6, "slow": 2, "long": 1}


def test_the_order_changes_from_round_to_round():
    watch, variants = score(**{f"v{k}": 1e-3 for k in range(6)})
    measure(variants, Effort(0.05), watch)
    orders = {tuple(o[1] for o in one if o[0] == "sample") for one in rounds_of(watch.log)[-5:]}
    assert len(orders) > 1


def test_bursts_are_single_calls_after_a_pause(monkeypatch):
    pauses = []
    monkeypatch.setattr(measurement.time, "sleep", pauses.append)
    monkeypatch.setattr(measurement, "MOST_ROUNDS", 5)
    watch, variants = score(a=1e-3, b=2e-3)
    samples = measure(variants, Effort(1e-9, "burst"), watch)
    assert samples == {"a": [1e-3] * 5, "b": [2e-3] * 5}
    assert set(pauses) == {0.01}
    assert len(pauses) == 2 * (1 + 5)
    assert [len([o for o in one if o[0] == "call"]) for one in rounds_of(watch.log)[-2:]] == [1, 1]


def test_alone_each_settles_before_it_is_measured(monkeypatch):
    monkeypatch.setattr(measurement, "MOST_ROUNDS", 5)
    watch, variants = score(fast=1e-3, slow=0.05, long=1.0)
    samples = measure(variants, Effort(1e-9, "alone"), watch)
    assert samples == {"fast": [1e-3] * 5, "slow": [0.05] * 5, "long": [1.0] * 5}
    blocks = rounds_of(watch.log)[-3:]
    assert all(one[0][0] == "lead" for one in blocks)
    calls = {one[-1][1]: sum(o[0] == "call" for o in one) for one in blocks}
    # 250 calls and then 150 measured, 5 and 3, or one of each.
    assert calls == {"fast": 400, "slow": 8, "long": 2}


def test_the_wait_is_as_long_as_the_host_falls_behind():
    watch, _ = score(a=1e-3)
    entry = Entry(watch.calls("a"))
    entry.host, entry.device = 5e-3, 1e-3
    assert entry.lag == pytest.approx(6 * 4e-3)
    measurement.sustained_round({"a": entry}, watch)
    assert watch.log[0][0] == "lead"
    assert watch.log[0][1] > entry.lag
    entry.host = 0.5e-3
    assert entry.lag == 0.0


@pytest.mark.parametrize(
    ("device", "calls"), [(1e-6, 20), (0.5e-3, 10), (4e-3, 1), (0.1, 1), (0.0, 20)]
)
def test_a_sample_takes_a_few_milliseconds(device, calls):
    entry = Entry([list])
    entry.device = device
    assert entry.calls == calls


def test_copies_are_taken_in_turn():
    taken = []
    entry = Entry([lambda k=k: taken.append(k) for k in range(3)])
    for _ in range(7):
        entry.call()
    assert taken == [0, 1, 2, 0, 1, 2, 0]


class Events:
    """Stands in for torch.cuda: an event knows how many calls were made before it."""

    def __init__(self, patch):
        self.done, self.slept = 0, []
        patch.setattr(torch.cuda, "Event", lambda enable_timing: Event(self))
        patch.setattr(torch.cuda, "_sleep", self.slept.append)
        patch.setattr(torch.cuda, "synchronize", lambda: None)


class Event:
    def __init__(self, events):
        self.events = events

    def record(self):
        self.at = self.events.done

    def elapsed_time(self, end):
        return 2.0 * (end.at - self.at)  # 2 ms a call


def test_a_gpus_samples_are_seconds_a_call(monkeypatch):
    events = Events(monkeypatch)

    def call():
        events.done += 1

    watch = stopwatch(torch.device("cuda"))
    reading = watch.sample(Entry([call]), 4)
    call()
    watch.finish()
    assert reading() == pytest.approx(2e-3)
    watch.lead(1e-3)
    assert events.slept == [2_000_000]
    assert measure({"a": [call]}, Effort(1e-9), watch)["a"] == pytest.approx([2e-3] * 5)


def test_a_gauge_knows_host_and_device():
    watch, variants = score(a=2e-3)
    entry = Entry(variants["a"])
    gauge(entry, watch)
    assert entry.device == 2e-3
    assert 0.0 < entry.host < 1.0


def test_the_budget_bounds_the_rounds():
    variants = {"a": [lambda: measurement.time.sleep(2e-3)]}
    few = measure(variants, Effort(1e-9), HostWatch())
    more = measure(variants, Effort(0.15), HostWatch())
    assert len(few["a"]) == measurement.LEAST_ROUNDS < len(more["a"])
    assert statistics.median(more["a"]) == pytest.approx(2e-3, rel=0.5)


def test_garbage_is_collected_between_rounds_and_not_inside():
    seen = []
    measure({"a": [lambda: seen.append(gc.isenabled())]}, Effort(1e-9), HostWatch())
    assert len(seen) > 4  # those of the gauge
    assert not any(seen[4:])
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_a_timing_is_median_and_quartiles():
    found = contest.timing([1e-6, 2e-6, 3e-6, 4e-6, 100e-6])
    assert found == {"us": 3.0, "quartiles": [2.0, 4.0], "samples": [1.0, 2.0, 3.0, 4.0, 100.0]}


def test_a_median_lies_between_its_quartiles_whatever_is_rounded():
    found = contest.timing([29.2e-6, 29.225e-6, 29.2257e-6, 29.2257e-6, 29.2257e-6])
    assert found["us"] == 29.226
    assert found["quartiles"] == [29.225, 29.226]


def test_a_peak_is_what_a_call_holds_at_most():
    size = 64 * 2**20
    found = contest.peak([lambda: torch.ones(size, dtype=torch.uint8)], torch.device("cpu"))
    assert found >= 0.9 * size
