"""Values and gradients on a GPU: built-in blocks and examples against float64 by torch's own error.

By the public API, in bfloat16, float16 and float32, at sizes that descriptors can read and at odd
ones, by the plain template and by Hopper's. Whole numbers under +, −, × and max agree bit by bit.
No row at all, one, and numbers of rows around a tile; operands and incoming gradients with any
strides.
"""

import random

import pytest
import random_programs
import torch
from block_operands import cast
from calls import (
    ALIGNED,
    BRAIN,
    DTYPES,
    EXAMPLES,
    HALF,
    NAMES,
    SINGLE,
    check_as_good_as_torch,
    check_same,
    example,
    example_operands,
    launches,
    operands,
    results,
    upstream_of,
)
from programs import labelled
from random_programs import LIMIT, written
from template_choice import PINGPONG, PLAIN, TOGETHER, each_block_by_a_template

import cadenza as cz
from cadenza import lang as L
from cadenza.backends.triton.launches import ProductLaunch
from cadenza.core.errors import ProgramError
from cadenza.library.blocks import BUILT_IN

pytestmark = pytest.mark.gpu
each_block = pytest.mark.parametrize("name", NAMES)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
RUNS = [*((d, PLAIN) for d in DTYPES), (BRAIN, PINGPONG), (HALF, PINGPONG), (BRAIN, TOGETHER)]


def each_run(runs):
    """Dtypes, each with a template."""
    return pytest.mark.parametrize(("dtype", "template"), runs, ids=str, indirect=["template"])


# --- against float64 ------------------------------------------------------------------------------


@pytest.mark.interpreted
@each_run(RUNS)
@each_block
def test_blocks_of_aligned_sizes_are_as_good_as_torch(name, dtype, template, place):
    place.allows(dtype)
    block, arguments = BUILT_IN[name], operands(name, place.rows(129), place, dtype, ALIGNED)
    with launches() as made:
        check_as_good_as_torch(block, arguments, upstream_of(block.plain, arguments))
    assert len(made), "nothing ran by Triton"


@each_block
def test_blocks_of_float32_as_tf32_are_as_good_as_torch(name, place, monkeypatch):
    """Products round their operands as torch's do where one of its switches allows it."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32")
    ran, run = [], ProductLaunch.run
    monkeypatch.setattr(ProductLaunch, "run", lambda step, on: ran.append(step) or run(step, on))
    block, arguments = BUILT_IN[name], operands(name, 129, place, SINGLE, ALIGNED)
    check_as_good_as_torch(block, arguments, upstream_of(block.plain, arguments))
    assert ran, "no product ran by Triton"


@pytest.mark.interpreted
@pytest.mark.parametrize("dtype", [BRAIN, SINGLE], ids=str)
@each_block
def test_17_blocks_of_odd_sizes_are_as_good_as_torch(name, dtype, place):
    place.allows(dtype)
    block, arguments = BUILT_IN[name], operands(name, place.rows(127), place, dtype, None)
    check_as_good_as_torch(block, arguments, upstream_of(block.plain, arguments))


@pytest.mark.interpreted
@each_run(RUNS[:4])
@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_are_as_good_as_torch(name, dtype, template, place):
    place.allows(dtype)
    program = getattr(example(name), name)
    arguments = example_operands(name, place.rows(129), place, dtype)
    check_as_good_as_torch(program, arguments, upstream_of(program.plain, arguments))


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run_as_they_stand_with_tensors_on_the_gpu(name, place):
    with torch.device(place.device), launches() as made:
        example(name).main()
    assert len(made), "nothing ran by Triton"


@each_block
def test_float64_runs_by_the_reference_back_end(name, place):
    block, arguments = BUILT_IN[name], operands(name, 33, place, torch.float64, None)
    upstream = upstream_of(block.plain, arguments)
    with launches() as made:
        actual = results(block, arguments, upstream)
    assert not len(made)
    for label, expected in results(block.plain, arguments, upstream).items():
        torch.testing.assert_close(actual[label], expected, rtol=1e-9, atol=1e-9, msg=label)


# --- numbers of rows ------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 127, 8191])
@each_block_by_a_template
def test_numbers_of_rows_around_tiles(name, rows, template, place):
    block, arguments = BUILT_IN[name], operands(name, rows, place, BRAIN, ALIGNED)
    check_as_good_as_torch(block, arguments, upstream_of(block.plain, arguments))


@pytest.mark.interpreted
@each_dtype
@each_block
def test_no_rows_give_zero_gradients_and_launch_nothing(name, dtype, place):
    block, arguments = BUILT_IN[name], operands(name, 0, place, dtype, ALIGNED)
    upstream = upstream_of(block.plain, arguments)
    with launches() as made:
        found = results(block, arguments, upstream)
    assert not len(made)
    for label, expected in results(block.plain, arguments, upstream).items():
        assert found[label].shape == expected.shape, label
        assert found[label].device == place.device, label
        assert not found[label].count_nonzero(), label


# --- whole numbers --------------------------------------------------------------------------------


def residual(x, w, y):
    """A sum, and reductions of it."""
    z = y + L.linear(x, w)
    return z, L.row_sum(z), L.row_max(z), L.column_sum(z)


def gated(x, w, y):
    """A product of halves."""
    gate, up = L.split(L.linear(x, w))
    return L.maximum(gate, 0.0) * up - L.split(y)[0]


def chained(x, w, y):
    """Two products, one of the other's result, and a third over the rows."""
    h = L.relu(L.linear(x, w)) - y
    small = L.minimum(L.maximum(h, -1.0), 1.0)
    return small @ w - x, L.matmul(x, small, transpose_a=True)


def interleaved(x, w, y):
    """Columns taken apart and put together in another order."""
    a, b = L.split(L.linear(x, w) - y, 8)
    return L.join(a * b, L.maximum(a, b), 4), L.group_sum(a - b, 16)


def grouped(x, w, y):
    """Statistics of groups: float32 whatever the product's dtype, and so is what comes back."""
    z = L.linear(x, w) - y
    return z, L.group_max(z, 32), L.group_sum(z, 32)


@pytest.mark.interpreted
@each_run(RUNS[:5])
@pytest.mark.parametrize("width", [64, 40])
@pytest.mark.parametrize("function", [residual, gated, chained, interleaved, grouped])
def test_whole_numbers_are_exact(function, width, dtype, template, place):
    place.allows(dtype)
    program, rows = cz.block(function), place.rows(129)
    shapes = {"x": (rows, width), "w": (128, width), "y": (rows, 128)}
    whole = {n: torch.randint(-1, 2, s, device=place.device).to(dtype) for n, s in shapes.items()}
    wide = cast(whole, torch.float64)
    exact = labelled(program.plain(**wide))
    upstream = {n: torch.randint_like(y, -1, 2) for n, y in exact.items()}
    actual = results(program, whole, upstream)
    expected = results(program.plain, wide, upstream)
    rounded = {n: v.to(actual[n].dtype) for n, v in expected.items()}  # once, at the end
    check_same(actual, rounded, "beside exact arithmetic")


# Up to which every whole number is one of the dtype, and of float32's products.
EXACT = {SINGLE: random_programs.EXACT, HALF: 2.0**11, BRAIN: 2.0**8}


@pytest.mark.interpreted
@each_dtype
@pytest.mark.parametrize("seed", range(12))
def test_random_programs_of_whole_numbers_are_exact(seed, dtype, place, monkeypatch):
    place.allows(dtype)
    monkeypatch.setattr(random_programs, "EXACT", EXACT[dtype])
    numbers = random.Random(seed)
    codes = [[numbers.randrange(LIMIT) for _ in range(7)] for _ in range(9)]
    recipe = written(codes, numbers.randint(1, 7), place.rows(129), whole=True)
    program = recipe.program()
    given = {n: t.to(place.device) for n, t in recipe.tensors(dtype).items()}
    actual, expected = labelled(program(**given)), labelled(program.plain(**given))
    check_same(actual, expected, repr(recipe))


# --- strides --------------------------------------------------------------------------------------


def transposed(tensor):
    """Columns that are runs in memory."""
    return tensor.T.contiguous().T


def sliced(tensor):
    """Rows apart from one another, starting at an odd address."""
    wide = tensor.new_full((tensor.shape[0], tensor.shape[1] + 9), float("nan"))
    return wide[:, 3:-6].copy_(tensor)


def spread(tensor):
    """Neither rows nor columns are runs in memory."""
    return tensor.repeat_interleave(2, 1)[:, ::2]


def negated(tensor):
    """Memory that holds the opposite, and a bit that says so."""
    return torch._neg_view(-tensor)


@pytest.mark.interpreted
@pytest.mark.parametrize("place_it", [transposed, sliced, spread, negated])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_strides_of_operands_and_gradients_change_rounding_at_most(name, place_it, template, place):
    dtype = SINGLE if place.interpreted else BRAIN
    block, arguments = BUILT_IN[name], operands(name, place.rows(127), place, dtype, ALIGNED)
    moved = {
        n: place_it(v) if isinstance(v, torch.Tensor) and v.dim() == 2 and v.shape[0] > 1 else v
        for n, v in arguments.items()
    }
    plain = upstream_of(block.plain, arguments)
    leaves = {n: v.requires_grad_() for n, v in moved.items() if n in ("x", "wo", "w_qkv")}
    outputs = labelled(block(**moved | leaves))
    found = torch.autograd.grad(
        list(outputs.values()), list(leaves.values()), [place_it(g) for g in plain.values()]
    )
    expected = results(block, arguments, plain)
    actual = outputs | {f"d {n}": g for n, g in zip(leaves, found, strict=True)}
    for label, value in actual.items():
        error = (value.double() - expected[label].double()).norm()
        assert error <= 2.0**-7 * expected[label].double().norm(), label


@pytest.mark.interpreted
def test_14_an_incoming_gradient_without_strides_is_read_rightly(template, place):
    dtype = SINGLE if place.interpreted else BRAIN
    block, arguments = BUILT_IN["llama"], operands("llama", place.rows(65), place, dtype, ALIGNED)
    shapes = {n: torch.ones_like(y) for n, y in upstream_of(block.plain, arguments).items()}
    expanded = {n: g.new_ones(1, 1).expand_as(g) for n, g in shapes.items()}
    check_same(results(block, arguments, expanded), results(block, arguments, shapes), "expanded")


def test_operands_on_two_devices_raise(place):
    arguments = operands("llama", 17, place, BRAIN, ALIGNED)
    with pytest.raises(ProgramError, match=r"operands on two devices(.|\n)*norm on cpu"):
        BUILT_IN["llama"](**arguments | {"norm": arguments["norm"].cpu()})
