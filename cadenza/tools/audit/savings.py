"""GPU-hours and money that a shorter step saves, with the range that a spread gives."""

from __future__ import annotations

from typing import Any, NamedTuple

from cadenza.tools.audit.options import AuditOptions
from cadenza.tools.fault import Fault


class Saving(NamedTuple):
    """The share of a step that is saved, and at least and at most; negative where it is lost."""

    share: float
    least: float
    most: float
    basis: str

    def times(self, factor: float) -> tuple[float, float, float]:
        """What is saved of a number of hours, or of their price, and its range."""
        return self.share * factor, self.least * factor, self.most * factor


def predicted(share: float, spread: float) -> Saving:
    """A predicted share; what is saved may be less or more by `spread` of it."""
    ends = sorted((share * (1 - spread), share * (1 + spread)))
    return Saving(share, *ends, f"predicted, give or take {100 * spread:g} % of what is saved")


def measured(before: tuple[float, float, float], after: tuple[float, float, float]) -> Saving:
    """A measured share, of (lower quartile, median, upper quartile) of both times."""
    share = 1 - after[1] / before[1]
    least, most = 1 - after[2] / before[0], 1 - after[0] / before[2]
    return Saving(share, least, most, "measured, between quartiles of steps")


def check(options: AuditOptions) -> None:
    """Raises Fault for hours, a price or a spread that are none."""
    for name in ("hours", "price"):
        number = getattr(options, name)
        if number is not None and number < 0:
            raise Fault(f"--{name} {number:g}: choose 0 or more")
    if options.price is not None and options.hours is None:
        raise Fault("--price needs --hours: how many GPU-hours training takes now")
    if not 0 <= options.spread <= 1:
        raise Fault(f"--spread {options.spread:g}: choose a share from 0 to 1")


def amounts(saving: Saving, options: AuditOptions) -> dict[str, Any]:
    """The saving as data, with hours and money where they were asked for."""
    found: dict[str, Any] = {
        "share": saving.share, "least": saving.least, "most": saving.most, "basis": saving.basis,
    }  # fmt: skip
    if options.hours is not None:
        found["hours"] = saving.times(options.hours)
    if options.hours is not None and options.price is not None:
        found["money"] = saving.times(options.hours * options.price)
    return found
