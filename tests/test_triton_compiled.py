"""Default configurations: every kernel of every built-in block fits every target.

And candidates of selection for Hopper: what is accepted fits. Kernels are compiled without a GPU,
in processes of their own; the binaries say what they take.
"""

from pathlib import Path

import pytest
import test_triton_gluon as pingpong
import torch
from kernel_reports import Compiled, Task, reports
from tuning_place import HOPPER, place, plans, settled

from cadenza.backends.triton import settings
from cadenza.backends.triton.compiled import CompilationError, Report, compile_for
from cadenza.backends.triton.configuration import Facts, default, strip
from cadenza.backends.triton.target import INTERPRETER, TARGETS, Target
from cadenza.backends.triton.tuning import candidates, choices
from cadenza.backends.triton.tuning.contests import Contest, contests_of
from cadenza.backends.triton.tuning.recipes import KernelCall
from cadenza.backends.triton.tuning.workers import Workers

NAMES = ("sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "gfx942")
SPILLED = 128  # bytes a thread
LARGE = Facts(2, 1, near=False, half=False, lanes=1, unit=1, M=None, N=4096, K=4096)


PAIRS, GROUPS = ("llama-mlp", "norm-qkv"), ("qwen3",)
OTHERS = [
    ("sm_86", "float16", (*PAIRS, *GROUPS)), ("sm_86", "float32", GROUPS),
    ("sm_100", "float16", GROUPS), ("sm_100", "float32", (*PAIRS, *GROUPS)),
    ("sm_120", "float16", PAIRS), ("sm_120", "float32", PAIRS),
    ("gfx942", "float16", GROUPS),
]  # fmt: skip


def assert_fits(found: list[Compiled]) -> None:
    """No kernel has a fault."""
    bad = [f"{f.target}: {f.kernel}: {fault}" for f in found for fault in f.faults]
    assert not bad, "\n".join(["kernels that don't fit:", *bad])


@pytest.mark.slow
def test_every_kernel_of_every_block_fits_every_target(tmp_path: Path) -> None:
    tasks = [Task(name) for name in NAMES]
    tasks += [Task(name, dtype) for name in ("sm_80", "sm_90") for dtype in ("float16", "float32")]
    tasks += [Task("gfx942", "float32")]
    found = reports(tasks, tmp_path)
    assert {f.target for f in found} == set(NAMES)
    assert_fits(found)


@pytest.mark.slow
def test_kernels_of_other_dtypes_fit_the_other_targets(tmp_path: Path) -> None:
    """Some blocks of each: pairs of halves and of neighbours, sums of groups of columns."""
    found = reports([Task(*each) for each in OTHERS], tmp_path)
    assert {f.target for f in found} == {target for target, *_ in OTHERS}
    assert len(found) > 10 * len(OTHERS)
    assert_fits(found)


@pytest.mark.slow
def test_every_kernel_of_losses_fits_hopper(tmp_path: Path) -> None:
    """Their finishes use a sum over tiles more than once, on which Triton failed inside a loop."""
    found = reports([Task("sm_90", blocks=["losses"])], tmp_path)
    assert len(found) > 20
    assert_fits(found)


@pytest.mark.slow
def test_every_kernel_of_the_library_fits(tmp_path: Path) -> None:
    """Programs that `cadenza explain` knows beside the blocks; one of them holds rows of pairs."""
    names = ("sm_86", "sm_90", "sm_120", "gfx942")
    found = reports([Task(name, blocks=["library"]) for name in names], tmp_path)
    assert len(found) > 800
    assert_fits(found)


@pytest.mark.slow
def test_kernels_with_every_number_fit_every_target(tmp_path: Path) -> None:
    found = reports([Task(name, blocks=["numbers"]) for name in NAMES], tmp_path)
    assert {f.target for f in found} == set(NAMES)
    assert_fits(found)


@pytest.mark.slow
def test_a_kernel_fits_every_target(tmp_path: Path) -> None:
    found = reports([Task(name, "bfloat16", ["llama-mlp"], 1) for name in NAMES], tmp_path)
    assert sorted(f.target for f in found) == sorted(NAMES)
    assert all(f.figures[0] > 32 and f.figures[2] > 16384 for f in found)
    assert_fits(found)


# --- candidates -----------------------------------------------------------------------------------


def contests_of_a_block() -> list[Contest]:
    """Those of the products of SwiGLU, of none and of SwiGLU's derivative, for an 8 B model.

    The others of the block are products alone, as the second one is.
    """
    found = [contests_of(*given, settled(given[0]), full=True) for given in plans("llama-mlp")]
    return [contest for each in found for contest in each][:3]


@pytest.mark.slow
@pytest.mark.usefixtures(place.__name__)
def test_what_selection_accepts_fits_and_hardly_spills(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Every candidate for Hopper, for products of a block, compiled as selection does it."""
    monkeypatch.setattr(candidates, "WORST", 0.0)  # none is left out for being slow
    monkeypatch.setitem(settings.TRITON_LOADED, "TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setattr(choices, "WORKERS", Workers())
    contests = contests_of_a_block()
    tried = [pair for c in contests for pair in zip(c.choices, c.calls, strict=True)]
    reports = choices._compiled([calls for _, calls in tried], HOPPER, 900.0)
    accepted, refused = set(), set()
    for choice, calls in tried:
        found = [reports[repr(c)].result() for c in calls if isinstance(c, KernelCall)]
        assert all(isinstance(each, Report) for each in found), f"{choice}: {found}"
        fault = choices._fault(reports, calls, HOPPER)
        assert (not fault) == all(map(hardly_spills, found)), f"{choice}: {found}, {fault!r}"
        (refused if fault else accepted).add(choice)
    choices.WORKERS.end()
    listed = {*candidates.HOPPER, *candidates.HOPPER_MORE}
    assert listed <= accepted, "each serves some product"
    assert listed & refused, "none is refused anywhere: what would be is not seen"
    pairs = [calls for choice, calls in zip(contests[2].choices, contests[2].calls, strict=True)
             if choice.together]  # fmt: skip
    own = [reports[repr(calls[0])].result() for calls in pairs]
    tasks = [("llama-mlp", "bfloat16", 2, rows) for rows in (128, 192)]
    asked = [Report(*found.figures) for found in pingpong.compiled(tasks, tmp_path)]
    judged = [{(each.shared, hardly_spills(each)) for each in both} for both in (own, asked)]
    assert judged[0] == judged[1], f"{own}, by the compiler itself {asked}"
    assert {verdict for _, verdict in judged[0]} == {True, False}


def hardly_spills(found: Report) -> bool:
    """Whether a kernel spills at most 128 bytes a thread and fits."""
    return found.spilled <= SPILLED and found.shared <= HOPPER.shared


def test_a_report_names_what_does_not_fit() -> None:
    faults = Report(registers=255, spilled=8, shared=101377).faults(Target.named("sm_86"))
    assert faults == [
        "8 bytes a thread spilled at 255 registers",
        "101377 bytes of shared memory, at most 101376",
    ]
    assert not Report(registers=255, spilled=0, shared=101376).faults(Target.named("sm_86"))


class Interpreted:
    """A kernel as Triton makes it where it interprets."""

    function = staticmethod(lambda: None)


@pytest.mark.parametrize(
    ("target", "words"),
    [(INTERPRETER, "name a target such as sm_90"), (Target.named("sm_90"), "unset TRITON_INT")],
)
def test_what_cannot_be_compiled_is_said(target: Target, words: str) -> None:
    with pytest.raises(CompilationError, match=words):
        compile_for(Interpreted(), target)  # type: ignore[arg-type] # no more of it is reached


# --- defaults -------------------------------------------------------------------------------------


def test_an_unknown_target_is_named() -> None:
    with pytest.raises(ValueError, match=r"no target 'sm_12'; the targets are sm_80, .*, gfx942"):
        Target.named("sm_12")


def test_a_cpu_interprets_small_tiles() -> None:
    assert Target.of(torch.device("cpu")) is INTERPRETER
    assert default(LARGE, INTERPRETER).BM == 16


def test_a_bare_product_on_hopper_has_the_tile_that_was_fastest() -> None:
    cut = default(LARGE, Target.named("sm_90"))
    assert (cut.BM, cut.BN, cut.BK, cut.warps, cut.stages) == (128, 256, 64, 8, 3)


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("weight", [1, 4, 9, 20])
@pytest.mark.parametrize("itemsize", [1, 2, 4])
def test_a_tile_is_no_larger_than_the_product_needs(
    target: Target, weight: int, itemsize: int
) -> None:
    for lanes, size in ((1, 1), (1, 16), (2, 24), (2, 64), (1, 100)):
        facts = LARGE._replace(
            itemsize=itemsize, weight=weight, lanes=lanes, M=size, N=size, K=size
        )
        cut = default(facts, target)
        sizes = (cut.BM, cut.BN, cut.BK)
        assert all(16 <= s < 2 * max(size, 16 * lanes) and s & (s - 1) == 0 for s in sizes)
        assert cut.width(lanes) >= 16
        assert cut.warps in (4, 8)


def test_a_strip_holds_whole_rows_only_where_it_must() -> None:
    assert strip(6144, 1, holds=False).W == 256
    assert strip(6144, 1, holds=True).W == 8192
    assert strip(5, 1, holds=False).W == 16
    assert strip(6144, 256, holds=False).W == 256
