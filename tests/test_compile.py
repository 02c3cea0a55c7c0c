"""Programs under torch.compile(fullgraph=True), forward and backward.

One operation a program in the captured graph, the results of eager mode bit by bit, no compilation
anew when the number of rows changes, and always one when a constant does.
"""

import logging
from functools import partial
from pathlib import Path

import pytest
import torch
from citizens import CASES, RUN, RUN_BACKWARD, K, N, gradients, mlp, same, summary, tensor, values
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend

import cadenza as cz
from cadenza import block, epilogue
from cadenza import lang as L

each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@pytest.fixture(autouse=True)
def forget():
    """Nothing compiled by one test is known to the next."""
    torch._dynamo.reset()


def compiled(function, backend="aot_eager", **options):
    """The compiled function, and the counter of its compilations."""
    counter = CompileCounterWithBackend(backend)
    return torch.compile(function, backend=counter, fullgraph=True, **options), counter


def agrees(function, reference, operands) -> None:
    """A compiled function gives the bits of its eager form, and so do its gradients."""
    found, expected = function(operands), reference(operands)
    assert type(found) is type(expected)
    assert same(found, expected)
    needing = [o for o in operands.values() if o.requires_grad]
    assert [v.requires_grad for v in values(found)] == [v.requires_grad for v in values(expected)]
    if needing:
        assert same(gradients(found, operands), gradients(expected, operands))


# --- what is captured -----------------------------------------------------------------------------


@each_case
@pytest.mark.slow
def test_results_and_gradients_are_those_of_eager_mode(case):
    function, counter = compiled(case.call)
    for dtype in (torch.float32, torch.bfloat16):
        agrees(function, case.call, case.operands((3, 5), dtype=dtype))
    assert counter.frame_count == 2


def ours(graph):
    """The nodes of a graph that run programs."""
    return [n for n in graph.graph.nodes if "cadenza" in str(n.target)]


@pytest.mark.slow
def test_compiled_autograd_sees_an_eager_calls_backward_as_one_operation():
    graphs, operands = [], CASES["tuple"].operands((3, 5))
    expected = gradients(mlp(**operands), operands)
    compiler = torch.compile(backend=lambda graph, given: graphs.append(graph) or graph)
    outputs = mlp(**operands)
    with torch._dynamo.compiled_autograd._enable(compiler):
        found = gradients(outputs, operands)
    assert same(found, expected)
    assert [str(n.target) for graph in graphs for n in ours(graph)] == ["cadenza.run_backward"]


@each_case
def test_a_program_is_one_operation_in_every_graph(case):
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return make_boxed_func(graph)

    function, counter = compiled(case.call, aot_autograd(fw_compiler=keep, bw_compiler=keep))
    operands = case.operands((3, 5))
    gradients(function(operands), operands)
    captured = [n.target for n in counter.graphs[0].graph.nodes if n.op == "call_function"]
    assert len(ours(counter.graphs[0])) == 1
    assert {t.__name__ for t in captured} == {"run", "getitem"}
    (forward,), (backward,) = map(ours, graphs)
    assert (forward.target, backward.target) == (RUN, RUN_BACKWARD)
    assert forward.args[4] == backward.args[0]  # the digest of what both run


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_is_saved(mode):
    function, counter = compiled(CASES["tuple"].call)
    operands = CASES["tuple"].operands((3, 5))
    with mode():
        found, expected = function(operands), mlp(**operands)
    assert same(found, expected)
    assert not any(v.requires_grad for v in found)
    (run,) = ours(counter.graphs[0])
    assert run.args[3] == 0
    agrees(function, CASES["tuple"].call, operands)


def test_a_context_without_gradients_inside_of_the_function():
    def function(operands):
        with torch.no_grad():
            y, _ = mlp(**operands)
        return mlp(**operands | {"x": y})

    operands = CASES["tuple"].operands((4,))
    found = compiled(function)[0](operands)
    needed = {n: o for n, o in operands.items() if n != "x"}
    assert same(gradients(found, needed), gradients(function(operands), needed))


@pytest.mark.slow
def test_frozen_weights_and_their_thaw():
    function, counter = compiled(CASES["tuple"].call)
    for frozen in ((), ("w_in",), ("x", "w_in", "bias")):
        operands = CASES["tuple"].operands((4,))
        for name in frozen:
            operands[name].requires_grad_(False)
        agrees(function, CASES["tuple"].call, operands)
    assert counter.frame_count == 3


def test_programs_one_after_another_in_modules():
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.outer = torch.nn.Linear(K, N), torch.nn.Linear(N, K, bias=False)
            self.program = mlp

        def forward(self, x):
            return self.program(x, self.inner.weight, self.inner.bias, self.outer.weight)[0]

    model, x = torch.nn.Sequential(Block(), Block()), tensor(3, K)
    operands = {"x": x} | dict(model.named_parameters())
    found, counter = compiled(model)
    assert same(gradients(found(x), operands), gradients(model(x), operands))
    assert len(ours(counter.graphs[0])) == 2


def test_activation_checkpointing_inside_of_compiled_code():
    def function(operands):
        return torch.utils.checkpoint.checkpoint(
            lambda: CASES["tuple"].call(operands), use_reentrant=False
        )

    agrees(compiled(function)[0], CASES["tuple"].call, CASES["tuple"].operands((4,)))


# --- the number of rows ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "grad"), [*((name, True) for name in CASES), ("tuple", False)], ids=str
)
@pytest.mark.slow
def test_a_new_number_of_rows_compiles_once_more_and_never_again(name, grad):
    case = CASES[name]
    function, counter = compiled(case.call)
    for rows in (5, 3, K, N, K * N):
        agrees(function, case.call, case.operands((rows,), grad=grad))
    assert counter.frame_count == 2


@pytest.mark.parametrize("first", [K, N])
def test_the_first_number_of_rows_may_equal_a_weights_size(first):
    case = CASES["tuple"]
    function, counter = compiled(case.call)
    for rows in (first, 5, K, N):
        agrees(function, case.call, case.operands((rows,)))
    assert counter.frame_count == 2


@pytest.mark.slow
def test_batch_and_sequence_may_both_change():
    case = CASES["tuple"]
    function, counter = compiled(case.call)
    for lead in ((2, 3), (4, 3), (4, 5), (3, 7), (N, K), (K, 2), (3, 4)):
        agrees(function, case.call, case.operands(lead))
    assert counter.frame_count == 3  # neither, one, both


@each_case
def test_a_dimension_marked_dynamic_compiles_once(case):
    function, counter = compiled(case.call)
    for rows in (N, 5, K, 31):  # the first is a weight's size by chance
        operands = case.operands((rows,))
        for name in ("x", "rstd", "index"):
            if name in operands:
                torch._dynamo.mark_dynamic(operands[name], 0)
        agrees(function, case.call, operands)
    assert counter.frame_count == 1


def test_everything_dynamic_from_the_start():
    case = CASES["epilogue"]
    function, counter = compiled(case.call, dynamic=True)
    for rows in (5, 3, 4, 31):
        agrees(function, case.call, case.operands((rows,)))
    assert counter.frame_count == 1


@pytest.mark.parametrize("rows", [0, 1])
def test_no_row_and_one_row(rows):
    function, counter = compiled(CASES["tuple"].call)
    for count in (4, 5, rows, 6, rows):
        agrees(function, CASES["tuple"].call, CASES["tuple"].operands((count,)))
    assert counter.frame_count <= 3  # torch takes sizes 0 and 1 for constants


# --- constants ------------------------------------------------------------------------------------


@block
def scaled(x, factor=1.0, offset=0, kind="silu", double=False, nothing=None):
    y = (L.silu(x) if kind == "silu" else L.tanh(x)) * factor + offset
    return (y + y if double else y) if nothing is None else y * nothing


@pytest.mark.parametrize(
    ("name", "choices"),
    [
        ("factor", [1.0, 2.0, 3.0, 1.0]),
        ("offset", [0, 1, 2, 0]),
        ("factor", [2, 2.0, True, 1.0]),
        ("kind", ["silu", "tanh"]),
        ("double", [True, False]),
        ("nothing", [None, 2.0]),
    ],
    ids=lambda v: v if isinstance(v, str) else None,
)
@pytest.mark.slow
def test_another_constant_is_compiled_and_right(name, choices):
    def function(operands, constant):
        return scaled(operands["x"], **{name: constant})

    found, counter = compiled(function)
    x = tensor(3, K)
    for choice in choices:
        agrees(lambda o, c=choice: found(o, c), lambda o, c=choice: function(o, c), {"x": x})
        again = counter.frame_count
        found({"x": x}, choice)
        assert counter.frame_count == again
    with torch.no_grad():
        assert same(found({"x": x}, choices[0]), function({"x": x}, choices[0]))


def test_a_constant_computed_from_sizes_of_weights():
    def function(operands):
        return scaled(operands["x"], factor=1.0 / operands["x"].shape[-1] ** 0.5)

    found, counter = compiled(function)
    for rows in (3, 5, 7):
        agrees(found, function, {"x": tensor(rows, K)})
    assert counter.frame_count == 2


# --- programs of one name -------------------------------------------------------------------------


def power(exponent):
    """A program over a closure; all that this makes have one name."""

    @block
    def raised(x):
        return x**exponent

    return raised


def test_closures_make_different_programs():
    square, cube, again = power(2), power(3), power(2)
    x = tensor(3, K)
    functions = [compiled(lambda o, p=p: p(o["x"]))[0] for p in (square, cube, again)]
    for function, exponent in zip(functions, (2, 3, 2), strict=True):
        assert torch.allclose(function({"x": x}), x**exponent)

    def both(operands):
        return square(operands["x"]) + cube(operands["x"]) + again(operands["x"])

    agrees(compiled(both)[0], both, {"x": x})


class Factor:
    """Something that a program may close over, and that looks like all of its kind."""

    def __init__(self, value):
        self.value = value

    def __repr__(self):
        return "a factor"


@pytest.mark.parametrize("closed", [(L.silu, L.tanh), (Factor(2.0), Factor(3.0))])
def test_closures_over_objects_make_different_programs(closed):
    def using(value):
        @epilogue
        def result(acc):
            return acc * value.value if isinstance(value, Factor) else value(acc)

        return result

    first, second = map(using, closed)
    assert first.key != second.key
    operands = {"x": tensor(3, K), "w": tensor(N, K)}

    def both(operands):
        return first(operands["x"], operands["w"]), second(operands["x"], operands["w"])

    agrees(compiled(both)[0], both, operands)
    product = operands["x"] @ operands["w"].T
    expected = product * 3.0 if isinstance(closed[1], Factor) else product.tanh()
    assert torch.allclose(both(operands)[1], expected, atol=1e-5)


# --- export ---------------------------------------------------------------------------------------


class Exported(torch.nn.Module):
    """A layer to export."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(N, K))

    def forward(self, x, index):
        return summary(x, self.weight, index)


@pytest.mark.parametrize("strict", [True, False])
def test_export_keeps_the_operation_and_any_number_of_rows(strict):
    module = Exported()
    arguments = tensor(5, K, grad=False), torch.randint(N, (5,))
    rows = torch.export.Dim("rows")
    exported = torch.export.export(
        module, arguments, dynamic_shapes=({0: rows}, {0: rows}), strict=strict
    )
    assert [n.target for n in exported.graph.nodes if "cadenza" in str(n.target)] == [RUN]
    for count in (5, 3, N):
        x, index = tensor(count, K, grad=False), torch.randint(N, (count,))
        assert same(exported.module()(x, index), module(x, index))


# --- Inductor -------------------------------------------------------------------------------------


def test_every_operation_is_one_that_inductor_is_told_of():
    package = Path(cz.__file__).parent
    others = [p.name for p in package.rglob("*.py") if "register_fake(" in p.read_text()]
    assert others == ["fakes.py"]


@pytest.mark.slow
@pytest.mark.parametrize("lean", [False, True])
def test_inductor_knows_operations_before_it_meets_them(lean):
    """Else some releases write down, for a log, all that their operands are computed from."""
    told = logging.getLogger("torch._inductor.graph")
    heard, handler = [], logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    from torch._inductor.lowering import lowerings

    known = {op for op in lowerings if "cadenza" in str(op)}
    for op in known:
        del lowerings[op]
    level = told.level
    told.addHandler(handler)
    told.setLevel(logging.INFO)
    try:
        x, w = (torch.randn(8, 16, requires_grad=True) for _ in range(2))
        rows = torch.arange(8)
        loss = partial(cz.ops.linear_cross_entropy, lean=lean)
        torch.compile(lambda: loss(torch.tanh(x), w, rows))().backward()
    finally:
        told.removeHandler(handler)
        told.setLevel(level)
    assert [op for op in lowerings if "cadenza" in str(op)]
    assert not [text for text in heard if "implicit fallback" in text and "cadenza" in text]
