"""A plan made ready to run on a GPU: its steps for a target, or launches that are repeated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from cadenza.backends import NOTHING, Rest, addresses_of, done, put
from cadenza.backends.steps import Owner
from cadenza.backends.triton.launch import NOT_CAPTURED
from cadenza.backends.triton.memory import Memory
from cadenza.backends.triton.overwriting import takers
from cadenza.backends.triton.program import Choose, Program
from cadenza.backends.triton.replay import Recording, Replay
from cadenza.backends.triton.replay import replay as make_replay
from cadenza.backends.triton.target import INTERPRETER, Target, tf32_allowed
from cadenza.backends.triton.tuning import choices
from cadenza.backends.triton.tuning.contests import rounded
from cadenza.core.errors import BackEndError
from cadenza.core.ir import Node
from cadenza.core.plan import Plan
from cadenza.core.plan_text import PairText
from cadenza.core.readiness import is_vector
from cadenza.core.storage import compute_dtype, dtypes_of

Tensor = torch.Tensor
KEPT_REPLAYS = 64  # layouts of one plan's inputs, numbers of rows among them


class Executable:
    """A plan made ready to run; it takes and gives what the reference back end does."""

    def __init__(
        self, plan: Plan, choose: Choose | None = None,
        described: Callable[[], PairText] | None = None, target: Target = INTERPRETER,
    ) -> None:  # fmt: skip
        self.plan, self.choose, self.described = plan, choose, described
        self.target = target  # that of the last call, or where none was made the one given
        self.rows = 0  # of the last call, rounded: what was measured holds for as many
        self.programs: dict[tuple[Target, int], Program] = {}
        self.wide = compute_dtype(plan.graph) == "float64"
        stored = dtypes_of(plan.graph)
        operands = [
            i
            for kernel in plan.kernels
            if kernel.product is not None
            for i in kernel.product.inputs
        ]
        self.single = any(stored[operand] == "float32" for operand in operands)
        self.replays: dict[Any, Replay | None] = {}

    @property
    def program(self) -> Program:
        """The steps for the target and the rows of the last call."""
        key = self.target, self.rows
        if key not in self.programs:
            text = self.described() if self.described else None
            self.programs[key] = Program(self.plan, self.choose, text, self.target)
        return self.programs[key]

    def _choose(self, tensors: Sequence[Tensor], rows: int) -> None:
        """Makes the steps for a call's rows, of what was measured or is measured now."""
        self.rows = rounded(rows)
        if (self.target, self.rows) in self.programs or self.choose is not None:
            return
        if torch.cuda.is_current_stream_capturing():
            raise BackEndError(NOT_CAPTURED)
        text = self.described() if self.described else None
        setting = choices.Setting.of(self.plan, self.target, tensors, rows)
        choose = choices.choices(self.plan, text, setting)
        self.programs[self.target, self.rows] = Program(self.plan, choose, text, self.target)

    def __call__(
        self, tensors: Sequence[Tensor], rows: int, into: Mapping[int, Tensor] = NOTHING,
        spent: Sequence[int] = (),
    ) -> list[Tensor]:  # fmt: skip
        """The outputs, new contiguous tensors, of inputs in the graph's order, each 2-D.

        Those at the positions `into` are written there; it may be an input that is added to, of
        which a tile is read before it is written, and no other reads it. Kernels may write over the
        inputs at the positions `spent`.
        """
        addresses = addresses_of(self.plan, tensors)
        if rows == 0 or self.wide:
            return put(self.program.plain(tensors, rows), into)
        device = tensors[0].device
        if not tensors[0].is_cuda:
            self.target = Target.of(device)
            memory = Memory(rows, device)
            memory.places = self._over([tensors[p] for p in spent], spent)
            return self._stepwise(tensors, memory, into)
        tf32, key = self._layout(tensors, addresses, rows)
        key += tuple(spent)
        replay = self.replays.get(key)
        if replay is not None and not into:
            return replay(addresses, tensors)
        self.target = replace(Target.of(device), tf32=tf32)
        self._choose(tensors, rows)
        captured = torch.cuda.is_current_stream_capturing()
        recorded = key in self.replays or into or captured
        memory = Memory(rows, device, recording=None if recorded else Recording())
        memory.places = self._over([tensors[p] for p in spent], spent)
        outputs = self._stepwise(tensors, memory, into)
        apart = len({*addresses}) == len(addresses)
        if memory.recording is not None and apart:  # else it wouldn't tell these inputs apart
            if len(self.replays) >= KEPT_REPLAYS:
                self.replays.pop(next(iter(self.replays)))
            after = memory.recording.done(self.plan.graph.outputs)
            self.replays[key] = make_replay(memory.recording, tensors, outputs, after, device)
        return outputs

    def begun(
        self, tensors: Sequence[Tensor], rows: int, kept: Sequence[int]
    ) -> tuple[list[Tensor], Rest]:
        """The outputs, of which those at the positions `kept` are made, and what makes the others.

        That is nothing where the steps are not known yet: then all are made.
        """
        addresses = addresses_of(self.plan, tensors)
        if rows == 0 or self.wide:
            return self(tensors, rows), done
        device = tensors[0].device
        if tensors[0].is_cuda:
            tf32, key = self._layout(tensors, addresses, rows)
            replay = self.replays.get(key)
            if replay is not None:
                return replay.begun(addresses, tensors, kept)
            if key not in self.replays:
                return self(tensors, rows), done
            self.target = replace(Target.of(device), tf32=tf32)
            self._choose(tensors, rows)
        else:
            self.target = Target.of(device)
        return self._begun_stepwise(tensors, Memory(rows, device), kept)

    def _begun_stepwise(
        self, tensors: Sequence[Tensor], memory: Memory, kept: Sequence[int]
    ) -> tuple[list[Tensor], Rest]:
        graph, program = self.plan.graph, self.program
        wanted = {graph.outputs[p] for p in kept if graph.outputs[p].inputs}
        later = [p for p in range(len(graph.outputs)) if p not in kept]
        made = {p: self._empty(memory, graph.outputs[p]) for p in later}
        # As matrices of their own: a caller may give an output another shape meanwhile.
        places = {p: tensor.detach() for p, tensor in made.items()}
        self._begin(tensors, memory, places)
        steps = iter(program.steps)
        while not wanted <= memory.values.keys():
            next(steps).run(memory)
        owner = Owner([*tensors, *made.values()])
        for position in kept:
            output = graph.outputs[position]
            made[position] = owner.own(self._output(memory, output), program.dtypes[output])

        def rest() -> None:
            for step in steps:
                step.run(memory)
            put([self._output(memory, o) for o in graph.outputs], places)

        return [made[p] for p in range(len(graph.outputs))], rest

    def _layout(
        self, tensors: Sequence[Tensor], addresses: Sequence[int], rows: int
    ) -> tuple[bool, tuple[Any, ...]]:
        """Whether products may be tf32's, and all of a call that launches depend on."""
        tf32 = self.single and tf32_allowed()
        bits = 0
        for address in addresses:
            bits |= address
        aligned = bits % 16 == 0 or tuple([address % 16 == 0 for address in addresses])
        index, strides = tensors[0].device.index, tuple([t.stride() for t in tensors])
        return tf32, (rows, index, tf32, aligned, strides)

    def _empty(self, memory: Memory, node: Node) -> Tensor:
        shape = [memory.size(d) for d in node.type[:2]]
        return torch.empty(shape, dtype=self.program.dtypes[node], device=memory.device)

    def _begin(self, tensors: Sequence[Tensor], memory: Memory, into: Mapping[int, Tensor]) -> None:
        memory.places |= {self.plan.graph.outputs[p]: place for p, place in into.items()}
        for node, tensor in zip(self.plan.graph.inputs, tensors, strict=True):
            memory.values[node] = tensor.reshape(-1).contiguous() if is_vector(node) else tensor

    def _stepwise(
        self, tensors: Sequence[Tensor], memory: Memory, into: Mapping[int, Tensor]
    ) -> list[Tensor]:
        """The outputs, step by step."""
        self._begin(tensors, memory, into)
        for step in self.program.steps:
            step.run(memory)
            if memory.recording is not None:
                memory.recording.usable &= step.recorded
                memory.recording.note(memory.values)
        owner = Owner(tensors)
        found = [
            into[p] if p in into and memory.values.get(o) is into[p] else
            owner.own(self._output(memory, o), self.program.dtypes[o])
            for p, o in enumerate(self.outputs)
        ]  # fmt: skip
        return put(found, into)

    def _over(self, tensors: Sequence[Tensor], positions: Sequence[int]) -> dict[Node, Tensor]:
        """The values that are written over these inputs, and where."""
        inputs = [self.plan.graph.inputs[p] for p in positions]
        known = dict(zip(inputs, tensors, strict=True))
        whole = [node for node, tensor in known.items() if tensor.is_contiguous()]
        return {value: known[given] for value, given in takers(self.program, whole).items()}

    @property
    def outputs(self) -> Iterable[Node]:
        """What it returns."""
        return self.plan.graph.outputs

    def _output(self, memory: Memory, node: Node) -> Tensor:
        shape = [memory.size(d) for d in node.type[:2]]
        if node in memory.values:
            return memory.values[node].reshape(shape)
        if memory.recording is not None:  # a constant, which no launch writes
            memory.recording.usable = False
        dtype, value = self.program.dtypes[node], node.attributes["value"]
        return torch.full(shape, value, dtype=dtype, device=memory.device)


def compile_plan(plan: Plan, **options: Any) -> Executable:
    """A plan made ready to run."""
    return Executable(plan, **options)
