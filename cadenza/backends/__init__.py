"""Back ends: each runs the compiler's programs on tensors. `select` picks one by name."""

from __future__ import annotations

import os

from cadenza.backends import reference
from cadenza.backends.reference import Executable
from cadenza.core.errors import BackEndError
from cadenza.core.ir import Graph

NAMES = ("auto", "reference")


def chosen(name: str | None) -> str:
    """The back end asked for by a call, else by CADENZA_BACKEND, else auto. Raises BackEndError."""
    source = "backend=" if name else "CADENZA_BACKEND="
    name = name or os.environ.get("CADENZA_BACKEND") or "auto"
    if name not in NAMES:
        raise BackEndError(f"{source}{name!r} is not a back end; write one of {', '.join(NAMES)}")
    return "reference"


def compile_graph(graph: Graph, backend: str) -> Executable:
    """A program made ready to run on the back end called `backend`."""
    if backend != "reference":
        raise BackEndError(f"{backend!r} is not a back end; write one of {', '.join(NAMES)}")
    return reference.compile_graph(graph)
