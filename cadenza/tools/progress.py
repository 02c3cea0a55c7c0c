"""How a training shows its progress: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import statistics
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

QUIET_SECONDS = 30
RECENT_STEPS = 20


class Pace:
    """Steps of equal work, timed; the median of the last few is the pace."""

    def __init__(self, tokens_a_step: int) -> None:
        self.tokens_a_step = tokens_a_step
        self.seconds: list[float] = []

    def tokens_per_second(self) -> float:
        """At the present pace; 0 before the first step."""
        recent = self.seconds[-RECENT_STEPS:]
        return self.tokens_a_step / statistics.median(recent) if recent else 0.0

    def seconds_left(self, steps: int) -> float:
        """For that many more steps at the present pace."""
        return statistics.median(self.seconds[-RECENT_STEPS:] or [0.0]) * steps


class Bar:
    """A live bar with loss, tokens a second and time left."""

    def __init__(self, label: str, done: int, total: int, pace: Pace) -> None:
        self.pace = pace
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            TimeRemainingColumn(),
            TextColumn("left"),
        )
        self.task = self.bar.add_task(label, completed=done, total=total, state="")

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.bar.stop()

    def step(self, loss: float) -> None:
        """One more step was taken."""
        state = f"loss {loss:.4f}  {self.pace.tokens_per_second():,.0f} tokens/s"
        self.bar.update(self.task, advance=1, state=state)

    def validated(self, step: int, loss: float) -> None:
        """The held-out text was measured."""
        self.bar.console.print(f"step {step}: held-out loss {loss:.4f}", highlight=False)


class Lines:
    """Plain lines: at each validation, and when nothing was said for half a minute."""

    def __init__(self, label: str, done: int, total: int, pace: Pace) -> None:
        self.label, self.done, self.total, self.pace = label, done, total, pace
        self.state = ""
        self.said = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        """Nothing is held."""

    def step(self, loss: float) -> None:
        """One more step was taken."""
        self.done += 1
        left = clock(self.pace.seconds_left(self.total - self.done))
        speed = f"{self.pace.tokens_per_second():,.0f} tokens/s"
        self.state = f"  loss {loss:.4f}  {speed}  {left} left"
        if time.monotonic() - self.said > QUIET_SECONDS:
            self._say("")

    def validated(self, step: int, loss: float) -> None:
        """The held-out text was measured."""
        self._say(f"  held-out loss {loss:.4f}")

    def _say(self, more: str) -> None:
        self.said = time.monotonic()
        print(f"{self.label} {self.done}/{self.total}{self.state}{more}", flush=True)


def progress(label: str, done: int, total: int, tokens_a_step: int) -> Bar | Lines:
    """What suits standard output, to be used in a `with` statement."""
    kind = Bar if Console().is_terminal else Lines
    return kind(label, done, total, Pace(tokens_a_step))


def clock(seconds: float) -> str:
    """Minutes and seconds, as 1:05."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
