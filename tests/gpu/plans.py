"""Plans of built-in blocks on a device, beside the reference back end there.

`attempt` runs a plan kernel by kernel under a configuration; a kernel that does not fit into the
device's shared memory under it gets a small one instead, and is counted.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import planned
import pytest
import torch
from calls import Place, operands
from triton.runtime.errors import OutOfResources
from triton_plans import POISON, WHOLE_POISON, Guarded, trials_of

from cadenza.backends.triton import replay
from cadenza.backends.triton.configuration import Configuration
from cadenza.backends.triton.executable import Executable
from cadenza.backends.triton.gluon_launch import GluonLaunch
from cadenza.backends.triton.launches import ProductLaunch
from cadenza.backends.triton.memory import Memory
from cadenza.core.ir import Node
from cadenza.core.plan import Kernel, Plan
from cadenza.core.plan_text import PairText

Tensor = torch.Tensor
DIRECTIONS = ("forward", "backward")
SMALL = Configuration(BM=16, BN=64, BK=16, warps=4, stages=2)
Choose = Callable[[Kernel], Configuration]


class Given(NamedTuple):
    """A plan with its inputs, what the reference back end makes of them, and its kernels' texts."""

    plan: Plan
    inputs: Sequence[Tensor]
    rows: int
    expected: Sequence[Tensor]
    text: PairText


def trials(name: str, rows: int, place: Place, sizes: Mapping[str, int] | None) -> list[Given]:
    """Both plans of a block in bfloat16 (float32 where it is interpreted), forward first."""
    dtype = torch.float32 if place.interpreted else torch.bfloat16
    call = planned.call_of(name, operands(name, rows, place, dtype, sizes))
    pair = call.pair()
    with torch.device(place.device):
        return [Given(*trial, PairText(pair)) for trial in trials_of(pair, call.tensors, rows)]


@cache
def kept_trials(name: str, rows: int, place: Place, sizes: tuple[Any, ...]) -> list[Given]:
    """The same for small sizes, given as pairs; made once, and nobody may change them."""
    return trials(name, rows, place, dict(sizes))


class Attempt(NamedTuple):
    """What a plan gave, what ran it, and which products did not fit into shared memory."""

    outputs: list[Tensor]
    executable: Executable
    too_large: frozenset[Node]

    @property
    def products(self) -> list[ProductLaunch]:
        """The launches of products that ran as they were asked to."""
        steps = self.executable.program.steps
        made = [s for s in steps if isinstance(s, ProductLaunch)]
        return [s for s in made if s.product not in self.too_large]


def attempt(given: Given, choose: Choose | None = None) -> Attempt:
    """Runs a plan by the configurations chosen, or by the default ones."""
    too_large: set[Node] = set()
    while True:
        executable = executable_of(given, choose, too_large)
        try:
            with watched() as current:
                outputs = executable(given.inputs, given.rows)
        except OutOfResources as error:
            product = current[-1]
            error.add_note(f"in the product {product.type}")
            if choose is None or error.name != "shared memory" or product in too_large:
                raise
            too_large.add(product)
            continue
        return Attempt(outputs, executable, frozenset(too_large))


def executable_of(given: Given, choose: Choose | None, too_large: set[Node]) -> Executable:
    """The plan, with a small configuration for products that don't fit under their own."""
    if choose is None:
        return Executable(given.plan, described=lambda: given.text)
    return Executable(
        given.plan, lambda k: SMALL if k.product in too_large else choose(k), lambda: given.text
    )


@contextmanager
def watched() -> Iterator[list[Node]]:
    """The products that are launched inside, in order."""
    products: list[Node] = []
    run = ProductLaunch.run

    def noted(launch: ProductLaunch, memory: Memory) -> None:
        products.append(launch.product)
        run(launch, memory)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProductLaunch, "run", noted)
        yield products


def ran_as_asked(launch: ProductLaunch, cut: Configuration) -> bool:
    """Whether a product that was to be made by a configuration was, and by nothing in its place.

    What its boxes are for has moved so; of Hopper's template its own kernel has run.
    """
    if not launch.launchers or isinstance(launch, GluonLaunch) != cut.pingpong:
        return False
    if not isinstance(launch, GluonLaunch):
        return launch.configuration == cut and _moved(launch) >= set(cut.boxes)
    own = ("BM", "BK", "stages", "group", "together")  # what else it has follows from the product
    alike = all(getattr(launch.configuration, n) == getattr(cut, n) for n in own)
    return alike and not launch.otherwise.launchers


def _moved(launch: ProductLaunch) -> set[str]:
    """Whether loads, and whether stores, of a product that has run moved as boxes."""
    assert launch.source is not None
    constants = [launcher.constants for launcher in launch.launchers.values()]
    return {
        argument.role
        for argument in launch.source.arguments
        if any(given.get(f"{argument.name}_box") for given in constants)
    }


def compiled_kernels(executable: Executable) -> list[tuple[str, Any]]:
    """Triton's compiled kernels of a plan that has run, each with the title of its text."""
    found = []
    for step in executable.program.steps:
        for launcher in getattr(step, "launchers", {}).values():
            text = step.source.text if step.source else type(step).__name__
            title = text.split("\n", 1)[0].strip('"')
            found += [(title, kernel) for kernel in launcher.compiled]
    return found


def spilled(kernel: Any) -> int:
    """Bytes a thread that a compiled kernel spills: Triton counts them in words."""
    return 4 * int(kernel.n_spills)


# --- comparing ------------------------------------------------------------------------------------

# Relative to the norm of all, and of each element beside the root mean square of all. Two sums of
# one product differ by float32's rounding; what is stored of them, now and then, by one unit in the
# last place, and sums over stored values by less than one.
OF_NORM = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-17}
OF_ELEMENT = {torch.bfloat16: 2.0**-6, torch.float32: 2.0**-12}


def check_agrees(given: Given, outputs: Sequence[Tensor], place: Place) -> None:
    """Outputs of a plan of `trials` are those of the reference back end."""
    rounded = torch.float32 if place.interpreted else torch.bfloat16
    labels = given.plan.graph.labels
    for position, (actual, expected) in enumerate(zip(outputs, given.expected, strict=True)):
        name = labels[position] if position < len(labels) else f"saved {position}"
        assert actual.shape == expected.shape, f"{name}: {actual.shape}, not {expected.shape}"
        assert actual.dtype == expected.dtype, f"{name}: {actual.dtype}, not {expected.dtype}"
        if not expected.is_floating_point():
            assert torch.equal(actual, expected), name
            continue
        check_close(name, actual.double(), expected.double(), rounded)


def check_close(name: str, actual: Tensor, expected: Tensor, rounded: torch.dtype) -> None:
    """Close in norm, and each element close: one wrong element of many is found too."""
    if not expected.numel():
        return
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    difference = torch.where(same, 0.0, actual - expected)
    finite = torch.where(expected.isfinite(), expected, 0.0)
    size = finite.norm().item()
    error, bound = difference.norm().item(), OF_NORM[rounded] * size
    assert error <= bound, f"{name}: error {error:.3g} of {size:.3g}, at most {bound:.3g}"
    least = size / expected.numel() ** 0.5
    limit = OF_ELEMENT[rounded] * finite.abs() + 16 * OF_NORM[rounded] * least
    wrong = (difference.abs() > limit) | ~difference.isfinite()
    if wrong.any():
        first = tuple(wrong.nonzero()[0].tolist())
        number = f"{int(wrong.sum())} of {wrong.numel()} elements"
        raise AssertionError(
            f"{name}: {number} are wrong, first at {first}: {actual[first].item():.6g}, "
            f"not {expected[first].item():.6g}"
        )


# --- memory ---------------------------------------------------------------------------------------


class GuardedOn(Guarded):
    """New memory on the device of a plan, all of it poison, with guards before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.workspaces: list[tuple[Tensor, Tensor]] = []

    def patch(self, patch: pytest.MonkeyPatch) -> None:
        """Has steps and replays take their memory from here."""
        patch.setattr(Memory, "empty", lambda *asked: self.empty(*asked))
        patch.setattr(replay, "_empty", self.of_replay)

    def empty(self, memory: Memory, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """What `Memory.empty` is replaced by."""
        with torch.device(memory.device):
            tensor = super().empty(memory, shape, dtype)
        if memory.recording is not None:
            memory.recording.allocated.append(tensor)
        return tensor

    def of_replay(self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
        """What `replay._empty` is replaced by; a workspace, of bytes, has gaps nobody writes."""
        memory = Memory(0, torch.device("cuda", torch.cuda.current_device()))
        if dtype is not torch.uint8:
            return self.empty(memory, shape, dtype)
        space = self.empty(memory, shape, torch.float8_e5m2)  # of numbers that poison is one of
        self.workspaces.append(self.given.pop())
        return space.view(dtype)

    def check(self) -> None:
        """Everything was written, and nothing beside it."""
        super().check()
        for buffer, space in self.workspaces:
            start = space.data_ptr() - buffer.data_ptr()
            around = torch.cat([buffer[:start], buffer[start + space.numel() :]])
            assert (around == POISON).all(), "written beside the workspace of a replay"


def among_poison(tensor: Tensor, gap: int) -> Tensor:
    """A matrix with `gap` columns of poison between its rows, and rows of it around them."""
    poison = float("nan") if tensor.is_floating_point() else WHOLE_POISON
    rows, columns = tensor.shape
    wide = tensor.new_full((rows + 2, columns + gap), poison)
    return wide[1:-1, :columns].copy_(tensor)
