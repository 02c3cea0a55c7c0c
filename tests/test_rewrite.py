"""Patterns and the engine that applies them: variables, attributes, types, order and names."""

import pytest
from graphs import program

from cadenza.core import lang as L
from cadenza.core.errors import VerificationError
from cadenza.core.ir import Node
from cadenza.core.ops import Op
from cadenza.core.rewrite import Pattern, equation, rebuild, rewrite_graph
from cadenza.core.text import show

X, Y = "x M 6", "y M 6"
ROW = "r 1 6"


def columns(x, start, stop):
    return Pattern(Op.COLUMNS, x, start=start, stop=stop)


TWICE = equation(lambda x: (x + x, x * 2.0))
SHARED = equation(lambda x, y, z: (x * y + x * z, x * (y + z)))
WHOLE = equation(lambda x, a: (columns(x, a, a), x))
SHIFTED = equation(lambda x, a, b: (columns(Pattern(Op.EXP, x), a, b), columns(x, a, b)))
NAMED = equation(lambda x, b: (columns(Pattern(Op.EXP, x), 0, b), columns(x, 0, b)))
SQUARE = equation(lambda x: (x**2, x * x))
CUBE = equation(lambda x, n: (Pattern(Op.POWER, x, exponent=n) * x, x))
REVERSED = equation(lambda x: (1.0 - x, -x))
TO_ROW = equation(lambda x, y: (x + y, y))


@pytest.mark.parametrize(
    ("rule", "function", "text"),
    [
        (TWICE, lambda x, y: (x - y) + (x - y), "(x - y) * 2.0"),
        (TWICE, lambda x, y: x + y, None),
        (SHARED, lambda x, y: x * y + x * (y - x), "x * (y + (y - x))"),
        (SHARED, lambda x, y: x * y + y * x, None),
        (SHIFTED, lambda x, y: L.columns(L.exp(x), 2, 5) + y.builder.constant(0.0, 1, 3),
         "columns(x, start=2, stop=5) + constant(0.0, rows=1, columns=3)"),
        (NAMED, lambda x, y: L.columns(L.exp(x), 0, 6) * y, "columns(x, start=0, stop=6) * y"),
        (NAMED, lambda x, y: L.columns(L.exp(x), 1, 6), None),
        (SHIFTED, lambda x, y: L.columns(L.log(x), 2, 5), None),
        (SQUARE, lambda x, y: x**2 + y, "x * x + y"),
        (SQUARE, lambda x, y: x**3, None),
        (CUBE, lambda x, y: x**7 * x + y, "x + y"),
        (CUBE, lambda x, y: x**7 * y, None),
        (REVERSED, lambda x, y: 1 - x + y, "-x + y"),
        (REVERSED, lambda x, y: 2 - x + y, None),
    ],
)  # fmt: skip
def test_an_equation_binds_variables_and_attributes(rule, function, text):
    before = program(function, X, Y)
    after = rewrite_graph(before, [rule])
    expected = (
        show(before) if text is None else f"{show(before).splitlines()[0]}\n    return {text}\n"
    )
    assert show(after) == expected


def test_one_attribute_in_two_places_must_be_the_same():
    graph = program(lambda x: L.columns(x, 2, 5), X)
    assert WHOLE(graph.outputs[0]) is None


def test_an_equation_never_changes_a_type():
    wider = program(lambda x, r: x + r, X, ROW)
    assert TO_ROW(wider.outputs[0]) is None
    same = program(lambda x, y: x + y, X, Y)
    assert TO_ROW(same.outputs[0]) is same.inputs[1]
    number = program(lambda x: (x > 0.0) + (x > 0.0), X)
    plus = equation(lambda a: (a + a, a))
    assert plus(number.outputs[0]) is None, "a condition is no number"


def test_a_rule_that_changes_a_type_is_caught():
    def narrow(node: Node) -> Node | None:
        return L.row_sum(node) if node.op is Op.EXP else None

    with pytest.raises(VerificationError, match="a rule turned"):
        rewrite_graph(program(lambda x: L.exp(x), X), [narrow])


def test_what_a_rule_makes_is_rewritten_too():
    doubled = equation(lambda x: (x * 3.0, x + x))
    graph = program(lambda x: x * 3.0, X)
    assert show(rewrite_graph(graph, [TWICE, doubled])).endswith("return x * 2.0\n")


def test_the_first_rule_that_fires_wins():
    graph = program(lambda x: x + x, X)
    other = equation(lambda x: (x + x, 2.0 * x))
    assert show(rewrite_graph(graph, [TWICE, other])).endswith("x * 2.0\n")
    assert show(rewrite_graph(graph, [other, TWICE])).endswith("2.0 * x\n")


def test_without_a_rule_nodes_stay_themselves():
    graph = program(lambda x, y: (x * y + y, x), X, Y)
    after = rewrite_graph(graph, [])
    assert all(a is b for a, b in zip(after.outputs, graph.outputs, strict=True))
    node = graph.outputs[0]
    assert rebuild(node, node.inputs) is node


def test_deep_programs_need_no_deep_stack():
    def deep(x):
        for _ in range(3000):
            x = (x + x) * 0.5
        return x

    after = rewrite_graph(program(deep, X), [TWICE])
    assert len(after.nodes()) == 2 * 3000 + 3


def test_names_move_with_their_values():
    graph = program(lambda x, y: L.name(L.exp(x) + L.exp(x), "twice") * y, X, Y)
    assert "    twice = exp(x) * 2.0\n" in show(rewrite_graph(graph, [TWICE]))
