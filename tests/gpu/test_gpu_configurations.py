"""Every product kernel of every built-in block under every configuration that competes by default.

Each gives what the reference back end gives on the same device; one that needs more shared memory
than there is counts as no candidate. Of the long list each runs some products as it was asked to.
What is chosen by default, at the sizes of an 8 B model, spills at most 128 bytes a thread and fits.
"""

from dataclasses import replace

import pytest
from calls import HEADS, LARGE, NAMES, RAGGED
from plans import (
    DIRECTIONS,
    attempt,
    check_agrees,
    compiled_kernels,
    kept_trials,
    ran_as_asked,
    spilled,
    trials,
)

from cadenza.backends.triton.configuration import Configuration, Facts, family
from cadenza.backends.triton.program import Program
from cadenza.backends.triton.target import Target
from cadenza.backends.triton.tuning.candidates import LIBRARY, LISTS, fits

pytestmark = pytest.mark.gpu
ROWS = 300  # two whole tiles of 128 rows, and a part of one
SPILLED = 128
BOTH = ("load", "store")

# Every value of every field stands beside every value of most others.
USUAL = [
    Configuration(BM=128, BN=128, BK=64, warps=8, stages=3, parts=1),
    Configuration(BM=128, BN=256, BK=64, warps=8, stages=3, parts=4, boxes=BOTH),
    Configuration(BM=128, BN=256, BK=64, warps=8, stages=3, parts=8, boxes=("load",)),
    Configuration(BM=64, BN=256, BK=64, warps=4, stages=3, parts=4, group=1),
    Configuration(BM=128, BN=128, BK=32, warps=8, stages=4, parts=2, descriptors=False),
    Configuration(BM=64, BN=64, BK=32, warps=4, stages=4, parts=1, descriptors=False),
    Configuration(BM=64, BN=128, BK=64, warps=4, stages=2, parts=2, boxes=("store",)),
    Configuration(BM=128, BN=64, BK=64, warps=4, stages=3, parts=1, boxes=BOTH),
    Configuration(BM=128, BN=256, BK=32, warps=8, stages=4, parts=2, descriptors=False),
    Configuration(BM=128, BN=256, BK=64, warps=8, stages=4, parts=8, group=4),
    Configuration(BM=128, BN=128, BK=64, stages=6, parts=4, pingpong=True),
    Configuration(BM=192, BN=128, BK=64, stages=5, parts=4, pingpong=True),
    Configuration(BM=128, BN=128, BK=64, stages=4, parts=4, pingpong=True, together=True),
    Configuration(BM=192, BN=128, BK=64, stages=3, parts=4, pingpong=True, together=True),
]
SLICES = 10
# Two programs between whose products every candidate has one that it can be taken for: pairs of
# halves and of neighbours, sums of rows and columns, even numbers of tiles of columns.
LISTED = ("llama-mlp", "norm-qkv")
EVEN = {"D": 448, "F": 512, **HEADS}
BARE = Facts(2, 1, near=False, half=False, lanes=1, unit=1, M=None, N=512, K=None)


def entries(target):
    """What competes by default on a target, whatever the product, and the usual ones."""
    short = [*LISTS[family(target)][0], LIBRARY] if target.backend else []
    # Hopper's template has 4 warps whatever is asked: these are for the plain one in its place.
    short = [replace(cut, warps=8) if cut.pingpong else cut for cut in short]
    return list(dict.fromkeys([*short, *USUAL]))


@pytest.mark.interpreted
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("part", range(SLICES))
def test_every_candidate_agrees_with_the_reference(part, name, direction, place):
    sizes = tuple(place.sizes(RAGGED).items())
    given = kept_trials(name, place.rows(ROWS), place, sizes)[DIRECTIONS.index(direction)]
    cuts = entries(Target.of(place.device))[part::SLICES]
    products = [check_candidate(given, cut, place) for cut in cuts]
    assert any(products), "no product is an emitted kernel"


def check_candidate(given, cut, place):
    """Runs a plan by one configuration; the products that ran and fitted."""
    try:
        found = attempt(given, lambda kernel: cut if kernel.product is not None else None)
        check_agrees(given, found.outputs, place)
    except Exception as error:
        error.add_note(f"by {cut}")
        raise
    return found.products


@pytest.mark.parametrize("name", LISTED)
@pytest.mark.parametrize("part", range(SLICES))
def test_every_candidate_that_is_listed_runs_as_asked(part, name, place):
    """Of the whole lists, whatever share of the device they would use; none is substituted."""
    target = Target.of(place.device)
    plans = kept_trials(name, ROWS, place, tuple(EVEN.items()))
    whole = [cut for each in LISTS[family(target)] for cut in each if fits(cut, BARE, target)]
    for cut in whole[part::SLICES]:
        products = [launch for given in plans for launch in check_candidate(given, cut, place)]
        assert any(ran_as_asked(launch, cut) for launch in products), f"none of all by {cut}"


RINGS = [cut for cut in USUAL if cut.pingpong]


@pytest.mark.parametrize("programs", [1, 2])
@pytest.mark.parametrize("cut", RINGS, ids=str)
@pytest.mark.parametrize("name", ["llama-mlp", "lm-head"])
def test_rings_go_round_over_several_tiles(name, cut, programs, place, monkeypatch):
    """Where programs are as many as tiles, a consumer has one at most."""
    monkeypatch.setattr(Program, "programs", lambda self, device: programs)
    for given in kept_trials(name, ROWS, place, tuple(RAGGED.items())):
        check_agrees(given, attempt(given, lambda kernel: cut).outputs, place)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_chosen_by_default_fits_and_hardly_spills(name, place, capsys):
    limit = Target.of(place.device).shared
    faults, most = [], 0
    for direction, given in zip(DIRECTIONS, trials(name, 256, place, LARGE), strict=True):
        found = attempt(given)
        for title, kernel in compiled_kernels(found.executable):
            most = max(most, spilled(kernel))
            taken = f"{kernel.n_regs} registers, {spilled(kernel)} bytes spilled"
            taken += f", {kernel.metadata.shared} of {limit} bytes shared"
            if spilled(kernel) > SPILLED or kernel.metadata.shared > limit:
                faults.append(f"{direction}, {title}: {taken}")
        check_agrees(given, found.outputs, place)
    with capsys.disabled():
        print(f"\n{name}: at most {most} bytes a thread spilled by default")
    assert not faults, "\n".join(faults)
