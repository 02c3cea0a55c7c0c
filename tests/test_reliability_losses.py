"""Faults of other libraries' losses, one test a number of docs/reliability.md.

Where a whole suite already holds a number, docs/reliability.md names it, and nothing here repeats
it. All run on the reference back end; tests/gpu/test_gpu_reliability.py has those of kernels.
"""

import pytest
import torch
import torch._dynamo.testing
from block_operands import operands
from loss_options import (
    EVERYTHING,
    REDUCTIONS,
    TRAINED,
    Example,
    each_form,
    each_reduction,
    example,
    oracle,
)
from programs import assert_close, labelled
from test_blocks import results
from torch import nn
from torch.nn import functional as F
from unwritten import unwritten_is_nan

import cadenza as cz
from cadenza.library.blocks import BUILT_IN

linear_cross_entropy = cz.ops.linear_cross_entropy
HALVES = [torch.bfloat16, torch.float16]
each_half = pytest.mark.parametrize("dtype", HALVES, ids=str)


# --- numbers --------------------------------------------------------------------------------------


@each_form
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_01_gradients_of_many_chunks_are_as_exact_as_torchs(reduction, lean):
    """256 chunks: a bfloat16 sum over them would have lost most of what it is given."""
    rows, classes = (16, 512) if lean else (512, 16)
    case = example({"bias": True, "reduction": reduction}, rows, 8, classes, torch.bfloat16)
    found = case.run(linear_cross_entropy, lean=lean, chunk=2)
    exact, own = case.run(oracle, torch.float64), case.run(oracle)
    for value, by_float64, by_torch in zip(found, exact, own, strict=True):
        assert_close(value, by_float64, by_torch)


@each_form
@each_half
@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("height", [4.0, 8.0, 12.0])
def test_02_a_confident_row_keeps_the_gradient_of_its_class(height, reduction, dtype, lean):
    """Of the identity as weight, dx is p − 1 itself: each element is right to a rounding.

    p rounds to 1 in these dtypes; the 8 units of float32 are what exp and − 1 may lose.
    """
    case = Example(
        {"x": height * torch.eye(8, dtype=dtype), "w": torch.eye(8, dtype=dtype),
         "target": torch.arange(8)}, {"reduction": reduction},
    )  # fmt: skip
    _, dx, dw = case.run(linear_cross_entropy, lean=lean, chunk=3)
    _, exact, exact_dw = case.run(oracle, torch.float64)
    bound, least = 2.0 * torch.finfo(dtype).eps, 8 * torch.finfo(torch.float32).eps
    torch.testing.assert_close(dx.double(), exact, rtol=bound, atol=least)
    torch.testing.assert_close(dw.double(), exact_dw, rtol=bound, atol=least * height)
    assert (dx.diagonal() != 0).all()


@each_form
@pytest.mark.parametrize("chunk", [3, 64])
def test_03_the_gradients_of_a_token_are_those_of_its_own_loss(chunk, lean):
    """Of tokens that several chunks hold; what comes in for the others, nothing, adds nothing."""
    case = example({**EVERYTHING, "reduction": "none"}, rows=8)
    leaves = [v.requires_grad_() for n, v in case.operands.items() if n in TRAINED]
    single = example({**EVERYTHING, "reduction": "sum"}, rows=8).options
    loss = linear_cross_entropy(**case.operands, **case.options, lean=lean, chunk=chunk)
    for token in range(8):
        upstream = torch.zeros(8, dtype=loss.dtype)
        upstream[token] = 3.0
        found = torch.autograd.grad(loss, leaves, upstream, retain_graph=True)
        rows = {"x", "target", "token_weights"}
        own = {n: v[token : token + 1] if n in rows else v for n, v in case.operands.items()}
        expected = torch.autograd.grad(3.0 * oracle(**own, **single), leaves)
        for value, exact in zip(found, expected, strict=True):
            torch.testing.assert_close(value, exact, rtol=1e-10, atol=1e-12)


# --- rows that don't count ------------------------------------------------------------------------


def ignoring(where, rows=24):
    """A call of which these rows don't count; chunks of 4 rows are ignored whole."""
    case = example({"bias": True, "token_weights": True}, rows)
    case.operands["target"] = torch.randint(0, 9, (rows,))
    case.operands["target"][where] = -100
    return case.operands


IGNORED = {"first chunk": slice(0, 4), "last chunk": slice(20, 24), "every other": slice(0, 24, 2)}


@each_form
@each_reduction
@pytest.mark.parametrize("where", IGNORED.values(), ids=IGNORED)
def test_04_what_no_row_writes_is_never_read(where, reduction, lean):
    case = Example(ignoring(where), reduction)
    with unwritten_is_nan():
        found = case.run(linear_cross_entropy, lean=lean, chunk=4)
    for value, expected in zip(found, case.run(oracle), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("lean", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["sum", "none"])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_04_compiled_with_ignored_rows_is_eager_bit_by_bit(backend, name, lean):
    torch._dynamo.reset()
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend=backend)
    for where in IGNORED.values():
        case = Example(ignoring(where), REDUCTIONS[name])
        with unwritten_is_nan():
            found = case.run(compiled, lean=lean, chunk=4)
        expected = case.run(linear_cross_entropy, lean=lean, chunk=4)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_04_compiled_sums_over_many_rows_are_eager_bit_by_bit(reduction, lean):
    torch._dynamo.reset()
    compiled = torch.compile(linear_cross_entropy, fullgraph=True)
    x, w = torch.randn(20011, 8, requires_grad=True), torch.randn(16, 8, requires_grad=True)
    options = {"reduction": reduction, "weight": torch.rand(16), "lean": lean}
    target = torch.randint(16, (20011,))
    found, expected = (
        (loss := function(x, w, target, **options), *torch.autograd.grad(loss, (x, w)))
        for function in (compiled, linear_cross_entropy)
    )
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_04_blocks_read_nothing_that_they_did_not_write(name):
    block, arguments = BUILT_IN[name], operands(name, 13)
    upstream = {n: torch.randn_like(y) for n, y in labelled(block(**arguments)).items()}
    expected = results(block, arguments, upstream)
    with unwritten_is_nan():
        found = results(block, arguments, upstream)
    assert all(torch.equal(found[label], value) for label, value in expected.items())


# --- what all logits have in common ---------------------------------------------------------------


@each_form
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("height", [2.0**12, -(2.0**20)])
def test_09_gradients_do_not_see_a_common_offset(height, smoothing, lean):
    """Of whole numbers, so that the offset rounds no logit away."""
    x, w = torch.randint(-2, 3, (37, 11)).float(), torch.randint(-2, 3, (23, 11)).float()
    given = {"x": x, "w": w, "target": torch.randint(0, 23, (37,)), "bias": torch.zeros(23)}
    options = {"reduction": "none", "label_smoothing": smoothing}
    level = Example(given, options).run(linear_cross_entropy, lean=lean, chunk=5)
    raised = Example(given | {"bias": torch.full((23,), height)}, options)
    found = raised.run(linear_cross_entropy, lean=lean, chunk=5)
    for value, expected in zip(found, level, strict=True):
        torch.testing.assert_close(value, expected, rtol=2e-6, atol=2e-6)


# --- no approximation -----------------------------------------------------------------------------


@each_form
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_10_the_least_likely_classes_keep_their_gradients(reduction, lean):
    """Probabilities down to 1e-13: what filters gradients by size would leave rows of dw at 0."""
    classes = 32
    w = -torch.arange(classes, dtype=torch.float32)[:, None]
    given = {"x": torch.ones(6, 1), "w": w, "target": torch.zeros(6, dtype=torch.int64)}
    _, _, dw = Example(given, {"reduction": reduction}).run(linear_cross_entropy, lean=lean)
    _, _, exact = Example(given, {"reduction": reduction}).run(oracle, torch.float64)
    torch.testing.assert_close(dw[1:].double(), exact[1:], rtol=2e-5, atol=0.0)
    assert 0 < exact[1:].abs().min() < 1e-11


# --- numbers of rows ------------------------------------------------------------------------------


@each_form
@each_reduction
@pytest.mark.parametrize("rows", [1, 127, 129, 8191])
def test_18_numbers_of_rows_around_tiles(rows, reduction, lean):
    case = example({**reduction, "bias": True}, rows, 3, 5)
    case.operands["target"][0] = 4
    found, expected = case.both(lean=lean, chunk=None if lean else 128)
    for value, other in zip(found, expected, strict=True):
        torch.testing.assert_close(value, other, rtol=1e-11, atol=1e-11)


# --- tied weights ---------------------------------------------------------------------------------


class Tied(nn.Module):
    """A model of nothing but an embedding and a head of its weight."""

    def __init__(self, head):
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 5), head
        self.head.weight = self.embedding.weight

    def forward(self, tokens, targets):
        x = torch.tanh(self.embedding(tokens))
        if isinstance(self.head, nn.Linear):
            return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())
        return self.head(x, targets)


@each_form
def test_21_a_tie_survives_saving_and_loading(lean, tmp_path):
    ours = Tied(cz.nn.LinearCrossEntropy(5, 9, lean=lean)).double()
    torch.save(ours.state_dict(), tmp_path / "state")
    again = Tied(cz.nn.LinearCrossEntropy(5, 9, lean=lean)).double()
    stock = Tied(nn.Linear(5, 9, bias=False)).double()
    for model in (again, stock):
        model.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    assert again.head.weight is again.embedding.weight
    assert [n for n, _ in again.named_parameters()] == ["embedding.weight"]
    assert list(again.state_dict()) == list(stock.state_dict())
    tokens = torch.randint(0, 9, (2, 6))
    for model in (again, stock):
        model(tokens, tokens.roll(-1, 1)).backward()
    torch.testing.assert_close(again.embedding.weight.grad, stock.embedding.weight.grad)


# --- one configuration, one result ----------------------------------------------------------------


@each_form
@each_reduction
def test_23_two_runs_are_equal_bit_by_bit(reduction, lean):
    case = example({**reduction, "bias": True, "z_loss": 0.01}, 61, 8, 33, torch.float32)
    first, second = (case.run(linear_cross_entropy, lean=lean, chunk=16) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
