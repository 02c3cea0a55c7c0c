"""Calls of programs on one device: operands, results by name, and the rule of tolerance.

`ALIGNED` sizes let every operand be read by descriptors, `RAGGED` ones too but end inside of tiles;
those of `block_operands` are odd, so that every operand is read by pointers.
"""

import runpy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import block_operands
import pytest
import torch
from programs import assert_close, gradients_of, labelled

from cadenza.backends.triton.launch import Launcher
from cadenza.backends.triton.replay import Replay
from cadenza.library.blocks import BUILT_IN
from cadenza.tools import numerics

Tensor = torch.Tensor
Operands = dict[str, Any]
Tensors = dict[str, Tensor]
NAMES = sorted(BUILT_IN)
FROZEN = block_operands.FROZEN
HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
DTYPES = [BRAIN, HALF, SINGLE]
HEADS = {"head_dim": 64, "heads": 4, "key_value_heads": 2}
# V is the number of classes from which `numerics.usual` draws targets.
ALIGNED = {"D": 256, "F": 384, "V": 640, **HEADS}
RAGGED = {"D": 320, "F": 352, "V": 648, **HEADS}
LARGE = {"D": 4096, "F": 14336, "V": 128256, "head_dim": 128, "heads": 32, "key_value_heads": 8}
TINY = {"D": 32, "F": 48, "V": 640, "head_dim": 16, "heads": 2, "key_value_heads": 1}
ROOT = Path(__file__).resolve().parents[2]


class Place(NamedTuple):
    """A device, and whether it is the interpreter, where everything has to be tiny."""

    device: torch.device
    interpreted: bool

    def rows(self, wanted: int) -> int:
        """That many rows, or few."""
        return min(wanted, 19) if self.interpreted else wanted

    def sizes(self, wanted: Mapping[str, int]) -> Mapping[str, int]:
        """Those sizes, or tiny ones."""
        return TINY if self.interpreted else wanted

    def allows(self, dtype: torch.dtype) -> None:
        """Skips what the interpreter computes wrongly."""
        if self.interpreted and dtype == BRAIN:
            pytest.skip("Triton's interpreter cuts what it should round to bfloat16")


def operands(
    name: str, rows: int, place: Place, dtype: torch.dtype, sizes: Mapping[str, int] | None
) -> Operands:
    """Arguments of a built-in block on a device; odd sizes where none are given."""
    with torch.device(place.device):
        if sizes is None:
            made = block_operands.operands(name, rows)
        else:
            made = numerics.usual(name, {**place.sizes(sizes), "M": rows})
    return block_operands.cast(made, dtype)


def with_gradients(arguments: Mapping[str, Any]) -> Operands:
    """The arguments with fresh leaves for all that a model trains."""
    return {
        name: value.detach().clone().requires_grad_()
        if isinstance(value, Tensor) and value.is_floating_point() and name not in FROZEN
        else value
        for name, value in arguments.items()
    }


def upstream_of(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Tensors:
    """A random incoming gradient for each output."""
    with torch.no_grad():
        outputs = labelled(function(**arguments))
    return {n: torch.randn_like(y) for n, y in outputs.items()}


def results(
    function: Callable[..., Any], arguments: Mapping[str, Any], upstream: Mapping[str, Tensor]
) -> Tensors:
    """Outputs, and gradients as `d name`, of one call with gradients."""
    leaves = with_gradients(arguments)
    outputs = labelled(function(**leaves))
    given = {n: g.to(outputs[n].dtype) for n, g in upstream.items()}
    found = gradients_of(outputs, leaves, given)
    return {n: y.detach() for n, y in outputs.items()} | {f"d {n}": g for n, g in found.items()}


def check_as_good_as_torch(program: Any, arguments: Operands, upstream: Tensors) -> Tensors:
    """Every output and gradient of a program errs at most twice as much as torch's; the results.

    The oracle is `plain` in float64, on the same device. Raises AssertionError with the name.
    """
    actual = results(program, arguments, upstream)
    stock = results(program.plain, arguments, upstream)
    wide = {n: g.double() for n, g in upstream.items()}
    oracle = results(program.plain, block_operands.cast(arguments, torch.float64), wide)
    for label, value in actual.items():
        with named(label):
            assert_close(value, oracle[label], stock[label].to(value.dtype))
    return actual


@contextmanager
def named(label: str) -> Iterator[None]:
    """Puts the name of a value before what an assertion says of it."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{label}: {error}") from error


def check_same(first: Mapping[str, Tensor], second: Mapping[str, Tensor], what: str) -> None:
    """Equal bit by bit, NaN as well. Raises AssertionError telling how many differ and by what."""
    assert first.keys() == second.keys(), f"{what}: {list(first)}, not {list(second)}"
    for name, value in first.items():
        other = second[name]
        alike = (value == other) | (value.isnan() & other.isnan())
        if not alike.all():
            largest = (value.double() - other.double()).abs().max().item()
            number = f"{int((~alike).sum())} of {value.numel()}"
            raise AssertionError(f"{what}: {number} of {name} differ, by up to {largest:.3g}")


class Launches:
    """Counts the launches of emitted kernels, and keeps those that no replay made."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.made: list[tuple[Launcher, Any, Any, torch.device]] = []
        self.replayed = 0
        launched, replayed = Launcher.__call__, Replay._run

        def launch(launcher: Launcher, grid: Any, arguments: Any, device: torch.device) -> None:
            self.made.append((launcher, grid, arguments, device))
            launched(launcher, grid, arguments, device)

        def repeat(
            replay: Replay, bases: Any, tensors: Any, first: int = 0, last: int | None = None
        ) -> None:
            made = replay.launches[first:last]
            self.replayed += sum(hasattr(x, "direct") for x in made)  # others: torch's products
            replayed(replay, bases, tensors, first, last)

        patch.setattr(Launcher, "__call__", launch)
        patch.setattr(Replay, "_run", repeat)

    def __len__(self) -> int:
        return len(self.made) + self.replayed


@contextmanager
def launches() -> Iterator[Launches]:
    """The launches made inside."""
    with pytest.MonkeyPatch.context() as patch:
        yield Launches(patch)


def poison_free_memory(device: torch.device) -> None:
    """Leaves NaN in memory that torch's allocator will hand out next."""
    kept = [
        torch.full((2**power,), float("nan"), device=device)
        for power in range(7, 23)
        for _ in range(4)
    ]
    del kept


# --- the programs in examples/ --------------------------------------------------------------------


def example(name: str) -> Any:
    """What an example's file defines, as attributes."""
    return SimpleNamespace(**runpy.run_path(str(ROOT / f"examples/{name}.py")))


def _of_example(name: str, rows: int, width: int, columns: int) -> Operands:
    weight = torch.randn(columns, width) * width**-0.5
    x, factor = torch.randn(rows, width), torch.rand(rows, 1) + 0.5
    angles = torch.randn(rows, 8)  # half of the example's head
    match name:
        case "bias_gelu":
            return {"x": x, "w": weight, "bias": torch.randn(columns)}
        case "geglu_dropout":
            return {"x": x, "w": weight, "seed": torch.tensor(1234)}
        case "norm_swiglu":
            return {"x": x, "w": weight, "rstd": factor}
        case "residual_rms":
            return {"x": x, "w": weight, "residual": torch.randn(rows, columns)}
        case "rope_qkv":
            tables = {"rstd": factor, "cos": angles.cos(), "sin": angles.sin()}
            return {"x": x, "w": weight, **tables, "head_dim": 16, "heads": 6}
        case "softcap_loss":
            return {"x": x, "w": 20 * weight, "target": torch.randint(0, columns, (rows,))}
    raise ValueError(f"no operands for examples/{name}.py")


def example_operands(name: str, rows: int, place: Place, dtype: torch.dtype) -> Operands:
    """Arguments of an example's epilogue on a device; w has 128 columns and more rows."""
    width, columns = (32, 160) if place.interpreted else (128, 320)
    with torch.device(place.device):
        made = _of_example(name, rows, width, columns)
    return block_operands.cast(made, dtype)


EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))
