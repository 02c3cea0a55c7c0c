"""Selection by measurement without a GPU: contests, keys, the file, worker processes, the choice.

A device is pretended where contests are made, and workers where they would launch; what they
compile for it they do compile.
"""

import logging
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from planned import call
from tuning_place import HOPPER, FakeGPU, place, plans, settled
from tuning_tasks import Answers, Dying, Hanging

from cadenza.backends.triton import settings
from cadenza.backends.triton.compiled import Report
from cadenza.backends.triton.configuration import Configuration, Facts, Strip
from cadenza.backends.triton.target import Target
from cadenza.backends.triton.tuning import candidates, contests, records, timing
from cadenza.backends.triton.tuning.recipes import KernelCall, ProductCall, views
from cadenza.backends.triton.tuning.worker import COMPILE, Compile
from cadenza.backends.triton.tuning.workers import Hangs, Worker, Workers
from cadenza.core.plan_text import PairText
from cadenza.library.blocks import BUILT_IN

pytestmark = pytest.mark.usefixtures(place.__name__)
TESTS = Path(__file__).parent
QUICK = ("llama-mlp", "lm-head")
SOME_SLOW = [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in BUILT_IN]


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
    pair = call("llama", 8, torch.bfloat16).pair()
    for rows in (1, 128, 4096):
        setting = settled(pair.forward_plan, rows=rows)
        assert contests.keys_of(pair.forward_plan, PairText(pair), setting) == {}


@pytest.mark.parametrize("rows", [1, 7, 128])
def test_products_of_few_rows_with_large_weights_are_measured(rows):
    """They take as long as reading the weights, and default tiles leave most of a device idle."""
    plan, text = plans("llama")[0]
    measured = contests.keys_of(plan, text, settled(plan, rows=rows))
    assert list(measured) == [k for k in plan.kernels if k.product is not None]


def test_the_full_list_holds_the_short_one():
    plan, text = plans("llama")[0]
    short, full = (contests.contests_of(plan, text, settled(plan), f)[0].choices for f in (0, 1))
    assert set(short) < set(full)


@pytest.mark.parametrize("family", candidates.LISTS)
def test_no_candidate_is_listed_twice(family):
    short, more = candidates.LISTS[family]
    assert len({*short, *more}) == len(short) + len(more)
    assert 5 <= len(short) <= 10


def test_tiles_that_go_together_are_counted_so():
    two = Configuration(192, 128, 64, warps=4, stages=3, pingpong=True, together=True)
    facts = Facts(2, 3, near=False, half=False, lanes=1, unit=1, M=None, N=512, K=4096)
    assert candidates.shared(two, facts) == 3 * (192 + 256) * 64 * 2
    assert candidates.fits(two, facts, HOPPER)
    assert not candidates.fits(replace(two, stages=5), facts, HOPPER)
    assert not candidates.fits(two, facts._replace(N=384), HOPPER), "3 tiles are no pairs"
    one = replace(two, together=False)
    assert candidates.use(one, facts, 192 * 132, 132) == 1.0
    assert candidates.use(two, facts, 192 * 33, 132) == 0.5


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


# --- times ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("milliseconds", [0.02, 0.3, 2.0, 15.0])
def test_by_itself_a_call_is_timed_once_its_clock_has_settled(monkeypatch, milliseconds):
    gpu = FakeGPU(monkeypatch, warm=1.2)
    runs = {"one": lambda: gpu.call(milliseconds), "two": lambda: gpu.call(2 * milliseconds)}
    found = timing.timed_alone(runs, 0.4)
    expected = {"one": 1200 * milliseconds, "two": 2400 * milliseconds}
    assert found == pytest.approx(expected, rel=1e-6)


# --- processes ------------------------------------------------------------------------------------


@pytest.fixture
def worker(monkeypatch):
    """A process that finds the tests' tasks."""
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    made = Worker(COMPILE)
    yield made
    made.end()


@pytest.mark.slow
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
    monkeypatch.setitem(settings.TRITON_LOADED, "TRITON_CACHE_DIR", chosen)
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
