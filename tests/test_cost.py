"""FLOPs, bytes and rooflines against numbers worked out by hand; the unfused program beside."""

import pytest

from cadenza.core import lang as L
from cadenza.core.cost import GPUS, ROWS, Gpu, Work, bytes_of, itemsize, kernel_work
from cadenza.core.ops import M, Type
from cadenza.core.pipeline import compile_program
from cadenza.core.storage import dtypes_of
from cadenza.core.trace import Operand, Signature, trace
from cadenza.core.unfused import Unfused

D, F = 4096, 14336
MLP = {"x": (M, D), "w_gate_up": (2 * F, D), "w_down": (D, F)}
X, W, RAW, U, WD = 2 * ROWS * D, 4 * F * D, 4 * ROWS * F, 2 * ROWS * F, 2 * D * F  # bytes in bf16
UP, DOWN = 2 * ROWS * 2 * F * D, 2 * ROWS * F * D  # FLOPs


def mlp(x, w_gate_up, w_down):
    return L.linear(L.swiglu(L.linear(x, w_gate_up)), w_down)


def signature(shapes, dtype="bfloat16"):
    """The signature of operands by name, (rows, columns) each."""
    return Signature(tuple(Operand(n, *shape, dtype) for n, shape in shapes.items()))


def works(plan, rows=ROWS):
    """What each kernel of a plan does."""
    dtypes = dtypes_of(plan.graph)
    return [kernel_work(kernel, dtypes, rows) for kernel in plan.kernels]


def unfused(function, shapes, needed=(), dtype="bfloat16"):
    """The textbook kernels of a function, forward and backward."""
    found = Unfused(trace(function, signature(shapes, dtype)))
    return found.forward(), found.backward(needed)


def test_kernels_of_an_mlp_by_hand():
    pair = compile_program(mlp, signature(MLP), needed=list(MLP))
    assert works(pair.forward_plan) == [Work(UP, X + W + RAW + U), Work(DOWN, U + WD + X)]
    assert works(pair.backward_plan) == [
        Work(DOWN, X + WD + RAW + RAW + U),
        Work(UP, RAW + W + X),
        Work(UP, RAW + X + W),
        Work(DOWN, X + U + WD),
    ]


def test_an_unfused_mlp_by_hand():
    forward, backward = unfused(mlp, MLP, list(MLP))
    assert forward == [Work(UP, X + W + RAW), Work(0, RAW + U), Work(DOWN, U + WD + X)]
    assert sorted(backward) == sorted(
        [
            Work(DOWN, X + WD + U),
            Work(DOWN, X + U + WD),
            Work(0, U + RAW + RAW),
            Work(UP, RAW + W + X),
            Work(UP, RAW + X + W),
        ]
    )


def test_vectors_and_partials_are_float32_and_count_once():
    def normed(x, g, w):
        return L.linear(L.rms_norm(x * x, g), w)

    shapes = {"x": (M, 64), "g": (1, 64), "w": (32, 64)}
    first, second = works(compile_program(normed, signature(shapes)).forward_plan, rows=100)
    assert first == Work(0, 2 * 6400 + 2 * 64 + 2 * 6400 + 4 * 100), "x, g; x·x·g and a partial"
    assert second == Work(2 * 100 * 32 * 64, 2 * 6400 + 2 * 2048 + 4 * 100 + 2 * 3200)


def test_an_operand_that_is_also_loaded_counts_once():
    shapes = {"x": (M, 64), "w": (64, 64)}
    (only,) = works(
        compile_program(lambda x, w: x + L.linear(x, w), signature(shapes)).forward_plan
    )
    assert only.bytes == 2 * ROWS * 64 * 2 + 2 * 64 * 64


@pytest.mark.parametrize(
    ("function", "forward", "backward"),
    [
        (lambda x, y: x + y, [6], []),
        (lambda x, y: x * y, [6], [10]),
        (lambda x, y: L.silu(x), [4], [6]),
        (lambda x, y: L.exp(L.exp(x)), [4, 4], [6, 6]),
        (lambda x, y: (L.exp(x), L.tanh(x)), [4, 4], [6, 6, 6]),
        (lambda x, y: L.join(*L.split(x)), [4], []),
        (lambda x, y: L.join(*reversed(L.split(x))), [4], [4]),
    ],
)
def test_functions_of_an_unfused_program_in_bytes_an_element(function, forward, backward):
    shapes = {"x": (M, 64), "y": (M, 64)}
    found = unfused(function, shapes, ["x", "y"])
    sizes = [[work.bytes / (ROWS * 64) for work in side] for side in found]
    assert sizes[0] == pytest.approx(forward)
    assert sizes[1] == pytest.approx(backward)


def test_a_function_of_the_language_is_one_kernel_however_it_is_written():
    shapes = {"x": (M, 64), "g": (1, 64), "b": (1, 64)}
    forward, backward = unfused(lambda x, g, b: L.layer_norm(x, g, b), shapes, ["x", "g", "b"])
    element = 2 * ROWS * 64
    assert forward == [Work(0, 2 * element + 4 * 64)]
    assert backward == [Work(0, 3 * element + 2 * 64 + 4 * 64)], "x, dy, g; dx, dg, db"


def test_a_bias_is_part_of_its_product_and_its_gradient_a_kernel():
    shapes = {"x": (M, 64), "w": (32, 64), "b": (1, 32)}
    forward, backward = unfused(lambda x, w, b: L.linear(x, w, b), shapes, ["x", "w", "b"])
    assert [work.flops for work in forward] == [2 * ROWS * 64 * 32]
    assert len(backward) == 3
    assert backward[-1] == Work(0, 2 * ROWS * 32 + 2 * 32)


def test_frozen_inputs_cost_no_kernel():
    _, backward = unfused(mlp, MLP, ["w_down"])
    assert backward == [Work(DOWN, X + U + WD)]
    assert unfused(mlp, MLP)[1] == []


def test_a_roofline_is_what_takes_longer_at_sustained_rates():
    gpu = Gpu("slow", half=2.0, single=1.0, memory=0.5, computing=0.5, moving=0.8)
    assert Work(10**12, 0).seconds(gpu, "bfloat16") == pytest.approx(1.0)
    assert Work(10**12, 0).seconds(gpu, "float32") == pytest.approx(2.0)
    assert Work(1, 4 * 10**11).seconds(gpu, "bfloat16") == pytest.approx(1.0)


def test_sustained_rates_are_below_nominal_and_the_measured_one_is_the_measured_one():
    for gpu in GPUS.values():
        assert 0.5 < gpu.flops("bfloat16") / (gpu.nominal("bfloat16") * 1e12) < 1.0
        assert 0.5 < gpu.bytes / (gpu.memory * 1e12) < 1.0
    products = 2 * 16384 * 4096 * (4096 + 28672 + 14336 + 6144)  # of a layer, forward
    measured = products / 10.824e-3
    assert GPUS["h200"].flops("bfloat16") == pytest.approx(measured, rel=0.01)


def test_bytes_of_a_value():
    assert bytes_of(Type(M, 8), "bfloat16") == 16 * ROWS
    assert bytes_of(Type(M, 1), "float32", rows=10) == 40
    assert [itemsize(d) for d in ("float64", "float32", "float16", "bool", "int64")] == [
        8,
        4,
        2,
        1,
        8,
    ]
