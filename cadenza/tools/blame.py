"""Whose fault an error is that nobody raised on purpose."""

from __future__ import annotations

import os
import traceback
from pathlib import Path

from cadenza.core.errors import CadenzaError, VerificationError

PACKAGE = str(Path(__file__).resolve().parents[1]) + os.sep
OURS = "a fault of Cadenza's: please report it, with the program"


def is_ours(error: BaseException) -> bool:
    """Whether Cadenza is at fault: a line of its own failed, in the first cause of the error.

    What it raises on purpose is about what it was given, unless a pass broke a program. Nor is it
    at fault where the very line that asked fails: then what it called took no such arguments.
    """
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, CadenzaError):
        return isinstance(error, VerificationError)
    below = traceback.extract_tb(error.__traceback__)[1:]
    return bool(below) and below[-1].filename.startswith(PACKAGE)
