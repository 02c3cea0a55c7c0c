"""A plan's launches, recorded once and then repeated with as little work on the host as there is.

For tensors that are laid out alike, every launch has the same kernels, sizes and tensor boxes; only
addresses differ. So these are numbers relative to a few bases: the inputs, the outputs, and one
workspace in which all that lives between kernels has its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch

from cadenza.backends import Rest
from cadenza.backends.triton.launch import Argument, Descriptor, Direct, Launcher

Tensor = torch.Tensor
ALIGNMENT = 512  # bytes; torch's own allocations have it
KEPT_ADDRESSES = 256  # of one plan and layout: a step of training comes back to the same ones
Grid = tuple[int, int]
# The C function, the grid and its other arguments; or what takes the tensors of all bases, no grid.
Call = tuple[Any, int, int, tuple[Any, ...]]


def _by_dispatcher(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="cuda")


# New memory on the current GPU; as Inductor's code has it, where torch has that.
_empty: Any = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", _by_dispatcher)


class Noted(NamedTuple):
    """A launch of a kernel on a grid; or, without a launcher, torch's product of a and b into c."""

    launcher: Launcher | None
    grid: Grid
    given: Sequence[Argument]


@dataclass
class Recording:
    """What the steps of one run did: what they allocated, and each launch, in order."""

    allocated: list[Tensor] = field(default_factory=list)
    launches: list[Noted] = field(default_factory=list)
    usable: bool = True
    made: dict[Any, int] = field(default_factory=dict)  # values, and after how many launches

    def note(self, values: Iterable[Any]) -> None:
        """Keeps of values that are new how many launches there have been."""
        for value in values:
            self.made.setdefault(value, len(self.launches))

    def done(self, values: Iterable[Any]) -> list[int]:
        """After how many launches each of these is made."""
        return [self.made.get(value, 0) for value in values]


class Span(NamedTuple):
    """Bytes that are in use from the first launch to the last that has their address."""

    size: int
    first: int
    last: int


def placed(spans: Sequence[Span]) -> tuple[list[int], int]:
    """Offsets for spans such that none that are in use together overlap, and the bytes in all."""
    offsets = [0] * len(spans)
    done: list[int] = []
    for index in sorted(range(len(spans)), key=lambda i: -spans[i].size):
        span, start = spans[index], 0
        together = [
            (offsets[o], offsets[o] + spans[o].size)
            for o in done
            if spans[o].first <= span.last and span.first <= spans[o].last
        ]
        for low, high in sorted(together):
            if start + span.size <= low:
                break
            start = max(start, high)
        offsets[index] = start
        done.append(index)
    total = max((o + s.size for o, s in zip(offsets, spans, strict=True)), default=0)
    return offsets, total


@dataclass(frozen=True)
class _Launch:
    """One launch: arguments with the addresses missing, and how each of these is made."""

    direct: Direct
    grid: Grid
    template: tuple[Any, ...]
    pointers: tuple[tuple[int, int, int], ...]  # position, base, offset
    maps: tuple[tuple[int, int, int, int, Descriptor], ...]  # …, number of the descriptor, itself

    def at(self, bases: Sequence[int]) -> Call:
        """The launch for bases at these addresses."""
        given = list(self.template)
        for position, base, offset in self.pointers:
            given[position] = bases[base] + offset
        for position, base, offset, number, descriptor in self.maps:
            given[position] = self.direct.map_at(bases[base] + offset, number, descriptor)
        return self.direct.raw, *self.grid, (*self.direct.head, *given)


@dataclass(frozen=True)
class _Part:
    """A tensor in the memory of a base: `whole` where it is the base's own."""

    base: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    whole: bool

    def of(self, tensors: Sequence[Tensor]) -> Tensor:
        """It, of the tensors of all bases."""
        tensor = tensors[self.base]
        if self.whole:
            return tensor
        if tensor.dtype != self.dtype:
            tensor = tensor.view(self.dtype)
        start = tensor.storage_offset() + self.offset // self.dtype.itemsize
        return tensor.as_strided(self.shape, self.strides, start)


@dataclass(frozen=True)
class _Product:
    """torch's product, whose operands and result are parts of bases."""

    left: _Part
    right: _Part
    result: _Part

    def at(self, bases: Sequence[int]) -> Call:
        """The product, wherever bases lie."""
        return self.run, 0, 0, ()

    def run(self, tensors: Sequence[Tensor]) -> None:
        """Makes it."""
        multiply(self.left.of(tensors), self.right.of(tensors), self.result.of(tensors))


def multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
    """a @ b, summed in float32 and rounded once to the dtype of `out`."""
    if a.dtype == out.dtype:
        torch.mm(a, b, out=out)
    else:
        torch.mm(a, b, out_dtype=out.dtype, out=out)


class Replay:
    """The launches of a plan for inputs that are laid out as they were in a recording."""

    def __init__(
        self, launches: Sequence[_Launch | _Product], outputs: Sequence[tuple[Any, ...]],
        done: Sequence[int], workspace: int, device: torch.device,
    ) -> None:  # fmt: skip
        self.launches, self.outputs, self.workspace = launches, outputs, workspace
        self.done = done
        self.device, self.index = device, device.index
        self.known: dict[tuple[int, ...], list[Call]] = {}

    def __call__(self, addresses: Sequence[int], inputs: Sequence[Tensor]) -> list[Tensor]:
        """The outputs of inputs, which lie at these addresses, in order."""
        if torch._C._cuda_getDevice() == self.index:
            return self._repeated(addresses, inputs)
        with torch.cuda.device(self.index):
            return self._repeated(addresses, inputs)

    def begun(
        self, addresses: Sequence[int], inputs: Sequence[Tensor], kept: Iterable[int]
    ) -> tuple[list[Tensor], Rest]:
        """The outputs, of which those at the positions `kept` are made, and what makes the others.

        Until then the inputs must stay where they are; outputs do, whoever drops them.
        """
        first = max((self.done[p] for p in kept), default=0)
        with torch.cuda.device(self.index):
            made, bases, space = self._places(addresses)
            # As matrices of their own: a caller may give an output another shape meanwhile.
            tensors = (space, *inputs, *[t.detach() for t in made])
            self._run(bases, tensors, 0, first)
        return made, partial(self._rest, bases, tensors, first)

    def _rest(self, bases: tuple[int, ...], tensors: Sequence[Tensor], first: int) -> None:
        """Makes the other launches, which read and write these tensors."""
        with torch.cuda.device(self.index):
            self._run(bases, tensors, first)

    def _repeated(self, addresses: Sequence[int], inputs: Sequence[Tensor]) -> list[Tensor]:
        """The outputs, on the current device."""
        made, bases, space = self._places(addresses)
        self._run(bases, (space, *inputs, *made))
        return made

    def _places(self, addresses: Sequence[int]) -> tuple[list[Tensor], tuple[int, ...], Tensor]:
        """Outputs without numbers, where all lies, and what must live until launches are made."""
        made = [_empty(shape, strides, dtype) for shape, strides, dtype in self.outputs]
        space = _empty((self.workspace,), (1,), torch.uint8)
        return made, (space.data_ptr(), *addresses, *[t.data_ptr() for t in made]), space

    def _run(
        self, bases: tuple[int, ...], tensors: Sequence[Tensor],
        first: int = 0, last: int | None = None,
    ) -> None:  # fmt: skip
        stream = torch._C._cuda_getCurrentRawStream(self.index)
        calls = self.known.get(bases)
        if calls is None:
            if len(self.known) >= KEPT_ADDRESSES:
                self.known.clear()
            calls = self.known[bases] = [launch.at(bases) for launch in self.launches]
        for raw, width, height, given in calls[first:last]:
            if width:
                raw(width, height, 1, stream, *given)
            else:
                raw(tensors)


def replay(
    recording: Recording, inputs: Sequence[Tensor], outputs: Sequence[Tensor],
    done: Sequence[int], device: torch.device,
) -> Replay | None:  # fmt: skip
    """What repeats a recording that gave `outputs`; None where it can't be repeated.

    `done` says of each output after how many launches it is made.
    """
    if not recording.usable:
        return None
    uses = [[_address(a) for a in given if not isinstance(a, int)]
            for _, _, given in recording.launches]  # fmt: skip
    own = {t.data_ptr(): p for p, t in enumerate(outputs)}
    allocated = {t.data_ptr(): t for t in recording.allocated}
    if len(own) < len(outputs) or not own.keys() <= allocated.keys():
        return None  # an output is an input, or the same as another
    inner = [address for address in allocated if address not in own]
    offsets, total = placed([_span(allocated[a], a, uses) for a in inner])
    places = {t.data_ptr(): (1 + p, 0) for p, t in enumerate(inputs)}
    places |= {a: (0, offset) for a, offset in zip(inner, offsets, strict=True)}
    places |= {a: (1 + len(inputs) + p, 0) for a, p in own.items()}
    if any(address not in places for each in uses for address in each):
        return None  # a copy of an input that was not laid out as a kernel needs it
    launches: list[_Launch | _Product] = []
    for launcher, grid, given in recording.launches:
        if launcher is None:
            launches.append(_product(given, places, (*inputs, *outputs)))
            continue
        direct = launcher.direct(given, device)
        if direct is None:
            return None
        launches.append(_launch(direct, grid, given, places))
    shapes = [(tuple(t.shape), t.stride(), t.dtype) for t in outputs]
    return Replay(launches, shapes, done, total, device)


def _address(argument: Any) -> int:
    if isinstance(argument, Descriptor):
        return argument.pointer
    address: int = argument.data_ptr()
    return address


def _span(tensor: Tensor, address: int, uses: Iterable[Sequence[int]]) -> Span:
    using = [number for number, addresses in enumerate(uses) if address in addresses]
    size = -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
    return Span(size, using[0], using[-1]) if using else Span(0, 0, 0)


def _product(
    given: Sequence[Any], places: Mapping[int, tuple[int, int]], whole: Sequence[Tensor]
) -> _Product:
    """A product of tensors, which are parts of bases or one of these as a whole."""
    parts = []
    for tensor in given:
        base, offset = places[tensor.data_ptr()]
        own = whole[base - 1] if base else None
        parts.append(
            _Part(
                base, offset, tuple(tensor.shape), tensor.stride(), tensor.dtype,
                own is not None and _laid_out(own) == _laid_out(tensor),
            )
        )  # fmt: skip
    return _Product(*parts)


def _laid_out(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype


def _launch(
    direct: Direct, grid: Grid, given: Sequence[Argument], places: dict[int, tuple[int, int]]
) -> _Launch:
    template: list[Any] = []
    pointers, maps = [], []
    for argument in given:
        if isinstance(argument, int):
            template.append(argument)
        elif isinstance(argument, Descriptor):
            place = places[argument.pointer]
            maps.append((len(template), *place, len(maps), argument))
            template += [None, *argument.shape, *argument.strides]
        else:
            pointers.append((len(template), *places[argument.data_ptr()]))
            template.append(None)
    template += direct.blanks
    return _Launch(direct, grid, tuple(template), tuple(pointers), tuple(maps))
