"""Random whole blocks: plans executed kernel by kernel equal plain, values and gradients.

Tiles are small and ragged. No plan has more products than the textbook program and its gradients,
and what a forward plan returns doesn't depend, bit by bit, on which gradients are asked for. A
failing example replays from its repr: `check_block(BlockRecipe(...), tile, frozen)`.
"""

import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from planned import adjoints_of, execute, products, verified
from programs import assert_same
from random_blocks import LIMIT, STEPS, BlockRecipe, block_recipes, written

from cadenza.core.ir import Graph, Node
from cadenza.core.ops import Op
from cadenza.core.pipeline import compile_program, gradients, new_adjoints
from cadenza.core.rules import simplify
from cadenza.core.trace import trace

Tensor = torch.Tensor
FEWER = settings.default.max_examples // 4
SUMMANDS = 10.0  # adjoints of these blocks are about as large where they cancel
TILES = (3, 1, 5, 7, 64)
frozen_sets = st.sets(st.integers(0, 12), max_size=4)


def trained(recipe: BlockRecipe, frozen: set[int]) -> list[str]:
    """The real operands but for those at some positions."""
    real = [name for name in recipe.operands if name != "t"]
    return [name for position, name in enumerate(real) if position not in frozen] or real[:1]


def by_autograd(
    recipe: BlockRecipe, tensors: dict[str, Tensor], names: Sequence[str], upstream: list[Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Outputs and gradients of the plain function."""
    leaves = {n: t.clone().requires_grad_(n in names) for n, t in tensors.items()}
    outputs = recipe.function()(**leaves)
    pairs = [(y, g) for y, g in zip(outputs.values(), upstream, strict=True) if y.requires_grad]
    wanted = [leaves[n] for n in names]
    found = [torch.zeros_like(t) for t in wanted]
    if pairs:
        values, given = zip(*pairs, strict=True)
        found = torch.autograd.grad(values, wanted, given, materialize_grads=True)
    return outputs, dict(zip(names, found, strict=True))


def check_block(recipe: BlockRecipe, tile: int | None, frozen: set[int]) -> None:
    """Plans executed equal plain at float64: every output and every gradient."""
    names, tensors = trained(recipe, frozen), recipe.tensors()
    pair = verified(compile_program(recipe.function(), recipe.signature(), needed=names))
    upstream = adjoints_of(pair.program, recipe.rows)
    actual = execute(pair, tensors, recipe.rows, upstream, tile)
    outputs, expected = by_autograd(recipe, tensors, names, upstream)
    assert_same(actual.outputs, outputs, SUMMANDS)
    for name in set(names) - set(pair.gradients):
        assert not expected[name].any(), f"no gradient of {name}"
    assert_same(actual.gradients, {n: expected[n] for n in pair.gradients}, SUMMANDS)


def check_products(recipe: BlockRecipe, frozen: set[int]) -> None:
    """Never more products than the textbook program and its gradients have."""
    names = trained(recipe, frozen)
    pair = compile_program(recipe.function(), recipe.signature(), needed=names)
    textbook = simplify(trace(recipe.function(), recipe.signature()))
    assert pair.forward_plan.products <= products(textbook)
    if pair.backward_plan is not None:
        wanted = [i for i in textbook.inputs if i.attributes["name"] in names]
        adjoints = new_adjoints(textbook, pair.differentiable)
        both = products(textbook, simplify(gradients(textbook, wanted, adjoints, set())))
        most = max(both, one_by_one(textbook, wanted)) if shares_a_weight(textbook) else both
        assert pair.forward_plan.products + pair.backward_plan.products <= most


def matrix_products(graph: Graph) -> list[Node]:
    return [n for n in graph.nodes() if n.op is Op.MATMUL and n.type.is_matrix]


def shares_a_weight(graph: Graph) -> bool:
    """Whether two products have an operand of the block in common.

    The textbook may then make one product of two adjoints that are equal, where deferral has
    scaled one of them.
    """
    weights = [i for n in matrix_products(graph) for i in n.inputs if i.op is Op.INPUT]
    return len(set(weights)) < len(weights)


def one_by_one(graph: Graph, wanted: Sequence[Node]) -> int:
    """The products, and one more for each operand of theirs that a gradient goes through."""
    depends = set(wanted)
    for node in graph.nodes():
        if any(i in depends for i in node.inputs):
            depends.add(node)
    return sum(1 + sum(i in depends for i in n.inputs) for n in matrix_products(graph))


def check_forward_bits(recipe: BlockRecipe, frozen: set[int], dtype: torch.dtype) -> None:
    """Outputs are the same bit by bit whatever needs a gradient."""
    tensors = recipe.tensors(dtype)
    signature = recipe.signature(str(dtype).removeprefix("torch."))
    results = []
    for names in ([], trained(recipe, frozen), trained(recipe, set())):
        pair = verified(compile_program(recipe.function(), signature, needed=names))
        results.append(execute(pair, tensors, recipe.rows, tile=3).outputs)
    for other in results[1:]:
        for name, value in results[0].items():
            assert torch.equal(value.nan_to_num(7.0), other[name].nan_to_num(7.0)), name


@given(recipe=block_recipes(), tile=st.sampled_from(TILES), frozen=frozen_sets)
def test_plans_equal_plain(recipe, tile, frozen):
    check_block(recipe, tile, frozen)


@settings(max_examples=FEWER)
@given(recipe=block_recipes(), frozen=frozen_sets)
def test_no_more_products_than_the_textbook(recipe, frozen):
    check_products(recipe, frozen)


@pytest.mark.slow
@settings(max_examples=FEWER)
@given(
    recipe=block_recipes(),
    frozen=frozen_sets,
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_results_do_not_depend_on_what_needs_a_gradient(recipe, frozen, dtype):
    check_forward_bits(recipe, frozen, dtype)


def random_block(numbers: random.Random) -> BlockRecipe:
    """A block from a generator of numbers, the same in every run."""
    codes = [[numbers.randrange(LIMIT) for _ in range(8)] for _ in range(numbers.randint(4, 9))]
    return written(codes, numbers.choice([4, 5]), 4)


def test_random_blocks_are_blocks():
    numbers, found, counts = random.Random(0), set(), []
    for _ in range(150):
        recipe = random_block(numbers)
        graph = trace(recipe.function(), recipe.signature())
        found |= {node.op for node in graph.nodes()}
        counts.append(products(graph))
    unused = {Op.ABS, Op.COLUMN_MAX, Op.ROW_INDEX, Op.RANDOM, Op.CAST, Op.GROUP_MAX, Op.MINIMUM,
              Op.LOG, Op.EXP, Op.SQRT}  # fmt: skip
    assert found >= set(Op) - unused
    assert sum(count >= 3 for count in counts) > 50, "blocks have several products"


def test_a_block_replays_from_its_repr():
    recipe = random_block(random.Random(3))
    again = eval(repr(recipe), {"BlockRecipe": BlockRecipe})
    assert again == recipe
    check_block(again, 3, set())


def test_every_step_is_written():
    numbers, lines = random.Random(1), 0
    for step in STEPS:
        lines = 0
        for _ in range(20):
            codes = [[numbers.randrange(LIMIT) for _ in range(8)] for _ in range(4)]
            chosen = [STEPS.index(step), *codes[0][1:]]
            lines += len(written([*codes, chosen, [0]], 4, 4).lines)
        assert lines > 0
