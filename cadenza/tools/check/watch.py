"""Runs something again each time a file is saved."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

PERIOD = 0.3  # seconds between two looks at the file
Stamp = tuple[int, int]


def watch(
    path: Path, run: Callable[[], object], pause: Callable[[float], object] = time.sleep
) -> None:
    """Calls `run` now and after every change of the file, until it is interrupted.

    A file that is not there is being saved: the next one of this name counts as a change.
    """
    while True:
        seen = stamp(path)
        run()
        while stamp(path) in (seen, None):
            pause(PERIOD)


def stamp(path: Path) -> Stamp | None:
    """What changes when a file is saved; None where there is no file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size
