"""What a command says when its input is bad: one line that names the cure, exit code 2."""

from __future__ import annotations

from cadenza.core.errors import CadenzaError


class Fault(CadenzaError):
    """Bad input to a command; the text is one line and names what to write instead."""
