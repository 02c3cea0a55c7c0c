"""Tile locality: what an epilogue ties together fits in a tile, or a pointwise kernel makes it."""

import pytest
import torch
from block_operands import cast, operands
from graphs import program
from programs import check_program

import cadenza as cz
from cadenza.core import lang as L
from cadenza.core.errors import VerificationError
from cadenza.core.locality import TILE_COLUMNS, Ties
from cadenza.core.plan import Kernel, Plan, verify_plan
from cadenza.core.schedule import schedule
from cadenza.library.blocks import BUILT_IN

WIDE = TILE_COLUMNS + 44


def table(acc):
    """A table of rotary factors for heads of four columns."""
    return acc.builder.constant(1.0, "M", 2)


def tied(function, columns: int) -> int:
    """The number of columns of the largest class that a function of a product ties together."""
    graph = program(lambda x, w: function(L.linear(x, w)), "x M 3", f"w {columns} 3")
    nodes = graph.nodes()
    ties = Ties(next(n for n in nodes if n.op.label == "matmul"))
    assert all(ties.admit(n) for n in nodes if n.type.is_matrix and n.inputs)
    return ties.widest()


@pytest.mark.parametrize(
    ("function", "columns", "expected"),
    [
        (lambda acc: L.silu(acc) * 2.0, 12, 1),
        (L.swiglu, 12, 2),
        (lambda acc: L.join(*L.split(acc, 1), 3), 12, 1),
        (lambda acc: L.rope(acc, table(acc), table(acc), 4), 12, 2),
        (lambda acc: acc * L.repeat(L.group_sum(acc**2, 4), 4), 12, 4),
        (lambda acc: L.columns(acc, 0, 4) + L.columns(acc, 4, 8) * L.columns(acc, 8, 12), 12, 3),
        (lambda acc: L.columns(acc, 1, 12) * L.columns(acc, 0, 11), 12, 12),
        (lambda acc: acc * L.tile(L.columns(acc, 0, 3), 4), 12, 4),
    ],
)  # fmt: skip
def test_classes_of_tied_columns(function, columns, expected):
    assert tied(function, columns) == expected


def shifted(x, w):
    acc = L.linear(x, w)
    return L.columns(acc, 1, WIDE) * L.columns(acc, 0, WIDE - 1)


def grouped(x, w):
    acc = L.linear(x, w)
    return acc * L.repeat(L.group_sum(acc**2, WIDE), WIDE)


@pytest.mark.parametrize("function", [shifted, grouped])
def test_what_no_tile_holds_is_made_by_a_pointwise_kernel(function):
    columns = WIDE if function is shifted else 2 * WIDE
    plan = schedule(program(function, "x M 3", f"w {columns} 3"))
    assert (plan.products, plan.pointwise) == (1, 1)
    check_program(cz.block(function), x=torch.randn(5, 3), w=torch.randn(columns, 3))


def test_an_epilogue_that_ties_too_much_is_refused():
    graph = program(shifted, "x M 3", f"w {WIDE} 3")
    product = next(n for n in graph.nodes() if n.op.label == "matmul")
    body = tuple(n for n in graph.nodes() if n.inputs and n is not product)
    kernel = Kernel(product, body, (), (), graph.outputs, ())
    with pytest.raises(VerificationError, match="no tile holds"):
        verify_plan(Plan(graph, (kernel,), ()))


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_built_in_blocks_keep_their_epilogues_in_tiles(name):
    block, arguments = BUILT_IN[name], cast(operands(name, 5), torch.float64)
    for value in arguments.values():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            value.requires_grad_()
    pair = block._compiled((), arguments, -1).pair
    for plan in (pair.forward_plan, pair.backward_plan):
        for kernel in plan.kernels:
            if kernel.product is not None:
                ties = Ties(kernel.product)
                assert all(ties.admit(n) for n in kernel.body if n.type.is_matrix)
                assert ties.widest() <= 6  # a head
