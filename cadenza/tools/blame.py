"""Whose fault an error is that nobody raised on purpose."""

from __future__ import annotations

import traceback
from types import TracebackType

from cadenza.core.errors import CadenzaError, VerificationError

PACKAGE = "cadenza."
OURS = "a fault of Cadenza's: please report it, with the program"
# What a line of code is at fault for. PyTorch's own errors, which come out of its C++ code in
# whatever line called it, are about the tensors that an author gave.
MISTAKES = (
    ArithmeticError, AssertionError, AttributeError, LookupError, NameError, RecursionError,
    StopIteration, TypeError,
)  # fmt: skip


def is_ours(error: BaseException) -> bool:
    """Whether Cadenza is at fault: a line of its own failed, in the first cause of the error.

    What a `raise` of Cadenza's says is about what it was given, unless a pass broke a program. Nor
    is it at fault where the very line that asked fails: what it called took no such arguments.
    """
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, CadenzaError):
        return isinstance(error, VerificationError)
    asked = error.__traceback__
    if not isinstance(error, MISTAKES) or asked is None or asked.tb_next is None:
        return False
    last = _innermost(asked)
    if not str(last.tb_frame.f_globals.get("__name__", "")).startswith(PACKAGE):
        return False
    line = traceback.extract_tb(last)[0].line or ""
    return not line.startswith("raise ")


def _innermost(found: TracebackType) -> TracebackType:
    while found.tb_next is not None:
        found = found.tb_next
    return found
