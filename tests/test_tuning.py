"""Selection by measurement without a GPU: contests, keys, the file, worker processes, the choice.

A device is pretended where contests are made, and workers where they would launch; what they
compile for it they do compile.
"""

import json
import logging
import subprocess
from pathlib import Path

import pytest
import torch
from planned import large_call
from tuning_tasks import Answers, Dying, Hanging

from cadenza.backends.triton.compiled import Report
from cadenza.backends.triton.configuration import Configuration, Strip
from cadenza.backends.triton.target import Target
from cadenza.backends.triton.tuning import candidates, choices, contests, records
from cadenza.backends.triton.tuning import workers as tuning_workers
from cadenza.backends.triton.tuning.recipes import KernelCall, ProductCall, views
from cadenza.backends.triton.tuning.worker import COMPILE, Compile, Measure
from cadenza.backends.triton.tuning.workers import Hangs, Worker, Workers
from cadenza.core.errors import BackEndError
from cadenza.core.plan_text import PairText
from cadenza.library.blocks import BUILT_IN

HOPPER = Target.named("sm_90")
TESTS = Path(__file__).parent
QUICK = ("llama-mlp", "lm-head")
SOME_SLOW = [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in BUILT_IN]


class Properties:
    """What of a device's properties counts."""

    multi_processor_count = 132


@pytest.fixture(autouse=True)
def place(monkeypatch, tmp_path):
    """A pretended GPU, an empty cache, nothing decided."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setenv("CADENZA_CACHE", str(tmp_path))
    monkeypatch.setenv("CADENZA_TUNE", "first")
    monkeypatch.setattr(choices, "_decided", {})


def settled(plan, rows=16384, target=HOPPER, turned=()):
    """A plan's setting: inputs without numbers, some of them laid out by columns."""
    inputs = {}
    for node in plan.graph.inputs:
        shape = [rows if d == "M" else int(d) for d in node.type[:2]]
        dtype = getattr(torch, node.attributes["dtype"])
        made = torch.empty(shape, dtype=dtype, device="meta")
        if node.attributes["name"] in turned:
            made = torch.empty(shape[::-1], dtype=dtype, device="meta").T
        inputs[node] = made
    return contests.Setting(target, torch.device("cuda", 0), contests.rounded(rows), inputs)


def plans(name, dtype="bfloat16"):
    """The plans of a built-in block at large sizes, with their text."""
    pair = large_call(name, dtype).pair()
    text = PairText(pair)
    return [(plan, text) for plan in (pair.forward_plan, pair.backward_plan) if plan is not None]


# --- contests -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SOME_SLOW)
def test_every_large_product_of_a_block_competes(name):
    for plan, text in plans(name):
        found = contests.contests_of(plan, text, settled(plan), False)
        assert len(found) >= plan.products
        for contest in found:
            assert 3 <= len(contest.choices) <= 13, contest.title
            assert len(contest.choices) == len(contest.calls)
            assert all(contest.calls), "a candidate does nothing"
            if contest.kernel.product is not None:
                assert contest.choices[-1].library
                assert isinstance(contest.calls[-1][0], ProductCall)
            else:
                assert all(isinstance(choice, Strip) for choice in contest.choices)


def test_candidates_read_the_same_memory_and_write_their_own():
    plan, text = plans("llama-mlp")[0]
    first, _ = contests.contests_of(plan, text, settled(plan), False)
    launches = [c[0] for c in first.calls if isinstance(c[0], KernelCall)]
    operands = [tuple(v.base for v in views(call)[:2]) for call in launches]
    written = [views(call)[-1].base for call in launches]
    assert len(set(operands)) == 1
    assert len(set(written)) == len(written)


def test_small_kernels_are_not_measured():
    plan, text = plans("llama")[0]
    assert contests.keys_of(plan, text, settled(plan, rows=1)) == {}


def test_the_full_list_holds_the_short_one():
    plan, text = plans("llama")[0]
    short, full = (contests.contests_of(plan, text, settled(plan), f)[0].choices for f in (0, 1))
    assert set(short) < set(full)


@pytest.mark.parametrize("family", candidates.LISTS)
def test_no_candidate_is_listed_twice(family):
    short, more = candidates.LISTS[family]
    assert len({*short, *more}) == len(short) + len(more)
    assert 5 <= len(short) <= 10


# --- keys -----------------------------------------------------------------------------------------


def keys(plan, text, **options):
    """The keys of a plan's kernels, in order."""
    return list(contests.keys_of(plan, text, settled(plan, **options)).values())


def test_keys_are_the_same_for_a_program_traced_again():
    assert keys(*plans("llama")[0]) == keys(*plans("llama")[0])


def test_keys_hold_what_a_time_depends_on(monkeypatch):
    usual = keys(*plans("llama")[0])
    assert keys(*plans("llama", "float16")[0])[0] != usual[0]
    assert keys(*plans("llama")[0], rows=4096) != usual
    assert keys(*plans("llama")[0], rows=16000) == usual
    assert keys(*plans("llama")[0], turned=("wo",))[0] != usual[0]
    assert keys(*plans("llama")[0], target=Target.named("sm_80")) != usual
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "another GPU")
    assert keys(*plans("llama")[0]) != usual


# --- the file -------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", [Configuration(BN=256, boxes=("load",)), Strip(BM=8)])
def test_an_entry_holds_its_choice(choice):
    records.add({"one": records.entry_of(choice, {"a": 1.5, "b": "no"}, "a kernel")})
    records.add({"two": {}})
    found = records.read()
    assert set(found) == {"one", "two"}
    assert records.choice_of(found["one"]) == choice
    assert found["one"]["microseconds"] == {"a": 1.5, "b": "no"}


@pytest.mark.parametrize("content", ["", "[1]", "{", '{"k": 1}', '{"k": {"choice": ["product"]}}'])
def test_what_cannot_be_read_counts_as_not_there(content):
    records.add({})
    records.path().write_text(content)
    assert records.choice_of(records.read().get("k")) is None


def test_one_process_at_a_time_measures(monkeypatch):
    monkeypatch.setattr(records, "PATIENCE", 0.3)
    said = []
    monkeypatch.setattr(records.log, "warning", lambda text, *given: said.append(text % given))
    with records.alone():
        assert not said
        with records.alone():
            assert said


def test_a_cache_that_cannot_be_written_costs_nothing(monkeypatch, caplog):
    monkeypatch.setenv("CADENZA_CACHE", "/dev/null/nowhere")
    with caplog.at_level(logging.WARNING, "cadenza"), records.alone():
        records.add({"k": {}})
    assert "can't be kept" in caplog.text


# --- processes ------------------------------------------------------------------------------------


@pytest.fixture
def worker(monkeypatch):
    """A process that finds the tests' tasks."""
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    made = Worker(COMPILE)
    yield made
    made.end()


def test_a_worker_says_and_answers(worker):
    heard = []
    assert worker.ask(Answers((1, 2), "done"), 60, heard.append) == "done"
    assert heard == [1, 2]
    assert worker.ask(Answers((), "again"), 60) == "again"


@pytest.mark.parametrize(("task", "problem"), [(Hanging(3), "in time"), (Dying(4), "died")])
@pytest.mark.slow
def test_a_worker_that_does_not_answer_is_ended(worker, task, problem):
    worker.ask(Answers((), "warm"), 60)
    with pytest.raises(Hangs, match=problem) as caught:
        worker.ask(task, 1)
    assert caught.value.said == task.said
    assert worker.process.poll() is not None


@pytest.mark.parametrize("chosen", [None, "/chosen"])
def test_workers_keep_kernels_there_too(monkeypatch, chosen):
    made = {}

    class Process:
        pid = 0

        def __init__(self, command, env, **_):
            made.update(env)

    monkeypatch.setattr(subprocess, "Popen", Process)
    monkeypatch.setenv("TRITON_CACHE_DIR", "/moved")
    monkeypatch.setattr(tuning_workers, "TRITON_CACHE", chosen)
    Worker(COMPILE)
    assert made.get("TRITON_CACHE_DIR") == chosen


@pytest.mark.slow
def test_workers_are_used_again_and_ended(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    workers = Workers()
    workers.prepare(COMPILE)
    [first] = workers.free[COMPILE]
    assert workers.ask(Answers((), "a"), 60, COMPILE) == "a"
    assert workers.free[COMPILE] == [first]
    workers.end()
    assert first.process.poll() is not None


@pytest.mark.slow
def test_a_worker_compiles_kernels(worker):
    plan, text = plans("llama-mlp")[0]
    contest = contests.contests_of(plan, text, settled(plan), False)[1]
    calls = [c for each in contest.calls[:4] for c in each if isinstance(c, KernelCall)]
    broken = calls[0]._replace(text="def kernel():\n    pass\n")
    heard = {}
    worker.ask(Compile([*calls, broken], HOPPER, 2), 300, lambda said: heard.update([said]))
    assert set(heard) == set(range(len(calls) + 1))
    assert isinstance(heard.pop(len(calls)), str)
    assert all(isinstance(found, Report) and found.registers > 30 for found in heard.values())


# --- choosing -------------------------------------------------------------------------------------


class Pretended:
    """Workers that compile everything and time it by a rule; they may hang at a candidate."""

    def __init__(self, rule, hanging=(), report=None):
        self.rule, self.hanging, self.measured = rule, set(hanging), 0
        self.report = report or Report(200, 0, 1000)

    def prepare(self, kind):
        """Nothing to start."""

    def ask(self, task, seconds, kind, hear=None):
        """The answers of a worker that is in good health."""
        if isinstance(task, Compile):
            for number in range(len(task.calls)):
                hear((number, self.report))
            return None
        assert isinstance(task, Measure)
        self.measured += 1
        for number, calls in enumerate(task.candidates):
            if isinstance(calls[0], KernelCall) and calls[0].options["num_warps"] in self.hanging:
                raise Hangs("no answer in time", number)
        return [self.rule(calls) for calls in task.candidates]


def chosen(monkeypatch, workers, name="llama-mlp"):
    """What each kernel of a forward plan is made by."""
    monkeypatch.setattr(choices, "WORKERS", workers)
    plan, text = plans(name)[0]
    choose = choices.choices(plan, text, settled(plan))
    return [choose(kernel) for kernel in plan.kernels] if choose else None


def stages(calls):
    """Fewer stages, less time; the library is slow."""
    if isinstance(calls[0], ProductCall):
        return 100.0
    return float(calls[0].options.get("num_stages", 50))


def library(calls):
    """The library is fast."""
    return 1.0 if isinstance(calls[0], ProductCall) else 2.0


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


def test_choices_are_what_a_program_is_made_of(monkeypatch):
    from cadenza.backends.triton.program import Program

    monkeypatch.setattr(choices, "WORKERS", Pretended(stages))
    plan, text = plans("llama-mlp")[0]
    choose = choices.choices(plan, text, settled(plan))
    steps = Program(plan, choose, text, HOPPER).steps
    assert [s.configuration for s in steps] == [choose(k) for k in plan.kernels]
