"""The programs of linear_cross_entropy: their plans, and their kernels in Triton's interpreter.

Whatever the options, a chunk is one product forward, two products and a pointwise kernel backward,
and holds the logits as they were rounded.
"""

import pytest
import torch
from planned import matrices_of
from triton_plans import check, interpreted, quiet, trials_of

from cadenza import lang as L
from cadenza.backends.triton.executable import Executable
from cadenza.backends.triton.overwriting import takers
from cadenza.core.pipeline import Sums, compile_program
from cadenza.core.plan_text import PairText, counts
from cadenza.core.trace import Operand, Signature
from cadenza.library.loss_blocks import linear_loss, vocabulary_gradient, vocabulary_part
from cadenza.library.operands import describe

ROWS, WIDTH, CLASSES = 37, 24, 50
SMOOTHED = {"label_smoothing": 0.1, "shift": True}
WEIGHED = {"own_weight": True, "class_weight": True, "mean_weight": True}
OPTIONS = {
    "plain": {},
    "bias": {"bias": True},
    "softcap": {"softcap": 3.0},
    "z_loss": {"z_loss": 0.01},
    "smoothing": SMOOTHED,
    "weights": {"own_weight": True},
    "all": {**SMOOTHED, **WEIGHED, "bias": True, "softcap": 3.0, "z_loss": 0.01},
}


def operands(dtype=torch.float32):
    """Every operand of every program, by name."""
    target = torch.randint(0, CLASSES, (ROWS,))
    target[::7] = -100
    columns = ("own_weight", "shift", "top", "total", "scale", "own", "spread")
    return {
        "x": torch.randn(ROWS, WIDTH).to(dtype),
        "w": torch.randn(CLASSES, WIDTH).to(dtype) / 4,
        "sum_x": torch.randn(ROWS, WIDTH),
        "target": target,
        "bias": torch.randn(CLASSES).to(dtype),
        "class_weight": torch.rand(CLASSES),
        "mean_weight": torch.rand(1, 1),
        **{name: torch.rand(ROWS) for name in columns},
    }


def compiled(program, given, options, needed=()):
    """The pair of plans for these operands, and the operands as matrices."""
    constants = {n: v for n, v in options.items() if v is not True and n in program.parameters}
    described = describe(list(given), list(given.values()), program.shapes, constants)
    matrices, sizes = matrices_of(described, given)
    signature = Signature(described.operands, tuple(constants.items()))
    wanted = [name for name in needed if name in given]
    sums = Sums(wide=frozenset(["bias"]), added=frozenset("w"))
    return compile_program(program.function, signature, sizes, wanted, sums=sums), matrices


def rows_of(options, dtype=torch.float32):
    """`linear_loss` compiled for some options, and its operands."""
    given = {n: v for n, v in operands(dtype).items() if n in ("x", "w", "target", *options)}
    return compiled(linear_loss, given, options, ("x", "w", "bias"))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_chunk_is_three_products_and_keeps_the_rounded_logits(options):
    """With a softcap too: not tanh of them, which would be rounded once more."""
    pair, _ = rows_of(options, torch.bfloat16)
    assert counts(pair.forward_plan) == "1 product"
    assert counts(pair.backward_plan) == "2 products, 1 pointwise kernel"
    matrices = [o for o in pair.forward.outputs if o.type.is_matrix]
    assert [PairText(pair).names[node] for node in matrices] == ["logits"]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_gradient_of_logits_takes_their_place(options):
    pair, _ = rows_of(options, torch.bfloat16)
    program = Executable(pair.backward_plan).program
    ((value, given),) = takers(program, pair.backward.inputs).items()
    assert PairText(pair).names[given] == "logits"
    products = [k.product for k in pair.backward_plan.kernels if k.product is not None]
    assert all(value in product.inputs for product in products)


@interpreted
@quiet
def test_kernels_write_over_what_is_spent_and_nothing_else():
    pair, matrices = rows_of(OPTIONS["all"])
    _, backward = trials_of(pair, matrices, ROWS)
    run, positions = Executable(backward.plan), range(len(backward.inputs))
    kept = [t.clone() for t in backward.inputs]
    expected = run(backward.inputs, ROWS)
    assert all(torch.equal(t, k) for t, k in zip(backward.inputs, kept, strict=True))
    found = run(backward.inputs, ROWS, spent=positions)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    written = [
        PairText(pair).names[node]
        for node, tensor, whole in zip(pair.backward.inputs, backward.inputs, kept, strict=True)
        if not torch.equal(tensor, whole)
    ]
    assert written == ["logits"]


def test_what_is_read_twice_or_elsewhere_keeps_its_place():
    def twice(x, w, v):
        z = L.stored(L.exp(x))
        return L.matmul(z, w), L.matmul(x, v)

    def apart(x, w):
        left, right = L.split(x)
        return L.matmul(L.stored(L.concat(right, left)), w)

    for function, names in ((twice, "xwv"), (apart, "xw")):
        operands = [Operand(n, ("M" if n == "x" else 64), 64, "bfloat16") for n in names]
        plan = compile_program(function, Signature(tuple(operands))).forward_plan
        assert takers(Executable(plan).program, plan.graph.inputs) == {}


@interpreted
@quiet
def test_kernels_of_all_options_agree():
    check_rows(OPTIONS["all"], torch.float32)


@interpreted
@quiet
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_kernels_of_rows_agree(options, dtype):
    check_rows(options, dtype)


def check_rows(options, dtype):
    """Both plans of a chunk of rows, every kernel by a template."""
    pair, matrices = rows_of(options, dtype)
    found = [check(trial) for trial in trials_of(pair, matrices, ROWS)]
    assert [each.reasons for each in found] == [[], []]


@interpreted
@quiet
@pytest.mark.parametrize("smoothed", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("softcap", [pytest.param(None, marks=pytest.mark.slow), 3.0])
def test_kernels_of_classes_agree(softcap, smoothed):
    given = operands()
    known = {"x", "w", "target", "bias"} | ({"class_weight"} if smoothed else set())
    first = {n: given[n] for n in given if n in known | ({"shift"} if smoothed else set())}
    columns = {"sum_x", "top", "total", "scale", "own"} | ({"spread"} if smoothed else set())
    second = {n: given[n] for n in given if n in known | columns}
    constants = {"softcap": softcap, "needed": 7}
    for program, tensors in ((vocabulary_part, first), (vocabulary_gradient, second)):
        pair, matrices = compiled(program, tensors, constants)
        for trial in trials_of(pair, matrices, ROWS):
            assert check(trial).reasons == []
