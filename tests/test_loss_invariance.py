"""What changes nothing about linear_cross_entropy, whatever its options, and what gets a gradient.

The order of tokens, how they are cut, strides, a common offset; frozen operands, tied ones, steps
of accumulation.
"""

import pytest
import torch
from loss_options import (
    EVERYTHING,
    TRAINED,
    Example,
    assert_equal,
    each_form,
    each_reduction,
    example,
    oracle,
)
from programs import error_of
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import cadenza as cz
from cadenza.core.errors import CadenzaError

linear_cross_entropy = cz.ops.linear_cross_entropy


# --- what changes nothing -------------------------------------------------------------------------


@each_form
@each_reduction
def test_the_order_of_tokens(reduction, lean):
    case, order = example({**EVERYTHING, **reduction}), torch.randperm(13)
    of_rows = ("x", "target", "token_weights")
    turned = {n: v[order] if n in of_rows else v for n, v in case.operands.items()}
    loss, dx, dw, *_ = case.run(linear_cross_entropy, lean=lean, chunk=4)
    if reduction == {"reduction": "none"}:
        x, w = (case.operands[name].requires_grad_() for name in ("x", "w"))
        turned |= {"x": x[order], "w": w}
        again = linear_cross_entropy(**turned, **case.options, lean=lean, chunk=4)
        assert_equal([again], [loss[order]])
        return
    again, dx_again, dw_again, *_ = Example(turned, case.options).run(
        linear_cross_entropy, lean=lean, chunk=4
    )
    assert_equal([again, dx_again, dw_again], [loss, dx[order], dw])


@each_form
@each_reduction
def test_the_size_of_chunks(reduction, lean):
    case = example({**EVERYTHING, **reduction})
    whole = case.run(linear_cross_entropy, lean=lean)
    for chunk in (1, 2, 5, 8, 9, 12, 13, 14, 100):
        assert_equal(case.run(linear_cross_entropy, lean=lean, chunk=chunk), whole)


@each_form
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_common_offset_of_the_logits(smoothing, lean):
    """Of whole numbers, so that no product rounds whatever its order."""
    target = torch.randint(0, 23, (37,))
    x, w = torch.randint(-2, 3, (37, 11)).float(), torch.randint(-2, 3, (23, 11)).float()
    shifted = torch.cat((x, torch.ones(37, 1)), 1)
    lifted = torch.cat((w, 2.0**20 * torch.ones(23, 1)), 1)
    options = {"reduction": "none", "label_smoothing": smoothing}
    expected = F.cross_entropy(F.linear(x, w).double(), target, **options)
    actual = linear_cross_entropy(shifted, lifted, target, lean=lean, chunk=5, **options)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-6, atol=1e-6)


@each_form
def test_logits_near_the_cap_keep_their_gradient(lean):
    """1 - tanh² is formed of the logits, not of what was rounded near the cap: 1.8 of the error."""
    case = example({"softcap": 3.0, "reduction": "none"}, 129, 32, 101, torch.bfloat16)
    case.operands["x"] *= 8
    actual = case.run(linear_cross_entropy, lean=lean, chunk=40)
    exact, own = case.run(oracle, torch.float64), case.run(oracle)
    for value, oracle_value, by_torch in zip(actual, exact, own, strict=True):
        assert error_of(value, oracle_value) <= 1.2 * error_of(by_torch, oracle_value)


@each_form
@each_reduction
def test_inputs_and_incoming_gradients_are_left_as_they_are(reduction, lean):
    case = example({**EVERYTHING, **reduction})
    given = {n: v.clone().requires_grad_(n in TRAINED) for n, v in case.operands.items()}
    loss = linear_cross_entropy(**given, **case.options, lean=lean, chunk=4)
    upstream = torch.ones_like(loss)
    loss.backward(upstream)
    assert all(value._version == 0 for value in (*given.values(), upstream))
    assert (upstream == 1).all()


@each_form
def test_strides_of_inputs_and_of_the_incoming_gradient(lean):
    case = example({**EVERYTHING, "reduction": "none"})
    expected = case.run(linear_cross_entropy, lean=lean, chunk=4)
    strided = {
        "x": case.operands["x"].T.clone().T,
        "w": torch.stack((case.operands["w"],) * 2, -1)[..., 0],
        "target": case.operands["target"].repeat_interleave(2)[::2],
        "bias": case.operands["bias"].repeat_interleave(3)[::3],
        "weight": case.operands["weight"].repeat_interleave(2)[::2],
        "token_weights": torch.stack((case.operands["token_weights"],) * 2, -1)[:, 0],
    }
    values = {n: v.requires_grad_(n in TRAINED) for n, v in strided.items()}
    trained = [values[name] for name in ("x", "w", "bias", "token_weights")]
    loss = linear_cross_entropy(**values, **case.options, lean=lean, chunk=4)
    assert_equal([loss], expected[:1])
    one = torch.autograd.grad(loss.sum(), trained, retain_graph=True)  # of stride 0
    assert_equal(one, torch.autograd.grad(loss, trained, torch.ones(13, dtype=loss.dtype)))


# --- what gets a gradient, and how often ----------------------------------------------------------


@each_form
@each_reduction
@pytest.mark.parametrize("wanted", [[], ["x"], ["w"], ["bias"], ["token_weights"], ["x", "bias"]])
def test_only_what_requires_a_gradient_gets_one(wanted, reduction, lean):
    case = example({**EVERYTHING, **reduction})
    given = {n: v.clone().requires_grad_(n in wanted) for n, v in case.operands.items()}
    loss = linear_cross_entropy(**given, **case.options, lean=lean, chunk=4)
    assert loss.requires_grad == bool(wanted)
    if wanted:
        loss.sum().backward()
    expected = dict(zip(TRAINED, full_gradients(case), strict=True))
    for name, value in given.items():
        assert (value.grad is not None) == (name in wanted)
        if name in wanted:
            assert_equal([value.grad], [expected[name]])


def full_gradients(case):
    """The oracle's gradients of all that can be trained, for an incoming gradient of ones."""
    given = {n: v.clone().requires_grad_(n in TRAINED) for n, v in case.operands.items()}
    loss = oracle(**given, **case.options).sum()
    return torch.autograd.grad(loss, [given[name] for name in TRAINED])


@each_form
@each_reduction
def test_second_backward_is_equal_and_double_backward_raises(reduction, lean):
    case = example({**EVERYTHING, **reduction})
    given = {n: v.requires_grad_(n in TRAINED) for n, v in case.operands.items()}
    trained = [given[name] for name in TRAINED]
    loss = linear_cross_entropy(**given, **case.options, lean=lean, chunk=4).sum()
    first = torch.autograd.grad(loss, trained, retain_graph=True)
    second = torch.autograd.grad(loss, trained, create_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(CadenzaError, match="can be differentiated once"):
        second[0].sum().backward()


@each_form
def test_a_tied_embedding_gets_both_gradients_once(lean):
    tokens = torch.randint(0, 9, (4, 6))

    def gradient(function, **own):
        torch.manual_seed(1)
        table = torch.randn(9, 5, dtype=torch.float64, requires_grad=True)
        x = torch.tanh(F.embedding(tokens, table))
        function(x, table, tokens.roll(-1, 1), z_loss=0.01, **own).backward()
        return table.grad

    assert_equal([gradient(linear_cross_entropy, lean=lean, chunk=4)], [gradient(oracle)])


# --- the number of items --------------------------------------------------------------------------


@each_form
@pytest.mark.parametrize("number", [7, 7.5, torch.tensor(7), torch.tensor(7.5)], ids=repr)
def test_the_number_of_items_divides_the_sum(number, lean):
    case = example({"bias": True, "num_items_in_batch": number})
    actual, expected = case.both(lean=lean)
    assert_equal(actual, expected)


@each_form
@pytest.mark.parametrize("number", [0, 0.0, torch.tensor(0)], ids=repr)
@pytest.mark.parametrize("ignored", [True, False])
def test_no_item_at_all_is_a_loss_of_zero(ignored, number, lean):
    """Whether or not there are rows that would count."""
    case = example({"num_items_in_batch": number})
    if ignored:
        case.operands["target"].fill_(-100)
    loss, *gradients = case.run(linear_cross_entropy, lean=lean)
    assert loss == 0
    assert all((gradient == 0).all() for gradient in gradients)


@each_form
def test_accumulation_over_uneven_steps_equals_one_batch(lean):
    x, w, target = example({}, rows=20).operands.values()
    number = (target != -100).sum()
    steps = [slice(0, 3), slice(3, 11), slice(11, 20)]
    assert len({int((target[step] != -100).sum()) for step in steps}) == 3

    def gradient(parts, **own):
        weight = w.clone().requires_grad_()
        for part in parts:
            linear_cross_entropy(x[part], weight, target[part], lean=lean, **own).backward()
        return weight.grad

    accumulated = gradient(steps, num_items_in_batch=number)
    assert_equal([accumulated], [gradient([slice(None)])])


@each_form
@each_reduction
def test_no_value_is_waited_for(reduction, lean):
    """A fake tensor raises where its value is asked for, as a number or to decide something."""
    case = example({**EVERYTHING, **reduction})
    options = case.options
    with FakeTensorMode() as mode:
        fake = {n: mode.from_tensor(v) for n, v in case.operands.items()}
        if "num_items_in_batch" in options:
            options["num_items_in_batch"] = (fake["target"] != -100).sum()
        trained = [fake[name].requires_grad_() for name in TRAINED]
        loss = linear_cross_entropy(**fake, **options, lean=lean)
        gradients = torch.autograd.grad(loss.sum(), trained)
    assert [g.shape for g in gradients] == [case.operands[n].shape for n in TRAINED]
