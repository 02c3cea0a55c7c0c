"""Back ends: each runs the compiler's programs on tensors. `select` picks one by name."""

from __future__ import annotations

import os

from cadenza.backends import reference
from cadenza.backends.reference import Executable
from cadenza.core.errors import BackEndError, author_line, explanation
from cadenza.core.plan import Plan

NAMES = ("auto", "reference")


def chosen(name: str | None) -> str:
    """The back end asked for by a call, else by CADENZA_BACKEND, else auto. Raises BackEndError."""
    asked = name or os.environ.get("CADENZA_BACKEND") or "auto"
    if asked not in NAMES:
        raise _unknown(asked, author_line() if name else "CADENZA_BACKEND")
    return "reference"


def _unknown(name: str, where: str) -> BackEndError:
    names = ", ".join(NAMES)
    return BackEndError(explanation("no such back end", repr(name), f"one of {names}", "", where))


def compile_plan(plan: Plan, backend: str) -> Executable:
    """A program made ready to run on the back end called `backend`."""
    if backend != "reference":
        raise _unknown(backend, "")
    return reference.compile_plan(plan)
