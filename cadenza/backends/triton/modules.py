"""Emitted kernels as files: one readable module a kernel, in the cache, named by its digest.

What runs is the text that was emitted, never what a file holds: the file is for people, debuggers
and profilers. It is written whole and then renamed, and only a regular file of one's own that
holds exactly this text is left as it is. Where the cache can't be written, a folder of this
process alone takes its place.
"""

from __future__ import annotations

import atexit
import hashlib
import linecache
import logging
import os
import re
import shutil
import stat
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from cadenza.backends.triton import templates

log = logging.getLogger("cadenza")


def folder() -> Path:
    """`$CADENZA_CACHE`, else `$XDG_CACHE_HOME/cadenza`, else `~/.cache/cadenza`; then `kernels`.

    Raises RuntimeError where the user has no home.
    """
    given = os.environ.get("CADENZA_CACHE")
    if given:
        return Path(given).expanduser().absolute() / "kernels"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "")
    return (cache if cache.is_absolute() else Path.home() / ".cache") / "cadenza" / "kernels"


def digest(text: str) -> str:
    """What names a module: a digest of all of its text."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def file_name(text: str) -> str:
    """The name of a module's file: its title, as far as a file can be called so, and its digest."""
    title = re.sub(r"[^a-zA-Z0-9]+", "_", text.split("\n", 1)[0].strip('"'))[:40].strip("_")
    return f"{title}_{digest(text)}.py"


def entry(title: str, kind: str) -> str:
    """What a kernel is called, in profiles too: by its place in its plan, and by its kind."""
    place = re.sub(r"[^a-zA-Z0-9]+", "_", title.split(":", 1)[0]).strip("_")
    return f"cadenza_{place}_{kind}"


@cache
def function(text: str) -> Any:
    """The kernel of an emitted module: the last function that it defines."""
    path = str(written(text))
    module = ModuleType(f"cadenza_kernels_{Path(path).stem}")
    module.__file__ = path
    # Triton asks for the source of a function by its file: it gets this text, whatever is there.
    linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
    exec(compile(text, path, "exec", dont_inherit=True), module.__dict__)
    _settle(module)
    return vars(module)[re.findall(r"^def (\w+)\(", text, re.MULTILINE)[-1]]


def _settle(module: ModuleType) -> None:
    """Has Triton digest a module's functions in the order of their text, those it calls first.

    The digest of a function holds the constants of what it calls only where that was digested
    before (in Triton 3.6): the order decides under which key a kernel is kept, and would
    differ from process to process.
    """
    for value in vars(module).values():
        if isinstance(value, ModuleType) and value.__name__.startswith(templates.__name__):
            _settle(value)
    for value in vars(module).values():
        if callable(value) and not isinstance(value, type):
            with suppress(RuntimeError):  # what can't be digested, a launch will say
                getattr(value, "cache_key", None)


def written(text: str) -> Path:
    """The file that holds this text; it is written where it is missing or differs."""
    name = file_name(text)
    try:
        return kept(made(folder()), name, text)
    except (OSError, RuntimeError) as error:
        _warn(str(getattr(error, "strerror", None) or error))
    try:
        return kept(_private(), name, text)
    except OSError:
        return Path(tempfile.gettempdir()) / name  # a name for it: the text runs without a file


# --- the cache ------------------------------------------------------------------------------------


def made(place: Path) -> Path:
    """The folder, and the one that it is in, made for this user alone. Raises OSError."""
    place.parent.parent.mkdir(parents=True, exist_ok=True)
    for each in (place.parent, place):
        each.mkdir(mode=0o700, exist_ok=True)
    info = place.stat()
    if info.st_uid != os.geteuid():
        raise PermissionError(f"{place} is another user's")
    if stat.S_IMODE(info.st_mode) & 0o077:
        place.chmod(0o700)
    return place


def kept(place: Path, name: str, text: str) -> Path:
    """The file in this folder. Raises OSError where it can't be written."""
    path = place / name
    if _read(path) == text.encode():
        return path
    handle, temporary = tempfile.mkstemp(dir=place, suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path


def _read(path: Path) -> bytes | None:
    """What a file holds; None where there is none, or not a regular one of one's own."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with os.fdopen(handle, "rb") as file:
        info = os.fstat(handle)
        own = stat.S_ISREG(info.st_mode) and info.st_uid == os.geteuid()
        return file.read() if own else None


@cache
def _private() -> Path:
    """A folder of this process alone, removed when it ends."""
    place = Path(tempfile.mkdtemp(prefix="cadenza-"))
    atexit.register(_removed, place, os.getpid())
    return place


def _removed(place: Path, process: int) -> None:
    # A forked process ends too, and must leave the folder to the one that made it.
    if os.getpid() == process:
        shutil.rmtree(place, ignore_errors=True)


_warned: set[str] = set()


def _warn(problem: str) -> None:
    if not _warned:
        _warned.add(problem)
        log.warning(
            "kernels can't be kept in the cache (%s): they are in a temporary folder; "
            "CADENZA_CACHE names another place",
            problem,
        )
