"""The ring of Hopper's template, run step by step in random orders: nobody waits for ever or reads
what is not there.

The emitted kernel and the template are Python; what they call of Gluon is pretended. Agents run one
at a time in random order, copies arrive late, and products read their stages when they are waited
for, so that a stage that is freed too early shows.
"""

import random
import threading
from collections import Counter
from dataclasses import replace
from functools import partial
from math import prod
from types import FunctionType, SimpleNamespace

import pytest
from test_triton_gluon import TOGETHER, again, of_function, swiglu

from cadenza import lang as L
from cadenza.backends.triton import modules
from cadenza.backends.triton.gluon_launch import HEAVY
from cadenza.backends.triton.templates import device, gluon_device

OF_RING = ("ring", "produce", "products", "_after", "_bring_right", "_turned", "_waited")


slow = partial(pytest.param, marks=pytest.mark.slow)


class Deadlock(Exception):
    """Nobody can go on."""


class Agents:
    """Threads of which one runs at a time, until it waits; copies that are under way."""

    def __init__(self, seed):
        self.order, self.copies, self.waiting, self.errors = random.Random(seed), [], {}, []
        self.main, self.ended = threading.Semaphore(0), False

    def start(self, function, given):
        """A thread that will run a partition of the kernel."""
        gate = threading.Semaphore(0)
        self.waiting[gate] = lambda: True
        threading.Thread(target=self._run, args=(gate, function, given), daemon=True).start()

    def _run(self, gate, function, given):
        gate.acquire()
        self.own = gate
        try:
            if not self.ended:
                function(*given)
        except Exception as error:  # noqa: BLE001  # raised again where all are awaited
            self.errors.append(error)
        self.main.release()

    def wait(self, ready):
        """Lets others go on, and goes on itself once this holds."""
        gate = self.own
        self.waiting[gate] = ready
        self.main.release()
        gate.acquire()
        self.own = gate
        if self.ended:
            raise Deadlock

    def run(self):
        """All of them to their end."""
        while self.waiting and not self.errors:
            able = [gate for gate, ready in self.waiting.items() if ready()]
            if not able and not self.copies:
                self.errors.append(Deadlock())
                break
            number = self.order.randrange(len(able) + len(self.copies))
            if number >= len(able):
                self.copies.pop(number - len(able))()
                continue
            del self.waiting[able[number]]
            able[number].release()
            self.main.acquire()
        found, self.ended = self.errors[:1], True
        for gate in list(self.waiting):
            gate.release()
            self.main.acquire()
        if found:
            raise found[0]


class Barrier:
    """An mbarrier: its phase ends when all have arrived, and all bytes."""

    def __init__(self):
        self.count = self.left = self.bytes = self.phase = 0

    def settle(self):
        """Begins the next phase if this one is over."""
        assert self.left >= 0, "more arrived than a phase has"
        if self.left == self.bytes == 0:
            self.phase, self.left = self.phase + 1, self.count


class Stages:
    """Shared memory: what was copied where, by the place within a stage."""

    def __init__(self, shape, kept=None, place=0):
        self.shape, self.kept, self.place = shape, kept, place

    def index(self, number):
        """One stage, or one barrier."""
        assert 0 <= number < self.shape[0]
        return self.kept[number]

    def slice(self, start, length, dim):
        """A part of a stage."""
        shape = [length if d == dim else n for d, n in enumerate(self.shape)]
        return Stages(shape, self.kept, start)

    def permute(self, order):
        """The stage, turned."""
        return self


class Pretended:
    """What the template calls of Gluon, for one program."""

    def __init__(self, agents, program, programs):
        self.agents, self.stored = agents, []
        self.gl = SimpleNamespace(
            constexpr=object, int64="barrier", float32="", static_range=range, num_warps=4,
            cdiv=lambda x, y: -(-x // y), where=lambda c, x, y: x if c else y,
            program_id=lambda axis: program, num_programs=lambda axis: programs,
            zeros=lambda *given: (), allocate_shared_memory=self.allocate,
            warp_specialize=lambda parts, *_: [agents.start(*part) for part in parts],
        )  # fmt: skip
        self.mbarrier = SimpleNamespace(
            init=self.init, wait=self.wait, arrive=self.arrive, expect=self.expect,
            MBarrierLayout=object,
        )  # fmt: skip
        self.bring = self.copy
        self.pending = {}

    def allocate(self, dtype, shape, layout):
        """Stages, or barriers."""
        if dtype == "barrier":
            return Stages(shape, [Barrier() for _ in range(shape[0])])
        return Stages(shape, [Stages(shape[1:], {}) for _ in range(shape[0])])

    def init(self, barrier, count):
        """As mbarrier.init."""
        barrier.count = barrier.left = count

    def wait(self, barrier, phase):
        """Until the phase of this parity is over."""
        self.agents.wait(lambda: barrier.phase % 2 != phase)

    def arrive(self, barrier, count, pred=True):
        """As mbarrier.arrive."""
        if pred:
            barrier.left -= count
            barrier.settle()
            self.agents.wait(lambda: True)

    def expect(self, barrier, count):
        """Arrives, but for bytes that have yet to come."""
        barrier.bytes += count
        barrier.left -= 1

    def copy(self, matrix, at, barrier, stage):
        """A copy that is done some time."""

        def arrive():
            stage.kept[stage.place] = (matrix.name, *at)
            barrier.bytes -= 2 * prod(stage.shape)
            barrier.settle()

        stage.kept.pop(stage.place, None)
        self.agents.copies.append(arrive)

    def multiply(self, x, b, acc, use_acc, is_async):
        """A product that reads its operands when it is waited for."""
        said = self.pending.setdefault(id(self.agents.own), [])
        acc = acc if use_acc else []
        said.append(lambda: acc.append((dict(x.kept), dict(b.kept))))
        return acc

    def waited(self, count, deps):
        """Of this agent's products all but the last."""
        said = self.pending[id(self.agents.own)]
        while len(said) > count:
            said.pop(0)()
        return deps if len(deps) > 1 else deps[0]


def ran(launch, seed, rows, depth, program, programs):
    """The tiles that one program of a launch stores: block of rows, column tile, its products."""
    agents = Agents(seed)
    fake, stored = Pretended(agents, program, programs), []

    def bound(function, names):
        return FunctionType(function.fn.__code__, names)

    names = vars(fake) | {
        "range": range, "warpgroup_mma": fake.multiply, "warpgroup_mma_wait": fake.waited,
        "BLOCK": 64, "COLUMNS": 128, "PRODUCT": None, "tile_at": device.tile_at.fn,
    }  # fmt: skip
    names |= {name: bound(getattr(gluon_device, name), names) for name in OF_RING}
    module = modules.function(launch.source.text)
    emitted = {"gl": fake.gl, "device": SimpleNamespace(**names)}
    emitted["epilogue"] = lambda acc, block, j, *_: stored.append((block, j, acc))
    emitted["consume"] = bound(module.fn.__globals__["consume"], emitted)
    kernel = bound(module, emitted)
    given = launch.constants()
    a, b = (
        SimpleNamespace(name=name, layout=None, dtype=SimpleNamespace(primitive_bitwidth=16))
        for name in "ab"
    )
    if launch.depth is None:
        given["K"] = depth
    pointers = [None] * len(launch.source.arguments)
    kernel(a, b, *pointers, rows, **given)
    agents.run()
    return stored


def products_of(block, j, depth, pairs):
    """What a tile is the sum of, step by step."""
    steps = range(0, depth, 64)
    if pairs:
        rights = [{0: ("b", 64 * j, k), 64: ("b", 64 * j + pairs, k)} for k in steps]
    else:
        rights = [{0: ("b", 128 * j, k)} for k in steps]
    return [({0: ("a", 64 * block, k)}, right) for k, right in zip(steps, rights, strict=True)]


def linear(x, w):
    """A product alone."""
    return L.linear(x, w) + 1.0


TURNS = replace(HEAVY, pingpong=True, stages=2)
CUTS = {
    "in turns": TURNS,
    "in turns, 192 rows": replace(TURNS, BM=192, stages=5),
    "together": replace(TOGETHER, stages=2),
    "together, 192 rows": replace(TOGETHER, BM=192, stages=3),
    "together, 64 rows": replace(TOGETHER, BM=64, stages=4),
}


def check(launch, depth, pairs):
    """All tiles are stored once, and each is the sum of its own steps."""
    for seed, (rows, programs) in enumerate([(1, 1), (70, 2), (300, 1), (500, 3)]):
        each = partial(ran, launch, seed, rows, depth)
        found = [tile for n in range(programs) for tile in each(n, programs)]
        wanted = {(block, j) for block in range(-(-rows // 64)) for j in range(4)}
        assert Counter((block, j) for block, j, _ in found) == Counter(wanted)
        for block, j, products in found:
            assert products == products_of(block, j, depth, pairs)


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("depth", [16, slow(64), 200, slow(320)])
@pytest.mark.parametrize("function", [linear, swiglu])
def test_every_tile_is_the_sum_of_its_own_steps(function, depth, cut):
    launch = again(of_function(function, x=("M", depth), w=(512, depth)), cut)
    check(launch, depth, 256 if function is swiglu else 0)


class Hasty(Pretended):
    """A stage is free when the first of two consumers has multiplied it."""

    def init(self, barrier, count):
        """One arrival ends every phase."""
        barrier.count = barrier.left = 1


class Careless(Pretended):
    """A stage is free while it is multiplied."""

    def waited(self, count, deps):
        """Products go on for one step more."""
        return super().waited(2 * count, deps)


class Unruly(Pretended):
    """Nobody waits."""

    def wait(self, barrier, phase):
        """Goes on."""
        self.agents.wait(lambda: True)


@pytest.mark.parametrize("fault", [Hasty, Careless, Unruly])
def test_what_breaks_the_ring_is_found(fault, monkeypatch):
    launch = again(of_function(linear, x=("M", 320), w=(512, 320)), CUTS["together"])
    monkeypatch.setitem(globals(), "Pretended", fault)
    with pytest.raises((AssertionError, Deadlock)):
        check(launch, 320, 0)
