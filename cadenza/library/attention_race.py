"""Timing PyTorch's kernels of causal attention on random numbers.

They are timed in a thread of their own, which has none of the caller's modes: no autocast, no hooks
on saved tensors, nobody who listens to operations. Random numbers are of a generator of its own,
too, so a training that measures draws the same numbers as one that doesn't.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import cache, partial
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from cadenza.library.attention_heads import Heads
from cadenza.library.attention_kernels import (
    EXPANDED,
    KERNELS,
    OWN,
    STOCK,
    attend,
    expanded,
    joined,
    serves,
)

log = logging.getLogger("cadenza")
METHOD = 2  # of timing: times by another one are measured anew
SECONDS = {"first": 0.1, "full": 1.0}  # of timing, beyond the fewest rounds
GAIN = 0.97  # of the time of PyTorch's own choice, which another kernel may take at most
LEAST = 128  # tokens: shorter sequences are bound by launches
TOKENS = 2**15  # of all sequences together
# Floating-point operations of forward and backward, by bytes a number: a few milliseconds.
WORK = {2: 2e12, 4: 2e11}
Times = dict[str, float | str]


class Call(NamedTuple):
    """A causal call: sequences and tokens of each; `backward`: whether its time counts as well."""

    device: torch.device
    dtype: torch.dtype
    heads: Heads
    batch: int
    length: int
    backward: bool

    def rounded(self) -> Call:
        """The one that stands for all calls of about these sizes, and takes no longer to tell."""
        batch, length = (1 << max(0, n - 1).bit_length() for n in (self.batch, self.length))
        length = max(length, LEAST)
        while self._work(batch, length) > WORK[self.dtype.itemsize] or batch * length > TOKENS:
            if batch == 1 and length == LEAST:
                break
            batch, length = (batch // 2, length) if batch > 1 else (batch, length // 2)
        return self._replace(batch=batch, length=length)

    def _work(self, batch: int, length: int) -> int:
        """Floating-point operations of forward and backward, of the pairs that are seen."""
        return 7 * batch * length**2 * self.heads.queries * self.heads.columns


# --- timing them ----------------------------------------------------------------------------------


@cache
def prepare(device: torch.device) -> None:
    """Lets PyTorch set its own order, which its first call sets over that of a traced graph."""

    def call() -> None:
        with torch.cuda.device(device):
            query = torch.zeros(1, 1, 8, 8, device=device, dtype=torch.float16)
            STOCK(query, query, query, is_causal=True)

    _elsewhere(call)


def times_of(call: Call, how: str) -> Times:
    """The µs of each kernel, or why there are none; empty where nothing could be measured."""
    found: Times = {}

    def measure() -> None:
        with torch.cuda.device(call.device):
            found.update(_measured(call, SECONDS[how]))
            torch.cuda.empty_cache()

    _elsewhere(measure)
    return found


def ranking(times: Times) -> list[str]:
    """The kernels that are faster than the one that PyTorch takes by itself, the fastest first."""
    numbers = {name: t for name, t in times.items() if not isinstance(t, str)}
    bound = GAIN * numbers.pop(OWN, float("inf"))
    return sorted((name for name, t in numbers.items() if t <= bound), key=numbers.__getitem__)


def _elsewhere(work: Callable[[], None]) -> None:
    """Does work in a thread of its own, and waits for it; what it raises is logged."""

    def guarded() -> None:
        try:
            work()
        except Exception:
            log.exception("measuring attention failed: PyTorch chooses its kernel")

    thread = threading.Thread(target=guarded, name="cadenza-attention")
    thread.start()
    thread.join()


def _measured(call: Call, seconds: float) -> Times:
    from cadenza.backends.triton.tuning.timing import timed

    torch.cuda.synchronize()
    found: Times = {}
    runs: dict[str, Callable[[], None]] = {}
    race = _Race(call)
    for name in (OWN, *KERNELS):
        start = perf_counter()
        try:
            race.check(name)
            race.run(name)
            torch.cuda.synchronize()
            runs[name] = partial(race.run, name)
        except RuntimeError as error:
            found[name] = f"{type(error).__name__}: {error}".splitlines()[0]
        log.debug("attention, %s: a first run took %.2f s", name, perf_counter() - start)
    found.update(timed(runs, seconds))
    return found


class _Race:
    """Random operands of a call, laid out as those of a model."""

    def __init__(self, call: Call) -> None:
        self.call, self.heads = call, call.heads
        self.generator = torch.Generator(call.device).manual_seed(0)
        self.qkv = self._drawn(self.heads.queries + 2 * self.heads.keys)
        self.upstream = self._drawn(self.heads.queries)
        self.qkv.requires_grad_(call.backward)

    def _drawn(self, heads: int) -> Tensor:
        call, shape = self.call, (self.call.batch, self.call.length, heads * self.heads.columns)
        return torch.randn(shape, generator=self.generator, device=call.device, dtype=call.dtype)

    def check(self, name: str) -> None:
        """Raises RuntimeError unless this kernel would run: PyTorch's own would instead."""
        if name == OWN:
            return
        if name == EXPANDED and not self.heads.grouped:
            raise RuntimeError("keys and values have as many heads as queries")
        operands = self.heads.by_head(self.qkv)
        if not serves(name, *(expanded(*operands) if name == EXPANDED else operands)):
            raise RuntimeError("it does not serve such calls")

    def run(self, name: str) -> None:
        """Forward, and backward where it counts."""
        order = () if name == OWN else (name,)
        found = joined(attend(*self.heads.by_head(self.qkv), order))
        if self.call.backward:
            torch.autograd.grad(found, self.qkv, self.upstream)
