"""Every error an author or a caller can meet, each naming the cure.

A message has at most four lines: where and what, what was found, what was expected, what to
write instead. The place is the innermost line of the author's own code, never one of ours.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path
from types import FrameType

_PACKAGE = Path(__file__).resolve().parent.parent
_OURS = tuple(str(_PACKAGE / part) for part in ("core", "backends"))
_BRIDGE = str(_PACKAGE / "library")
_BLOCKS = str(_PACKAGE / "library" / "blocks.py")
_STANDARD = sysconfig.get_path("stdlib")
_SITE = "site-packages"
_LIBRARIES = tuple(str(Path(_SITE, package)) + os.sep for package in ("torch", "numpy"))


class CadenzaError(Exception):
    """Base of all errors raised on purpose by Cadenza."""


def explanation(problem: str, found: str, expected: str, write: str, where: str) -> str:
    """The lines of a message; what is empty is left out."""
    lines = {"  found:    ": found, "  expected: ": expected, "  write:    ": write}
    first = f"{where}: {problem}" if where else problem
    return "\n".join([first, *(label + text for label, text in lines.items() if text)])


class ProgramError(CadenzaError, TypeError):
    """A program or a call of one is wrong; the text says where, and what to write."""

    def __init__(
        self,
        problem: str,
        *,
        found: str = "",
        expected: str = "",
        write: str = "",
        where: str | None = None,
    ) -> None:
        place = author_line() if where is None else where
        self.parts = problem, found, expected, write
        super().__init__(explanation(*self.parts, place))

    def moved(self, where: str) -> ProgramError:
        """The same error at another place."""
        problem, found, expected, write = self.parts
        return ProgramError(problem, found=found, expected=expected, write=write, where=where)


class UnknownOperationError(ProgramError, AttributeError):
    """An operation outside the language was asked of a traced value."""


class VerificationError(CadenzaError):
    """A compiler pass made a graph that breaks an invariant: a fault of ours, never a user's."""


class BackEndError(CadenzaError, ValueError):
    """The back end asked for does not exist or cannot run here."""


def _is_ours(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    if file.startswith(_OURS) or file.startswith("<frozen"):
        return True
    if any(library in file for library in _LIBRARIES):
        return True
    if file.startswith(_STANDARD) and _SITE not in file:
        return True
    return file.startswith(_BRIDGE) and file != _BLOCKS


def author_line() -> str:
    """`file:line` of the innermost frame of the author's own code, or "" when there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_ours(frame):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
