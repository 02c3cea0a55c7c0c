"""Which kernels of a plan are worth measuring where, their keys, and their candidates.

A key holds all that a kernel's time depends on: its text, types and constants, where it runs, how
what it reads is laid out, and every version below it. Kernels are judged with the default kernels
before them, so that no choice waits for another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from cadenza.backends.triton import templates
from cadenza.backends.triton.columns import Unsupported
from cadenza.backends.triton.configuration import Facts
from cadenza.backends.triton.gluon_launch import HEAVY, heavy
from cadenza.backends.triton.launch import version
from cadenza.backends.triton.launches import Launch, PointwiseLaunch, ProductLaunch
from cadenza.backends.triton.memory import Step
from cadenza.backends.triton.program import Choice, Program
from cadenza.backends.triton.target import Target
from cadenza.backends.triton.tuning.candidates import LISTS, product_candidates, strip_candidates
from cadenza.backends.triton.tuning.recipes import NOWHERE, Call, Sketch
from cadenza.core.ir import Node
from cadenza.core.ops import M
from cadenza.core.plan import Kernel, Plan
from cadenza.core.plan_text import PairText

Tensor = torch.Tensor
METHOD = "in turns and by itself"  # how candidates are compared: part of a key
WORTH = 2**33  # floating-point operations from which on a product's kernel is measured
WORTH_BYTES = 2**26  # of a kernel without a product
WORTH_READ = 2**24  # bytes of the right operand where rows are few, as in decoding
FEW = 128


class Setting(NamedTuple):
    """Where a plan runs, and on what: the device, the number of rows, its inputs' layouts.

    Kernels compete at the number of `rows` that stands for many; this call has `own`.
    """

    target: Target
    device: torch.device
    rows: int
    own: int
    inputs: Mapping[Node, Tensor]

    @staticmethod
    def of(plan: Plan, target: Target, tensors: Sequence[Tensor], rows: int) -> Setting:
        """That of a call."""
        inputs = dict(zip(plan.graph.inputs, tensors, strict=True))
        return Setting(target, tensors[0].device, rounded(rows), rows, inputs)

    @property
    def programs(self) -> int:
        """How many programs run at a time."""
        return torch.cuda.get_device_properties(self.device).multi_processor_count


def rounded(rows: int) -> int:
    """The number of rows that stands for this one: the next power of two."""
    return 1 << max(0, rows - 1).bit_length()


@dataclass
class Contest:
    """A kernel, its key, and the candidates with what each would do."""

    kernel: Kernel
    key: str
    title: str
    choices: list[Choice]
    calls: list[list[Call]]


def keys_of(plan: Plan, text: PairText | None, setting: Setting) -> dict[Kernel, str]:
    """The key of each kernel that is worth measuring: all that its time depends on."""
    found: dict[Kernel, str] = {}

    def note(kernel: Kernel, steps: Sequence[Step], make: Any) -> None:
        if _competes(kernel, steps, setting):
            found[kernel] = _key(kernel, steps, setting)

    Program(plan, None, text, setting.target, note)
    return found


def _competes(kernel: Kernel, steps: Sequence[Step], setting: Setting) -> bool:
    return _worth(kernel, setting) and all(isinstance(step, Launch) for step in steps)


def _worth(kernel: Kernel, setting: Setting) -> bool:
    def size(dim: Any) -> int:
        return setting.rows if dim == M else int(dim)

    if kernel.product is None:
        cells = [size(n.type.rows) * size(n.type.columns) for n in (*kernel.loads, *kernel.stores)]
        return 2 * sum(cells) >= WORTH_BYTES
    left, turned = kernel.product.inputs[0], kernel.product.attributes["transpose_a"]
    depth = size(left.type.rows if turned else left.type.columns)
    rows, columns = (size(d) for d in kernel.product.type[:2])
    read = 2 * columns * depth if rows <= FEW else 0
    return 2 * rows * columns * depth >= WORTH or read >= WORTH_READ


def _key(kernel: Kernel, steps: Sequence[Step], setting: Setting) -> str:
    name = torch.cuda.get_device_name(setting.device)
    parts: list[Any] = [version(), torch.__version__, _templates(), LISTS, METHOD]
    parts += [setting.target, name, setting.programs, setting.rows]
    for step in steps:
        assert isinstance(step, Launch), step
        assert step.source is not None
        parts += [step.source.text, step.signature(), step.constants(), step.options()]
    operands = kernel.product.inputs if kernel.product is not None else ()
    parts += [_layout(setting.inputs.get(n)) for n in (*operands, *kernel.loads)]
    return hashlib.sha256("\n".join(map(repr, parts)).encode()).hexdigest()[:32]


def _layout(tensor: Tensor | None) -> tuple[Any, ...]:
    """What of a tensor's layout decides how it is read."""
    if tensor is None:
        return ()
    aligned = tensor.data_ptr() % 16 == 0
    strides = tuple(1 if s == 1 else s * tensor.element_size() % 16 for s in tensor.stride())
    return aligned, strides


@cache
def _templates() -> str:
    """A digest of the fixed text that kernels call."""
    places = sorted(Path(templates.__path__[0]).glob("*.py"))
    return hashlib.sha256(b"".join(place.read_bytes() for place in places)).hexdigest()


def contests_of(plan: Plan, text: PairText | None, setting: Setting, full: bool) -> list[Contest]:
    """The kernels that are worth measuring, with their candidates."""
    sketch = sketch_of(setting)
    offers: dict[Step, list[tuple[Choice, Sequence[Step]]]] = {}
    starts: dict[Step, Contest] = {}

    def note(kernel: Kernel, steps: Sequence[Step], make: Any) -> None:
        if not _competes(kernel, steps, setting):
            return
        made: list[tuple[Choice, Sequence[Step]]] = []
        for choice in _candidates(steps[-1], setting, full):
            try:
                made.append((choice, make(choice)))
            except Unsupported:
                continue
        offers[steps[0]] = made
        starts[steps[0]] = Contest(kernel, _key(kernel, steps, setting), "", [], [])

    program = Program(plan, None, text, setting.target, note)
    for step in program.steps:
        if step in offers:
            contest = starts[step]
            assert step.source is not None
            contest.title = step.source.text.split("\n", 1)[0].strip('"')
            for choice, steps in offers[step]:
                calls = sketch.trial(steps)
                if calls not in contest.calls:  # one that falls to another template may be there
                    contest.choices.append(choice)
                    contest.calls.append(calls)
        sketch.run(step)
    return list(starts.values())


def sketch_of(setting: Setting) -> Sketch:
    """A memory with the inputs of a setting."""
    sketch = Sketch(setting.rows, setting.device)
    for node, tensor in setting.inputs.items():
        sketch.values[node] = _without_numbers(node, tensor, setting.rows)
        sketch.alive.append(sketch.values[node])
    return sketch


def _without_numbers(node: Node, tensor: Tensor, rows: int) -> Tensor:
    """A graph's input as it is laid out, with the rounded number of rows."""
    shape = [rows if d == M else int(d) for d in node.type[:2]]
    if not node.type.is_matrix:
        return torch.empty(shape[0] * shape[1], dtype=tensor.dtype, device=NOWHERE)
    if tensor.stride(1) == 1:
        strides = (max(tensor.stride(0), shape[1]), 1)
    elif tensor.stride(0) == 1:
        strides = (1, max(tensor.stride(1), shape[0]))
    else:
        strides = (shape[1], 1)
    return torch.empty_strided(shape, strides, dtype=tensor.dtype, device=NOWHERE)


def _candidates(launch: Launch, setting: Setting, full: bool) -> Sequence[Choice]:
    assert launch.source is not None
    if isinstance(launch, ProductLaunch):
        size = launch.plan.dtypes[launch.operands[0]].itemsize
        facts = Facts.of(launch.source, launch.product, size)
        rows = setting.rows if facts.M is None else facts.M
        found = product_candidates(facts, setting.target, rows, setting.programs, full)
        if full or not heavy(launch.source):
            return found
        return [c for c in found if not c.pingpong or c.BM <= HEAVY.BM]
    assert isinstance(launch, PointwiseLaunch)
    return strip_candidates(launch.strip, launch.source.unit, launch.holds, full)
