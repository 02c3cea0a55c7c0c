"""A GPU and workers that are pretended for tests of tuning, and plans whose kernels compete."""

from types import SimpleNamespace

import pytest
import torch
from planned import large_call

from cadenza.backends.triton.compiled import Report
from cadenza.backends.triton.target import Target
from cadenza.backends.triton.tuning import choices, contests, timing
from cadenza.backends.triton.tuning.recipes import KernelCall, ProductCall
from cadenza.backends.triton.tuning.worker import Compile, Measure
from cadenza.backends.triton.tuning.workers import Hangs
from cadenza.core.plan_text import PairText

HOPPER = Target.named("sm_90")


class Properties:
    """What of a device's properties counts."""

    multi_processor_count = 132


@pytest.fixture
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
    return contests.Setting(target, torch.device("cuda", 0), contests.rounded(rows), rows, inputs)


def plans(name, dtype="bfloat16"):
    """The plans of a built-in block at large sizes, with their text."""
    pair = large_call(name, dtype).pair()
    text = PairText(pair)
    return [(plan, text) for plan in (pair.forward_plan, pair.backward_plan) if plan is not None]


class FakeGPU:
    """A GPU in place of torch's, and its time in place of the host's.

    Its calls take `warm` times as long once it has worked for 100 ms without a rest.
    """

    def __init__(self, monkeypatch, warm=1.0):
        self.now = self.rested = 0.0  # milliseconds
        self.warm = warm
        monkeypatch.setattr(torch.cuda, "Event", self.event)
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: self.rest())
        monkeypatch.setattr(torch.cuda, "synchronize", self.rest)
        clock = SimpleNamespace(perf_counter=lambda: self.now / 1e3)
        monkeypatch.setattr(timing, "time", clock)

    def call(self, milliseconds):
        """Works for so long, or more."""
        self.now += milliseconds * (self.warm if self.now - self.rested > 100.0 else 1.0)

    def rest(self):
        """Waits for the host."""
        self.rested = self.now

    def event(self, enable_timing):
        """A place in the queue, of a time."""
        made = SimpleNamespace(record=lambda: setattr(made, "at", self.now))
        made.elapsed_time = lambda other: other.at - made.at
        return made


class Pretended:
    """Workers that compile everything and time it by a rule; they may hang at a candidate."""

    def __init__(self, rule, hanging=(), report=None, alone=None):
        self.rule, self.hanging, self.measured, self.alone = rule, set(hanging), 0, alone
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
        self.measured += not task.alone
        for number, calls in enumerate(task.candidates):
            if isinstance(calls[0], KernelCall) and calls[0].options["num_warps"] in self.hanging:
                raise Hangs("no answer in time", number)
        rule = self.alone if task.alone and self.alone else self.rule
        return [rule(calls) for calls in task.candidates]


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
