"""Built-in and random blocks on the Triton back end, in Triton's interpreter.

Every kernel, forward and backward, agrees with the reference back end on the same inputs, in every
dtype and however tiles are cut; and steps are a template's but where a table here says otherwise.
"""

from collections.abc import Iterator
from functools import partial

import block_operands
import pytest
import torch
from block_operands import Operands, cast, operands
from hypothesis import given, settings
from hypothesis import strategies as st
from planned import call_of
from random_blocks import BlockRecipe, block_recipes
from test_random_blocks import frozen_sets, trained
from triton.runtime.errors import InterpreterError
from triton_plans import (
    SMALL,
    Trial,
    check,
    configured,
    cz_program,
    interpreted,
    outcome,
    padded,
    quiet,
    spread,
    trials,
    trials_of,
    turned,
)

from cadenza import lang as L
from cadenza.backends.triton import modules
from cadenza.backends.triton.configuration import Configuration
from cadenza.backends.triton.executable import Executable
from cadenza.core.pipeline import compile_program
from cadenza.library.blocks import BUILT_IN

pytestmark = [interpreted, quiet]
FEWER = settings.default.max_examples // 40
CALLS = [
    (65, torch.float32, False), (37, torch.float32, True), (16, torch.float16, True),
    (37, torch.float16, False), (1, torch.bfloat16, False), (65, torch.bfloat16, True),
]  # fmt: skip
HEADS = "groups of 6 columns: not a power of two"
# What no template makes, by block, forward and backward; at even sizes there is less of it.
REASONS: dict[str, tuple[set[str], set[str]]] = {"qwen3": ({HEADS}, {HEADS})}
EVEN_REASONS: dict[str, tuple[set[str], set[str]]] = {}
EVEN = {
    "WIDTH": 32, "FEED_FORWARD": 32, "VOCABULARY": 64, "HEAD_DIM": 8, "HEADS": 2,
    "KEY_VALUE_HEADS": 1, "ROTATED": 3, "QKV": 32, "EMBEDDED": 16,
}  # fmt: skip
CUTS = [
    configured(BN=32, parts=1), configured(BN=64, BK=32, parts=2), configured(BN=128, parts=4),
    configured(BM=32, BN=64, parts=4, group=1), configured(BN=16, parts=1),
]  # fmt: skip
BLOCKS = list(BUILT_IN)
QUICK = ("llama", "lm-head")
SOME_SLOW = [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in BLOCKS]
RAGGED_AND_EVEN = [False, pytest.param(True, marks=pytest.mark.slow)]


def even_operands(name: str, rows: int) -> Operands:
    """Operands of which sizes are multiples of tiles and heads a power of two."""
    with pytest.MonkeyPatch.context() as patch:
        for size, number in EVEN.items():
            patch.setattr(block_operands, size, number)
        rotary = partial(block_operands.rotary, head_dim=EVEN["HEAD_DIM"])
        patch.setattr(block_operands, "rotary", rotary)
        return operands(name, rows)


def block_trials(
    name: str, rows: int, dtype: torch.dtype = torch.float32, even: bool = False
) -> Iterator[Trial]:
    """The plans of a built-in block."""
    made = even_operands(name, rows) if even else operands(name, rows)
    call = call_of(name, cast(made, dtype))
    return trials_of(call.pair(), call.tensors, rows)


@pytest.mark.parametrize("even", RAGGED_AND_EVEN, ids=["ragged", "even"])
@pytest.mark.parametrize("name", SOME_SLOW)
def test_blocks_agree_in_float32(name, even):
    cut = CUTS[1] if even else SMALL
    found = [check(trial, cut=cut) for trial in block_trials(name, 37, even=even)]
    expected = (EVEN_REASONS if even else REASONS).get(name, (set(), set()))
    assert [set(each.reasons) for each in found] == list(expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.slow
def test_blocks_agree_in_half_precision(name, dtype):
    for trial in block_trials(name, 37, dtype):
        check(trial, cut=configured(BM=64, BN=64, parts=2))


@pytest.mark.slow
@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_agree_however_they_are_cut(name, cut):
    for rows, dtype, even in CALLS:
        for trial in block_trials(name, rows, dtype, even):
            check(trial, cut=cut)


@pytest.mark.parametrize(("rows", "place"), [(1, spread), (16, turned), (65, padded)])
@pytest.mark.parametrize("name", ["llama", "gpt2", "lm-head"])
@pytest.mark.slow
def test_blocks_of_other_heights_and_layouts(name, rows, place):
    for trial in block_trials(name, rows):
        check(trial, place=place)


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_without_a_row(name):
    for trial in block_trials(name, 0):
        check(trial)


@pytest.mark.slow
def test_two_runs_are_the_same_bit_by_bit():
    for trial in block_trials("qwen3", 37, torch.float16, even=True):
        first, second = (outcome(trial, CUTS[1]).outputs for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# --- random blocks --------------------------------------------------------------------------------

cuts = st.builds(
    configured, BN=st.sampled_from([16, 32, 64]), parts=st.sampled_from([1, 2, 4]),
    group=st.sampled_from([1, 8]),
)  # fmt: skip


def check_block(recipe: BlockRecipe, frozen: set[int], cut: Configuration) -> None:
    """Both plans of a random block, backward on what this back end's own forward has saved.

    The gradient of a row's largest is given to the values that equal it when they are made again:
    what rounding decides there can't be compared.
    """
    needed = [] if "L.row_max" in "".join(recipe.lines) else trained(recipe, frozen)
    pair = compile_program(recipe.function(), recipe.signature("float32"), needed=needed)
    saved: list[torch.Tensor] = []
    for trial in trials_of(pair, recipe.tensors(torch.float32), recipe.rows):
        if saved:
            inputs = list(trial.inputs)
            inputs[: len(pair.values)] = [
                saved[value] if isinstance(value, int) else given
                for value, given in zip(pair.values, inputs, strict=False)
            ]
            trial = trial._replace(inputs=inputs)
        saved = check(trial, cut=cut, floor=10.0).outputs


@pytest.mark.slow
@settings(max_examples=FEWER)
@given(recipe=block_recipes(), frozen=frozen_sets, cut=cuts)
def test_random_blocks_agree(recipe, frozen, cut):
    check_block(recipe, frozen, cut)


# --- the checks themselves ------------------------------------------------------------------------


def program(x: object, w: object, y: object) -> object:
    """A product with an epilogue that loads."""
    return L.linear(x, w) * L.exp(y)


@pytest.mark.parametrize("fault", ["wrong", "short", "long"])
def test_a_broken_kernel_is_noticed(fault, monkeypatch):
    texts = {
        "wrong": ("tl.exp(", "1.00001 * tl.exp("),
        "short": ("row_ok = rows < ROWS", "row_ok = rows < ROWS - 1"),
        "long": ("row_ok = rows < ROWS", "row_ok = rows < ROWS + 1"),
    }
    good, bad = texts[fault]
    given = {"x": torch.randn(37, 20), "w": torch.randn(33, 20), "y": torch.randn(37, 33)}
    (trial,) = trials(cz_program(program), given, backward=False)
    check(trial)
    original = modules.function

    def changed(text: str) -> object:
        assert good in text
        return original(text.replace(good, bad))

    monkeypatch.setattr(modules, "function", changed)
    expected = {"wrong": "error", "short": "not written", "long": "outside of"}[fault]
    with pytest.raises((AssertionError, InterpreterError), match=expected):
        check(trial)


def test_the_interpreter_is_hastened_without_a_change():
    x = torch.randn(5, 20)
    x[1, 3], x[2] = torch.nan, -torch.inf
    (trial,) = trials(cz_program(lambda x: (L.row_max(x), L.logsumexp(x))), {"x": x}, False)
    quick = outcome(trial).outputs
    slow = Executable(trial.plan, lambda kernel: SMALL)(trial.inputs, trial.rows)
    assert all(
        torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(quick, slow, strict=True)
    )
