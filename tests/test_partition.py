"""The minimum cut: the fewest bytes from which everything below can be computed.

Held against brute force on small random programs: no set of values is cheaper, none as cheap
computes less again, and what may not be computed again is not.
"""

import math
from collections.abc import Iterable, Iterator
from itertools import combinations
from typing import NamedTuple

from graphs import program
from hypothesis import given, settings
from hypothesis import strategies as st

from cadenza.core import lang as L
from cadenza.core.cost import ROWS, bytes_of, itemsize
from cadenza.core.ir import Builder, Node
from cadenza.core.ops import Op, Type
from cadenza.core.partition import minimum_cut

FREE, FINAL = "free", "final"


class Problem(NamedTuple):
    """Values of a random program with their prices, which are free or final, and the roots."""

    nodes: list[Node]
    prices: dict[Node, float]
    kinds: dict[Node, str]
    roots: list[Node]

    def weight(self, node: Node) -> float:
        return self.prices[node]

    def sources(self, node: Node) -> tuple[Node, ...] | None:
        kind = self.kinds.get(node)
        return None if kind == FINAL else () if kind == FREE else node.inputs


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """One to three free inputs and up to eight operations over them."""
    builder, nodes = Builder(), []
    for k in range(draw(st.integers(1, 3))):
        shape = {"dtype": "float32", "rows": "M", "columns": 4, "kind": "real"}
        nodes.append(builder.make(Op.INPUT, (), {"name": f"x{k}"} | shape))
    inputs = list(nodes)
    for _ in range(draw(st.integers(1, 8))):
        op = draw(st.sampled_from([Op.ADD, Op.MUL, Op.EXP, Op.NEG]))
        operands = tuple(draw(st.sampled_from(nodes)) for _ in range(op.arity))
        nodes.append(builder.make(op, operands, {}))
    nodes = list(dict.fromkeys(nodes))
    prices: dict[Node, float] = dict.fromkeys(inputs, 0)
    kinds = dict.fromkeys(inputs, FREE)
    for node in nodes[len(inputs) :]:
        prices[node] = draw(st.sampled_from([1, 2, 2, 3, 5, math.inf]))
        if prices[node] < math.inf and draw(st.booleans()):
            kinds[node] = FINAL
    roots = draw(st.lists(st.sampled_from(nodes), min_size=1, max_size=3, unique_by=id))
    return Problem(nodes, prices, kinds, roots)


def cost(problem: Problem, kept: Iterable[Node]) -> float:
    """The price of keeping some values: one unit a value is added to its own."""
    return sum(problem.prices[n] + 1 for n in kept if problem.prices[n])


def computed(problem: Problem, kept: set[Node]) -> set[Node] | None:
    """What must be computed again for the roots, or None if it can't be."""
    again: set[Node] = set()
    pending = list(problem.roots)
    while pending:
        node = pending.pop()
        if node in kept or node in again:
            continue
        sources = problem.sources(node)
        if sources is None:
            return None
        if sources:
            again.add(node)
            pending.extend(sources)
    return again


def alternatives(problem: Problem) -> Iterator[set[Node]]:
    """Every set of values that can be kept and suffices."""
    priced = [n for n in problem.nodes if 0 < problem.prices[n] < math.inf]
    for size in range(len(priced) + 1):
        for kept in combinations(priced, size):
            if computed(problem, set(kept)) is not None:
                yield set(kept)


def keep(problem: Problem) -> set[Node]:
    """What the minimum cut keeps: nothing that is at hand for free."""
    found = minimum_cut(problem.roots, problem.weight, problem.sources)
    assert [n.id for n in found] == sorted(n.id for n in found)
    assert all(problem.prices[n] for n in found)
    return set(found)


@given(problems())
@settings(max_examples=150)
def test_no_set_of_values_is_cheaper(problem):
    kept = keep(problem)
    assert computed(problem, kept) is not None, "what is kept does not suffice"
    assert all(math.isfinite(problem.prices[n]) for n in kept)
    assert cost(problem, kept) == min(cost(problem, other) for other in alternatives(problem))


@given(problems())
@settings(max_examples=150)
def test_of_equal_sets_the_one_that_computes_least_again(problem):
    kept = keep(problem)
    again = computed(problem, kept)
    for other in alternatives(problem):
        if cost(problem, other) == cost(problem, kept):
            assert again <= computed(problem, other)


@given(problems())
@settings(max_examples=50)
def test_the_answer_does_not_depend_on_the_order_of_the_roots(problem):
    assert keep(problem) == keep(problem._replace(roots=problem.roots[::-1]))


def cut(function, *operands: str, final: tuple[Op, ...] = (Op.MATMUL, Op.ROW_SUM)) -> list[str]:
    """The operations of what is kept for a function's outputs; inputs are free."""
    graph = program(function, *operands)

    def weight(node: Node) -> float:
        return 0 if node.op in (Op.INPUT, Op.CONSTANT) else bytes_of(node.type, "float32")

    def sources(node: Node) -> tuple[Node, ...] | None:
        return None if node.op in final else node.inputs

    return [n.op.label for n in minimum_cut(graph.outputs, weight, sources)]


def test_two_halves_never_beat_their_whole():
    assert cut(lambda x, w: L.split(L.linear(x, w)), "x M 4", "w 6 4") == ["matmul"]


def test_one_half_beats_the_whole():
    assert cut(lambda x, w: L.split(L.linear(x, w))[0], "x M 4", "w 6 4") == ["split"]


def test_a_column_beats_the_matrix_that_it_came_from():
    def scaled(x):
        return x * L.rsqrt(L.row_sum(x * x) + 1.0)

    assert cut(scaled, "x M 4") == ["rsqrt"]


def test_what_follows_from_inputs_alone_is_not_kept():
    assert cut(lambda x, y: L.exp(x) * y + L.tanh(y), "x M 4", "y M 4") == []


def test_an_input_is_never_kept():
    assert cut(lambda x: (x, x * 2.0), "x M 4") == []


def test_a_product_or_a_reduction_is_kept_or_something_after_it():
    def gated(x, w):
        h = L.linear(x, w)
        return L.sigmoid(h), h * h, L.row_sum(h)

    assert cut(gated, "x M 4", "w 6 4") == ["matmul", "row_sum"]


def test_a_value_in_the_middle_that_everything_needs():
    def narrow(x, w, v):
        h = L.linear(x, w) * L.linear(x, v)
        return L.exp(h), L.tanh(h), h + 1.0

    assert cut(narrow, "x M 4", "w 6 4", "v 6 4") == ["mul"]


def test_bytes_are_those_of_a_fixed_number_of_rows():
    assert bytes_of(Type("M", 3), "bfloat16") == ROWS * 3 * 2
    assert bytes_of(Type(1, 3), "float32") == 12
    assert bytes_of(Type(7, 1), "float64") == 56
    sizes = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1,
             "int64": 8, "int32": 4, "int16": 2, "uint8": 1, "int8": 1, "bool": 1}  # fmt: skip
    assert {dtype: itemsize(dtype) for dtype in sizes} == sizes
