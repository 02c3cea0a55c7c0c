"""What a command says when its input is bad: one line that names the cure, exit code 2."""

from __future__ import annotations

import re

from cadenza.core.errors import CadenzaError

PARTS = re.compile(r"\n  (found|expected|write): +")


class Fault(CadenzaError):
    """Bad input to a command; the text is one line and names what to write instead."""


def one_line(problem: str) -> str:
    """A text in one line; the parts of an error of a program are set apart."""
    return " ".join(PARTS.sub(r"; \1: ", problem).split())
