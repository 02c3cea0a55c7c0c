"""Compiled programs by signature: one entry a program, signature, needed gradients, back end.

A specialisation knows all that running needs, and is found again by its digest, which is how
backward and torch.compile name it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Any

import torch

from cadenza.backends import NOTHING, compile_plan
from cadenza.core.ir import Graph
from cadenza.core.ops import BOOLEAN, M
from cadenza.core.pipeline import Pair, Sums, compile_program
from cadenza.core.plan_text import PairText
from cadenza.core.storage import dtypes_of
from cadenza.core.text import digest
from cadenza.core.trace import Signature, undecided
from cadenza.library.operands import Operands, describe

Tensor = torch.Tensor
NO_TENSORS: Mapping[str, Tensor] = MappingProxyType({})


@dataclass(frozen=True)
class Call:
    """What a call fixes besides its tensors: operand names, constants, autocast, back end.

    `wide` and `added` name operands whose gradients the caller adds up, as `Sums` has them.
    """

    names: tuple[str, ...]
    constants: tuple[tuple[str, Any], ...]
    autocast: str | None
    backend: str
    wide: tuple[str, ...] = ()
    added: tuple[str, ...] = ()

    def encode(self) -> str:
        """The call as text, so that torch.compile sees a constant."""
        fields = [self.names, self.constants, self.autocast, self.backend, self.wide, self.added]
        return json.dumps(fields)

    @staticmethod
    @lru_cache(maxsize=4096)
    def decode(text: str) -> Call:
        """The call that `encode` wrote."""
        names, constants, autocast, backend, *sums = json.loads(text)
        pairs = tuple((k, v) for k, v in constants)
        return Call(tuple(names), pairs, autocast, backend, *map(tuple, sums))


@dataclass(frozen=True, eq=False)
class Specialization:
    """A program compiled for one signature, ready to run."""

    pair: Pair
    backend: str
    digest: str

    @cached_property
    def forward(self) -> Any:
        """Runs forward: 2-D tensors in the graph's order to outputs, then saved values."""
        return compile_plan(self.pair.forward_plan, self.backend, lambda: self.text)

    @cached_property
    def backward(self) -> Any:
        """Runs backward: 2-D tensors in its graph's order to gradients."""
        assert self.pair.backward_plan is not None
        return compile_plan(self.pair.backward_plan, self.backend, lambda: self.text)

    @cached_property
    def text(self) -> PairText:
        """The plans as people read them."""
        return PairText(self.pair)

    def forward_on(
        self, named: Mapping[str, Tensor], rows: int, into: Mapping[int, Tensor] = NOTHING
    ) -> list[Tensor]:
        """Outputs, then saved values, of 2-D operands by name; some over an operand, in place."""
        inputs = [named[i.attributes["name"]] for i in self.pair.forward.inputs]
        results: list[Tensor] = self.forward(inputs, rows, into)
        return results

    def backward_on(
        self,
        named: Mapping[str, Tensor],
        results: Sequence[Tensor],
        adjoints: Sequence[Tensor],
        rows: int,
        places: Mapping[str, Tensor] = NO_TENSORS,
        spent: bool = False,
    ) -> dict[str, Tensor]:
        """Gradients by operand, given what `forward_on` returned and the outputs' adjoints.

        Those in `places` are written there; of operands that are `added`, added to what is there.
        What forward saved beside its outputs may be written over if it is `spent`.
        """
        pair = self.pair
        if pair.backward is None:
            return {}
        values = [results[v] if isinstance(v, int) else named[v] for v in pair.values]
        inputs = [*values, *(adjoints[p] for p in pair.adjoints), *(places[n] for n in pair.added)]
        into = {p: places[name] for p, name in enumerate(pair.gradients) if name in places}
        found = self.backward(inputs, rows, into, self.own if spent else ())
        return dict(zip(pair.gradients, found, strict=True))

    @cached_property
    def own(self) -> list[int]:
        """Where among backward's inputs the values are that forward makes for it alone."""
        values, outputs = self.pair.values, self.pair.outputs
        return [p for p, v in enumerate(values) if isinstance(v, int) and v >= outputs]

    @cached_property
    def outputs(self) -> list[tuple[Any, int, torch.dtype]]:
        """Rows, columns and dtype of each output of forward, saved values included."""
        return described_outputs(self.pair.forward)

    @cached_property
    def backward_sizes(self) -> list[tuple[int | None, int]]:
        """Rows (None for M) and columns of backward's inputs."""
        assert self.pair.backward is not None
        return [
            (None if i.type.rows == M else int(i.type.rows), int(i.type.columns))
            for i in self.pair.backward.inputs
        ]

    @cached_property
    def gradients(self) -> list[tuple[Any, int, torch.dtype]]:
        """Rows, columns and dtype of each gradient that backward returns."""
        return described_outputs(self.pair.backward) if self.pair.backward else []

    @cached_property
    def structure(self) -> tuple[str, tuple[str, ...]]:
        """How the function returned its outputs, and their labels."""
        return self.pair.program.structure, self.pair.program.labels


def described_outputs(graph: Graph) -> list[tuple[Any, int, torch.dtype]]:
    """Rows, columns and dtype of each output of a program."""
    stored = dtypes_of(graph)
    names = ["bool" if o.type.kind == BOOLEAN else stored[o] for o in graph.outputs]
    return [
        (o.type.rows, int(o.type.columns), getattr(torch, name))
        for o, name in zip(graph.outputs, names, strict=True)
    ]


BY_DIGEST: dict[str, Specialization] = {}


class Specializations:
    """The compiled forms of one function."""

    def __init__(
        self, function: Callable[..., Any], name: str, shapes: Mapping[str, str] | None
    ) -> None:
        self.function, self.name, self.shapes = function, name, shapes
        self.structures: dict[str, tuple[str, tuple[str, ...]]] = {}
        self._sized: dict[Any, tuple[str, ...]] = {}
        self._known: dict[Any, Specialization] = {}

    def find(
        self, tensors: Sequence[Tensor], text: str, needed: int
    ) -> tuple[Specialization, Operands]:
        """The compiled form for these tensors, compiled now if it is new."""
        call = Call.decode(text)
        found = describe(call.names, tensors, self.shapes, dict(call.constants))
        key = (found.operands, text, needed)
        specialization = self._known.get(self._sizes(key, tensors, call))
        if specialization is None:
            specialization = self._compile(found, call, needed)
            self._sized[key] = _known_sizes(found, specialization)
            self._known[self._sizes(key, tensors, call)] = specialization
        self.structures[text] = specialization.structure
        return specialization, found

    def _sizes(self, key: Any, tensors: Sequence[Tensor], call: Call) -> Any:
        """The key, with the rows of operands that were undecided and turned out not to be M."""
        sized = self._sized.get(key, ())
        if not sized:
            return key
        rows = {n: int(t.shape[0]) for n, t in zip(call.names, tensors, strict=True) if n in sized}
        return (key, tuple(rows.items()))

    def _compile(self, found: Operands, call: Call, needed: int) -> Specialization:
        autocast = call.autocast
        if any(o.dtype == "float64" for o in found.operands):
            autocast = None  # torch casts no float64
        signature = Signature(found.operands, call.constants, autocast)
        names = [n for i, n in enumerate(call.names) if needed >> i & 1]
        sizes = {o.name: found.rows for o in found.operands if o.rows == undecided(o.name)}
        sums = Sums(frozenset(call.wide), frozenset(call.added))
        pair = compile_program(self.function, signature, sizes, names, self.name, sums)
        identity = specialization_digest(pair, call.backend)
        return BY_DIGEST.setdefault(identity, Specialization(pair, call.backend, identity))


def _known_sizes(found: Operands, specialization: Specialization) -> tuple[str, ...]:
    """Names of the operands that were undecided and turned out to have a known size."""
    rows = {i.attributes["name"]: i.type.rows for i in specialization.pair.program.inputs}
    return tuple(o.name for o in found.operands if o.rows != rows[o.name] and rows[o.name] != M)


def specialization_digest(pair: Pair, backend: str) -> str:
    """The identity of a compiled pair: both programs, their order of values, the back end."""
    parts = [digest(pair.program), digest(pair.forward), backend]
    parts += [digest(pair.backward)] if pair.backward else []
    parts += [repr((pair.differentiable, pair.values, pair.adjoints, pair.gradients))]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
