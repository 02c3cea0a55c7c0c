"""PyTorch's kernels of causal attention: preferring one, and timing them on random numbers.

They are timed in a thread of their own, which has none of the caller's modes: no autocast, no hooks
on saved tensors, nobody who listens to operations. Random numbers are of a generator of its own,
too, so a training that measures draws the same numbers as one that doesn't.
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.backends import cuda
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from cadenza.library.attention_heads import Heads

log = logging.getLogger("cadenza")
OWN = "own"  # the kernel that PyTorch takes by itself
EXPANDED = "efficient, expanded"  # keys and values spread to as many heads as there are of queries
BACK_ENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    EXPANDED: SDPBackend.EFFICIENT_ATTENTION,
}
SERVES = {
    "flash": cuda.can_use_flash_attention,
    "cudnn": cuda.can_use_cudnn_attention,
    "efficient": cuda.can_use_efficient_attention,
    EXPANDED: cuda.can_use_efficient_attention,
}
ALL = (*dict.fromkeys(BACK_ENDS.values()), SDPBackend.MATH)
SECONDS = {"first": 0.1, "full": 1.0}  # of timing, beyond the fewest rounds
GAIN = 0.97  # of the time of PyTorch's own choice, which another kernel may take at most
LEAST = 128  # tokens: shorter sequences are bound by launches
TOKENS = 2**15  # of all sequences together
# Floating-point operations of forward and backward, by bytes a number: a few milliseconds.
WORK = {2: 2e12, 4: 2e11}
Times = dict[str, float | str]
Order = tuple[str, ...]


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


# --- preferring a kernel --------------------------------------------------------------------------

# What PyTorch prefers is one setting of the whole process: one thread at a time changes it.
_setting = threading.RLock()
_inside = threading.local()


def listed(order: Order) -> list[SDPBackend]:
    """PyTorch's kernels in the order in which they are tried: none is out, or a call could fail."""
    return list(dict.fromkeys((*(BACK_ENDS[name] for name in order), *ALL)))


def preferring(order: Order) -> AbstractContextManager[Any]:
    """Within, PyTorch takes the first of these kernels that serves a call; with none, its own."""
    if not order:
        return nullcontext()
    if torch.compiler.is_compiling():
        return sdpa_kernel(listed(order), set_priority=True)
    return _alone(order)


@contextmanager
def _alone(order: Order) -> Iterator[None]:
    with _setting, sdpa_kernel(listed(order), set_priority=True):
        outer, _inside.it = is_inside(), True
        try:
            yield
        finally:
            _inside.it = outer


def is_inside() -> bool:
    """Whether this thread prefers a kernel now: another thread would wait for it to end."""
    return getattr(_inside, "it", False)


@cache
def prepare(device: torch.device) -> None:
    """Lets PyTorch set its own order, which it does at its first call, over any other."""

    def call() -> None:
        with torch.cuda.device(device):
            query = torch.zeros(1, 1, 8, 8, device=device, dtype=torch.float16)
            F.scaled_dot_product_attention(query, query, query, is_causal=True)

    _elsewhere(call)


def scaled(qkv: Tensor, heads: Heads, expanded: bool = False, **options: Any) -> Tensor:
    """F.scaled_dot_product_attention of qkv `[B, S, N]`: `[B, S, heads · columns]`.

    `expanded` hands it as many heads of keys and values as there are of queries.
    """
    query, key, value = _operands(qkv, heads, expanded)
    grouped = heads.grouped and not expanded
    mixed = F.scaled_dot_product_attention(query, key, value, enable_gqa=grouped, **options)
    return mixed.transpose(1, 2).flatten(2)


def _operands(qkv: Tensor, heads: Heads, expanded: bool) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = heads.by_head(qkv)
    if expanded:
        key, value = (part.repeat_interleave(heads.group, dim=1) for part in (key, value))
    return query, key, value


# --- timing them ----------------------------------------------------------------------------------


def times_of(call: Call, how: str) -> Times:
    """The µs of each kernel, or why there are none; empty where nothing could be measured."""
    found: Times = {}

    def measure() -> None:
        with torch.cuda.device(call.device), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of kernels that don't serve
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
    for name in (OWN, *BACK_ENDS):
        try:
            race.check(name)
            race.run(name)
            torch.cuda.synchronize()
            runs[name] = partial(race.run, name)
        except RuntimeError as error:
            found[name] = f"{type(error).__name__}: {error}".splitlines()[0]
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
        """Raises RuntimeError unless PyTorch would take this kernel: another one would run."""
        if name == OWN:
            return
        if name == EXPANDED and not self.heads.grouped:
            raise RuntimeError("keys and values have as many heads as queries")
        grouped = self.heads.grouped and name != EXPANDED
        operands = _operands(self.qkv, self.heads, name == EXPANDED)
        if not SERVES[name](cuda.SDPAParams(*operands, None, 0.0, True, grouped)):
            raise RuntimeError("it does not serve such calls")

    def run(self, name: str) -> None:
        """Forward, and backward where it counts."""
        with preferring(() if name == OWN else (name,)):
            found = scaled(self.qkv, self.heads, name == EXPANDED, is_causal=True)
        if self.call.backward:
            torch.autograd.grad(found, self.qkv, self.upstream)
