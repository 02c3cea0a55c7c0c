"""Shapes and layouts: leading dimensions, numbers of rows, strides, and no rows at all.

Values are compared with the program's `plain` form on contiguous copies, gradients too; incoming
gradients come in every layout that losses and masks make.
"""

import pytest
import torch
from citizens import (
    CASES,
    K,
    N,
    gradients,
    mlp,
    norm_swiglu,
    same,
    summary,
    tensor,
    values,
)

from cadenza import block
from cadenza import lang as L

each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
ROWS = [1, 2, 127, 128, 129, 8191]


EXACT = {"rtol": 1e-9, "atol": 1e-9}


def close(first, second) -> bool:
    """Whether float64 tensors are equal but for the order of sums."""
    return all(torch.allclose(a, b, **EXACT) for a, b in zip(first, second, strict=True))


def agrees_with_plain(case, operands, contiguous=None) -> None:
    """Outputs and gradients of the program equal those of plain torch operations."""
    contiguous = contiguous or operands
    outputs = case.call(operands)
    plain = case.call(contiguous, case.program.plain)
    for mine, other in zip(values(outputs), values(plain), strict=True):
        assert mine.shape == other.shape
        wide = other.dtype == torch.float64
        assert torch.allclose(mine, other, **EXACT) if wide else same(mine, other)
    found, expected = gradients(outputs, operands), gradients(plain, contiguous)
    for name, gradient in found.items():
        assert gradient.shape == operands[name].shape
        assert torch.allclose(gradient, expected[name], **EXACT), name


# --- leading dimensions and rows ------------------------------------------------------------------


@each_case
@pytest.mark.parametrize("lead", [(), (1,), (4,), (1, 1), (3, 5), (5, 1), (2, 3, 4)], ids=str)
def test_leading_dimensions_become_rows_and_come_back(case, lead):
    agrees_with_plain(case, case.operands(lead, dtype=torch.float64))


@pytest.mark.parametrize("lead", [(), (1,), (4,), (3, 5), (2, 3, 4)], ids=str)
def test_outputs_have_the_leading_dimensions_of_the_inputs(lead):
    outputs = summary(**CASES["dict"].operands(lead))
    expected = {"y": N, "picked": 1, "mask": N, "index": 1, "half": N, "x": K}
    assert outputs.pop("total").shape == (1, N)
    if not lead:  # a whole number alone is a scalar
        assert outputs.pop("index").shape == (1, 1)
    assert {n: o.shape for n, o in outputs.items()} == {n: (*lead, expected[n]) for n in outputs}


@each_case
@pytest.mark.parametrize("rows", ROWS)
def test_any_number_of_rows(case, rows):
    agrees_with_plain(case, case.operands((rows,), dtype=torch.float64))


@pytest.mark.parametrize("rows", [K, N, N * K], ids=str)
def test_as_many_rows_as_a_weight_has(rows):
    for case in CASES.values():
        agrees_with_plain(case, case.operands((rows,), dtype=torch.float64))


@pytest.mark.parametrize("columns", [1, 3, 7, 17, 33])
def test_17_odd_numbers_of_columns(columns):
    operands = {
        "x": tensor(5, columns, dtype=torch.float64),
        "w_in": tensor(2 * columns + 1, columns, dtype=torch.float64),
        "bias": tensor(2 * columns + 1, dtype=torch.float64),
        "w_out": tensor(columns, 2 * columns + 1, dtype=torch.float64),
    }
    agrees_with_plain(CASES["tuple"], operands)


# --- no rows --------------------------------------------------------------------------------------


@each_case
@pytest.mark.parametrize("lead", [(0,), (0, 5), (3, 0), (2, 0, 4)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_empty_batch_has_empty_results_and_zero_gradients(case, lead, dtype):
    operands = case.operands(lead, dtype=dtype)
    like = values(case.call(case.operands((*lead[:-1], 7), dtype=dtype)))
    outputs = values(case.call(operands))
    for output, full in zip(outputs, like, strict=True):
        assert output.dtype == full.dtype
        assert output.shape in ((*lead, full.shape[-1]), (1, full.shape[-1]))
    assert all(o.numel() == 0 or not o.any() for o in outputs)
    sum(o.double().sum() for o in outputs if o.requires_grad).backward()
    for operand in operands.values():
        if operand.requires_grad:
            assert same(operand.grad, torch.zeros_like(operand))


@pytest.mark.parametrize("reduce", [L.row_sum, L.row_max, L.logsumexp, L.row_variance])
def test_reductions_of_no_rows(reduce):
    @block
    def reduced(x, w):
        return x * reduce(L.linear(x, w)), L.column_sum(x)

    operands = {"x": tensor(0, K), "w": tensor(N, K)}
    scaled, total = reduced(**operands)
    assert (scaled.shape, total.tolist()) == ((0, K), [[0.0] * K])
    assert same(gradients((scaled, total), operands), {n: o * 0 for n, o in operands.items()})


# --- strides --------------------------------------------------------------------------------------


def transposed(t):
    return t.transpose(0, -1).contiguous().transpose(0, -1) if t.dim() > 1 else t


def sliced(t):
    """Every second row and column of a larger tensor, from the second on."""
    larger = t.new_full([2 * s + 3 for s in t.shape], 99)
    place = larger[tuple(slice(1, 2 * s + 1, 2) for s in t.shape)]
    return place.copy_(t)


def padded(t):
    """Rows further apart than they are long: stride(-1) is 1."""
    larger = t.new_full([s + 5 for s in t.shape], 99)
    return larger[tuple(slice(2, s + 2) for s in t.shape)].copy_(t)


def expanded(t):
    return t[:1].expand(t.shape)


def permuted(t):
    """stride(-1) is 1, but the rows' dimensions are in another order."""
    order = [*reversed(range(t.dim() - 1)), t.dim() - 1]
    return t.permute(order).contiguous().permute(order) if t.dim() > 2 else t


def negated(t):
    """A lazy negation: the bit says that the memory holds the opposite."""
    return torch._neg_view(-t)


LAYOUTS = [transposed, sliced, padded, expanded, permuted, negated]


@each_case
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("lead", [(6,), (2, 3, 5)], ids=str)
def test_15_inputs_of_any_layout(case, layout, lead):
    operands = case.operands(lead, dtype=torch.float64, grad=False)
    strided = {n: layout(o) if o.is_floating_point() else o for n, o in operands.items()}
    if layout is not negated and "index" in operands:
        strided["index"] = layout(operands["index"])
    copies = {n: o.clone(memory_format=torch.contiguous_format) for n, o in strided.items()}
    for name, operand in operands.items():
        strided[name].requires_grad_(operand.is_floating_point())
        copies[name].requires_grad_(operand.is_floating_point())
    agrees_with_plain(case, strided, copies)


@each_case
@pytest.mark.parametrize("layout", LAYOUTS)
def test_incoming_gradients_of_any_layout(case, layout):
    operands = case.operands((3, 5), dtype=torch.float64)
    leaves = [o for o in operands.values() if o.requires_grad]
    outputs = [o for o in values(case.call(operands)) if o.requires_grad]
    incoming = [layout(torch.randn_like(o)) for o in outputs]
    copies = [g.clone(memory_format=torch.contiguous_format) for g in incoming]
    found = torch.autograd.grad(outputs, leaves, incoming, retain_graph=True)
    assert same(found, torch.autograd.grad(outputs, leaves, copies))


@each_case
def test_14_the_gradient_of_a_plain_sum_has_no_strides(case):
    operands = case.operands((3, 5), dtype=torch.float64)
    outputs = [o for o in values(case.call(operands)) if o.requires_grad]
    strides = []
    outputs[0].register_hook(lambda g: strides.append(g.stride()))
    outputs[0].sum().backward()
    assert set(strides[0]) == {0}
    plain = [o for o in values(case.call(operands, case.program.plain)) if o.requires_grad]
    leaves = [n for n, o in operands.items() if o.grad is not None]
    expected = torch.autograd.grad(
        plain[0].sum(), [operands[n] for n in leaves], materialize_grads=True
    )
    assert close([operands[n].grad for n in leaves], expected)


def test_14_masked_and_sliced_outputs_hand_on_strided_gradients():
    operands = CASES["epilogue"].operands((4, 6), dtype=torch.float64)
    leaves = list(operands.values())
    mask = torch.rand(4, 6, N // 2) > 0.5
    for reduced in (
        lambda y: y[:, ::2].square().sum(),
        lambda y: y[mask].exp().sum(),
        lambda y: y.transpose(0, 2).reshape(-1).cumsum(0).sum(),
        lambda y: y[..., 0].sum() + y.mean(),
    ):
        ours = torch.autograd.grad(reduced(CASES["epilogue"].call(operands)), leaves)
        plain = reduced(CASES["epilogue"].call(operands, norm_swiglu.plain))
        assert close(ours, torch.autograd.grad(plain, leaves))


def test_outputs_and_gradients_are_contiguous():
    operands = CASES["tuple"].operands((6,), grad=False)
    operands = {n: transposed(o).requires_grad_() for n, o in operands.items()}
    outputs = mlp(**operands)
    assert all(o.is_contiguous() for o in outputs)
    assert all(g.is_contiguous() for g in gradients(outputs, operands).values())
