"""Ctrl-C as a wish to stop after the step under way, so that what is saved is consistent."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """False until a signal asks to stop; then true, with the exit code to stop with."""

    def __init__(self, number: int = 0) -> None:
        self.number = number

    def __bool__(self) -> bool:
        return self.number != 0

    @property
    def exit_code(self) -> int:
        """128 and the signal's number, as shells have it: 130 for Ctrl-C."""
        return 128 + self.number


@contextmanager
def interruptible() -> Iterator[Interruption]:
    """Note SIGINT and SIGTERM instead of dying of them; a second one acts as it always did."""
    previous = {number: signal.getsignal(number) for number in SIGNALS}
    interruption = Interruption()

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    def note(number: int, _frame: FrameType | None) -> None:
        interruption.number = number
        restore()

    for number in SIGNALS:
        signal.signal(number, note)
    try:
        yield interruption
    finally:
        restore()
