"""What has been measured, in files beside the cache of kernels: a table of kernels, and others.

A table is read whole, and written whole under a lock, then renamed. An entry's key holds all that a
time depends on; a file or an entry that can't be read counts as not there.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cadenza.backends.triton import modules
from cadenza.backends.triton.configuration import Configuration, Strip

log = logging.getLogger("cadenza")
Choice = Configuration | Strip
KERNELS = "tuned"  # the table of kernels
PATIENCE = 600.0  # seconds that another process may take to measure


def path(table: str = KERNELS) -> Path:
    """The file of a table."""
    return modules.folder().parent / f"{table}.json"


def read(table: str = KERNELS) -> dict[str, Any]:
    """All entries by key."""
    try:
        found = json.loads(path(table).read_text(encoding="utf-8"))
    except (OSError, ValueError, RuntimeError):
        return {}
    return found if isinstance(found, dict) else {}


def add(entries: Mapping[str, Any], table: str = KERNELS) -> None:
    """Puts entries into a table; those of others that are there stay."""
    try:
        place = modules.made(path(table).parent)
        modules.kept(place, path(table).name, json.dumps(read(table) | dict(entries), indent=1))
    except (OSError, RuntimeError) as error:
        log.warning("what was measured can't be kept in %s (%s)", path(table), error)


@contextmanager
def alone() -> Iterator[None]:
    """While inside, no other process measures with the same cache; after PATIENCE it may."""
    try:
        handle = os.open(modules.made(path().parent) / "tuned.lock", os.O_RDWR | os.O_CREAT, 0o600)
    except (OSError, RuntimeError):
        yield
        return
    try:
        _locked(handle)
        yield
    finally:
        os.close(handle)


def _locked(handle: int) -> None:
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.2)
        else:
            return
    log.warning("another process has been measuring for %d s: going on beside it", PATIENCE)


def choice_of(entry: Any) -> Choice | None:
    """The choice that an entry holds; None if it is not one."""
    try:
        kind, fields = entry["choice"]
        if kind == "strip":
            return Strip(**fields)
        return Configuration(**{**fields, "boxes": tuple(fields["boxes"])})
    except (KeyError, TypeError, ValueError):
        return None


def entry_of(choice: Choice, times: Mapping[str, float], title: str) -> dict[str, Any]:
    """An entry: the choice, the median time of each candidate in µs, what it is for people."""
    kind = "strip" if isinstance(choice, Strip) else "product"
    return {"title": title, "choice": [kind, asdict(choice)], "microseconds": dict(times)}
