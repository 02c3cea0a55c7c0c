"""The entrance of selection: for each kernel of a plan, the fastest of its candidates on a device.

`CADENZA_TUNE=off` takes defaults, `first` (the default) measures what has no entry yet before the
first result of a signature, `full` measures a longer list. A kernel's choice is fixed for the
process once it is made. What goes wrong costs a candidate or the measurement, never a result.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from threading import Lock, Thread
from time import monotonic
from typing import Any

from cadenza.backends.triton.configuration import Configuration
from cadenza.backends.triton.program import Choice, Choose, Program
from cadenza.backends.triton.target import Target
from cadenza.backends.triton.tuning import records, timing
from cadenza.backends.triton.tuning.contests import (
    Contest,
    Setting,
    contests_of,
    keys_of,
    sketch_of,
)
from cadenza.backends.triton.tuning.recipes import Call, KernelCall
from cadenza.backends.triton.tuning.worker import COMPILE, MEASURE, Compile, Measure
from cadenza.backends.triton.tuning.workers import WORKERS, Hangs
from cadenza.core.errors import BackEndError, explanation
from cadenza.core.plan import Kernel, Plan
from cadenza.core.plan_text import PairText

log = logging.getLogger("cadenza")
MODES = ("off", "first", "full")
MOST = 16  # kernels that are compiled at a time
SPILL = 128  # bytes a thread; candidates that spill more are out
OF_KERNEL = {"first": 0.2, "full": 2.0}  # seconds of measuring, in turns
BY_ITSELF = {"first": 0.19, "full": 0.5}  # seconds of each of the fastest: clocks settle in 0.15
IN_ALL = {"first": 1.0, "full": 10.0}  # seconds of measuring a kernel
NEAR = 1.15  # times the fastest one's time in turns: what takes more has lost
ENERGY = 1.08  # times the fastest one's time in turns, that less energy can make up for
FINALISTS = 4  # that go on, where there is time for so many
COMPILING = {"first": 45.0, "full": 300.0}  # seconds of compilation for a plan
LAUNCHING = 30.0  # seconds beyond measuring after which a kernel counts as hanging
Times = list[float | str]  # µs of each candidate, or why there are none
# Of so many kernels so many are done; the title of the last, and its entry if it has one.
Tell = Callable[[int, int, str, Mapping[str, Any]], None]
_decided: dict[str, Choice] = {}
_telling: list[Tell] = []
_lock = Lock()


@contextmanager
def telling(tell: Tell) -> Iterator[None]:
    """Inside, `tell` hears of each kernel that is measured."""
    _telling.append(tell)
    try:
        yield
    finally:
        _telling.remove(tell)


def mode() -> str:
    """What CADENZA_TUNE says. Raises BackEndError for an unknown word."""
    given = os.environ.get("CADENZA_TUNE") or "first"
    if given not in MODES:
        raise BackEndError(
            explanation(
                "no such way to choose kernels", repr(given), f"one of {', '.join(MODES)}", "",
                "CADENZA_TUNE",
            )
        )  # fmt: skip
    return given


def choices(plan: Plan, text: PairText | None, setting: Setting) -> Choose | None:
    """What was measured to be fastest for each kernel; None where nothing is measured."""
    how = mode()
    if how == "off" or not setting.target.backend:
        return None
    with _lock:
        keys = keys_of(plan, text, setting)
        _recall([k for k in keys.values() if k not in _decided], how)
        if any(k not in _decided for k in keys.values()):
            try:
                _measure_missing(plan, text, setting, how)
            except Exception:
                log.exception("%s: measuring failed, its kernels are the defaults", plan.graph.name)
        return _chosen(keys)


def _chosen(keys: Mapping[Kernel, str]) -> Choose:
    return {kernel: _decided[key] for kernel, key in keys.items() if key in _decided}.get


def _recall(keys: Sequence[str], how: str) -> None:
    """Takes entries of the file; with `full`, those that were measured so alone."""
    if not keys:
        return
    entries = records.read()
    for key in keys:
        entry = entries.get(key)
        choice = records.choice_of(entry) if entry else None
        if choice is not None and (how == "first" or entry.get("full")):
            _decided[key] = choice


# --- measuring ------------------------------------------------------------------------------------


def _measure_missing(plan: Plan, text: PairText | None, setting: Setting, how: str) -> None:
    with records.alone():
        WORKERS.prepare(COMPILE)
        WORKERS.prepare(MEASURE)
        contests = contests_of(plan, text, setting, how == "full")
        _recall([c.key for c in contests], how)  # another process may have measured meanwhile
        missing = list({c.key: c for c in contests if c.key not in _decided}.values())
        if not missing:
            return
        log.info("%s: measuring %d kernels (CADENZA_TUNE=off leaves it out)", plan.graph.name,
                 len(missing))  # fmt: skip
        found = {}
        for number, (contest, times, alone) in enumerate(measured(missing, setting, how), 1):
            entry = _entry(contest, times, alone, how)
            if entry is not None:
                found[contest.key] = entry
                _decided[contest.key] = records.choice_of(entry) or contest.choices[0]
            _tell(number, len(missing), contest, entry or {})
        for contest in missing:
            _decided.setdefault(contest.key, contest.choices[0])
        records.add(found)
        chosen = _chosen(keys_of(plan, text, setting))
        _compile_ahead(Program(plan, chosen, text, setting.target), setting)


def _compile_ahead(program: Program, setting: Setting) -> None:
    """Compiles what a program launches in parallel, so that its first call finds it done."""
    sketch = sketch_of(setting._replace(rows=setting.own))
    for step in program.steps:
        sketch.run(step)
    calls = [c for c in sketch.calls if isinstance(c, KernelCall) and c.text]
    for future in _compiled([calls], setting.target, COMPILING["first"]).values():
        future.result()


def measured(
    contests: Sequence[Contest], setting: Setting, how: str
) -> Iterator[tuple[Contest, Times, Times]]:
    """Each contest with the µs of each candidate, or why there are none, as they come.

    First in turns; then of the finalists, each by itself, if there are several. The least product
    of both times wins.
    """
    calls = [each for contest in contests for each in contest.calls]
    reports = _compiled(calls, setting.target, COMPILING[how])
    for contest in contests:
        faults = [_fault(reports, call, setting.target) for call in contest.calls]
        times = _times(contest, faults, setting, OF_KERNEL[how])
        known = [time for time in times if not isinstance(time, str)]
        left = IN_ALL[how] - timing.spent(known, OF_KERNEL[how])
        finalists = _finalists(contest.choices, times, int(left / BY_ITSELF[how]))
        alone: Times = [text if isinstance(text, str) else "lost in turns" for text in times]
        if len(finalists) > 1:
            calls = [contest.calls[n] for n in finalists]
            final = replace(contest, choices=[contest.choices[n] for n in finalists], calls=calls)
            seconds = BY_ITSELF[how] * len(finalists)
            answers = _times(final, [""] * len(finalists), setting, seconds, alone=True)
            for number, answer in zip(finalists, answers, strict=True):
                alone[number] = answer
        yield contest, times, alone


def _finalists(choices: Sequence[Choice], times: Times, most: int = FINALISTS) -> list[int]:
    """Of those that are near, the fastest of each template and tile: `most`, one at least.

    Before others of one template comes another that is no further behind than energy may make up.
    """
    timed = {n: t for n, t in enumerate(times) if not isinstance(t, str)}
    least = min(timed.values(), default=0.0)
    first: dict[Any, int] = {}
    second: dict[Any, int] = {}
    for number in sorted((n for n in timed if timed[n] <= NEAR * least), key=timed.__getitem__):
        template, tile = _kind(choices[number])
        if timed[number] <= ENERGY * least:
            first.setdefault(template, number)
        second.setdefault((template, tile), number)
    count = max(1, min(FINALISTS, most))
    return sorted(list(dict.fromkeys([*first.values(), *second.values()]))[:count])


def _kind(choice: Choice) -> tuple[Any, Any]:
    """The template and the tile: what decides how much energy an operation takes."""
    if not isinstance(choice, Configuration):
        return (), ()
    return (choice.library, choice.pingpong, choice.together), (choice.BM, choice.BN)


def _tell(number: int, total: int, contest: Contest, entry: Mapping[str, Any]) -> None:
    log.debug("measured %d of %d: %s", number, total, contest.title)
    for tell in _telling:
        tell(number, total, contest.title, entry)


def _compiled(
    candidates: Sequence[Sequence[Call]], target: Target, seconds: float
) -> dict[str, Future[Any]]:
    """The report of each kernel, or why there is none, as soon as it is there."""
    calls = {repr(c): c for each in candidates for c in each if isinstance(c, KernelCall)}
    found: dict[str, Future[Any]] = {key: Future() for key in calls}
    keys = list(calls)
    count = min(MOST, os.cpu_count() or 1)
    task = Compile(list(calls.values()), target, count)
    Thread(target=_compile, args=(task, [found[k] for k in keys], seconds), daemon=True).start()
    return found


def _compile(task: Compile, futures: Sequence[Future[Any]], seconds: float) -> None:
    start = monotonic()
    try:
        WORKERS.ask(task, seconds, COMPILE, lambda said: futures[said[0]].set_result(said[1]))
        log.debug("compiled %d kernels in %.1f s", len(futures), monotonic() - start)
        problem = "it was not compiled"
    except (Hangs, OSError) as error:
        problem = f"compiling it: {error}"
    for future in futures:
        if not future.done():
            future.set_result(problem)


def _fault(reports: Mapping[str, Any], calls: Sequence[Call], target: Target) -> str:
    """Why a candidate is not launched; "" if it is."""
    for call in calls:
        if isinstance(call, KernelCall):
            report = reports[repr(call)].result()
            if isinstance(report, str):
                return report
            if report.spilled > SPILL or report.shared > target.shared:
                return "; ".join(report.faults(target))
    return ""


def _times(
    contest: Contest, faults: Sequence[str], setting: Setting, seconds: float, alone: bool = False
) -> Times:
    """The µs of each candidate, or why there are none."""
    found: Times = [fault or "not timed" for fault in faults]
    while True:
        entrants = [n for n, text in enumerate(found) if text == "not timed"]
        if not entrants:
            return found
        index = setting.device.index or 0
        try:
            calls = [contest.calls[n] for n in entrants]
            answers = _launched(Measure(index, calls, seconds, alone))
        except Hangs as error:
            said = error.said if isinstance(error.said, int) else len(entrants)
            if said >= len(entrants):  # it is not known which
                return [str(error) if text == "not timed" else text for text in found]
            found[entrants[said]] = str(error)
            continue
        for number, answer in zip(entrants, answers, strict=True):
            found[number] = answer
        return found


def _launched(task: Measure) -> Times:
    """The µs of each candidate, or why there are none. Raises Hangs."""
    heard = [monotonic()]
    answers: Times = WORKERS.ask(
        task, task.seconds + LAUNCHING, MEASURE, lambda said: heard.append(monotonic())
    )
    taken = monotonic() - heard[0], heard[-1] - heard[0]
    log.debug("launched %d candidates in %.1f s, each once in %.1f s", len(answers), *taken)
    return answers


def _entry(contest: Contest, times: Times, alone: Times, how: str) -> dict[str, Any] | None:
    """What is kept of a contest; None if nobody finished."""
    known = {n: t for n, t in enumerate(times) if not isinstance(t, str)}
    settled = {n: t for n, t in enumerate(alone) if not isinstance(t, str)}
    named = {_named(c): t for c, t in zip(contest.choices, times, strict=True)}
    if not known:
        log.warning("%s: none of its candidates runs: %s", contest.title, named)
        return None
    # Both count: from run to run a time by itself scatters by 5 %, one in turns by 1.5 %.
    scores = {n: known[n] * t for n, t in settled.items()} or known
    best = min(scores, key=scores.__getitem__)
    entry = records.entry_of(contest.choices[best], named, contest.title)
    entry["fastest"] = _named(contest.choices[best])
    if settled:
        entry["alone"] = {_named(contest.choices[n]): t for n, t in settled.items()}
    return entry | {"full": how == "full"}


def _named(choice: Choice) -> str:
    """A choice in few words."""
    if isinstance(choice, Configuration) and choice.library:
        return "library"
    default = type(choice)()
    fields = {n: v for n, v in vars(choice).items() if v != getattr(default, n) or n in SAID}
    return " ".join(n if v is True else f"{n}={v}" for n, v in fields.items())


SAID = ("BM", "BN", "W")
