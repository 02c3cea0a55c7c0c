"""The verifier: each invariant of a graph, broken on purpose, is caught and named.

It runs after every step that makes a program; nothing here is reachable by an author.
"""

import pytest
from graphs import program

from cadenza.core import lang as L
from cadenza.core.errors import VerificationError
from cadenza.core.ir import Builder, Graph, Node, equal, verify
from cadenza.core.ops import INTEGER, Op, Type

X, Y = "x M 6", "y M 6"


def example() -> Graph:
    return program(lambda x, y: L.split(L.exp(x) * y, 3), X, Y)


def caught(graph: Graph) -> str:
    with pytest.raises(VerificationError) as found:
        verify(graph)
    return str(found.value)


def named(graph: Graph, op: Op) -> Node:
    return next(node for node in graph.nodes() if node.op is op)


def test_a_sound_graph_comes_back_itself():
    graph = example()
    assert verify(graph) is graph


@pytest.mark.parametrize(
    ("kind", "shown"),
    [
        (Type("M", 7), "<value mul [M, 7]> should have type [M, 6]"),
        (Type(1, 6), "<value mul [1, 6]> should have type [M, 6]"),
        (Type("M", 6, INTEGER), "<value mul [M, 6]> should have type [M, 6]"),
    ],
)
def test_a_wrong_type(kind, shown):
    graph = program(lambda x, y: x * y, X, Y)
    graph.outputs[0].type = kind
    assert caught(graph) == shown


def test_a_wrong_type_in_the_middle():
    graph = example()
    named(graph, Op.EXP).type = Type("M", 5)
    assert caught(graph) == "<value exp [M, 5]> should have type [M, 6]"


@pytest.mark.parametrize(
    "attributes",
    [
        {},
        {"part": 0},
        {"inner": 3, "part": 0},
        {"part": 0, "inner": 3, "outer": 1},
        {"part": 0, "outer": 3},
    ],
)
def test_attributes_that_are_not_those_of_the_operation(attributes):
    graph = example()
    named(graph, Op.SPLIT).attributes = attributes
    assert caught(graph) == "<value split [M, 3]> has wrong attributes"


@pytest.mark.parametrize(
    ("op", "attributes", "problem"),
    [
        (Op.SPLIT, {"part": 0, "inner": 2}, "6 columns, inner=2"),
        (Op.SPLIT, {"part": 2, "inner": 3}, "part 2"),
        (Op.POWER, {"exponent": 0.5}, "exponent 0.5"),
        (Op.COMPARE, {"relation": ">"}, "relation '>'"),
        (Op.CAST, {"dtype": "int8"}, "dtype 'int8'"),
        (Op.COLUMNS, {"start": 2, "stop": 9}, "range 2:9"),
        (Op.GROUP_SUM, {"size": 4}, "6 columns in groups of 4"),
        (Op.REPEAT, {"times": 0}, "times=0"),
    ],
)
def test_attributes_that_break_the_type_rule(op, attributes, problem):
    def everything(x):
        parts = L.split(x)[0], x**2, x < 0.0, L.cast(x, "float16"), L.columns(x, 0, 3)
        return (*parts, L.group_sum(x, 2), L.repeat(x, 2))

    graph = program(everything, X)
    named(graph, op).attributes = attributes
    assert problem in caught(graph)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_too_few_or_too_many_inputs(count):
    graph = program(lambda x, y: x * y, X, Y)
    node = graph.outputs[0]
    node.inputs = (node.inputs * 2)[:count]
    assert f"found {count} values, expected 2" in caught(graph)


def test_a_node_over_the_nodes_of_another_program():
    graph, other = example(), example()
    x, stranger = graph.inputs[0], other.inputs[0]
    both = graph.inputs[0].builder.make(Op.ADD, (x, stranger), {})
    assert caught(Graph("f", (x, stranger), (both,), ("0",))) == "<value add [M, 6]> mixes programs"


def test_outputs_and_inputs_of_two_programs():
    one, other = program(lambda x: -x, X), program(lambda y: -y, Y)
    outputs = (*one.outputs, *other.outputs)
    assert (
        caught(Graph("f", (*one.inputs, *other.inputs), outputs, ("0", "1"))) == "f mixes programs"
    )
    assert (
        caught(Graph("f", (*one.inputs, *other.inputs), one.outputs, ("0",))) == "f mixes programs"
    )


def test_an_input_that_is_not_listed():
    graph = example()
    assert caught(Graph("f", graph.inputs[:1], graph.outputs, graph.labels)) == (
        "<value input [M, 6]> is not among the inputs"
    )


def test_a_computed_value_among_the_inputs():
    graph = program(lambda x: -x, X)
    found = caught(Graph("f", (*graph.inputs, graph.outputs[0]), graph.outputs, ("0",)))
    assert found == "an input that is none"


def test_two_inputs_of_one_name():
    graph = example()
    x, _ = graph.inputs
    twin = x.builder.make(Op.INPUT, (), x.attributes | {"columns": 3})
    assert caught(Graph("f", (*graph.inputs, twin), graph.outputs, graph.labels)) == (
        "two inputs share a name: ['x', 'y', 'x']"
    )
    assert "share a name" in caught(Graph("f", (x, *graph.inputs), graph.outputs, graph.labels))


@pytest.mark.parametrize("labels", [(), ("0",), ("0", "1", "2")])
def test_labels_and_outputs_that_differ_in_number(labels):
    graph = example()
    found = caught(Graph("f", graph.inputs, graph.outputs, labels))
    assert found == "labels and outputs differ in number"


def test_two_outputs_of_one_label():
    graph = example()
    found = caught(Graph("f", graph.inputs, graph.outputs, ("a", "a"), "dict"))
    assert found == "two outputs share a label: ('a', 'a')"


@pytest.mark.parametrize("structure", ["list", "", "value"])
def test_a_structure_that_does_not_fit(structure):
    graph = example()
    found = caught(Graph("f", graph.inputs, graph.outputs, graph.labels, structure))
    assert found == f"structure {structure!r}"


def test_equal_content_is_one_node_and_other_content_another():
    builder = Builder()
    x = builder.make(Op.INPUT, (), {"name": "x", "dtype": "float32", "rows": "M", "columns": 6,
                                    "kind": "real"})  # fmt: skip
    assert L.exp(x) is L.exp(x)
    assert (x + 1).inputs[1] is builder.constant(1.0)
    assert builder.constant(1.0) is not builder.constant(1), "a number of another kind"
    assert builder.constant(0.0) is not builder.constant(-0.0)
    assert L.split(x)[0] is not L.split(x)[1]
    assert L.exp(x).id > x.id


def test_equality_of_graphs_is_that_of_content():
    graph = example()
    assert equal(graph, example())
    assert not equal(graph, program(lambda x, y: L.split(y * L.exp(x), 3), X, Y))
    assert not equal(graph, program(lambda x, y: L.split(L.exp(x) * y, 3)[::-1], X, Y))
    assert not equal(graph, program(lambda x, y: L.split(L.exp(x) * y, 3), Y, X))
    assert not equal(graph, program(lambda x, y: (*L.split(L.exp(x) * y, 3), x), X, Y))
    renamed = Graph("other", graph.inputs, graph.outputs, graph.labels, graph.structure)
    assert not equal(graph, renamed)
