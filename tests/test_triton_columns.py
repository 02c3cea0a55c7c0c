"""Frames and spaces: which columns of a value stand in which part of a tile.

A frame is held to the columns that it says, worked out with numbers; a space to where columns lie.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from triton_plans import cz_program, trials

from cadenza import lang as L
from cadenza.backends.triton.columns import ROWS, Frame, Layout, Space, Spaces
from cadenza.backends.triton.configuration import Configuration
from cadenza.backends.triton.program import Program
from cadenza.backends.triton.target import Target
from cadenza.backends.triton.tile import STEPS
from cadenza.core.ir import Graph, Node
from cadenza.core.ops import Op

RUN = torch.arange(48)


def columns(frame: Frame) -> torch.Tensor:
    """The columns of a frame of which the run is 0, 1, 2, …, by the texts that kernels have."""
    found = RUN
    for kind, *counts in frame.steps:
        found = eval(STEPS[kind]("x", *counts), {"x": found})
    return found


@pytest.mark.parametrize(
    ("frame", "expected"),
    [
        (Frame("c"), RUN),
        (Frame("c").shifted(3), RUN + 3),
        (Frame("c").shifted(3).shifted(-5), RUN - 2),
        (Frame("c").shifted(3).shifted(-3), RUN),
        (Frame("c").wrapped(5), RUN % 5),
        (Frame("c").shifted(10).wrapped(5), RUN % 5),
        (Frame("c").shifted(7).wrapped(5), (RUN + 7) % 5),
        (Frame("c").wrapped(5).shifted(2), RUN % 5 + 2),
        (Frame("c").then("div", 4), RUN // 4),
        (Frame("c").then("pair", 1, 3), RUN // 3 * 6 + 3 + RUN % 3),
        (Frame("c").then("unpair", 3), RUN // 6 * 3 + RUN % 3),
    ],
    ids=str,
)
def test_frames_say_columns(frame, expected):
    assert torch.equal(columns(frame), expected)


def test_a_column_goes_to_its_pair_and_back():
    both = [columns(Frame("c").then("pair", part, 4)) for part in (0, 1)]
    assert sorted(torch.cat(both).tolist()) == list(range(96))
    for part in both:
        unpaired = part // 8 * 4 + part % 4
        assert torch.equal(unpaired, RUN)


@pytest.mark.parametrize(
    ("frame", "shift"),
    [(ROWS, 0), (Frame("c").shifted(3), 3), (Frame("c").wrapped(4), None),
     (Frame("c").shifted(1).wrapped(4), None), (Frame("h").then("div", 2), None)],
    ids=str,
)  # fmt: skip
def test_a_frame_knows_that_it_is_only_shifted(frame, shift):
    assert frame.shift == shift


@pytest.mark.parametrize(
    ("layout", "lanes"),
    [(Layout(64), 1), (Layout(64, 8), 2), (Layout(64, 8, product_is_half=True), 1)],
)
def test_lanes_of_the_accumulator(layout, lanes):
    assert layout.lanes == lanes


SPACES = {
    "itself": (None, lambda p: p * 2.0, Space("full")),
    "columns": (None, lambda p: L.columns(p, 3, 20), Space("full", -3)),
    "columns of columns": (None, lambda p: L.columns(L.columns(p, 3, 20), 2, 9), Space("full", -5)),
    "after another": (None, lambda p: L.concat(L.name(p * 0.5, "a"), p), Space("full")),
    "half": (16, lambda p: L.split(p)[1] * 2.0, Space("half")),
    "another half": (8, lambda p: L.split(p)[1] * 2.0, None),
    "joined": (16, lambda p: L.join(L.exp(L.split(p)[0]), L.exp(L.split(p)[1])), Space("full")),
    "half of two heads": (4, lambda p: L.split(L.columns(p, 8, 24), 4)[0], Space("half", -4)),
    "half of a part of a head": (4, lambda p: L.split(L.columns(p, 4, 20), 4)[0], None),
    "groups": (None, lambda p: L.group_sum(p, 4) * 2.0, Space("4")),
    "later groups": (None, lambda p: L.group_max(L.columns(p, 8, 32), 4), Space("4", -2)),
    "groups across": (None, lambda p: L.group_max(L.columns(p, 2, 30), 4), None),
    "groups repeated": (None, lambda p: L.repeat(L.group_sum(p, 4), 4), Space("full")),
    "tiled": (None, lambda p: L.tile(p, 2), None),
}


def test_masks_move_by_pointers_whatever_is_chosen():
    """Triton ends the process on a descriptor of one: it has boxes of numbers alone."""
    program = cz_program(lambda x, w: (L.linear(x, w), L.linear(x, w) > 0.0))
    given = {"x": torch.randn(64, 64).bfloat16(), "w": torch.randn(64, 64).bfloat16()}
    (trial,) = trials(program, given, backward=False)
    boxed = Configuration(64, 64, 64, boxes=("store", "load"))
    (step,) = Program(trial.plan, lambda _: boxed, target=Target.named("sm_90")).steps
    stores = {a.name: a.node.type.kind for a in step.source.arguments if a.role == "store"}
    assert {"real", "boolean"} == set(stores.values())
    assert step.source.movable == {n for n, kind in stores.items() if kind != "boolean"}
    types = step.signature(descriptors=True)
    assert all(types[n].startswith("tensordesc") == (stores[n] == "real") for n in stores)


def graph_of(function: Callable[..., Any]) -> Graph:
    """The program of a function of a product with 32 columns."""
    program = cz_program(lambda x, w: function(L.linear(x, w)))
    given = {"x": torch.randn(5, 8), "w": torch.randn(32, 8)}
    (trial,) = trials(program, given, backward=False)
    return trial.plan.graph


@pytest.mark.parametrize("name", SPACES)
def test_spaces_of_values_made_of_a_product(name):
    pairs, function, expected = SPACES[name]
    graph = graph_of(function)
    product = next(n for n in graph.nodes() if n.op is Op.MATMUL)
    spaces = Spaces(pairs, {product: Space("full")})
    assert spaces.of(graph.outputs[0]) == expected


def test_values_of_no_product_fit_any_space():
    graph = graph_of(lambda p: L.tanh(p))
    leaves: list[Node] = [n for n in graph.nodes() if n.op is Op.INPUT]
    assert [Spaces(None, {}).of(leaf) for leaf in leaves] == [None, None]


@pytest.mark.parametrize(
    ("pairs", "space", "runs"),
    [(None, Space("full", 3), ["c"]), (4, Space("full", -8), ["c0", "c1"]),
     (4, Space("half", 2), ["h"]), (None, Space("8"), ["g8"])],
)  # fmt: skip
def test_frames_that_hold_a_tile(pairs, space, runs):
    frames = Spaces(pairs, {}).frames(space)
    assert frames == [Frame(run).shifted(space.shift) for run in runs]
    assert space.run[0] == runs[0][0]
