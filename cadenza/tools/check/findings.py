"""What a check found: a line each, whether it holds, and what to change if it does not."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Finding(NamedTuple):
    """One thing that was checked. `holds` is None where it could not be asked here.

    `figure` is what was found, `cure` what to change; one without a figure needs none.
    """

    check: str
    holds: bool | None
    figure: str = ""
    cure: str = ""


@dataclass
class Judgement:
    """All findings on one program; `kernels` and `compiled` are their details for programs."""

    name: str
    findings: list[Finding] = field(default_factory=list)
    kernels: list[dict[str, Any]] = field(default_factory=list)
    compiled: list[dict[str, Any]] = field(default_factory=list)
    times: list[dict[str, Any]] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Whether nothing that was asked fails."""
        return all(finding.holds is not False for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        """The judgement as data."""
        return {
            "name": self.name,
            "holds": self.holds,
            "findings": [finding._asdict() for finding in self.findings],
            "kernels": self.kernels,
            "compiled": self.compiled,
            "times": self.times,
        }
