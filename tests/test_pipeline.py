"""From a function to its pair: what is saved, what is computed again, what frozen inputs cost."""

from itertools import combinations

import pytest
import torch
from graphs import LLAMA, LLAMA_CONSTANTS, count, llama_block, pair, program, run, values

from cadenza.core import lang as L
from cadenza.core.ir import Graph, equal, verify
from cadenza.core.ops import Op
from cadenza.core.pipeline import Pair, compile_program, differentiate_program
from cadenza.core.rules import simplify
from cadenza.core.storage import dtypes_of
from cadenza.core.text import digest
from cadenza.core.trace import Operand, Signature

WEIGHTS = ["wo", "norm", "w_gate_up", "w_down", "next_norm", "w_qkv"]
LLAMA_NAMES = [text.split()[0] for text in LLAMA]


def llama() -> Graph:
    return simplify(program(llama_block, *LLAMA, **LLAMA_CONSTANTS))


def saved(found: Pair) -> list[str]:
    """Operation and shape of what forward keeps besides its outputs."""
    return [f"{n.op.label} {n.type}" for n in found.forward.outputs[found.outputs :]]


def test_llama_saves_the_stream_the_raw_product_and_two_columns():
    found = differentiate_program(llama(), ["x", "y", *WEIGHTS])
    assert saved(found) == ["add [M, 16]", "rsqrt [M, 1]", "mul [M, 48]", "rsqrt [M, 1]"]
    assert found.forward.outputs[2].inputs[0].attributes["name"] == "x", "x1 = x + y @ wo.T"


def test_gradients_of_the_rotation_need_raw_queries_and_keys_besides():
    found = differentiate_program(llama(), LLAMA_NAMES)
    assert saved(found)[-1] == "mul [M, 24]", "columns of the product, scaled"
    assert len(saved(found)) == 5


def swiglu(x, w, w_down):
    return L.linear(L.swiglu(L.linear(x, w)), w_down)


SWIGLU = ("x M 4", "w 6 4", "w_down 5 3")


@pytest.mark.parametrize("needed", [["x"], ["w"], ["w_down"], ["x", "w", "w_down"]])
def test_swiglu_saves_the_raw_product_alone(needed):
    found = pair(swiglu, *SWIGLU, needed=needed)
    expected = ["mul [M, 3]"] if needed == ["w_down"] else ["matmul [M, 6]"]
    assert saved(found) == expected


def test_outputs_and_inputs_are_at_hand_for_free():
    both = pair(lambda x, w: L.exp(L.linear(x, w)), "x M 4", "w 6 4", needed=["x", "w"])
    assert saved(both) == []
    assert both.values == ("x", "w", 0)


def test_names_of_saved_values_are_the_authors():
    def named(x, w):
        h = L.name(L.linear(x, w), "raw")
        return L.silu(h)

    assert pair(named, "x M 4", "w 6 4", needed=["x"]).forward.labels == ("0", "raw")


@pytest.mark.parametrize("names", [(), ("x",), ("wo",), ("cos",), tuple(LLAMA_NAMES)])
def test_forward_is_the_same_whatever_is_needed(names):
    graph = llama()
    found, plain = differentiate_program(graph, names), differentiate_program(graph)
    assert found.program is graph
    assert found.forward.outputs[:2] == plain.forward.outputs, "the very same nodes"
    assert found.forward.labels[:2] == graph.labels
    kernels = zip(found.forward_plan.kernels, plain.forward_plan.kernels, strict=True)
    assert all(a.loads == b.loads and a.product is b.product for a, b in kernels)
    retraced = pair(swiglu, *SWIGLU, needed=["x", "w"]).program
    assert digest(retraced) == digest(pair(swiglu, *SWIGLU).program)


def mlp(x, w1, w2, w3):
    return L.linear(L.relu(L.linear(L.silu(L.linear(x, w1)), w2)), w3)


MLP = ("x M 4", "w1 5 4", "w2 6 5", "w3 7 6")


def products(needed: tuple[str, ...]) -> int:
    """One for each weight's gradient, one for each product that hands an adjoint further back."""
    order = ["x", "w1", "w2", "w3"]
    weights = sum(name != "x" for name in needed)
    first = min(order.index(name) for name in needed)
    return weights + 3 - max(first - 1, 0) - (first > 0)


SUBSETS = [s for n in range(1, 5) for s in combinations(["x", "w1", "w2", "w3"], n)]


@pytest.mark.parametrize("needed", SUBSETS, ids=",".join)
def test_frozen_inputs_cost_no_product(needed):
    found = pair(mlp, *MLP, needed=needed)
    assert count(found.backward, Op.MATMUL) == products(needed)
    assert found.gradients == needed
    assert count(found.forward, Op.MATMUL) == 3


def test_frozen_weights_of_llama_leave_a_chain_of_products():
    everything = differentiate_program(llama(), LLAMA_NAMES)
    assert count(everything.backward, Op.MATMUL) == 8
    assert count(differentiate_program(llama(), ["x", "y"]).backward, Op.MATMUL) == 4
    assert count(differentiate_program(llama(), ["x"]).backward, Op.MATMUL) == 3
    assert count(differentiate_program(llama(), ["w_qkv"]).backward, Op.MATMUL) == 1


def test_frozen_inputs_save_less():
    assert saved(differentiate_program(llama(), ["w_qkv"])) == ["rsqrt [M, 1]"]
    assert saved(pair(mlp, *MLP, needed=["w3"])) == ["where [M, 6]"]


@pytest.mark.parametrize(
    ("function", "operands", "needed"),
    [
        (swiglu, SWIGLU, []),
        (swiglu, SWIGLU, ["no_operand"]),
        (lambda x, index: L.pick(x, index) * 1.0, ("x M 4", "index M 1 int64"), ["index"]),
        (lambda x, y: (x > 0.0, y), ("x M 4", "y M 4"), ["x"]),
        (lambda x, y: x * L.random(x, 3) * 0.0 + L.row_index(y), ("x M 4", "y M 4"), ["y"]),
    ],
)
def test_without_a_gradient_there_is_no_backward_and_nothing_saved(function, operands, needed):
    found = pair(function, *operands, needed=needed)
    assert found.backward is None
    assert found.forward.labels == found.program.labels
    assert (found.differentiable, found.values, found.adjoints, found.gradients) == ((), (), (), ())


def test_gradients_come_through_the_outputs_that_depend_on_what_is_needed():
    def three(x, y):
        return x * 2.0, y * 3.0, x < y, x * y

    found = pair(three, "x M 4", "y M 4", needed=["x"])
    assert found.differentiable == (0, 3)
    assert found.adjoints == (0, 3)
    assert [i.attributes["name"] for i in found.backward.inputs] == ["y", "d_0", "d_3"]
    assert found.values == ("y",)


def test_names_of_adjoints_and_saved_values_do_not_clash():
    def clash(x, d_y, saved0):
        return {"y": L.exp(x * d_y) + saved0, "not a name": L.row_sum(L.tanh(x))}

    found = pair(clash, "x M 4", "d_y M 4", "saved0 M 4", needed=["x", "d_y"])
    names = [i.attributes["name"] for i in found.backward.inputs]
    assert len(set(names)) == len(names)
    assert all(name.isidentifier() for name in names)
    assert len(set(found.forward.labels)) == len(found.forward.labels)


def layer_norm_gelu(x, g, b, w):
    return L.gelu(L.linear(L.layer_norm(x, g, b), w), "tanh")


def cross_entropy(x, w, index):
    logits = L.linear(x, w)
    return L.logsumexp(logits) - L.pick(logits, index)


@pytest.mark.parametrize(
    ("function", "operands", "needed"),
    [
        (swiglu, SWIGLU, ["x", "w", "w_down"]),
        (layer_norm_gelu, ("x M 6", "g 1 6", "b 1 6", "w 8 6"), ["x", "g", "b", "w"]),
        (cross_entropy, ("x M 6", "w 9 6", "index M 1 int64"), ["x", "w"]),
        (lambda x: L.rms_norm(x, None) * L.logsumexp(x), ("x M 6",), ["x"]),
    ],
)
def test_products_and_reductions_of_forward_are_never_computed_again(function, operands, needed):
    found = pair(function, *operands, needed=needed)
    verify(found.backward)
    depends = {i for i in found.backward.inputs if i.attributes["name"].startswith("d_")}
    again = []
    for node in found.backward.nodes():
        if any(i in depends for i in node.inputs):
            depends.add(node)
        elif node.op.group in ("product", "reduction"):
            again.append(node)
    assert again == []


def test_values_say_where_backward_finds_them():
    graph = llama()
    found = differentiate_program(graph, LLAMA_NAMES)
    tensors = dict(zip(LLAMA_NAMES, values(graph), strict=True))
    results = run(found.forward, list(tensors.values()))
    for value, node in zip(found.values, found.backward.inputs, strict=False):
        tensor = results[value] if isinstance(value, int) else tensors[value]
        assert node.attributes["dtype"] == str(tensor.dtype).removeprefix("torch.")
        assert node.type.columns == tensor.shape[1]
    assert len(found.backward.inputs) == len(found.values) + len(found.adjoints)


def test_gradients_have_the_dtype_of_their_inputs():
    found = pair(lambda x, g: x * g, "x M 4 bfloat16", "g 1 4 bfloat16", needed=["x", "g"])
    tensors = values(found.backward)
    assert {g.dtype for g in run(found.backward, tensors)} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("function", "more"),
    [
        (lambda x, w: (L.linear(x, w), L.group_max(L.linear(x, w), 4)), []),
        (lambda x, w: L.group_sum(L.linear(x, w) ** 2, 4), []),
        (lambda x, w: L.cast(L.group_sum(L.linear(x, w), 4), "bfloat16"), []),
        (lambda x, w, r: r + L.linear(x, w), ["r M 8 float32"]),
    ],
)
def test_products_of_backward_have_operands_of_the_products_dtype(function, more):
    operands = ["x M 4 bfloat16", "w 8 4 bfloat16", *more]
    found = pair(function, *operands, needed=["x", "w"])
    stored = dtypes_of(found.backward)
    products = [n for n in found.backward.nodes() if n.op is Op.MATMUL]
    assert len(products) == 2
    assert {stored[i] for n in products for i in n.inputs} == {"bfloat16"}


def test_the_same_function_twice_gives_equal_pairs():
    one, two = (pair(swiglu, *SWIGLU, needed=["x", "w"]) for _ in range(2))
    assert equal(one.forward, two.forward)
    assert equal(one.backward, two.backward)
    assert digest(one.backward) == digest(two.backward)


@pytest.mark.parametrize("needed", [(), ("y",), ("w",), ("y", "r", "w")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_has_no_rows_is_stored_and_kept_as_other_values_are(dtype, needed):
    """It takes no bytes, and is at hand no more than they are."""

    def scaled(y, r, w):
        product = L.matmul(L.rms_norm(y, r, 0.25, offset=1.0) * 0.25, w, transpose_b=True) * 0.5
        return product, product

    sizes = {"y": (0, 2), "r": (1, 2), "w": (3, 2)}
    operands = tuple(Operand(name, *size, dtype) for name, size in sizes.items())
    pair = compile_program(scaled, Signature(operands), needed=needed)
    assert (pair.backward_plan is None) == (not needed)
