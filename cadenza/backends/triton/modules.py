"""Emitted kernels as files: one readable module a kernel, in the cache, named by its digest.

A file is written whole and then renamed, and its text is compared with what is expected before it
is run, so that nothing else is ever executed from there.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any


def folder() -> Path:
    """`$CADENZA_CACHE`, else `$XDG_CACHE_HOME/cadenza`, else `~/.cache/cadenza`; then `kernels`."""
    given = os.environ.get("CADENZA_CACHE")
    if given:
        return Path(given) / "kernels"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cadenza" / "kernels"


@lru_cache(maxsize=None)
def function(text: str) -> Any:
    """The function `kernel` of an emitted module."""
    path = written(text)
    name = f"cadenza_kernels_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.kernel


def digest(text: str) -> str:
    """What names a module: a digest of all of its text."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def written(text: str) -> Path:
    """The file that holds this text; it is written where it is missing or differs."""
    place = folder()
    title = re.sub(r"[^a-zA-Z0-9]+", "_", text.split("\n", 1)[0].strip('"'))[:40].strip("_")
    path = place / f"{title}_{digest(text)}.py"
    try:
        if path.read_text(encoding="utf-8") == text:
            return path
    except (OSError, UnicodeDecodeError):
        pass
    place.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle, temporary = tempfile.mkstemp(dir=place, suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path
