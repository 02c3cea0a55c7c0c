"""What backward writes over: what forward saved for it alone, where nothing needs it later.

A plan's kernels give the same bits with and without, whichever template makes them; autograd lets
them only where a graph is used up and nobody else was handed its saved values.
"""

import planned
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_blocks import BlockRecipe, block_recipes
from triton_plans import interpreted, quiet, trials_of

from cadenza import lang as L
from cadenza.backends.triton.executable import Executable
from cadenza.backends.triton.program import Program
from cadenza.backends.triton.target import INTERPRETER, Target
from cadenza.core.pipeline import compile_program
from cadenza.core.plan_text import PairText
from cadenza.core.trace import Operand, Signature
from cadenza.library.blocks import BUILT_IN

ROWS = 19
# The saved values that are written over, of those that have some at all: pre-activations.
WRITTEN = {
    "llama": "v3", "llama-mlp": "acc1", "gpt2": "v3", "qwen3": "v3", "gemma2": "v3",
    "parallel": "v4", "lm-head": "v2", "norm-qkv": None,
}  # fmt: skip


def own_values(pair):
    """Where among backward's inputs the values are that forward made for it alone."""
    return [p for p, v in enumerate(pair.values) if isinstance(v, int) and v >= pair.outputs]


def trial_of(name):
    """A built-in block's pair, and its backward plan on what forward has saved."""
    torch.manual_seed(0)
    made = planned.call(name, ROWS, torch.float32)
    pair = made.pair()
    return pair, list(trials_of(pair, made.tensors, ROWS))[1]


def executable(plan, path):
    """A plan by templates, or with torch's products."""
    found = Executable(plan)
    if path == "library":  # which float32's are there
        program = Program(plan, target=Target.named("sm_90"))
        found.programs[INTERPRETER, found.rows] = program
    return found


def written_over(run, trial, positions):
    """The inputs that a call with these positions spent changes; it gives the same outputs."""
    kept = [t.clone() for t in trial.inputs]
    expected = run(trial.inputs, trial.rows)
    assert unlike(trial.inputs, kept) == []
    found = run(trial.inputs, trial.rows, spent=positions)
    assert unlike(found, expected) == []
    return unlike(trial.inputs, kept)


def unlike(found, expected):
    """Where tensors differ in a bit."""
    pairs = zip(found, expected, strict=True)
    return [
        p for p, (a, b) in enumerate(pairs) if not torch.equal(a.nan_to_num(7), b.nan_to_num(7))
    ]


# --- plans ----------------------------------------------------------------------------------------


def test_every_block_is_told_of():
    assert WRITTEN.keys() == BUILT_IN.keys()


@interpreted
@quiet
@pytest.mark.parametrize("path", ["template", "library"])
@pytest.mark.parametrize("name", WRITTEN)
def test_a_pre_activation_is_written_over_and_nothing_else(name, path):
    pair, trial = trial_of(name)
    written = written_over(executable(trial.plan, path), trial, own_values(pair))
    names = [PairText(pair).names[pair.backward.inputs[p]] for p in written]
    assert names == ([WRITTEN[name]] if WRITTEN[name] else [])


@interpreted
@quiet
@pytest.mark.slow
@settings(max_examples=settings.default.max_examples // 10)
@given(block_recipes(), st.data())
def test_random_blocks_give_the_same_bits(recipe: BlockRecipe, data):
    """Whichever inputs are spent, those of the author among them."""
    needed = [name for name in recipe.operands if name != "t"]
    pair = compile_program(recipe.function(), recipe.signature("float32"), needed=needed)
    tensors = {n: t.float() if t.is_floating_point() else t for n, t in recipe.tensors().items()}
    for trial in trials_of(pair, tensors, recipe.rows):
        apart = {t.data_ptr(): p for p, t in enumerate(trial.inputs)}.values()
        spent = [p for p in apart if data.draw(st.booleans())]
        written_over(Executable(trial.plan), trial, spent)


def other_lane(x, w, g):
    """Of each lane the other is made: the first to be written is still to be read."""
    a, b = L.split(g, inner=32)
    return L.matmul(L.stored(L.join(b * 2, a * 3, inner=32)), w)


def other_tiles(x, w, g):
    """Pairs of what a product is multiplied by lie in other tiles of the product."""
    a, b = L.split(g, inner=32)
    return L.matmul(L.stored(L.matmul(x, w) * L.join(b, a, inner=32)), w)


def two_widths(x, w, g):
    """Paired at one distance, of a whole row and of its half."""
    a, b = L.split(x, inner=16)
    c, d = L.split(g, inner=16)
    return L.stored(a * b * g), L.row_sum(c * d)


def one_lane_later(x, w, g):
    """What is made of one lane is written over both, before a sum reads the other."""
    a, b = L.split(g, inner=32)
    c, d = L.split(x, inner=32)
    return L.matmul(L.stored(L.join(a * c, d, inner=32)), w), L.row_sum(b * c)


def whether(x, w, g):
    """A condition is stored in bytes."""
    mask = L.matmul(x, w) > g
    return L.where(mask, L.matmul(x * 2.0, w), 1.0)


def product_alone(x, w, g):
    """The library writes its product before a kernel reads what it is multiplied by."""
    z = L.stored(L.matmul(x, w))
    return L.matmul(z, w), L.row_sum(z * g)


def product_last(x, w, g):
    z = L.matmul(x, w)
    return g * z, L.matmul(L.stored(z), w)


def operand_too(x, w, g):
    """A product of g, whose other tiles read what one writes."""
    return L.matmul(L.stored(g * L.matmul(g, w)), w)


def column(x, w, g):
    s = L.row_sum(g)
    return L.matmul(x, w) * s, L.row_sum(L.matmul(x, w)) * s


def rotated(x, w, g):
    a, b = L.split(g, inner=32)
    return L.matmul(L.stored(L.matmul(x, w) * L.join(-b, a, inner=32)), w)


def of_both(x, w, g):
    """Both lanes of what is written first are made of both."""
    a, b = L.split(g, inner=32)
    return L.matmul(L.stored(L.join(a * b, a + b, inner=32)), w)


def of_itself(x, w, g):
    return L.matmul(L.stored(g * L.matmul(x, w)), w)


REFUSED = (
    other_lane, other_tiles, one_lane_later, whether, product_alone, operand_too, column, rotated,
)  # fmt: skip


@interpreted
@quiet
@pytest.mark.parametrize("path", ["template", "library"])
@pytest.mark.parametrize("function", [*REFUSED, two_widths, product_last, of_both, of_itself])
def test_what_a_kernel_still_reads_is_not_written_over(function, path):
    torch.manual_seed(0)
    wide = function is not two_widths
    shapes = {"x": ("M", 64), "w": (64, 64), "g": ("M", 64 if wide else 32)}
    dtype = "bfloat16" if function is whether else "float32"
    operands = tuple(Operand(n, *shape, dtype) for n, shape in shapes.items())
    pair = compile_program(function, Signature(operands))
    sizes = {n: [ROWS if d == "M" else d for d in shape] for n, shape in shapes.items()}
    tensors = {n: torch.randn(size).to(getattr(torch, dtype)) for n, size in sizes.items()}
    trial = next(iter(trials_of(pair, tensors, ROWS)))
    run = executable(trial.plan, path)
    written = written_over(run, trial, range(len(trial.inputs)))
    if function in REFUSED:
        assert written == []
    elif function in (of_both, of_itself):
        assert [trial.plan.graph.inputs[p].attributes["name"] for p in written] == ["g"]


@interpreted
@quiet
@pytest.mark.parametrize("path", ["template", "library"])
@pytest.mark.parametrize("inner", [1, 8, 32])
@pytest.mark.parametrize("joined", [False, True], ids=["product", "rotated"])
def test_gated_units_of_all_kinds_give_the_same_bits(joined, inner, path):
    """Bilinear ones, whose lanes are each made of the other."""

    def unit(x, w, v):
        a, b = L.split(L.linear(x, w), inner=inner)
        h = L.join(-b * a, a * a, inner=inner) if joined else a * b
        return L.linear(h, v)

    torch.manual_seed(0)
    shapes = {"x": ("M", 16), "w": (64, 16), "v": (16, 64 if joined else 32)}
    pair = compile_program(
        unit, Signature(tuple(Operand(n, *s, "float32") for n, s in shapes.items())),
        needed=[*shapes],
    )  # fmt: skip
    sizes = {n: [ROWS if d == "M" else d for d in s] for n, s in shapes.items()}
    trial = list(trials_of(pair, {n: torch.randn(s) for n, s in sizes.items()}, ROWS))[1]
    written_over(executable(trial.plan, path), trial, own_values(pair))
