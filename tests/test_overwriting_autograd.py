"""When backward writes over what forward saved: where it is the last through its graph, no other.

Whoever was handed a saved value finds it as it was; what can't be told from it raises.
"""

import pytest
import torch
from hf_models import LAYERS, assert_near, batch, outcome, pair
from test_overwriting import ROWS, unlike
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from triton_plans import interpreted, quiet

import cadenza as cz
from cadenza import lang as L
from cadenza.backends import NOTHING
from cadenza.backends.triton.executable import Executable
from cadenza.backends.triton.launches import ProductLaunch
from cadenza.backends.triton.overwriting import takers
from cadenza.core.errors import CadenzaError
from cadenza.library import eager
from cadenza.library.eager import SPENT


@cz.block(shapes={"x": "M 16", "w": "32 16", "v": "16 16"})
def swiglu(x, w, v):
    return L.linear(L.swiglu(L.linear(x, w)), v)


@pytest.fixture
def spent(monkeypatch):
    """The inputs that were written over, of each call of a plan where some were."""
    heard, call = [], Executable.__call__

    def noted(own, tensors, rows, into=NOTHING, spent=()):
        taken = takers(own.program, [own.plan.graph.inputs[p] for p in spent])
        heard.extend([tuple(taken.values())] if taken and not into else [])  # not a loss's chunk
        return call(own, tensors, rows, into, spent)

    monkeypatch.setattr(Executable, "__call__", noted)
    return heard


def leaves_of(seed=0):
    torch.manual_seed(seed)
    shapes = ((ROWS, 16), (32, 16), (16, 16))
    return [torch.randn(shape).requires_grad_() for shape in shapes]


def run(leaves):
    return swiglu(*leaves, backend="triton").square().sum()


def gradients(leaves, **options):
    return torch.autograd.grad(run(leaves), leaves, **options)


@interpreted
@quiet
def test_the_last_backward_of_a_graph_writes_over_what_was_saved(spent):
    leaves = leaves_of()
    loss = run(leaves)
    kept = torch.autograd.grad(loss, leaves, retain_graph=True)
    again = torch.autograd.grad(loss, leaves, retain_graph=True)
    assert not spent
    last = torch.autograd.grad(loss, leaves)
    assert unlike(again, kept) == unlike(last, kept) == []
    assert [len(positions) for positions in spent] == [1]
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, leaves)


@interpreted
@quiet
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not"])
def test_a_checkpointed_call_writes_over_what_was_made_again(spent, reentrant):
    leaves = leaves_of()
    expected = gradients(leaves, retain_graph=True)
    for leaf in leaves:
        leaf.grad = None
    loss = checkpoint(lambda *given: run(given), *leaves, use_reentrant=reentrant)
    if not reentrant:
        loss.backward(retain_graph=True)
        assert unlike([leaf.grad for leaf in leaves], expected) == []
        for leaf in leaves:
            leaf.grad = None
    assert not spent
    loss.backward()
    assert unlike([leaf.grad for leaf in leaves], expected) == []
    assert len(spent) == 1


def holding(held):
    """Hooks that keep what they are handed, and hand it on."""
    return saved_tensors_hooks(lambda t: held.append(t) or t, lambda t: t)


@interpreted
@quiet
def test_what_hooks_were_handed_stays_as_it_is(spent):
    leaves, held = leaves_of(), []
    expected = gradients(leaves, retain_graph=True)
    methods = saved_tensors_hooks(torch.Tensor.detach, torch.Tensor.detach)  # of no module
    for hooks in (holding(held), save_on_cpu(), methods):
        with hooks:
            loss = run(leaves)
        before = [t.clone() for t in held]
        assert unlike(torch.autograd.grad(loss, leaves), expected) == []
        assert unlike(held, before) == []
    assert held
    assert not spent


@interpreted
@quiet
def test_hooks_around_a_checkpoint_get_what_stays(spent):
    leaves, held = leaves_of(), []
    expected = gradients(leaves, retain_graph=True)
    with holding(held):
        loss = checkpoint(lambda *given: run(given), *leaves, use_reentrant=False)
    before = [t.clone() for t in held]
    assert unlike(torch.autograd.grad(loss, leaves), expected) == []
    assert unlike(held, before) == []


@interpreted
@quiet
def test_a_gradient_that_is_used_further_leaves_what_was_saved(spent):
    leaves = leaves_of()
    expected = gradients(leaves, retain_graph=True)
    found = gradients(leaves, create_graph=True)
    assert unlike(found, expected) == []
    assert not spent


@interpreted
@quiet
def test_two_losses_of_one_call(spent):
    """The first goes through the graph that the second needs."""
    leaves = leaves_of()
    out = swiglu(*leaves, backend="triton")
    first, second = out.square().sum(), out.sin().sum()
    first.backward(retain_graph=True)
    assert not spent
    second.backward()
    assert len(spent) == 1
    found = [leaf.grad for leaf in leaves]
    out = swiglu(*leaves, backend="triton")
    expected = torch.autograd.grad(out.square().sum() + out.sin().sum(), leaves)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_the_reference_back_end_writes_over_nothing_and_says_so_of_nothing():
    leaves = leaves_of()
    out = swiglu(*leaves, backend="reference")
    saved = [t for t in out.grad_fn.saved_tensors if t.shape == (ROWS, 32)]
    before = [t.clone() for t in saved]
    out.sum().backward()
    assert saved
    assert unlike(saved, before) == []
    assert not any(hasattr(tensor.untyped_storage(), SPENT) for tensor in saved)


@interpreted
@quiet
@pytest.mark.slow
def test_a_checkpointed_model_writes_over_its_pre_activations(spent, monkeypatch):
    """Gate and up are two parameters in one storage there, saved as what they are parts of."""
    monkeypatch.setenv("CADENZA_BACKEND", "triton")
    model, twin = pair("llama")
    cz.accelerate(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_near(outcome(model, **batch()), outcome(twin, **batch()), 1e-5)
    assert len(spent) == LAYERS


class Full(Exception):
    """A device without memory."""


@interpreted
@quiet
def test_a_backward_that_failed_is_not_gone_through_again(spent, monkeypatch):
    leaves, launch = leaves_of(), ProductLaunch.run
    loss, launched = swiglu(*leaves, backend="triton").sum(), []

    def full(own, memory):
        launched.append(own)
        if len(launched) == 2:
            raise Full
        launch(own, memory)

    monkeypatch.setattr(ProductLaunch, "run", full)
    with pytest.raises(Full):
        loss.backward()
    assert spent
    with pytest.raises(CadenzaError, match=r"was written over(.|\n)*write: +retain_graph=True"):
        loss.backward()
    assert all(leaf.grad is None for leaf in leaves)


@interpreted
@quiet
def test_the_graph_of_a_second_run_that_is_kept_raises(spent):
    """A checkpointed call's second run shares what it made with the graph of the first."""
    leaves, kept = leaves_of(), []

    def function(*given):
        kept.append(swiglu(*given, backend="triton"))
        return kept[-1].sin()

    loss = checkpoint(function, *leaves, use_reentrant=False).sum()
    torch.autograd.grad(loss, leaves)
    assert len(kept) == 2
    with pytest.raises(CadenzaError, match="was written over"):
        torch.autograd.grad(kept[1].square().sum(), leaves)


@interpreted
@quiet
def test_a_backward_within_a_checkpointed_call_leaves_what_the_outer_one_reads(spent):
    leaves = leaves_of()

    def function(*given):
        out = swiglu(*given, backend="triton")
        (inner,) = torch.autograd.grad(out.square().sum(), given[:1], retain_graph=False)
        return swiglu(*given, backend="triton").sin() * inner.detach().mean()

    expected = torch.autograd.grad(function(*leaves).sum(), leaves)
    with set_checkpoint_early_stop(False):
        loss = checkpoint(function, *leaves, use_reentrant=False).sum()
    assert unlike(torch.autograd.grad(loss, leaves), expected) == []


def test_on_a_gpu_it_has_to_be_asked_for_and_a_capture_leaves_all(monkeypatch):
    leaf, said = torch.ones(2, requires_grad=True), []
    leaf.register_hook(lambda gradient: said.append(eager._is_last("cuda")))

    def told(keep=False):
        leaf.square().sum().backward(retain_graph=keep)
        return said[-1]

    monkeypatch.delenv("CADENZA_OVERWRITE", raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert not told()
    monkeypatch.setenv("CADENZA_OVERWRITE", "1")
    assert told()
    assert not told(keep=True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not told()
