"""Every option of linear_cross_entropy, alone and with the others, by rows and by classes.

Values and gradients against torch at float64, in other dtypes by torch's own error; rows that don't
count, and classes that don't exist; autocast, torch.compile.
"""

import pytest
import torch
import torch._dynamo.testing
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_options import (
    EVERYTHING,
    REDUCTIONS,
    TRAINED,
    Example,
    assert_equal,
    combinations,
    each_form,
    each_option,
    each_reduction,
    example,
    oracle,
)
from programs import assert_close
from torch.nn import functional as F

import cadenza as cz
from cadenza.library import cross_entropy
from cadenza.library.loss_batch import Batch

linear_cross_entropy = cz.ops.linear_cross_entropy
DTYPES = [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)]
FEWER = settings.default.max_examples // 10


# --- against torch --------------------------------------------------------------------------------


@each_form
@each_reduction
@each_option
def test_equals_torch_at_float64(options, reduction, lean):
    actual, expected = example({**options, **reduction}).both(lean=lean, chunk=4)
    assert_equal(actual, expected)


@pytest.mark.slow
@each_form
@each_reduction
def test_every_combination_equals_torch_at_float64(reduction, lean):
    for options in combinations():
        actual, expected = example({**options, **reduction}).both(lean=lean, chunk=4)
        assert_equal(actual, expected)


@each_form
@each_option
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_error_is_at_most_twice_torch(dtype, reduction, options, lean):
    case = example({**options, "reduction": reduction}, 129, 32, 101, dtype)
    actual = case.run(linear_cross_entropy, lean=lean, chunk=40)
    for a, exact, own in zip(
        actual, case.run(oracle, torch.float64), case.run(oracle), strict=True
    ):
        assert_close(a, exact, own)


@each_form
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.slow
def test_gradcheck(reduction, lean):
    case = example({**EVERYTHING, "reduction": reduction}, 4, 3, 5)
    fixed = {n: v for n, v in case.operands.items() if n not in TRAINED}
    trained = {n: v.requires_grad_() for n, v in case.operands.items() if n in TRAINED}

    def loss(*values):
        operands = dict(zip(trained, values, strict=True))
        return linear_cross_entropy(**operands, **fixed, **case.options, lean=lean, chunk=2)

    assert torch.autograd.gradcheck(loss, tuple(trained.values()))


@st.composite
def examples(draw):
    """A call of any size with any options, and how it is cut."""
    options = {name: True for name in ("bias", "weight", "token_weights") if draw(st.booleans())}
    options["label_smoothing"] = draw(st.sampled_from([0.0, 0.2, 1.0]))
    options["z_loss"] = draw(st.sampled_from([0.0, 0.3]))
    options["softcap"] = draw(st.sampled_from([None, 0.5, 30.0]))
    options["ignore_index"] = draw(st.sampled_from([-100, 0, 2]))
    options |= draw(st.sampled_from(list(REDUCTIONS.values())))
    sizes = [draw(st.integers(least, 9)) for least in (0, 1, 3)]
    case = example(options, *sizes)
    case.operands["target"][case.operands["target"] == -100] = options["ignore_index"]
    cut = {"lean": draw(st.booleans()), "chunk": draw(st.sampled_from([None, 1, 2, 5]))}
    return case, cut


@settings(max_examples=FEWER)
@given(examples())
def test_any_options_of_any_size(drawn):
    case, cut = drawn
    actual, expected = case.both(**cut)
    assert actual[0].isnan().equal(expected[0].isnan())
    if not expected[0].isnan().any():
        assert_equal(actual, expected, 1e-11)


@each_form
def test_leading_dimensions(lean):
    case = example({**EVERYTHING, "reduction": "none"}, rows=12)
    flat = case.run(linear_cross_entropy, lean=lean)
    shapes = {"x": (2, 3, 2, 5), "target": (2, 3, 2), "token_weights": (2, 3, 2)}
    deep = {n: v.reshape(shapes.get(n, v.shape)) for n, v in case.operands.items()}
    actual = Example(deep, case.options).run(linear_cross_entropy, lean=lean)
    assert actual[0].shape == (2, 3, 2)
    expected = Example(deep, case.options).run(oracle)
    assert_equal(actual, expected)
    assert_equal([actual[0].flatten()], flat[:1])


@each_form
def test_a_single_row_without_leading_dimensions(lean):
    case = example({"bias": True, "label_smoothing": 0.1}, rows=2)
    x, w, target, bias = case.operands.values()
    loss = linear_cross_entropy(x[1], w, target[1], bias=bias, label_smoothing=0.1, lean=lean)
    expected = F.cross_entropy(F.linear(x[1], w, bias), target[1], label_smoothing=0.1)
    torch.testing.assert_close(loss, expected)


@each_form
@each_reduction
def test_classes_that_a_bias_of_minus_infinity_rules_out(reduction, lean):
    case = example({"bias": True, **reduction}, classes=31)
    case.operands["bias"][10:24] = -torch.inf
    case.operands["bias"][:3] = -torch.inf
    target = case.operands["target"]
    target[target >= 0] = 24 + target[target >= 0] % 7
    actual, expected = case.both(lean=lean, chunk=4)
    assert_equal(actual, expected)
    assert all(value.isfinite().all() for value in actual)


# --- rows that don't count ------------------------------------------------------------------------


@each_form
@each_option
@each_reduction
def test_a_row_that_is_ignored_has_no_gradient_and_no_influence(reduction, options, lean):
    case = example({**options, **reduction})
    ignored = case.operands["target"] == -100
    first = case.run(linear_cross_entropy, lean=lean, chunk=4)
    assert (first[1][ignored] == 0).all()
    other = {**case.operands, "x": case.operands["x"].clone()}
    other["x"][ignored] = 3 * torch.randn_like(other["x"][ignored])
    second = Example(other, case.options).run(linear_cross_entropy, lean=lean, chunk=4)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[2], second[2])


@each_form
@each_reduction
@pytest.mark.parametrize("rows", [0, 6])
def test_05_nothing_that_counts(rows, reduction, lean):
    """0, but for the mean, which is NaN as torch's; gradients are 0."""
    case = example({**EVERYTHING, **reduction}, rows)
    case.operands["target"].fill_(-100)
    loss, *gradients = case.run(linear_cross_entropy, lean=lean)
    alone = reduction == {"reduction": "mean"}
    assert torch.equal(loss.isnan(), torch.full_like(loss, alone, dtype=torch.bool))
    assert alone or (loss == 0).all()
    assert all((gradient == 0).all() for gradient in gradients)


@each_form
def test_a_mean_over_weights_of_zero_is_nan(lean):
    x, w, target = example({}).operands.values()
    zero = torch.zeros(9, dtype=torch.float64)
    assert F.cross_entropy(F.linear(x, w), target, zero).isnan()
    assert linear_cross_entropy(x, w, target, weight=zero, lean=lean).isnan()


@each_form
@each_option
def test_a_class_that_does_not_exist_is_nan_where_nothing_may_be_waited_for(
    options, lean, monkeypatch
):
    monkeypatch.setattr(Batch, "check_range", lambda self: None)  # as on a GPU
    case = example({**options, "reduction": "none"})
    wrong = torch.tensor([1, 5, 6])
    case.operands["target"][wrong] = torch.tensor([-1, 9, 2**40])
    losses, dx, *others = case.run(linear_cross_entropy, lean=lean, chunk=4)
    assert torch.equal(losses.isnan().nonzero()[:, 0], wrong)
    assert (dx[wrong] == 0).all()
    left = torch.ones(13, dtype=torch.bool).index_fill_(0, wrong, False)
    assert_equal([losses[left]], [oracle_of_rows(case, left)])
    assert all(value.isfinite().all() for value in (dx, others[0]))


def oracle_of_rows(case, rows):
    """The oracle's losses of some rows."""
    of_rows = ("x", "target", "token_weights")
    operands = {n: v[rows] if n in of_rows else v for n, v in case.operands.items()}
    return oracle(**operands, **case.options)


@each_form
@each_option
def test_a_class_that_does_not_exist_raises_on_a_cpu(options, lean):
    case = example(options)
    case.operands["target"][1] = 9
    with pytest.raises(IndexError, match=r"target 9 is outside of \[0, 9\)"):
        case.run(linear_cross_entropy, lean=lean)


# --- torch's other modes --------------------------------------------------------------------------


@each_form
@each_option
def test_autocast_is_that_of_linear(options, lean):
    case = example({**options, "reduction": "none"}, 65, 16, 40, torch.float32)
    exact = case.run(oracle, torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        actual, own = case.both(lean=lean, chunk=16)
    assert [a.dtype for a in actual] == [torch.float32] * len(actual)
    for value, oracle_value, by_torch in zip(actual, exact, own, strict=True):
        assert_close(value, oracle_value, by_torch)


@pytest.mark.slow
@each_form
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_opcheck(reduction, lean):
    terms = {"ignore_index": -100, "label_smoothing": 0.1, "z_loss": 0.01, "softcap": 2.0}
    given = {n: v.requires_grad_(n in TRAINED) for n, v in example(EVERYTHING).operands.items()}
    x, w, target = (given.pop(name) for name in ("x", "w", "target"))
    operands = cross_entropy._operands(x, w, target, given, terms)
    operation = torch.ops.cadenza.cross_entropy_sum.default
    if lean or reduction == "none":
        del operands["token_weights"]
        both = torch.ops.cadenza.cross_entropy_rows, torch.ops.cadenza.cross_entropy_lean
        operation = both[lean].default
    call = cross_entropy._call(tuple(operands), tuple(terms.items()), None)
    needed = (7,) if operation is torch.ops.cadenza.cross_entropy_sum.default else ()
    torch.library.opcheck(operation, (list(operands.values()), call, 4, *needed))


@pytest.mark.slow
@each_form
@each_reduction
def test_torch_compile_in_one_graph(reduction, lean):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend=counter)
    for rows in (5, 6, 23, 40):
        options = dict(reduction)
        if "num_items_in_batch" in options:
            options["num_items_in_batch"] = torch.tensor(rows - 1)
        case = example({**EVERYTHING, **options}, rows)
        assert_equal(case.run(compiled, lean=lean, chunk=8), case.run(oracle))
    assert counter.frame_count <= 2


@pytest.mark.slow
def test_torch_compile_when_options_and_the_number_of_items_change():
    torch._dynamo.reset()
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager")
    for smoothing, number in ((0.1, 5), (0.1, 6), (0.2, 7), (0.3, 7.5)):
        case = example({"label_smoothing": smoothing, "num_items_in_batch": number})
        assert_equal(case.run(compiled), case.run(oracle))
