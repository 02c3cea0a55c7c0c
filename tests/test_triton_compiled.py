"""Default configurations: every kernel of every built-in block fits every target.

Kernels are compiled without a GPU, in processes of their own; the binaries say what they take.
"""

from pathlib import Path

import pytest
import torch
from kernel_reports import Compiled, Task, reports

from cadenza.backends.triton.compiled import CompilationError, Report, compile_for
from cadenza.backends.triton.configuration import Facts, default, strip
from cadenza.backends.triton.target import INTERPRETER, TARGETS, Target

NAMES = ("sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "gfx942")
LARGE = Facts(2, 1, near=False, half=False, lanes=1, unit=1, M=None, N=4096, K=4096)


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
def test_every_kernel_of_losses_fits_hopper(tmp_path: Path) -> None:
    """Their finishes use a sum over tiles more than once, on which Triton failed inside a loop."""
    found = reports([Task("sm_90", blocks=["losses"])], tmp_path)
    assert len(found) > 20
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
