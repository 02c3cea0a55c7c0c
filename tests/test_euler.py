"""Euler's rule: where it fires, where it must not, and that it is the textbook's derivative.

The column is c = rsqrt(s² + ½) of an operand s [M, 1]; its adjoint by Euler's rule, by the table of
derivatives and by autograd agree at float64.
"""

import pytest
import torch
from graphs import LLAMA, LLAMA_CONSTANTS, ROWS, llama_block, operand, program, run, values
from planned import large_call

from cadenza.core import lang as L
from cadenza.core.defer import defer
from cadenza.core.euler import euler_adjoint
from cadenza.core.ir import Graph, Node, topological, verify
from cadenza.core.ops import REAL, Op
from cadenza.core.pipeline import new_adjoints
from cadenza.core.readiness import is_product
from cadenza.core.rules import lower, simplify
from cadenza.core.saved import new_input
from cadenza.core.trace import Signature, trace
from cadenza.core.vjp import differentiate

X, S, W = "x M 6 float64", "s M 1 float64", "w 4 6 float64"
B, G, COS, SIN = "b 1 6 float64", "g 1 6 float64", "cos M 1 float64", "sin M 1 float64"


def c(s):
    """A positive column."""
    return L.rsqrt(s * s + 0.5)


FIRES = {
    "plain scaling": (lambda x, s: x * c(s), [X, S]),
    "a product behind it": (lambda x, s, w: L.linear(x, w) * c(s), [X, S, W]),
    "on the left": (lambda x, s: c(s) * x, [X, S]),
    "bias": (lambda x, s, b: x * c(s) + b, [X, S, B]),
    "two biases": (lambda x, s, b, g: (x * c(s) - b) * g + b, [X, S, B, G]),
    "a column beside": (lambda x, s, m, b: x * c(s) + m * b, [X, S, "m M 1 float64", B]),
    "LayerNorm": (lambda x, s, g, b: (x - L.row_mean(x)) * c(s) * g + b, [X, S, G, B]),
    "LayerNorm, deferred": (
        lambda x, s, m, g, b: x * c(s) - g * (m * c(s)) + b, [X, S, "m M 1 float64", G, B]),
    "RoPE": (lambda x, s, cos, sin: L.rope(x * c(s), cos, sin, 2, heads=2), [X, S, COS, SIN]),
    "RoPE of pairs": (
        lambda x, s, cos, sin: L.rope(x * c(s), cos, sin, 2, interleaved=True), [X, S, COS, SIN]),
    "RoPE and a bias": (
        lambda x, s, b, cos, sin: L.rope(x * c(s) + b, cos, sin, 2, heads=3), [X, S, B, COS, SIN]),
    "a column as a bias, and RoPE": (
        lambda x, s, m, cos, sin: L.rope(x * c(s) - m, cos, sin, 2),
        [X, S, "m M 1 float64", COS, SIN]),
    "a scalar as a bias, and halves": (
        lambda x, s, t: L.concat(*L.split(t + x * c(s))), [X, S, "t 1 1 float64"]),
    "side by side": (lambda x, s, y: L.concat(x * c(s), y * c(s)), [X, S, "y M 3 float64"]),
    "halves swapped": (lambda x, s: L.concat(*L.split(-x * c(s))[::-1]), [X, S]),
    "divided": (lambda x, s, z: x * c(s) / (z * z + 1.0), [X, S, "z M 1 float64"]),
}  # fmt: skip

# All effect of the column passes through one scaled value; what follows may be anything.
STOPS = {
    "a nonlinearity": (lambda x, s: L.tanh(x * c(s)), [X, S]),
    "SwiGLU": (lambda x, s: L.swiglu(x * c(s)), [X, S]),
    "two halves multiplied": (lambda x, s: L.split(x * c(s))[0] * L.split(x * c(s))[1], [X, S]),
    "a square": (lambda x, s: (x * c(s)) ** 2, [X, S]),
    "two exits behind": (lambda x, s: (x * c(s), x * c(s) + 1.0), [X, S]),
    "something behind the output": (lambda x, s: {"y": x * c(s), "z": L.tanh(x * c(s))}, [X, S]),
    "the rest is a matrix": (lambda x, s: x * c(s) + x, [X, S]),
    "the rest is a product": (lambda x, s, w: L.linear(x, w) * c(s) + L.linear(x, w), [X, S, W]),
    "a choice": (lambda x, s: L.where(x > 0.0, x * c(s), 0.0), [X, S]),
    "a reduction": (lambda x, s: L.row_sum(x * c(s)) * x, [X, S]),
    "a sum over rows": (lambda x, s: L.column_sum(x * c(s)), [X, S]),
    "a product": (lambda x, s, w: L.linear(x * c(s), w), [X, S, W]),
}

DOES_NOT = {
    "the column twice": (lambda x, s: x * c(s) * c(s), [X, S]),
    "two scaled values": (lambda x, s, y: (x * c(s), L.tanh(y * c(s))), [X, S, "y M 6 float64"]),
    "the column goes out, scaled": (lambda x, s: (x * c(s), c(s) * 2.0), [X, S]),
    "the column itself goes out": (lambda x, s: (x * c(s), c(s)), [X, S]),
    "a nonlinearity of the column beside": (lambda x, s: x * c(s) * L.tanh(c(s)), [X, S]),
    "a divisor": (lambda x, s: x / c(s), [X, S]),
    "may be negative": (lambda x, s: x * L.tanh(s), [X, S]),
    "may be zero": (lambda x, s: x * L.sqrt(s * s), [X, S]),
    "may underflow to zero": (lambda x, s: x * L.exp(s), [X, S]),
    "an operand": (lambda x, s: x * s, [X, S]),
    "a row": (lambda x, b: x * c(b), [X, B]),
    "a scalar": (lambda x, t: x * c(t), [X, "t 1 1 float64"]),
    "a matrix": (lambda x: x * c(x), [X]),
}
ALL = {**FIRES, **STOPS, **DOES_NOT}


def prepared(function, operands) -> tuple[Graph, dict[Node, Node]]:
    """The program, and a new adjoint for every output."""
    graph = verify(simplify(program(function, *operands)))
    made = new_adjoints(graph, range(len(graph.outputs)))
    return graph, {graph.outputs[p]: adjoint for p, adjoint in made.items()}


def scalings(graph: Graph) -> list[Node]:
    """What the rule could be asked of: every value that a matrix is multiplied or divided by."""
    factors = [i for n in graph.nodes() if n.op in (Op.MUL, Op.DIV) for i in n.inputs]
    return list(dict.fromkeys(factors))


def fired(graph: Graph) -> dict[Node, Node]:
    """The values to which the rule applies, and through what value all their effect passes."""
    nodes = [n for n in graph.nodes() if n.type.kind == REAL and n.op is not Op.CONSTANT]
    own = {n: new_input(n, f"adjoint{k}", "float64") for k, n in enumerate(nodes)}
    found = {}
    for value in scalings(graph):
        known = {n: adjoint for n, adjoint in own.items() if n is not value}
        adjoint = euler_adjoint(value, graph.nodes(), graph.outputs, known)
        if adjoint is not None:
            (found[value],) = set(topological([adjoint])) & set(own.values())
    passage = {adjoint: node for node, adjoint in own.items()}
    return {value: passage[adjoint] for value, adjoint in found.items()}


def gradients(graph: Graph, adjoints: dict[Node, Node], euler: bool) -> Graph:
    """The gradients of all real inputs as a program."""
    wanted = [i for i in graph.inputs if i.type.kind == "real"]
    found = differentiate(adjoints.items(), wanted, euler)
    labels = tuple(i.attributes["name"] for i in found)
    inputs = (*graph.inputs, *adjoints.values())
    return verify(simplify(Graph("f", inputs, tuple(found.values()), labels, "dict")))


@pytest.mark.parametrize("case", FIRES)
def test_it_fires(case):
    graph, _ = prepared(*FIRES[case])
    ((column, through),) = fired(graph).items()
    assert column.op is Op.RSQRT
    assert {through} == set(graph.outputs)


@pytest.mark.parametrize("case", STOPS)
def test_it_goes_no_further_than_the_scaled_value(case):
    graph, _ = prepared(*STOPS[case])
    ((column, through),) = fired(graph).items()
    assert through.op is Op.MUL
    assert column in set(through.inputs)


@pytest.mark.parametrize("case", DOES_NOT)
def test_it_does_not_fire(case):
    graph, _ = prepared(*DOES_NOT[case])
    assert fired(graph) == {}


@pytest.mark.parametrize("case", ALL)
def test_gradients_are_the_textbooks(case):
    function, operands = ALL[case]
    graph, adjoints = prepared(function, operands)
    by_rule, textbook = (gradients(graph, adjoints, euler) for euler in (True, False))
    tensors = values(by_rule)
    actual = dict(zip(by_rule.labels, run(by_rule, tensors), strict=True))
    plain = dict(zip(textbook.labels, run(textbook, tensors), strict=True))
    for name, expected in by_autograd(function, graph, tensors).items():
        torch.testing.assert_close(actual[name], expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(plain[name], expected, rtol=1e-12, atol=1e-12)


def by_autograd(function, graph: Graph, tensors) -> dict[str, torch.Tensor]:
    leaves = [t.clone().requires_grad_() for t in tensors[: len(graph.inputs)]]
    returned = function(*leaves)
    outputs = returned if isinstance(returned, tuple) else (returned,)
    outputs = tuple(returned.values()) if isinstance(returned, dict) else outputs
    found = torch.autograd.grad(
        outputs, leaves, tensors[len(graph.inputs) :], materialize_grads=True
    )
    names = [i.attributes["name"] for i in graph.inputs]
    return dict(zip(names, found, strict=True))


@pytest.mark.parametrize("case", FIRES)
def test_it_keeps_nothing_between_the_column_and_the_output(case):
    graph, adjoints = prepared(*FIRES[case])
    ((column, output),) = fired(graph).items()
    adjoint = euler_adjoint(column, graph.nodes(), graph.outputs, adjoints)
    known = {output, column, *adjoints.values()}
    pending, seen = [adjoint], set()
    while pending:
        node = pending.pop()
        if node not in seen and node not in known:
            seen.add(node)
            pending.extend(node.inputs)
    matrices = [n for n in seen if n.type.is_matrix and n.op is Op.INPUT]
    assert matrices == [], "nothing but the output, its adjoint, columns and rows"


def test_the_norm_before_a_rotation_is_seen_through_it():
    split = [operand(text, "float64") for text in LLAMA]
    signature = Signature(tuple(split), tuple((LLAMA_CONSTANTS | {"heads": 8}).items()))
    graph = simplify(defer(lower(simplify(trace(llama_block, signature)))))
    stream, rotated = graph.outputs
    through = {n for n in fired(graph).values() if n in set(graph.outputs)}
    assert through == {rotated}
    (column,) = [r for r, n in fired(graph).items() if n is rotated]
    assert stream in set(topological([column])), "rsqrt(mean(x2²) + eps)"


def test_built_in_blocks_save_no_raw_product_behind_a_rotation():
    for name in ("llama", "gpt2", "parallel", "norm-qkv"):
        pair = large_call(name).pair()
        saved = pair.forward.outputs[pair.outputs :]
        widths = [n.type.columns for n in saved if is_product(n)]
        assert 6144 not in widths, f"{name} keeps its raw queries, keys and values"


def test_rows_of_zeros_are_no_division_by_zero():
    graph, adjoints = prepared(*FIRES["plain scaling"])
    by_rule = gradients(graph, adjoints, euler=True)
    tensors = values(by_rule)
    tensors[0] = torch.zeros(ROWS, 6, dtype=torch.float64)
    assert all(g.isfinite().all() for g in run(by_rule, tensors))


def test_a_column_that_underflows_has_a_gradient():
    graph, adjoints = prepared(lambda x, s: x * L.exp(s), [X, S])
    by_rule = gradients(graph, adjoints, euler=True)
    tensors = values(by_rule)
    tensors[1] = torch.full((ROWS, 1), -800.0, dtype=torch.float64)
    assert all((g == 0.0).all() for g in run(by_rule, tensors))
