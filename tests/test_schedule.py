"""Scheduling: the worked example kernel by kernel, and where values are computed and stored.

In the worked example every value that a kernel loads, stores or reduces is recognised by its
numbers, computed by hand here from the table's formulas; nothing goes by names or by order. Only a1
differs from the table: it is kept scaled, acc · r0.
"""

import dataclasses
import functools

import pytest
import torch
from block_operands import WIDTH
from graphs import program
from planned import Call, call, large_call, verified
from torch.nn import functional as F

from cadenza.backends.whole import run_graph
from cadenza.core import lang as L
from cadenza.core.ir import Graph
from cadenza.core.ops import Op
from cadenza.core.pipeline import Pair, compile_program, differentiate_program
from cadenza.core.plan import Kernel, Plan
from cadenza.core.readiness import is_vector, reduces_matrix
from cadenza.core.rules import simplify
from cadenza.core.schedule import ROW_LIMIT, schedule
from cadenza.core.trace import Operand, Signature
from cadenza.library.blocks import BUILT_IN

Tensor = torch.Tensor
ROWS = 5


# --- the worked example ---------------------------------------------------------------------------


@functools.cache
def llama() -> tuple[Call, Pair]:
    torch.manual_seed(0)
    made = call("llama", ROWS)
    return made, verified(made.pair())


def rope(x: Tensor, made: Call) -> Tensor:
    constants = dict(made.signature.constants)
    cos, sin = made.tensors["cos"], made.tensors["sin"]
    return L.rope(x, cos, sin, constants["head_dim"], heads=constants["heads"])


def forward_by_hand(made: Call) -> dict[str, Tensor]:
    """The forward half of the table."""
    v = dict(made.tensors)
    x1 = v["x"] + v["y"] @ v["wo"].T
    v |= {"x1": x1, "h1": x1 * v["norm"], "s0": (x1**2).sum(1, keepdim=True)}
    r0 = torch.rsqrt(v["s0"] / WIDTH + 1e-5)
    a1 = v["h1"] @ v["w_gate_up"].T * r0
    gate, up = a1.chunk(2, 1)
    v |= {"r0": r0, "a1": a1, "u": F.silu(gate) * up}
    x2 = x1 + v["u"] @ v["w_down"].T
    v |= {"x2": x2, "h2": x2 * v["next_norm"], "s1": (x2**2).sum(1, keepdim=True)}
    v["r1"] = torch.rsqrt(v["s1"] / WIDTH + 1e-5)
    v["qkv"] = rope(v["h2"] @ v["w_qkv"].T * v["r1"], made)
    return v


def pullback(function, at: Tensor, g: Tensor) -> Tensor:
    leaf = at.clone().requires_grad_()
    return torch.autograd.grad(function(leaf), leaf, g)[0]


def swiglu(z: Tensor) -> Tensor:
    gate, up = z.chunk(2, 1)
    return F.silu(gate) * up


def backward_by_hand(made: Call, v: dict[str, Tensor]) -> dict[str, Tensor]:
    """The backward half of the table, from the adjoints dx2 and dqkv."""
    v = v | {"dx2": torch.randn_like(v["x2"]), "dqkv": torch.randn_like(v["qkv"])}
    turned = pullback(lambda q: rope(q, made), torch.zeros_like(v["qkv"]), v["dqkv"])
    v |= {"dq": turned * v["r1"], "s2": (v["dqkv"] * v["qkv"]).sum(1, keepdim=True)}
    acc = v["dq"] @ v["w_qkv"]
    c1 = -v["s2"] * v["r1"] ** 2 / WIDTH
    v |= {"dx2'": v["dx2"] + acc * v["next_norm"] + v["x2"] * c1, "dg2": (acc * v["x2"]).sum(0)}
    v["dWqkv"] = v["dq"].T @ v["x2"] * v["next_norm"]
    dz = pullback(swiglu, v["a1"], v["dx2'"] @ v["w_down"])
    v |= {"dz": dz * v["r0"], "s3": (dz * v["a1"]).sum(1, keepdim=True)}
    acc, c0 = v["dz"] @ v["w_gate_up"], -v["s3"] * v["r0"] ** 2 / WIDTH
    v |= {"dx1": v["dx2'"] + acc * v["norm"] + v["x1"] * c0, "dg1": (acc * v["x1"]).sum(0)}
    v |= {"dWd": v["dx2'"].T @ v["u"], "dWgu": v["dz"].T @ v["x1"] * v["norm"]}
    v |= {"dy0": v["dx1"] @ v["wo"], "dWo": v["dx1"].T @ v["y"]}
    return v | {"dg1": v["dg1"][None], "dg2": v["dg2"][None]}


FORWARD = [
    ("y @ wo.T", {"x"}, {"x1", "h1"}, {"s0"}),
    ("h1 @ w_gate_up.T", set(), {"a1", "u"}, set()),
    ("u @ w_down.T", {"x1"}, {"x2", "h2"}, {"s1"}),
    ("h2 @ w_qkv.T", {"cos", "sin"}, {"qkv"}, set()),
]
BACKWARD = [
    ("", {"dqkv", "qkv", "cos", "sin"}, {"dq"}, {"s2"}),
    ("dq @ w_qkv", {"dx2", "x2"}, {"dx2'"}, {"dg2"}),
    ("dq.T @ x2", set(), {"dWqkv"}, set()),
    ("dx2' @ w_down", {"a1"}, {"dz", "u"}, {"s3"}),
    ("dx2'.T @ u", set(), {"dWd"}, set()),
    ("dz @ w_gate_up", {"dx2'", "x1"}, {"dx1"}, {"dg1"}),
    ("dz.T @ x1", set(), {"dWgu"}, set()),
    ("dx1 @ wo", set(), {"dy0"}, set()),
    ("dx1.T @ y", set(), {"dWo"}, set()),
]


def recognised(graph: Graph, tensors: list[Tensor], known: dict[str, Tensor]) -> dict[object, str]:
    """For each value of a program, the name of the known tensor that it equals."""
    nodes = [n for n in graph.nodes() if n.op is not Op.CONSTANT]
    labels = tuple(map(str, range(len(nodes))))
    found = run_graph(Graph("f", graph.inputs, tuple(nodes), labels, "dict"), tensors, ROWS)
    return {
        node: next((name for name, t in known.items() if same(t, value)), f"unknown {node!r}")
        for node, value in zip(nodes, found, strict=True)
    }


def same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-9, atol=1e-12)


def described(kernel: Kernel, name: dict[object, str]) -> tuple[str, set[str], set[str], set[str]]:
    """A kernel as a row of the table."""
    text = ""
    if kernel.product is not None:
        a, b = (name[i] for i in kernel.product.inputs)
        turned = kernel.product.attributes
        text = f"{a}{'.T' * turned['transpose_a']} @ {b}{'.T' * turned['transpose_b']}"
    groups = (kernel.loads, kernel.stores, kernel.reductions)
    return text, *({name[n] for n in group} for group in groups)


def test_llama_forward_is_the_table():
    made, pair = llama()
    tensors = [made.tensors[i.attributes["name"]] for i in pair.forward.inputs]
    name = recognised(pair.forward, tensors, forward_by_hand(made))
    assert [described(kernel, name) for kernel in pair.forward_plan.kernels] == FORWARD
    held = [name[n] for n in pair.forward.outputs[pair.outputs :]]
    assert held == ["x1", "r0", "a1", "r1"]


def test_llama_backward_is_the_table():
    made, pair = llama()
    known = backward_by_hand(made, forward_by_hand(made))
    at_hand = ["x2", "qkv", "x1", "r0", "a1", "r1"]
    tensors = [known[v] if isinstance(v, str) else known[at_hand[v]] for v in pair.values]
    tensors += [known[("dx2", "dqkv")[position]] for position in pair.adjoints]
    name = recognised(pair.backward, tensors, known)
    rows = [described(kernel, name) for kernel in pair.backward_plan.kernels]
    assert sorted(rows, key=lambda row: row[0]) == sorted(BACKWARD, key=lambda row: row[0])
    order = [row[0] for row in rows if ".T" not in row[0]]
    assert order == [row[0] for row in BACKWARD if ".T" not in row[0]]
    gradients = [name[n] for n in pair.backward.outputs]
    assert gradients == ["dx1", "dy0", "dWo", "dg1", "dWgu", "dWd", "dg2", "dWqkv"]


def test_finished_vectors_of_llama_are_read_not_made_again():
    _, pair = llama()
    for plan in (pair.forward_plan, pair.backward_plan):
        for kernel in plan.kernels:
            assert not any(reduces_matrix(node) for node in kernel.body)
            assert all(is_vector(vector) for vector in kernel.vectors)


def counts(pair: Pair) -> tuple[int, ...]:
    plans = (pair.forward_plan, pair.backward_plan)
    return tuple(n for plan in plans if plan for n in (plan.products, plan.pointwise))


def test_frozen_weights_shrink_the_plan():
    made = large_call("llama")
    assert counts(made.pair()) == (4, 0, 8, 1)
    assert counts(made.pair(["x", "y"])) == (4, 0, 4, 1)
    assert counts(made.pair(["x"])) == (4, 0, 3, 1)
    assert counts(made.pair([])) == (4, 0)
    frozen, full = made.pair(["x", "y"]), made.pair()
    stores = [sum(len(k.stores) for k in p.backward_plan.kernels) for p in (frozen, full)]
    assert stores == [5, 10], "no operand of a weight's gradient either"


# --- nothing knows a block ------------------------------------------------------------------------


def skeleton(plan: Plan) -> list[object]:
    """A plan without names: operations, types, and which values each kernel reads and writes."""
    number = {node: k for k, node in enumerate(plan.graph.nodes())}

    def attributes(node):
        kept = {k: v for k, v in node.attributes.items() if k != "name"}
        return sorted(kept.items(), key=str)

    nodes = [(n.op, n.type, attributes(n), [number[i] for i in n.inputs]) for n in number]
    kernels = [
        [number.get(k.product), *([number[n] for n in group] for group in
         (k.body, k.loads, k.vectors, k.stores, k.reductions))]
        for k in plan.kernels
    ]  # fmt: skip
    return [nodes, kernels, [number[n] for n in plan.vector_products]]


def own_unit(state, heard, mix, loudness, inside, outside, second, ask, a, b, *, size, turned):
    """An author's own block, which happens to be the structure of Llama's."""
    flow = state + L.matmul(heard, mix, transpose_b=True)
    scaled = flow * L.rsqrt(L.row_sum(flow**2) / flow.shape[1] + 1e-5) * loudness
    left, right = L.split(L.linear(scaled, inside))
    flow = flow + L.linear(left * L.sigmoid(left) * right, outside)
    scaled = flow * L.rsqrt(L.row_sum(flow**2) / flow.shape[1] + 1e-5) * second
    return flow, L.rope(L.linear(scaled, ask), a, b, size, heads=turned)


def test_an_authors_own_block_gets_the_same_plan():
    made = large_call("llama")
    names = own_unit.__code__.co_varnames[: len(made.signature.operands)]
    operands = [o._replace(name=n) for o, n in zip(made.signature.operands, names, strict=True)]
    signature = Signature(tuple(operands), (("size", 128), ("turned", 40)))
    needed = [n for n in names if n not in ("a", "b")]
    own, built_in = compile_program(own_unit, signature, needed=needed), made.pair()
    assert skeleton(own.forward_plan) == skeleton(built_in.forward_plan)
    assert skeleton(own.backward_plan) == skeleton(built_in.backward_plan)


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_plans_do_not_depend_on_the_number_of_rows(name):
    expected = call(name, 5).pair()
    for rows in (0, 1, WIDTH, 15):
        found = call(name, rows).pair()
        assert skeleton(found.forward_plan) == skeleton(expected.forward_plan)
        assert skeleton(found.backward_plan) == skeleton(expected.backward_plan)


# --- where values are made ------------------------------------------------------------------------


def plan_of(function, *operands: str) -> Plan:
    return differentiate_program(simplify(program(function, *operands))).forward_plan


X, Y, W, V = "x M 6", "y M 6", "w 6 6", "v 6 4"


def test_an_operand_is_made_where_its_source_is_loaded():
    plan = plan_of(lambda x, y, w, v: (x + y @ w, L.silu(x) @ v), X, Y, W, V)
    first, second = plan.kernels
    assert (plan.products, plan.pointwise) == (2, 0)
    assert second.product.inputs[0] in set(first.stores)
    assert len(first.loads) == 1


def test_an_operand_whose_source_no_kernel_loads_is_made_by_a_pointwise_kernel():
    plan = plan_of(lambda x, y, w, v: (y @ w, L.silu(x) @ v), X, Y, W, V)
    assert (plan.products, plan.pointwise) == (2, 1)
    pointwise = plan.kernels[0]
    assert pointwise.kind == "pointwise"
    assert [n.op for n in pointwise.loads] == [Op.INPUT]


def test_an_operand_of_the_first_product_waits_for_no_kernel():
    plan = plan_of(lambda x, y, w, v: (L.silu(x) @ v, x + y @ w), X, Y, W, V)
    assert [kernel.kind for kernel in plan.kernels] == ["pointwise", "product", "product"]


def test_an_operand_of_two_sources_goes_where_both_are_loaded():
    plan = plan_of(
        lambda x, y, z, w, v: (x + z @ w, x * y + z @ w @ w, (x * y) @ v), X, Y, "z M 6", W, V
    )
    assert plan.pointwise == 0
    (host,) = [k for k in plan.kernels if plan.kernels[-1].product.inputs[0] in set(k.stores)]
    assert {n.attributes["name"] for n in host.loads if n.op is Op.INPUT} == {"x", "y"}


def test_a_kernel_before_the_one_that_stores_a_value_computes_it_itself():
    def shared(x, w, v):
        h = L.silu(x)
        return L.linear(h, w), L.linear(L.rms_norm(h, None), v)

    graph = simplify(program(shared, X, W, "v 4 6"))
    plan = differentiate_program(graph, ["x", "w", "v"]).backward_plan
    products = [k.product for k in plan.kernels if k.product is not None]
    (operand,) = {a.inputs[1] for a in products} & {n for k in plan.kernels for n in k.stores}
    (host,) = [p for p, k in enumerate(plan.kernels) if operand in set(k.stores)]
    earlier = [k for k in plan.kernels[:host] if operand in set(k.body)]
    assert earlier, "it is needed before it is stored"
    assert not any(operand in set(k.loads) for k in plan.kernels[: host + 1])


def post_norm(x, y, w, v):
    return (x + L.rms_norm(L.linear(y, w), None)) @ v


def test_a_norm_after_a_product_holds_rows_in_a_pointwise_kernel():
    plan = plan_of(post_norm, X, Y, W, V)
    first, norm, last = plan.kernels
    assert [k.kind for k in plan.kernels] == ["product", "pointwise", "product"]
    assert set(first.stores) == {first.product}
    assert first.reductions, "its partials see float32"
    assert set(norm.loads) == {plan.graph.inputs[0], first.product}
    assert last.product.inputs[0] in set(norm.stores)


def normed_first(x, v):
    return L.silu(L.rms_norm(x, None)) @ v


@pytest.mark.parametrize(("columns", "held"), [(ROW_LIMIT, True), (ROW_LIMIT + 1, False)])
def test_a_pointwise_kernel_holds_rows_up_to_a_limit(columns, held):
    plan = plan_of(normed_first, f"x M {columns}", f"v {columns} 4")
    pointwise = [k for k in plan.kernels if k.kind == "pointwise"]
    assert len(pointwise) == (1 if held else 2)
    assert any(reduces_matrix(n) for n in pointwise[-1].body) == held
    assert bool(pointwise[-1].vectors) != held


def test_a_reduction_of_rows_is_never_held():
    plan = plan_of(lambda x, v: L.silu(x * L.column_sum(x)) @ v, X, V)
    first, second, _ = plan.kernels
    assert [r.op for r in first.reductions] == [Op.COLUMN_SUM]
    assert second.vectors == first.reductions


def test_products_are_never_computed_twice():
    def twice(x, w, v):
        h = x @ w
        return h, L.tanh(h) @ v, h * L.row_sum(h) + L.tanh(h)

    plan = plan_of(twice, X, W, V)
    made = [k.product for k in plan.kernels if k.product is not None]
    assert len(made) == len(set(made)) == 2


def test_elementwise_values_are_computed_again_rather_than_stored():
    def again(x, w, v):
        gate = L.sigmoid(x @ w)
        return gate @ v, gate * x, (x + 1.0) @ v

    plan = plan_of(again, X, W, V)
    stored = [n for kernel in plan.kernels for n in kernel.stores]
    operands = {i for k in plan.kernels if k.product is not None for i in k.product.inputs}
    assert set(stored) <= operands | set(plan.graph.outputs)


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_what_is_saved_changes_no_kernel_but_for_stores(name):
    pair = large_call(name).pair()
    graph = pair.forward
    alone = schedule(own_outputs(graph, pair.outputs))
    for kernel, plain in zip(pair.forward_plan.kernels, alone.kernels, strict=True):
        assert kernel.product is plain.product
        assert set(kernel.loads) == set(plain.loads)
        assert set(kernel.stores) >= set(plain.stores)
        assert set(kernel.stores) - set(plain.stores) <= set(graph.outputs[pair.outputs :])


def own_outputs(graph: Graph, count: int) -> Graph:
    """The program of the first outputs alone."""
    return dataclasses.replace(graph, outputs=graph.outputs[:count], labels=graph.labels[:count])


def test_values_of_forward_that_backward_uses_are_not_made_by_another_product():
    def scaled(x, z, v):
        h = x * z
        return L.relu(L.rms_norm(h @ v, None)), h

    operands = (Operand("x", "M", 6, "float32"), Operand("z", "M", 1, "float32"),
                Operand("v", 6, 4, "float32"))  # fmt: skip
    pair = compile_program(scaled, Signature(operands), needed=["x", "z", "v"])
    assert counts(pair)[0::2] == (1, 2)
