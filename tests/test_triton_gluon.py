"""The pingpong template: what it emits, refuses and compiles to for Hopper, without a GPU.

Kernels are compiled in processes of their own, where Triton does not interpret: this file, run as a
program, compiles its share. Values are tested on a GPU alone, as Gluon has no interpreter; the
epilogue's lines are those of the plain template, which are tested by interpretation.
"""

import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from kernel_reports import NUMBERS, plan_of_numbers
from planned import large_call

from cadenza import lang as L
from cadenza.backends.triton.arguments import Arguments, Vectors
from cadenza.backends.triton.body import Body
from cadenza.backends.triton.columns import Layout, Unsupported
from cadenza.backends.triton.compiled import CompilationError, report
from cadenza.backends.triton.configuration import Configuration
from cadenza.backends.triton.gluon_launch import HEAVY, GluonLaunch
from cadenza.backends.triton.gluon_source import cut_of
from cadenza.backends.triton.launches import ProductLaunch
from cadenza.backends.triton.memory import Memory
from cadenza.backends.triton.program import Program, layout_of
from cadenza.backends.triton.target import Target
from cadenza.backends.triton.templates import device, gluon_device
from cadenza.core.pipeline import compile_program
from cadenza.core.plan import Plan
from cadenza.core.trace import Operand, Signature
from cadenza.library.blocks import BUILT_IN

HOPPER = Target.named("sm_90")
PLAIN = Configuration(BM=128, BN=128, BK=64, warps=8, stages=3, parts=2)
# Bytes a thread, spilled once a tile. Most are pointers: a consumer gets them through shared memory
# and keeps them while it multiplies. gemma2's widest epilogue has 164, no other more than 128.
SPILLED = 164
TOGETHER = Configuration(128, 128, 64, warps=4, stages=4, parts=4, pingpong=True, together=True)
WORKERS = 2


# --- launches -------------------------------------------------------------------------------------


def launches(plan: Plan, cut: Configuration | None = None) -> Iterator[GluonLaunch | str]:
    """A plan's products by the pingpong template, or the reason why one is not."""
    program = Program(plan, lambda kernel: PLAIN, target=HOPPER)
    kernels = {kernel.product: kernel for kernel in plan.kernels}
    for step in program.steps:
        if isinstance(step, ProductLaunch):
            kernel = kernels[step.product]
            body = Body(kernel, Arguments({}), Vectors(), layout_of(kernel))
            try:
                yield GluonLaunch(step, kernel, body, cut=cut)
            except Unsupported as error:
                yield str(error)


def of_block(
    name: str, dtype: str = "bfloat16", cut: Configuration | None = None
) -> list[GluonLaunch | str]:
    """The products of both plans of a built-in block at the sizes of an 8 B model."""
    if name == NUMBERS:
        return list(launches(plan_of_numbers(dtype), cut))
    pair = large_call(name, dtype).pair()
    plans = [pair.forward_plan, *([pair.backward_plan] if pair.backward_plan else [])]
    return [launch for plan in plans for launch in launches(plan, cut)]


def of_function(function: Any, dtype: str = "bfloat16", **shapes: tuple[Any, int]) -> GluonLaunch:
    """The product of a function of matrices."""
    operands = tuple(Operand(n, rows, columns, dtype) for n, (rows, columns) in shapes.items())
    plan = compile_program(function, Signature(operands, ()), {}, ()).forward_plan
    (found,) = launches(plan)
    assert isinstance(found, GluonLaunch), found
    return found


def swiglu(x, w):
    """Of a product's columns the first half is the gate."""
    return L.swiglu(L.linear(x, w))


class Compiled(NamedTuple):
    """A kernel's name, its registers, spilled bytes and shared memory, or the compiler's words."""

    name: str
    figures: Sequence[int]
    words: str = ""


Task = tuple[str, str, int, int]


def compiled(tasks: Sequence[Task], cache: Path) -> list[Compiled]:
    """Kernels compiled in processes of their own.

    Of a block, in a dtype, by number (all with -1), with so many rows of tiles taken together (by
    default with 0).
    """
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    root = str(Path(__file__).resolve().parent.parent)
    environment |= {
        "TRITON_CACHE_DIR": str(cache / "triton"), "CADENZA_CACHE": str(cache / "kernels"),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]),
    }  # fmt: skip
    processes = []
    for worker in range(min(WORKERS, len(tasks))):
        given = json.dumps([worker, tasks])
        command = [sys.executable, __file__, given]
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE))
    lines = []
    for process in processes:
        lines += process.communicate()[0].decode().splitlines()
        assert process.returncode == 0
    return [Compiled(*json.loads(line)) for line in lines if line.startswith("[")]


def work(worker: int, tasks: Sequence[Task]) -> None:
    """Compiles what is this worker's, each text once."""
    seen = set()
    workers, count = min(WORKERS, len(tasks)), 0
    for name, dtype, number, rows in tasks:
        cut = replace(TOGETHER, BM=rows, stages=4 if rows == 128 else 3) if rows else None
        found = [f for f in of_block(name, dtype, cut) if isinstance(f, GluonLaunch)]
        for position, launch in enumerate(found):
            text = launch.source.text
            if (text, rows) in seen or number not in (-1, position):
                continue
            seen.add((text, rows))
            count += 1
            if count % workers == worker:
                print(json.dumps(one(f"{name} product {position} ({dtype})", launch)), flush=True)


def one(name: str, launch: GluonLaunch) -> Compiled:
    """One kernel."""
    try:
        return Compiled(name, report(launch, HOPPER))
    except CompilationError as error:
        return Compiled(name, (), str(error))


def assert_fits(found: Sequence[Compiled]) -> None:
    """Every kernel compiles, spills next to nothing and fits into shared memory."""
    bad = [f for f in found if f.words or f.figures[1] > SPILLED or f.figures[2] > HOPPER.shared]
    assert found
    assert not bad, "\n".join(map(str, bad))


# --- compiling ------------------------------------------------------------------------------------

# A·Bᵀ with two runs of columns, A·B, and Aᵀ·B with a K that is an argument.
REPRESENTATIVE = [("llama-mlp", "bfloat16", number, 0) for number in (0, 3, 4)]


@pytest.mark.slow
def test_a_kernel_of_every_layout_compiles_for_hopper(tmp_path: Path) -> None:
    found = compiled(REPRESENTATIVE, tmp_path)
    assert len(found) == len(REPRESENTATIVE)
    assert_fits(found)


@pytest.mark.slow
def test_every_kernel_of_every_block_compiles_for_hopper(tmp_path: Path) -> None:
    tasks = [(name, "bfloat16", -1, 0) for name in BUILT_IN]
    assert_fits(compiled([*tasks, ("llama", "float16", -1, 0)], tmp_path))


@pytest.mark.slow
def test_a_kernel_with_every_number_compiles_for_hopper(tmp_path: Path) -> None:
    found = compiled([("numbers", "bfloat16", -1, 0)], tmp_path)
    assert len(found) == 2
    assert_fits(found)


@pytest.mark.slow
def test_tiles_that_are_taken_together_compile_for_hopper(tmp_path: Path) -> None:
    tasks = [("llama", "bfloat16", -1, 128), ("lm-head", "bfloat16", -1, 128)]
    assert_fits(compiled([*tasks, ("llama-mlp", "bfloat16", 0, 192)], tmp_path))


def test_layouts_of_representatives() -> None:
    found = of_block("llama-mlp")
    turned = [found[number].turned for _, _, number, _ in REPRESENTATIVE]
    assert turned == [[False, True], [False, False], [True, False]]
    assert found[4].depth is None


# --- what is emitted ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BUILT_IN)
def test_emitted_text_is_gluon_alone(name: str) -> None:
    for launch in of_block(name):
        if isinstance(launch, str):
            continue
        text = launch.source.text
        compile(text, "emitted", "exec")
        assert "tl." not in text
        for called in re.findall(r"device\.(\w+)", text.partition("\n@gluon")[2]):
            assert called in gluon_device.__all__ or called == "gluon_device"


def test_functions_of_both_devices_take_the_same() -> None:
    """What differs is in the names: blocks by number for rows, constants with a type of Gluon's."""
    own = [n for n in gluon_device.__all__ if hasattr(device, n)]
    assert len(own) > 20
    for name in own:
        plain, gluon = (
            inspect.signature(getattr(module, name).fn) for module in (device, gluon_device)
        )
        assert len(plain.parameters) == len(gluon.parameters), name


def test_plain_functions_that_serve_both_are_not_written_twice() -> None:
    shared = [n for n in gluon_device.__all__ if getattr(device, n, 0) is getattr(gluon_device, n)]
    assert {"tanh", "maximum", "uniform", "merged_moments"} <= set(shared)


@pytest.mark.slow
def test_kernels_have_one_key_in_every_process() -> None:
    """In whatever order a process meets kernels: else each would compile them again."""
    texts = [
        text
        for launch in of_block("llama")
        if isinstance(launch, GluonLaunch)
        for text in (launch.source.text, launch.otherwise.source.text)
    ]
    code = (
        "import sys, json; from cadenza.backends.triton import modules\n"
        "for t in json.load(sys.stdin): print(modules.digest(t), modules.function(t).cache_key)"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    found = [
        subprocess.run(
            [sys.executable, "-c", code], input=json.dumps(order), check=True, text=True,
            capture_output=True, env=environment | {"PYTHONPATH": os.pathsep.join(sys.path)},
        ).stdout.splitlines()
        for order in (texts, texts[::-1])
    ]  # fmt: skip
    assert len(set(found[0])) > 10
    assert sorted(found[0]) == sorted(found[1])


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_operands_that_are_not_of_16_bits_are_refused(dtype: torch.dtype) -> None:
    launch = of_function(swiglu, x=("M", 64), w=(160, 64))
    launch.plan.dtypes |= dict.fromkeys(launch.operands, dtype)
    with pytest.raises(Unsupported, match=f"a product of {dtype} by tensor maps"):
        again(launch)


def again(launch: GluonLaunch, cut: Configuration | None = None) -> GluonLaunch:
    """The same launch, made once more."""
    (kernel,) = (k for k in launch.plan.plan.kernels if k.product is launch.product)
    return GluonLaunch(
        launch.otherwise, kernel, Body(kernel, Arguments({}), Vectors(), layout_of(kernel)), cut=cut
    )


@pytest.mark.parametrize(
    ("layout", "unit", "words"),
    [
        (Layout(512), 256, "groups of 256 columns in tiles of 128"),
        (Layout(512, 128), 128, "groups of 256 columns in tiles of 128"),
        (Layout(192, 48), 1, "pairs at 48 columns in parts of 32"),
    ],
)
def test_columns_that_no_part_holds_are_refused(layout: Layout, unit: int, words: str) -> None:
    with pytest.raises(Unsupported, match=words):
        cut_of(layout, unit, HEAVY)


@pytest.mark.parametrize("inner", [1, 2, 4, 8, 16, 32, 64, 128])
def test_pairs_within_a_tile_and_pairs_of_whole_tiles_are_taken(inner: int) -> None:
    assert cut_of(Layout(1024, inner), 1, HEAVY).parts == 2


@pytest.mark.slow
def test_every_product_of_every_block_is_taken() -> None:
    found = {name: [f for f in of_block(name) if isinstance(f, str)] for name in BUILT_IN}
    assert not any(found.values()), found


# --- launching ------------------------------------------------------------------------------------


class Kept(Memory):
    """Memory that keeps launches instead of making them."""

    made: list[Any] | None = None

    def launch(self, launcher: Any, grid: Any, given: Sequence[Any]) -> None:
        self.made = [launcher, grid, given]


def launched(
    x: torch.Tensor, w: torch.Tensor, cut: Configuration | None = None
) -> tuple[GluonLaunch, Kept]:
    """A launch of SwiGLU with these operands."""
    launch = of_function(swiglu, x=("M", 64), w=(w.shape[0], 64))
    launch = again(launch, cut) if cut else launch
    memory = Kept(x.shape[0], x.device)
    memory.values |= dict(zip(launch.operands, (x, w), strict=True))
    launch.run(memory)
    return launch, memory


def half(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns).to(torch.bfloat16)


def test_operands_are_described_by_boxes() -> None:
    launch, memory = launched(half(200, 64), half(160, 64))
    launcher, grid, given = memory.made
    assert [given[0].box, given[1].box] == [[64, 64], [64, 64]]
    assert launcher.constants["TB"]
    assert grid == (3, 1)  # of 2·2 tiles, as many as a CPU has programs
    assert given[-1] == 200
    assert launcher.function is launch.function


@pytest.mark.parametrize("fault", ["stride", "address"])
def test_operands_that_cannot_be_described_take_the_plain_kernel(fault: str) -> None:
    wide = half(200, 68 if fault == "stride" else 80)
    x = wide[:, :64] if fault == "stride" else wide[:, 1:65]
    launch, memory = launched(x, half(160, 64))
    assert memory.made[0].function is launch.otherwise.function


def test_tiles_are_taken_together_two_at_a_time() -> None:
    _, memory = launched(half(200, 64), half(256, 64), TOGETHER)
    launcher, grid, _ = memory.made
    assert launcher.constants["ABREAST"] == 2
    assert grid == (2, 1)  # two tiles of rows, each with one turn of two tiles of columns
    _, memory = launched(half(200, 64), half(256, 64))
    assert memory.made[0].constants["ABREAST"] == 1


def test_an_odd_number_of_tiles_is_not_taken_two_at_a_time() -> None:
    with pytest.raises(Unsupported, match="3 tiles of columns, two at a time"):
        launched(half(200, 64), half(384, 64), TOGETHER)


@pytest.mark.parametrize("width", [384, 512])
def test_tiles_are_of_128_columns_whatever_is_asked_for(width: int) -> None:
    """Partials and turns are counted by them."""
    launch = of_function(swiglu, x=("M", 64), w=(width, 64))
    wide = again(launch, Configuration(128, 256, 64, warps=4, stages=5, pingpong=True))
    assert (wide.column_tiles, wide.configuration.BN) == (width // 128, 128)


def test_turned_operands_keep_their_memory() -> None:
    _, memory = launched(half(64, 200).T, half(64, 160).T)
    launcher, _, given = memory.made
    assert (launcher.constants["TA"], launcher.constants["TB"]) == (True, False)
    assert [given[0].box, given[1].box] == [[64, 64], [64, 64]]


def test_column_sums_are_left_by_blocks_of_64_rows() -> None:
    found = [f for f in of_block("llama") if isinstance(f, GluonLaunch)]
    sums = [(f, a) for f in found for a in f.source.arguments if a.role == "reduction"]
    assert sums
    for launch, argument in sums:
        by_rows = argument.node.op.name.startswith("ROW")
        tiles = launch.tiles(Memory(1000, torch.device("cpu")), argument.node)
        assert tiles == (launch.column_tiles if by_rows else 16)


def test_a_plain_kernel_of_other_columns_is_refused() -> None:
    launch = of_function(swiglu, x=("M", 64), w=(160, 64))
    launch.otherwise.configuration = replace(PLAIN, BN=256)
    with pytest.raises(Unsupported, match="tiles of 256 columns"):
        again(launch)


if __name__ == "__main__":
    work(*json.loads(sys.argv[1]))
