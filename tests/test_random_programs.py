"""Random well-typed programs: what is compiled and run equals `plain`, value and gradients.

Each program also prints and parses to itself, and gives the same outputs and gradients, bit by
bit, whatever subset of its gradients is asked for. Programs of whole numbers and exact operations
agree bit by bit. A failing example replays from its repr: `check_recipe(Recipe(...))`.
"""

import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import (
    check_against,
    check_round_trip,
    double_copies,
    gradients_of,
    labelled,
    upstream_of,
)
from random_programs import LIMIT, Recipe, recipes, written

from cadenza.core.ops import Op

FEWER = settings.default.max_examples // 3
SUMMANDS = 10.0  # adjoints of these programs are about as large where they cancel


def check_recipe(recipe: Recipe) -> None:
    """A random program against plain, and against its own printed form."""
    program, operands = recipe.program(), double_copies(recipe.tensors())
    check_against(program, program.plain, operands, SUMMANDS)
    for graph in (program.graph(**operands), program.backward_graph(**operands)):
        if graph is not None:
            check_round_trip(graph)


def check_subset(recipe: Recipe, wanted: list[str]) -> None:
    """Asking for some gradients changes neither these nor the outputs, bit by bit."""
    program, operands = recipe.program(), double_copies(recipe.tensors())
    outputs = labelled(program(**operands))
    upstream = upstream_of(outputs)
    full = gradients_of(outputs, operands, upstream)
    frozen = {n: v if n in wanted or n not in full else v.detach() for n, v in operands.items()}
    again = labelled(program(**frozen))
    assert all(torch.equal(again[name], value) for name, value in outputs.items())
    for name, gradient in gradients_of(again, frozen, upstream).items():
        assert torch.equal(gradient, full[name]), f"{name}: {gradient - full[name]}"


def check_exact(recipe: Recipe) -> None:
    """A program of whole numbers: outputs bit by bit at float32, gradients too at float64."""
    program = recipe.program()
    narrow = recipe.tensors(torch.float32)
    results = labelled(program(**narrow)), labelled(program.plain(**narrow))
    assert all(torch.equal(results[0][name], value) for name, value in results[1].items())
    operands = double_copies(narrow)
    outputs, expected = labelled(program(**operands)), labelled(program.plain(**operands))
    upstream = {n: torch.randint_like(y, -3, 4) for n, y in upstream_of(expected).items()}
    actual = gradients_of(outputs, operands, upstream)
    for name, gradient in gradients_of(expected, operands, upstream).items():
        assert torch.equal(outputs.get(name, gradient), expected.get(name, gradient)), name
        assert torch.equal(actual[name], gradient), name


@given(recipe=recipes())
def test_programs_equal_plain_and_read_back(recipe):
    check_recipe(recipe)


@settings(max_examples=FEWER)
@given(recipe=recipes(), chosen=st.sets(st.sampled_from("xycrswb")))
def test_gradients_do_not_depend_on_which_are_asked_for(recipe, chosen):
    check_subset(recipe, sorted(chosen))


@settings(max_examples=FEWER)
@given(recipe=recipes(whole=True))
def test_programs_of_whole_numbers_agree_bit_by_bit(recipe):
    check_exact(recipe)


def test_random_programs_use_the_whole_language():
    numbers, found = random.Random(0), set()
    for _ in range(300):
        codes = [[numbers.randrange(LIMIT) for _ in range(9)] for _ in range(9)]
        recipe = written(codes, numbers.randint(1, 7), 3)
        found |= {node.op for node in recipe.program().graph(**recipe.tensors()).nodes()}
    assert found == set(Op)


def test_a_recipe_replays_from_its_repr():
    recipe = written([[1, 2, 3], [4, 5, 6], [7, 8, 9]], 4, 3)
    again = eval(repr(recipe), {"Recipe": Recipe})
    assert again == recipe
    check_recipe(again)
