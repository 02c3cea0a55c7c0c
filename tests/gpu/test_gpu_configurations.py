"""Every product kernel of every built-in block under every candidate configuration.

Each gives what the reference back end gives on the same device; one that needs more shared memory
than there is counts as no candidate. What is chosen by default, at the sizes of an 8 B model,
spills at most 128 bytes a thread and fits.
"""

import pytest
from calls import LARGE, NAMES, RAGGED
from plans import (
    DIRECTIONS,
    attempt,
    check_agrees,
    compiled_kernels,
    kept_trials,
    spilled,
    trials,
)

from cadenza.backends.triton.configuration import Configuration, Facts
from cadenza.backends.triton.launches import ProductLaunch
from cadenza.backends.triton.program import Program
from cadenza.backends.triton.target import Target
from cadenza.backends.triton.tuning.candidates import product_candidates

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
SLICES = len(USUAL)


def candidates_of(given, device, long):
    """By product, what competes for its kernel (the long list?), and the usual ones."""
    target = Target.of(device)
    program = Program(given.plan, target=target)
    made = [step for step in program.steps if isinstance(step, ProductLaunch)]
    if not target.backend:
        return {step.product: USUAL for step in made}
    itemsize = {step.product: program.dtypes[step.operands[0]].itemsize for step in made}
    found = {}
    for step in made:
        facts = Facts.of(step.source, step.product, itemsize[step.product])
        rows, programs = facts.M or given.rows, program.programs(device)
        own = product_candidates(facts, target, rows, programs, full=long)
        found[step.product] = list(dict.fromkeys([*own, *USUAL]))
    return found


@pytest.mark.interpreted
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("part", range(SLICES))
def test_every_candidate_agrees_with_the_reference(part, name, direction, place):
    sizes = tuple(place.sizes(RAGGED).items())
    given = kept_trials(name, place.rows(ROWS), place, sizes)[DIRECTIONS.index(direction)]
    candidates = candidates_of(given, place.device, long=name == "llama")
    assert candidates, "no product is an emitted kernel"
    most = max(map(len, candidates.values()))
    for number in range(part, most, SLICES):
        check_candidate(given, candidates, number, place)


def check_candidate(given, candidates, number, place):
    """Runs a plan by the candidate of that number of each kernel; past the last, from the first."""

    def choose(kernel):
        own = candidates.get(kernel.product, USUAL)
        return own[number % len(own)]

    try:
        check_agrees(given, attempt(given, choose).outputs, place)
    except Exception as error:
        used = {str(own[number % len(own)]) for own in candidates.values()}
        error.add_note(f"by {', '.join(sorted(used))}")
        raise


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
