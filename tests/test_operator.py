"""A program is one operation of torch, and a good one.

Registration (opcheck), one call a pass, meta and fake tensors, devices, no aliasing and no writing
into inputs, determinism, threads, copies and pickles, and no tracing once warm.
"""

import copy
import pickle
import threading
import time

import pytest
import torch
from citizens import (
    CASES,
    RUN,
    RUN_BACKWARD,
    Calls,
    Case,
    K,
    N,
    gradients,
    norm_swiglu,
    same,
    summary,
    tensor,
    values,
    weighted,
)
from torch._subclasses import FakeTensorMode

from cadenza import block
from cadenza import lang as L
from cadenza.core.errors import ProgramError

each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def recorded(case, operands) -> Calls:
    """All that torch dispatches in one forward and one backward."""
    with Calls() as calls:
        weighted(case.call(operands)).backward()
    return calls


@each_case
def test_a_forward_is_one_operation_and_so_is_a_backward(case):
    calls = recorded(case, case.operands((3, 5)))
    ours = [c for c, _, _ in calls.calls if c.namespace == "cadenza"]
    assert ours == [RUN, RUN_BACKWARD]


def test_the_profiler_sees_one_operation_a_pass():
    case = CASES["tuple"]
    operands = case.operands((4,))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        weighted(case.call(operands)).backward()
    names = [event.name for event in profile.events()]
    assert names.count("cadenza::run") == 1
    assert names.count("cadenza::run_backward") == 1


@each_case
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no grad"])
def test_opcheck_of_forward(case, grad):
    calls = Calls()
    with calls:
        case.call(case.operands((3, 5), grad=grad))
    (arguments,) = calls.of(RUN)
    assert set(torch.library.opcheck(RUN, arguments).values()) == {"SUCCESS"}


MIXED = Case(
    norm_swiglu,
    lambda lead: (
        CASES["epilogue"].operands(lead, dtype=torch.bfloat16) | {"rstd": tensor(*lead, 1)}
    ),
)


@pytest.mark.parametrize("case", [*CASES.values(), MIXED], ids=[*CASES, "mixed dtypes"])
def test_opcheck_of_backward(case):
    calls = recorded(case, case.operands((3, 5)))
    (arguments,) = calls.of(RUN_BACKWARD)
    program, saved, adjoints, rows = arguments
    detached = ([v.detach() for v in saved], [a.detach() for a in adjoints])
    checked = torch.library.opcheck(RUN_BACKWARD, (program, *detached, rows))
    assert set(checked.values()) == {"SUCCESS"}


def test_without_gradients_the_operation_returns_the_outputs_alone():
    case = CASES["epilogue"]
    lengths = {}
    for grad in (True, False):
        with Calls() as calls:
            case.call(case.operands((4,), grad=grad))
        lengths[grad] = [len(result) for called, _, result in calls.calls if called is RUN]
    assert lengths[False] == [1]
    assert lengths[True] == [2]  # the product besides


# --- tensors without data -------------------------------------------------------------------------


def shapes(results):
    return [(tuple(v.shape), v.dtype, v.requires_grad) for v in results]


@each_case
def test_meta_tensors_give_shapes_and_dtypes(case):
    real = case.operands((3, 5))
    meta = {k: v.detach().to("meta").requires_grad_(v.requires_grad) for k, v in real.items()}
    outputs = values(case.call(meta))
    assert shapes(outputs) == shapes(values(case.call(real)))
    assert {o.device.type for o in outputs} == {"meta"}
    leaves = [v for v in meta.values() if v.requires_grad]
    found = torch.autograd.grad([o.sum() for o in outputs if o.requires_grad], leaves)
    assert [(g.shape, g.dtype) for g in found] == [(v.shape, v.dtype) for v in leaves]


@each_case
def test_fake_tensors_give_shapes_and_dtypes(case):
    real = case.operands((3, 5))
    mode = FakeTensorMode()
    with mode:
        fake = {k: mode.from_tensor(v) for k, v in real.items()}
        outputs = values(case.call(fake))
        gradients(outputs, fake)
    assert shapes(outputs) == shapes(values(case.call(real)))
    assert {o.device.type for o in outputs} == {"cpu"}


def test_two_devices_raise_naming_both_operands():
    operands = CASES["epilogue"].operands((4,))
    message = r"operands on two devices\n  found:    x on cpu, rstd on meta\n.*\n.*rstd\.to\(x\.dev"
    with pytest.raises(ProgramError, match=message):
        norm_swiglu(operands["x"], operands["w"], rstd=operands["rstd"].to("meta"))


# --- memory ---------------------------------------------------------------------------------------


@each_case
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no grad"])
@pytest.mark.parametrize("lead", [(3, 5), (1,), ()], ids=str)
def test_outputs_share_memory_with_nothing(case, grad, lead):
    operands = case.operands(lead, grad=grad)
    kept = {name: o.detach().clone() for name, o in operands.items()}
    outputs = [o.detach() for o in values(case.call(operands))]
    before = [o.clone() for o in outputs]
    for position, output in enumerate(outputs):
        output.zero_()
        assert same(outputs[position + 1 :], before[position + 1 :])
    assert same({n: o.detach() for n, o in operands.items()}, kept)


def test_parts_of_one_value_are_outputs_of_their_own():
    @block
    def halves(x):
        doubled = x + x
        return (*L.split(doubled), doubled, doubled)

    outputs = halves(tensor(1, 4, grad=False))
    before = [o.clone() for o in outputs]
    for position, output in enumerate(outputs):
        output.zero_()
        assert same(outputs[position + 1 :], before[position + 1 :])


def test_an_output_can_be_written_in_place_before_backward():
    case = CASES["epilogue"]
    operands = case.operands((3, 5))
    expected = gradients(case.call(operands) * 2.0, operands)
    assert same(gradients(case.call(operands).mul_(2.0), operands), expected)


@each_case
def test_an_output_made_without_gradients_can_be_written_with_them(case):
    operands = case.operands((3, 5))
    with torch.no_grad():
        outputs = values(case.call(operands))
    for output in outputs:
        if output.is_floating_point():
            assert output.mul_(operands["x"].sum()).requires_grad


@each_case
def test_07_inputs_and_incoming_gradients_are_never_written(case):
    operands = case.operands((3, 5))
    outputs = [o for o in values(case.call(operands)) if o.requires_grad]
    incoming = [torch.randn_like(o) for o in outputs]
    watched = [*operands.values(), *incoming]
    before = [(w._version, w.detach().clone()) for w in watched]
    torch.autograd.grad(outputs, [o for o in operands.values() if o.requires_grad], incoming)
    for tensor_, (version, value) in zip(watched, before, strict=True):
        assert tensor_._version == version
        assert torch.equal(tensor_, value)


# --- living in a process --------------------------------------------------------------------------


@each_case
def test_two_runs_are_equal_bit_by_bit(case):
    operands = case.operands((31,))
    first, second = (case.call(operands) for _ in range(2))
    assert same(values(first), values(second))
    assert same(gradients(first, operands), gradients(second, operands))


def test_26_a_warm_call_runs_nothing_of_the_authors_function():
    runs = []

    @block
    def counted(x, w):
        runs.append(None)
        return L.silu(L.linear(x, w))

    def step(*lead, grad=True):
        y = counted(tensor(*lead, K, grad=grad), tensor(N, K, grad=grad))
        if grad:
            y.sum().backward()

    step(4)
    step(4, grad=False)
    warm = len(runs)
    for lead in ((5,), (0,), (1,), (), (2, 3), (2, 3, 4)):
        step(*lead)
        step(*lead, grad=False)
    assert len(runs) == warm


@each_case
@pytest.mark.parametrize(
    ("setting", "value", "usual"),
    [
        (torch.set_default_dtype, torch.bfloat16, torch.float32),
        (torch.set_default_device, "meta", None),
    ],
    ids=["dtype", "device"],
)
def test_torchs_defaults_for_new_tensors_count_nothing(case, setting, value, usual):
    operands = case.operands((5,))
    expected = case.call(operands)
    leaves = [o for o in operands.values() if o.requires_grad]
    incoming = [torch.randn_like(o) for o in values(expected) if o.requires_grad]

    def found(outputs):
        needing = [o for o in values(outputs) if o.requires_grad]
        return torch.autograd.grad(needing[:1], leaves, incoming[:1])

    kept = found(expected)
    setting(value)
    try:
        outputs = case.call(operands)
        assert same(found(outputs), kept)
    finally:
        setting(usual)
    assert same(values(outputs), values(expected))


def test_two_threads_can_call_a_new_program_at_once():
    @block
    def slow(x, w):
        time.sleep(0.02)  # both threads trace at the same time
        return L.gelu(L.linear(x, w)), L.row_max(x)

    barrier, results = threading.Barrier(2), {}
    operands = {"x": tensor(5, K), "w": tensor(N, K)}

    def call(name):
        barrier.wait()
        outputs = slow(**operands)
        results[name] = (values(outputs), gradients(outputs, operands))

    threads = [threading.Thread(target=call, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    again = slow(**operands)
    expected = (values(again), gradients(again, operands))
    assert same(results["a"], expected)
    assert same(results["b"], expected)


class Layer(torch.nn.Module):
    """Holds a program as an attribute, and calls another."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(K, N)
        self.activation = norm_swiglu

    def forward(self, x):
        y = self.activation(x, self.linear.weight, rstd=x[..., :1].abs() + 0.5)
        return summary(x, self.linear.weight, torch.zeros(x.shape[:-1], dtype=torch.int64))["y"], y


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))],
    ids=["copy", "deepcopy", "pickle"],
)  # fmt: skip
def test_a_module_that_holds_a_program_can_be_copied(copied):
    layer, x = Layer(), tensor(3, K)
    twin = copied(layer)
    assert twin.activation is norm_swiglu
    assert same(layer(x), twin(x))
    sum(y.sum() for y in twin(x)).backward()
    assert (layer.linear.weight.grad is None) == (copied is not copy.copy)
