"""Tasks that a worker process runs in tests: one answers, one hangs, one dies."""

import os
import time
from typing import NamedTuple


class Answers(NamedTuple):
    """Says each of some things, then answers."""

    said: tuple[int, ...]
    answer: str

    def run(self, say):
        """Prints, too, which must not disturb the answers."""
        for each in self.said:
            say(each)
        print("printed")
        return self.answer


class Hanging(NamedTuple):
    """Says one thing, and never answers."""

    said: int

    def run(self, say):
        """Sleeps for longer than any test."""
        say(self.said)
        time.sleep(1000)


class Dying(NamedTuple):
    """Says one thing, and ends the process."""

    said: int

    def run(self, say):
        """As a crash of a driver would."""
        say(self.said)
        os._exit(1)
