"""What forward keeps for backward, and activation checkpointing, which keeps less.

Nothing without gradients; exactly the plan's values with them; no zeros made for what is saved;
both kinds of checkpointing and selective checkpointing, bit by bit.
"""

import gc
import weakref
from functools import partial

import pytest
import torch
from citizens import CASES, RUN, RUN_BACKWARD, Calls, K, N, gradients, mlp, same, values, weighted
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from cadenza import block
from cadenza import lang as L
from cadenza.core.cost import itemsize

each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


class Kept(torch.autograd.graph.saved_tensors_hooks):
    """The tensors that autograd is asked to keep while it is entered."""

    def __init__(self):
        self.tensors = []
        super().__init__(lambda t: self.tensors.append(t) or t, lambda t: t)

    def __enter__(self):
        super().__enter__()
        return self


def planned(case, operands, rows):
    """Shape and dtype of each value that the backward program takes, adjoints apart."""
    graph = case.call(operands, case.program.backward_graph)
    labels = case.call(operands, case.program.graph).labels
    adjoints = {f"d_{label}" for label in labels} | {"d_output", "d_output_"}
    kept = [i.attributes for i in graph.inputs if i.attributes["name"] not in adjoints]
    return [(rows if a["rows"] == "M" else a["rows"], a["columns"], a["dtype"]) for a in kept]


# --- what is kept ---------------------------------------------------------------------------------


@each_case
def test_the_saved_tensors_are_those_of_the_plan(case):
    operands = case.operands((3, 5))
    with Kept() as kept:
        case.call(operands)
    found = [(t.numel(), str(t.dtype).removeprefix("torch.")) for t in kept.tensors]
    plan = planned(case, operands, 15)
    assert found == [(rows * columns, dtype) for rows, columns, dtype in plan]
    expected = sum(rows * columns * itemsize(dtype) for rows, columns, dtype in plan)
    assert sum(t.nbytes for t in kept.tensors) == expected
    assert sum(t.untyped_storage().nbytes() for t in kept.tensors) == expected


def new(kept, operands):
    """The tensors that were kept besides the operands themselves."""
    given = {o.data_ptr() for o in operands.values()}
    return [t for t in kept.tensors if t.numel() and t.data_ptr() not in given]


def test_of_an_mlp_the_argument_of_its_activation_is_kept_and_nothing_else_that_is_new():
    operands = CASES["tuple"].operands((5,))
    with Kept() as kept:
        mlp(**operands)
    (argument,) = new(kept, operands)
    x, w, bias = operands["x"], operands["w_in"], operands["bias"]
    assert torch.allclose(argument, torch.nn.functional.linear(x, w, bias), atol=1e-6)


@each_case
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_is_kept(case, mode):
    operands = case.operands((5,))
    expected = values(case.call(operands))
    with Kept() as kept, mode(), Calls() as calls:
        outputs = values(case.call(operands))
    assert kept.tensors == []
    assert [len(result) for called, _, result in calls.calls if called is RUN] == [len(outputs)]
    assert not any(o.requires_grad for o in outputs)
    assert same([o.clone() for o in outputs], expected)
    assert all(o.is_inference() == (mode is torch.inference_mode) for o in outputs)


def test_frozen_inputs_are_not_kept_for_gradients_that_nobody_needs():
    operands = CASES["tuple"].operands((5,))
    for name in ("x", "w_in", "bias"):
        operands[name].requires_grad_(False)
    with Kept() as kept:
        mlp(**operands)
    assert [tuple(t.shape) for t in kept.tensors] == [(5, N)]  # what w_out multiplies


@pytest.mark.slow
def test_what_was_kept_goes_with_the_graph():
    operands = CASES["tuple"].operands((5,))
    with Kept() as kept:
        outputs = mlp(**operands)
    (product,) = [weakref.ref(t) for t in new(kept, operands)]
    kept.tensors.clear()
    assert product() is not None
    weighted(outputs).backward()
    gc.collect()
    assert product() is None


def test_backward_makes_no_zeros_for_what_was_kept():
    operands = CASES["tuple"].operands((5,))
    loss = weighted(mlp(**operands))
    with Calls() as calls:
        loss.backward()
    zeros = [tuple(r.shape) for f, _, r in calls.calls if "zeros" in f.name()]
    assert zeros == []


# --- activation checkpointing ---------------------------------------------------------------------


@each_case
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_checkpointing_changes_no_bit(case, reentrant, dtype):
    operands = case.operands((9,), dtype=dtype)
    outputs = case.call(operands)
    weighted(outputs).backward()
    expected = {n: o.grad for n, o in operands.items()}
    for operand in operands.values():
        operand.grad = None

    def function(*given):
        return tuple(values(case.call(dict(zip(operands, given, strict=True)))))

    with Kept() as kept:
        again = checkpoint(function, *operands.values(), use_reentrant=reentrant)
    assert same(list(again), values(outputs))
    assert new(kept, operands) == []
    with Calls() as calls:
        weighted(again).backward()
    assert (len(calls.of(RUN)), len(calls.of(RUN_BACKWARD))) == (1, 1)
    for name, operand in operands.items():
        assert (operand.grad is None) == (expected[name] is None)
        assert operand.grad is None or same(operand.grad, expected[name]), name


@block
def activated(x, w):
    return L.silu(L.linear(x, w))


@pytest.mark.parametrize(
    ("policy", "recomputed"),
    [
        ([RUN], 0),
        ([torch.ops.aten.mm.default], 2),
        (lambda context, op, *args, **kwargs: CheckpointPolicy.MUST_SAVE, 0),
        (lambda context, op, *args, **kwargs: CheckpointPolicy.PREFER_RECOMPUTE, 2),
    ],
    ids=["list", "another list", "save", "recompute"],
)
def test_selective_checkpointing_sees_the_operation(policy, recomputed):
    x, w = CASES["epilogue"].operands((5,))["x"], torch.randn(K, K, requires_grad=True)

    def function(x, w):
        return activated(activated(x, w), w)

    expected = gradients(function(x, w), {"x": x, "w": w})
    context = partial(create_selective_checkpoint_contexts, policy)
    y = checkpoint(function, x, w, use_reentrant=False, context_fn=context)
    with Calls() as calls:
        found = gradients(y, {"x": x, "w": w})
    assert same(found, expected)
    assert len(calls.of(RUN)) == recomputed
