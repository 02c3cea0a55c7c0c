"""Plans on the Triton back end, in Triton's interpreter, beside the reference back end.

A trial is a plan with inputs and what the reference back end makes of them. `outcome` runs it with
every input between numbers that nobody may read, and with all new memory poisoned and guarded:
what isn't written stays poison, what is written elsewhere breaks a guard.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from planned import adjoints_of, matrices_of
from programs import error_of
from triton import language as tl
from triton.runtime import interpreter

import cadenza as cz
from cadenza.backends import reference
from cadenza.backends.triton.configuration import Configuration
from cadenza.backends.triton.executable import Executable
from cadenza.backends.triton.launch import Launcher
from cadenza.backends.triton.memory import Memory, Step
from cadenza.backends.triton.templates import device
from cadenza.core.ops import REAL
from cadenza.core.pipeline import Pair, compile_program
from cadenza.core.plan import Kernel, Plan
from cadenza.core.trace import Signature
from cadenza.library.function import Program
from cadenza.library.operands import describe

Tensor = torch.Tensor
POISON, WHOLE_POISON = 0xFF, -77  # bytes: NaN in every floating dtype, no boolean
GUARD = 256  # bytes
SMALL = Configuration(BM=16, BN=32, BK=16, warps=4, stages=2)
Choose = Callable[[Kernel], Configuration]
# Relative to the norm: a unit of rounding, and sums in another order.
BOUNDS = {
    torch.float64: 2e-6,
    torch.float32: 2e-6,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
}
# On a machine with a GPU kernels are compiled for it, and tests of their own run them there.
interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are not interpreted beside a GPU"
)
# NumPy's, of the interpreter's arithmetic on what a mask leaves out.
quiet = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")


class Trial(NamedTuple):
    """A plan, its inputs and the outputs that are expected."""

    plan: Plan
    inputs: Sequence[Tensor]
    rows: int
    expected: Sequence[Tensor]


def trials_of(
    pair: Pair, tensors: Mapping[str, Tensor], rows: int, tile: int | None = None
) -> Iterator[Trial]:
    """The forward plan, and the backward plan on what forward has saved and random adjoints."""
    given = [tensors[i.attributes["name"]] for i in pair.forward.inputs]
    found = reference.Executable(pair.forward_plan, tile)(given, rows)
    yield Trial(pair.forward_plan, given, rows, found)
    if pair.backward_plan is None:
        return
    adjoints = iter(adjoints_of(pair.program, rows, torch.float32))
    real = [p for p, output in enumerate(pair.program.outputs) if output.type.kind == REAL]
    adjoints = dict(zip(real, adjoints, strict=True))
    given = [found[v] if isinstance(v, int) else tensors[v] for v in pair.values]
    given += [adjoints[p] for p in pair.adjoints]
    given += [torch.randn(i.type[:2]) for i in pair.backward.inputs[len(given) :]]  # sums
    expected = reference.Executable(pair.backward_plan, tile)(given, rows)
    yield Trial(pair.backward_plan, given, rows, expected)


def cz_program(function: Callable[..., Any]) -> Program:
    """A fresh program of a function."""
    return cz.block(function)


def configured(**sizes: Any) -> Configuration:
    """The small configuration with other sizes."""
    return replace(SMALL, **sizes)


def trials(program: Program, tensors: Mapping[str, Any], backward: bool = True) -> Iterator[Trial]:
    """The plans of a program for a call, with the gradients of all real operands."""
    given = {n: v for n, v in tensors.items() if isinstance(v, Tensor)}
    constants = {n: v for n, v in tensors.items() if n not in given}
    described = describe(list(given), list(given.values()), program.shapes, constants)
    matrices, sizes = matrices_of(described, given)
    real = [n for n, t in given.items() if backward and t.is_floating_point()]
    signature = Signature(described.operands, tuple(constants.items()))
    pair = compile_program(program.function, signature, sizes, real)
    return trials_of(pair, matrices, described.rows)


# --- running --------------------------------------------------------------------------------------


class Guarded:
    """New memory, all of it poison, with guards before and after."""

    def __init__(self) -> None:
        self.given: list[tuple[Tensor, Tensor]] = []

    def empty(self, memory: Memory, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """What `Memory.empty` is replaced by."""
        size = prod(shape) * dtype.itemsize
        buffer = torch.full((size + 2 * GUARD,), POISON, dtype=torch.uint8)
        tensor = buffer[GUARD : GUARD + size].view(dtype)
        if not dtype.is_floating_point and dtype is not torch.bool:
            tensor.fill_(WHOLE_POISON)
        self.given.append((buffer, tensor))
        return tensor.reshape(tuple(shape))

    def check(self) -> None:
        """Everything was written, and nothing beside it."""
        for buffer, tensor in self.given:
            guards = torch.cat([buffer[:GUARD], buffer[-GUARD:]])
            assert (guards == POISON).all(), "written beside the memory of a value"
            poison = tensor.view(torch.uint8).reshape(-1, tensor.itemsize) == POISON
            assert not poison.all(1).any(), f"not written: {tensor}"
            assert not (tensor == WHOLE_POISON).any() or tensor.is_floating_point()


class Bounds:
    """Every address that a kernel reads or writes lies in a tensor that it was given."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.spans: list[tuple[int, int]] = []
        builder = interpreter.InterpreterBuilder
        launched, convert = Launcher.__call__, builder.cast_impl
        load, store = builder.create_masked_load, builder.create_masked_store

        def launch(launcher: Launcher, grid: Any, arguments: Any, device: Any) -> None:
            self.spans = [span(a) for a in arguments if isinstance(a, Tensor)]
            with pytest.MonkeyPatch.context() as inner:
                hasten(inner)
                launched(launcher, grid, arguments, device)

        def read(own: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
            self.check(pointers, mask)
            return load(own, pointers, mask, *rest)

        def write(own: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
            self.check(pointers, mask)
            return store(own, pointers, value, mask, *rest)

        def cast(own: Any, given: Any, wanted: Any) -> Any:
            down = (given.dtype.scalar, wanted.scalar) == (tl.float32, tl.bfloat16)
            return rounded(given) if down else convert(own, given, wanted)

        patch.setattr(Launcher, "__call__", launch)
        patch.setattr(builder, "cast_impl", cast)
        patch.setattr(builder, "create_masked_load", read)
        patch.setattr(builder, "create_masked_store", write)

    def check(self, pointers: Any, mask: Any) -> None:
        """Raises AssertionError for an address that is nowhere."""
        used = pointers.data[np.broadcast_to(mask.data.astype(bool), pointers.data.shape)]
        if used.size:
            low, high = int(used.min()), int(used.max())
            inside = any(start <= low and high < stop for start, stop in self.spans)
            assert inside, f"addresses {low} to {high}, outside of {self.spans}"


def rounded(given: Any) -> Any:
    """Float32 as bfloat16, rounded to the nearest; the interpreter would cut it."""
    numbers = torch.from_numpy(np.ascontiguousarray(given.data)).to(torch.bfloat16)
    bits = numbers.view(torch.int16).numpy().view(np.uint16)
    return interpreter.TensorHandle(bits.reshape(given.data.shape), tl.bfloat16)


def hasten(patch: pytest.MonkeyPatch) -> None:
    """For one launch: the interpreter prepares Triton's language once, not in each function called.

    And what the device functions reduce by `_larger`, it reduces as a whole.
    """
    prepare, reduce = interpreter._patch_lang, interpreter.ReduceOps.apply_impl
    prepared: dict[Any, Any] = {}

    def once(function: Any) -> Any:
        named = tuple(name for name in ("tl", "core") if name in function.__globals__)
        if named not in prepared:
            prepared[named] = prepare(function)
        return prepared[named]

    def as_a_whole(own: Any, given: Any) -> Any:
        if own.combine_fn is device._larger:
            return own.min_max(given[0], val_reduce_op=np.max)
        return reduce(own, given)

    patch.setattr(interpreter, "_patch_lang", once)
    patch.setattr(interpreter.ReduceOps, "apply_impl", as_a_whole)


def span(tensor: Tensor) -> tuple[int, int]:
    """The addresses from a tensor's first element to behind its last."""
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.itemsize if tensor.numel() else start


class Outcome(NamedTuple):
    """What a plan gave, and the steps that it took."""

    outputs: list[Tensor]
    steps: list[Step]

    @property
    def reasons(self) -> list[str]:
        """Why steps are not those of a template."""
        return [step.reason for step in self.steps if step.reason]


def padded(tensor: Tensor) -> Tensor:
    """A tensor with rows apart from one another, poison between them."""
    poison = float("nan") if tensor.is_floating_point() else 1
    wide = torch.full((tensor.shape[0], tensor.shape[1] + 5), poison, dtype=torch.float64)
    inside = wide.to(tensor.dtype)[:, 2:-3]
    return inside.copy_(tensor)


def turned(tensor: Tensor) -> Tensor:
    """A tensor of which columns are runs in memory."""
    return padded(tensor.T).T


def spread(tensor: Tensor) -> Tensor:
    """A tensor of which neither rows nor columns are runs in memory."""
    return tensor.repeat_interleave(2, 1)[:, ::2]


def outcome(
    trial: Trial, cut: Configuration | Choose = SMALL, place: Callable[[Tensor], Tensor] = padded
) -> Outcome:
    """Runs a trial; AssertionError where memory is not written as it should be."""
    choose = cut if callable(cut) else lambda kernel: cut
    executable, guarded = Executable(trial.plan, choose), Guarded()
    inputs = [place(tensor) for tensor in trial.inputs]
    before = [tensor.clone() for tensor in inputs]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Memory, "empty", lambda *given: guarded.empty(*given))
        Bounds(patch)
        outputs = executable(inputs, trial.rows)
    guarded.check()
    for tensor, kept in zip(inputs, before, strict=True):
        assert torch.equal(tensor.nan_to_num(), kept.nan_to_num()), "an input was changed"
    return Outcome(outputs, executable.program.steps)


# --- comparing ------------------------------------------------------------------------------------


def assert_agrees(actual: Tensor, expected: Tensor, bound: float, floor: float = 0.0) -> None:
    """Equal, but for `bound` of the norm; `floor` is the size of summands that may cancel."""
    assert actual.shape == expected.shape, f"{actual.shape}, not {expected.shape}"
    assert actual.dtype == expected.dtype, f"{actual.dtype}, not {expected.dtype}"
    if not expected.is_floating_point():
        assert torch.equal(actual, expected), f"{actual}, not {expected}"
        return
    size = expected[expected.isfinite()].double().norm().item() + floor * expected.numel() ** 0.5
    error = error_of(actual, expected)
    assert error <= bound * size, f"error {error:.3g}, at most {bound * size:.3g}"


def check(trial: Trial, **options: Any) -> Outcome:
    """Runs a trial and compares every output.

    Where values between kernels are stored in half precision, so are those behind a statistic: a
    sum in another order may have rounded one of them the other way.
    """
    floor = options.pop("floor", 0.0)
    found = outcome(trial, **options)
    widest = max((BOUNDS.get(tensor.dtype, 0.0) for tensor in trial.inputs), default=0.0)
    for label, actual, expected in zip(
        trial.plan.graph.labels, found.outputs, trial.expected, strict=True
    ):
        bound = max(widest, BOUNDS.get(expected.dtype, 0.0))
        try:
            assert_agrees(actual, expected, bound, floor)
        except AssertionError as error:
            raise AssertionError(f"{label}: {error}") from error
    return found
