"""Faults of other libraries' losses, by numbers of docs/reliability.md, on a GPU.

Every form and reduction by kernels: values and gradients, what is not written or read, numbers of
rows, runs that are equal, graphs that are captured, memory.
"""

import pytest
import torch
from block_operands import cast
from calls import BRAIN, HALF, SINGLE, check_same, launches, poison_free_memory
from loss_options import EVERYTHING, REDUCTIONS, Example, each_form, each_reduction, example, oracle
from programs import assert_close
from test_gpu_memory import free_bytes

import cadenza as cz
from cadenza.core.errors import BackEndError
from cadenza.library.loss_batch import Batch

pytestmark = pytest.mark.gpu
PAST = 2**31
linear_cross_entropy = cz.ops.linear_cross_entropy


def loss_case(place, options, dtype=None, rows=300, classes=1000, width=128):
    """A call of the loss on a device; tiny, in float32, where it is interpreted."""
    dtype = SINGLE if place.interpreted else dtype or BRAIN
    sizes = (19, 16, 41) if place.interpreted else (rows, width, classes)
    with torch.device(place.device):
        return example(options, *sizes, dtype)


def run(place, case, function=linear_cross_entropy, **own):
    """Loss and gradients; the generator of incoming gradients is the CPU's."""
    given = {n: v.detach().clone() for n, v in case.operands.items()}
    names = [n for n in ("x", "w", "bias", "token_weights") if n in given]
    leaves = [given[n].requires_grad_() for n in names]
    loss = function(**given, **case.options, **own)
    upstream = torch.randn(loss.shape, generator=torch.Generator().manual_seed(7))
    gradients = torch.autograd.grad(loss, leaves, upstream.to(loss))
    return dict(zip(("loss", *names), (loss.detach(), *gradients), strict=True))


# --- values of losses -----------------------------------------------------------------------------


@pytest.mark.interpreted
@each_form
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_01_gradients_of_many_chunks_are_as_exact_as_torchs(reduction, lean, place):
    """512 chunks: a bfloat16 sum over them would have lost most of what it is given."""
    rows, classes = (64, 4096) if lean else (4096, 64)
    case = loss_case(place, {"bias": True, "reduction": reduction}, None, rows, classes)
    wide = Example(cast(case.operands, torch.float64), case.options)
    exact, own = run(place, wide, oracle), run(place, case, oracle)
    for name, value in run(place, case, lean=lean, chunk=2 if place.interpreted else 8).items():
        assert_close(value, exact[name], own[name])


SOME = {"bias": True, "label_smoothing": 0.1, "z_loss": 1e-3}
CASES = {"even": (1000, SOME), "odd": (1003, SOME), "every term": (1000, EVERYTHING)}


@pytest.mark.interpreted
@each_form
@pytest.mark.parametrize("dtype", [BRAIN, HALF, SINGLE], ids=str)
@each_reduction
@pytest.mark.parametrize(("classes", "terms"), CASES.values(), ids=CASES)
def test_03_gradients_for_random_incoming_ones(classes, terms, reduction, dtype, lean, place):
    """Of many chunks, ignored rows among them; 1003 columns are not a multiple of anything."""
    case = loss_case(place, {**terms, **reduction}, dtype, classes=classes)
    wide = Example(cast(case.operands, torch.float64), case.options)
    exact, own = run(place, wide, oracle), run(place, case, oracle)
    for name, value in run(place, case, lean=lean, chunk=8 if place.interpreted else 64).items():
        assert_close(value, exact[name], own[name])


@pytest.mark.interpreted
@each_form
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_02_a_confident_row_keeps_the_gradient_of_its_class(reduction, lean, place):
    dtype = SINGLE if place.interpreted else BRAIN
    with torch.device(place.device):
        eye, target = torch.eye(64, dtype=dtype), torch.arange(64)
    case = Example({"x": 12 * eye, "w": eye, "target": target}, {"reduction": reduction})
    wide = Example(cast(case.operands, torch.float64), case.options)
    found, exact = run(place, case, lean=lean, chunk=24), run(place, wide, oracle)
    bound = 2.0 * torch.finfo(dtype).eps
    torch.testing.assert_close(found["x"].double(), exact["x"], rtol=bound, atol=1e-6)
    assert (found["x"].diagonal() != 0).all()


@pytest.mark.interpreted
@each_form
@each_reduction
def test_05_a_batch_in_which_no_target_counts(reduction, lean, place):
    """Losses are 0, but for the mean, which is NaN as torch's; gradients are 0."""
    case = loss_case(place, EVERYTHING | reduction)
    case.operands["target"].fill_(-100)
    found = run(place, case, lean=lean, chunk=64)
    loss = found.pop("loss")
    assert loss.isnan().all() if reduction == REDUCTIONS["mean"] else not loss.any()
    for name, gradient in found.items():
        assert not gradient.any(), name


@each_form
@pytest.mark.parametrize("name", ["sum", "none"])
@pytest.mark.parametrize("where", [slice(0, 64), slice(236, 300), slice(0, 300, 2)])
def test_04_compiled_with_ignored_rows_is_eager_bit_by_bit(where, name, lean, place):
    torch._dynamo.reset()
    compiled = torch.compile(linear_cross_entropy, fullgraph=True)
    case = loss_case(place, REDUCTIONS[name] | {"bias": True})
    case.operands["target"][:] = torch.arange(300, device=place.device)
    case.operands["target"][where] = -100
    expected = run(place, case, lean=lean, chunk=64)
    poison_free_memory(place.device)
    check_same(run(place, case, compiled, lean=lean, chunk=64), expected, "compiled")
    assert all(value.isfinite().all() for value in expected.values())


@pytest.mark.interpreted
@each_form
@each_reduction
def test_07_nothing_that_is_given_is_written(reduction, lean, place):
    case = loss_case(place, {"bias": True, "weight": True, "token_weights": True, **reduction})
    kept = {n: v.clone() for n, v in case.operands.items()}
    leaves = [case.operands[n].requires_grad_() for n in ("x", "w", "bias")]
    loss = linear_cross_entropy(**case.operands, **case.options, lean=lean, chunk=64)
    upstream = torch.randn_like(loss)
    before = upstream.clone()
    torch.autograd.grad(loss, leaves, upstream)
    given = {n: v.detach() for n, v in case.operands.items()}
    check_same(given | {"upstream": upstream}, kept | {"upstream": before}, "after backward")


@pytest.mark.interpreted
@each_form
@each_reduction
def test_08_a_second_backward_is_the_first_whatever_ran_between(reduction, lean, place):
    case, other = (loss_case(place, {"bias": True, **reduction}) for _ in range(2))
    leaves = [case.operands[n].requires_grad_() for n in ("x", "w", "bias")]
    loss = linear_cross_entropy(**case.operands, **case.options, lean=lean, chunk=64).sum()
    value = loss.detach().clone()
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    kept = {str(n): g.clone() for n, g in enumerate(first)}
    run(place, other, lean=lean, chunk=64)
    second = torch.autograd.grad(loss, leaves)
    for found in (first, second):
        check_same({str(n): g for n, g in enumerate(found)}, kept, "after another call")
    check_same({"loss": loss.detach()}, {"loss": value}, "after another call")


@pytest.mark.interpreted
@each_form
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_09_classes_that_do_not_exist_are_nan_and_never_read(smoothing, lean, place, monkeypatch):
    monkeypatch.setattr(Batch, "check_range", lambda self: None)  # as on a GPU
    case = loss_case(place, {"reduction": "none", "label_smoothing": smoothing})
    classes = case.operands["w"].shape[0]
    wrong = torch.tensor([1, 5, 6], device=place.device)
    case.operands["target"][wrong] = torch.tensor([-1, classes, 2**40], device=place.device)
    found = run(place, case, lean=lean, chunk=64)
    assert torch.equal(found["loss"].isnan().nonzero()[:, 0], wrong)
    assert not found["x"][wrong].any()
    assert found["x"].isfinite().all()
    assert found["w"].isfinite().all()


@pytest.mark.interpreted
@each_form
def test_09_gradients_do_not_see_a_common_offset(lean, place):
    case = loss_case(place, {"reduction": "none"}, SINGLE)
    whole = {n: case.operands[n].mul(2).round() for n in ("x", "w")}
    level = case.operands | whole
    level["bias"] = torch.zeros_like(level["w"][:, 0])
    raised = level | {"bias": torch.full_like(level["bias"], 2.0**14)}
    found, expected = (
        run(place, Example(given, case.options), lean=lean, chunk=64) for given in (raised, level)
    )
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.interpreted
@each_form
@each_reduction
@pytest.mark.parametrize("rows", [0, 1, 127, 129, 8191])
def test_18_numbers_of_tokens(rows, reduction, lean, place):
    rows = place.rows(rows)
    with torch.device(place.device):
        case = example({"bias": True, **reduction}, rows, 16, 41, SINGLE)
    with launches() as made:
        found = run(place, case, lean=lean, chunk=None)
    wide = Example(cast(case.operands, torch.float64), case.options)
    expected = run(place, wide, oracle)
    alone = lean or reduction == {"reduction": "none"}  # else dw is scaled, rows or not
    assert rows or not alone or not len(made), "a launch for nothing"
    for name, value in found.items():
        torch.testing.assert_close(
            value.double(), expected[name].double(), rtol=1e-4, atol=1e-4, equal_nan=True, msg=name
        )


@pytest.mark.alone
def test_16_a_sum_over_logits_of_more_than_2_to_the_31_elements(place):
    """One chunk of them, whose gradients forward has already; beside chunks that are smaller."""
    rows, width, classes = 40_000, 64, 65_536
    assert rows * classes > PAST
    if free_bytes() < 60e9:
        pytest.skip("needs 60 GB of a GPU's memory")
    case = loss_case(place, {"reduction": "sum"}, BRAIN, rows, classes, width)
    found, expected = (run(place, case, chunk=chunk) for chunk in (rows, 4096))
    for name, value in found.items():
        error = (value.double() - expected[name].double()).norm()
        assert error <= 2.0**-7 * expected[name].double().norm(), name


@pytest.mark.alone
def test_16_a_weight_gradient_of_more_than_2_to_the_31_elements(place):
    rows, columns, tokens = 65_536, 40_000, 64
    assert rows * columns > PAST
    if free_bytes() < 40e9:
        pytest.skip("needs 40 GB of a GPU's memory")
    x = torch.randn(tokens, columns, device=place.device).to(BRAIN)
    dy = torch.randn(tokens, rows, device=place.device).to(BRAIN)
    gradient = torch.full((rows, columns), 3.0, dtype=SINGLE, device=place.device)
    cz.ops.accumulate_weight_gradient(gradient, x, dy)
    for row in (0, PAST // columns - 1, PAST // columns + 1, rows - 1):
        exact = 3.0 + dy[:, row].double() @ x.double()
        assert (gradient[row].double() - exact).norm() <= 1e-5 * exact.norm(), row


@pytest.mark.alone
@each_form
def test_16_logits_of_more_than_2_to_the_31_elements(lean, place):
    """One chunk of them, so that every kernel of the loss counts that far."""
    rows, width, classes = 40_000, 64, 65_536
    assert rows * classes > PAST
    if free_bytes() < 60e9:
        pytest.skip("needs 60 GB of a GPU's memory")
    case = loss_case(place, {"reduction": "none"}, BRAIN, rows, classes, width)
    found = run(place, case, lean=lean, chunk=max(rows, classes))
    sample = torch.tensor([1, rows // 2 + 1, rows - 1], device=place.device)
    some = {n: v[sample] if n in ("x", "target") else v for n, v in case.operands.items()}
    wide = cast(some, torch.float64)
    logits = wide["x"] @ wide["w"].T
    loss = torch.nn.functional.cross_entropy(logits, some["target"], reduction="none")
    torch.testing.assert_close(found["loss"][sample].double(), loss, rtol=1e-2, atol=1e-2)
    in_chunks = run(place, case, lean=lean, chunk=4096)
    for name in ("x", "w"):
        error = (found[name].double() - in_chunks[name].double()).norm()
        assert error <= 2.0**-7 * in_chunks[name].double().norm(), name


# --- runs, graphs, memory -------------------------------------------------------------------------


@each_form
@each_reduction
def test_23_runs_are_equal_bit_by_bit_whatever_memory_held(reduction, lean, place):
    case = loss_case(place, {"bias": True, "z_loss": 1e-3, **reduction})
    first = run(place, case, lean=lean, chunk=64)
    for _ in range(3):
        poison_free_memory(place.device)
        check_same(run(place, case, lean=lean, chunk=64), first, "a later run")


@each_form
@each_reduction
def test_31_a_loss_never_waits_for_the_gpu(reduction, lean, place):
    case = loss_case(place, {"bias": True, **reduction})
    leaves = [case.operands[n].requires_grad_() for n in ("x", "w", "bias")]

    def step():
        loss = linear_cross_entropy(**case.operands, **case.options, lean=lean, chunk=64)
        return torch.autograd.grad(loss.sum(), leaves)

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@each_form
@pytest.mark.parametrize("name", ["mean", "none"])
def test_35_a_captured_loss_replays_the_eager_one(name, lean, place):
    """And a first call while a graph is captured raises, and tells the cure."""
    own = {
        "lean": lean,
        "chunk": 64,
        "softcap": 7.25 if lean else 9.75,
    }  # a call of this test's own
    case = loss_case(place, REDUCTIONS[name] | {"bias": True}, rows=311)
    leaves = [case.operands[n].requires_grad_() for n in ("x", "w", "bias")]

    def step():
        loss = linear_cross_entropy(**case.operands, **case.options, **own)
        return [loss.detach(), *torch.autograd.grad(loss.sum(), leaves)]

    if name == "mean":
        with (
            pytest.raises(BackEndError, match="call it once before"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            step()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        case.operands["x"].copy_(torch.randn_like(case.operands["x"]))
    graph.replay()
    kept = {str(n): v.clone() for n, v in enumerate(captured)}
    check_same(kept, {str(n): v for n, v in enumerate(step())}, "replayed")


@pytest.mark.alone
@pytest.mark.parametrize(("lean", "chunk"), [(False, 1024), (False, None), (True, 1024)])
def test_38_a_loss_takes_the_memory_of_its_formula(lean, chunk, place):
    """Gradients, float32 sums of several chunks, the logits of one, and what a row takes.

    The logits' gradient takes their place but in chunks of classes.
    """
    rows, width, classes = 8192, 1024, 32_000
    case = loss_case(place, {"reduction": "mean"}, BRAIN, rows, classes, width)
    leaves = [case.operands[n].requires_grad_() for n in ("x", "w")]

    def step():
        loss = linear_cross_entropy(**case.operands, lean=lean, chunk=chunk)
        return torch.autograd.grad(loss, leaves)

    step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    peak = torch.cuda.max_memory_allocated() - before
    gradients = 2 * (rows + classes) * width
    sums = 4 * (rows if lean else classes) * width if chunk else 0
    logits = 2 * 2 * chunk * rows if lean else 2 * (chunk or rows) * classes
    own = 2 * (chunk or 0) * width + 64 * 4 * rows  # operands of a chunk, some numbers a row
    tiles = 2 * 4 * (chunk or rows) * -(-classes // 128)  # partial sums of exponentials
    # Those of the only chunk are gone before there are gradients.
    own += max(0, tiles - (0 if chunk else gradients))
    assert peak <= (1.1 if chunk else 1.01) * (gradients + sums + logits + own)
