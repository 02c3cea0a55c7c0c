"""Files that are there whole or not at all, and the folder they go to.

Content is written to a part file beside its target and renamed over it, so that a process killed
at any moment leaves the old file or the new one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from cadenza.tools.fault import Fault


def write_whole(path: Path, content: bytes | Callable[[Path], None]) -> None:
    """Make `path` hold `content`, or what it writes to the path that it is given.

    Raises Fault, leaving `path` as it was, where that fails.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        _write_through(part, content)
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise Fault(
            f"{path} cannot be written ({error.strerror}): free space, or choose another --out"
        ) from error
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _write_through(path: Path, content: bytes | Callable[[Path], None]) -> None:
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.touch()
        mode = path.stat().st_mode  # safetensors would let nobody else read what it writes
        content(path)
        path.chmod(mode)
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def prepare_folder(folder: Path) -> None:
    """Create `folder` where missing; raises Fault unless files can be written in it."""
    probe = folder / f".probe.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except (FileExistsError, NotADirectoryError) as error:
        raise Fault(f"--out {folder} is a file or lies below one: name a folder") from error
    except OSError as error:
        raise Fault(
            f"--out {folder} cannot be written ({error.strerror}): choose another folder"
        ) from error
