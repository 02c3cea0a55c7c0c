"""The suite `host`: how long a call keeps the host, once warm, the device not waited for."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping

import torch

from cadenza.backends import chosen
from cadenza.library.specialize import Call as Arguments
from cadenza.library.specialize import Specialization
from cadenza.tools.bench.case import Bench, Case, Record, Sizes, Suite, Unavailable
from cadenza.tools.bench.contest import failure
from cadenza.tools.bench.draw import Draw
from cadenza.tools.bench.layer import sizes_of
from cadenza.tools.bench.measurement import Call, stopwatch, without_collection
from cadenza.tools.bench.stage import TRANSFORMS
from cadenza.tools.bench.subject import Layer, OneKernel, Subject

Tensor = torch.Tensor
SUBJECTS: Mapping[str, type[OneKernel] | type[Layer]] = {"one-kernel": OneKernel, "layer": Layer}
PENDING = 400  # launches that may wait for the GPU: with about 1000 the host waits as well
LAUNCHES = {"one-kernel": 8, "layer": 160}  # of forward and backward in eager mode, at most
BATCHES = 30


def run(case: Case, bench: Bench) -> list[Record]:
    """A record for each variant: microseconds by what is done, or why there are none."""
    torch.compiler.reset()
    subject = SUBJECTS[case.pattern].drawn(
        Draw(case.torch_dtype, bench.device, case.seed), case.sizes
    )
    records = []
    for variant in bench.variants:
        try:
            found = _of_variant(subject, variant, case.pattern, bench.device)
        except Exception as error:  # noqa: BLE001  # whatever fails is that variant's result
            found = failure(error)
        records.append({"variant": variant, **found})
    return records


def _of_variant(subject: Subject, variant: str, pattern: str, device: torch.device) -> Record:
    if variant not in ("ours", *TRANSFORMS):
        raise Unavailable("host is of ours and of torch alone")
    ours = variant == "ours"
    forward = subject.ours() if ours else subject.stock(TRANSFORMS[variant](subject.function))
    calls = max(1, PENDING // LAUNCHES[pattern])
    with torch.no_grad():
        found = {"a call": microseconds(forward.call, calls, device)}
    with torch.enable_grad():
        found["a call with gradients"] = microseconds(forward.call, calls, device)
        found["forward and backward"] = microseconds(forward.both, calls, device)
    if not ours:
        return {"host_us": found}
    kernels, plan = _plan(subject)
    found["a kernel of forward"] = microseconds(plan, calls, device) / kernels
    return {"host_us": found, "kernels": kernels}


def microseconds(function: Call, calls: int, device: torch.device) -> float:
    """The median over batches of what one call takes of the host."""
    watch = stopwatch(device)
    measured = []
    with without_collection():
        for _ in range(BATCHES):
            watch.finish()
            start = time.perf_counter()
            for _ in range(calls):
                function()
            measured.append((time.perf_counter() - start) / calls * 1e6)
    watch.finish()
    return round(statistics.median(measured[BATCHES // 5 :]), 3)


def _plan(subject: Subject) -> tuple[int, Call]:
    """How many product and pointwise kernels a call launches, and the plan of them alone."""
    specialization = _specialization(subject)
    tensors = {n: v.detach() for n, v in subject.operands.items() if isinstance(v, Tensor)}
    named = {n: v.reshape(-1, v.shape[-1]) for n, v in tensors.items()}
    rows = next(iter(named.values())).shape[0]
    kernels = len(specialization.pair.forward_plan.kernels)

    def run_plan() -> list[Tensor]:
        with torch.no_grad():
            return specialization.forward_on(named, rows)

    return kernels, run_plan


def _specialization(subject: Subject) -> Specialization:
    bound = [(name, subject.operands.get(name, subject.program.defaults.get(name)))
             for name in subject.program.parameters]  # fmt: skip
    tensors = [value.detach() for _, value in bound if isinstance(value, Tensor)]
    names = tuple(name for name, value in bound if isinstance(value, Tensor))
    constants = tuple((name, value) for name, value in bound if name not in names)
    text = Arguments(names, constants, None, chosen(None)).encode()
    return subject.program.specializations.find(tensors, text, 0)[0]


def _changed(pattern: str, given: Sizes) -> Sizes:
    if pattern == "one-kernel":
        return {name: given.get(name, 64) for name in ("M", "N", "K")}
    known = {"M": 64, "HD": 32, **{n: s for n, s in given.items() if n not in ("D", "N", "K")}}
    return sizes_of(given.get("D", 64), **known)


def _sizes(pattern: str) -> dict[str, Sizes]:
    return {"small": _changed(pattern, {})}


HOST = Suite(
    "host", ("ours", "compile", "eager"), tuple(SUBJECTS), _sizes, _changed, run, timed=False
)
