"""Which configurations compete for a kernel: few, of different kinds, that fit the target.

The library's product is always among them, so that no kernel is slower than what it replaces.
"""

from __future__ import annotations

from collections.abc import Iterable

from cadenza.backends.triton.configuration import (
    Configuration,
    Facts,
    Strip,
    default,
    family,
    shrunk,
)
from cadenza.backends.triton.target import Target

LIBRARY = Configuration(library=True)
LOADS, STORES, BOTH = ("load",), ("store",), ("load", "store")
WORST = 0.75  # of the best use of the device by whole rounds of tiles: what is below isn't tried
HOPPER = (
    Configuration(128, 128, 64, warps=4, stages=5, parts=4, pingpong=True),
    Configuration(128, 128, 64, warps=4, stages=5, parts=4, group=4, pingpong=True),
    Configuration(192, 128, 64, warps=4, stages=5, parts=4, pingpong=True),
    Configuration(128, 128, 64, warps=4, stages=4, parts=4, pingpong=True, together=True),
    Configuration(192, 128, 64, warps=4, stages=3, parts=4, pingpong=True, together=True),
    Configuration(128, 256, 64, warps=8, stages=3, parts=4),
    Configuration(128, 256, 64, warps=8, stages=3, parts=4, boxes=STORES),
    Configuration(128, 128, 64, warps=8, stages=4, parts=2),
)
HOPPER_MORE = (
    Configuration(128, 128, 64, warps=4, stages=6, parts=4, pingpong=True),
    Configuration(192, 128, 64, warps=4, stages=5, parts=8, pingpong=True),
    Configuration(128, 128, 64, warps=4, stages=6, parts=8, pingpong=True),
    Configuration(128, 256, 64, warps=8, stages=3, parts=2),
    Configuration(128, 256, 64, warps=8, stages=3, parts=8),
    Configuration(128, 256, 64, warps=8, stages=3, parts=8, boxes=BOTH),
    Configuration(128, 256, 64, warps=8, stages=3, parts=8, boxes=LOADS),
    Configuration(128, 256, 64, warps=8, stages=3, parts=4, boxes=BOTH),
    Configuration(128, 256, 64, warps=8, stages=4, parts=4, boxes=LOADS),
    Configuration(128, 256, 64, warps=8, stages=4, parts=4, boxes=BOTH),
    Configuration(128, 256, 64, warps=8, stages=3, parts=4, group=4),
    Configuration(128, 128, 64, warps=8, stages=4, parts=2, boxes=LOADS),
    Configuration(256, 128, 64, warps=8, stages=3, parts=2, boxes=BOTH),
    Configuration(128, 128, 64, warps=8, stages=4, parts=4),
    Configuration(128, 128, 64, warps=8, stages=4, parts=1),
    Configuration(128, 128, 64, warps=8, stages=5, parts=2, boxes=STORES),
    Configuration(256, 128, 64, warps=8, stages=3, parts=4),
    Configuration(64, 256, 64, warps=4, stages=4, parts=4),
    Configuration(128, 64, 64, warps=4, stages=6, parts=1),
)
BLACKWELL = (
    *(c for c in HOPPER if not c.pingpong),
    Configuration(128, 256, 64, warps=8, stages=4, parts=4, boxes=LOADS),
    Configuration(128, 128, 64, warps=8, stages=4, parts=2, boxes=LOADS),
    Configuration(256, 128, 64, warps=8, stages=3, parts=2, boxes=BOTH),
)
AMPERE = (
    Configuration(128, 256, 32, warps=8, stages=3, parts=2),
    Configuration(128, 256, 64, warps=8, stages=3, parts=4),
    Configuration(128, 128, 32, warps=8, stages=4, parts=2),
    Configuration(128, 128, 64, warps=8, stages=3, parts=2),
    Configuration(128, 128, 32, warps=4, stages=4, parts=4),
    Configuration(256, 128, 32, warps=8, stages=3, parts=2),
    Configuration(128, 64, 64, warps=4, stages=3, parts=2),
    Configuration(64, 128, 64, warps=4, stages=3, parts=2),
)
AMPERE_MORE = (
    Configuration(64, 256, 32, warps=4, stages=4, parts=4),
    Configuration(128, 128, 64, warps=4, stages=3, parts=4),
    Configuration(128, 64, 32, warps=4, stages=4, parts=1),
    Configuration(64, 64, 64, warps=4, stages=4, parts=1),
)
AMD = (
    Configuration(128, 128, 32, warps=8, stages=2),
    Configuration(128, 128, 64, warps=8, stages=2),
    Configuration(256, 128, 32, warps=8, stages=2, parts=2),
    Configuration(128, 64, 64, warps=8, stages=2),
    Configuration(64, 128, 64, warps=4, stages=2),
)
LISTS = {
    "hopper": (HOPPER, HOPPER_MORE),
    "blackwell": (BLACKWELL, [c for c in HOPPER_MORE if not c.pingpong and c not in BLACKWELL]),
    "ampere": (AMPERE, AMPERE_MORE),
    "workstation": (AMPERE, AMPERE_MORE),
    "amd": (AMD, ()),
}


def product_candidates(
    facts: Facts, target: Target, rows: int, programs: int, full: bool
) -> list[Configuration]:
    """The default first, then those that fit the target and the product's size, and the library.

    `rows` are the product's, `programs` how many run at a time; `full` is the long list.
    """
    short, more = LISTS[family(target)]
    found = [default(facts, target)]
    found += [shrunk(cut, facts) for cut in (short + more if full else short)]
    fitting = [c for c in dict.fromkeys(found) if fits(c, facts, target)]
    used = {c: use(c, facts, rows, programs) for c in fitting}
    best = max(used.values(), default=0.0)
    return [*(c for c in fitting if used[c] >= WORST * best), LIBRARY]


def fits(cut: Configuration, facts: Facts, target: Target) -> bool:
    """Whether the target has the shared memory, and the product pairs of tiles where two go."""
    pairs = not cut.together or -(-facts.N // cut.BN) % 2 == 0
    return pairs and shared(cut, facts) <= target.shared


def shared(cut: Configuration, facts: Facts) -> int:
    """Bytes of shared memory that the operands of a tile take in all stages."""
    return cut.stages * (cut.BM + _across(cut)) * cut.BK * facts.itemsize


def _across(cut: Configuration) -> int:
    """Columns that a program takes at a time."""
    return cut.BN * (2 if cut.together else 1)


def use(cut: Configuration, facts: Facts, rows: int, programs: int) -> float:
    """Which share of the device works on the product, when all tiles take equally long."""
    down, across = -(-rows // cut.BM), -(-facts.N // _across(cut))
    rounds = -(-down * across // programs)
    return rows * facts.N / (rounds * programs * cut.BM * _across(cut))


def strip_candidates(strip: Strip, unit: int, holds: bool, full: bool) -> list[Strip]:
    """The default first, then other strips of a kernel without a product."""
    more: Iterable[Strip] = (
        (Strip(BM, strip.W, warps) for BM in (1, 2, 4) for warps in (4, 8, 16))
        if holds
        else (
            Strip(BM, W, warps)
            for BM, W, warps in ((8, 256, 4), (16, 128, 4), (4, 512, 4), (16, 256, 8), (64, 64, 8))
        )
    )
    found = [s for s in more if s.W % unit == 0]
    return list(dict.fromkeys([strip, *(found if full or not holds else found[:6])]))
