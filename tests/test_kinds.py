"""How a call is recognised: by torch's guard of tensors where it can, as its key says always.

What a call depends on is in every pair of the variants below; what has no kind goes to torch's
dispatcher.
"""

import contextlib
import gc
import itertools
import weakref

import pytest
import torch
from citizens import CASES, K, N, gradients, same, tensor, values

from cadenza import block
from cadenza import lang as L
from cadenza.backends import Executable
from cadenza.library import kinds

X, W = tensor(2, 3, K), tensor(N, K)
GUARDS = torch._C._dynamo.guards


def scaled():
    """A new program, which knows no kind."""

    @block
    def scaled(x, w, factor=1.0, note=None):
        return L.linear(x, w) * factor

    return scaled


@contextlib.contextmanager
def asked_for(backend):
    """The back end that the environment asks for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CADENZA_BACKEND", backend)
        yield


def variant(*args, within=contextlib.nullcontext, **kwargs):
    """A call, and what it is made within."""
    return within, args, kwargs


def autocast(dtype):
    """Within autocast to a dtype."""
    return lambda: torch.autocast("cpu", dtype=dtype)


VARIANTS = {
    "plain": variant(X, W),
    "by name": variant(X, w=W),
    "by name, the other way": variant(w=W, x=X),
    "a parameter": variant(X, torch.nn.Parameter(W.detach())),
    "no gradient of x": variant(X.detach(), W),
    "no gradient of w": variant(X, W.detach()),
    "other rows": variant(tensor(3, 3, K), W),
    "rows in another shape": variant(tensor(6, K), W),
    "another w": variant(X, tensor(2 * N, K)),
    "another dtype": variant(X.double(), W.double()),
    "a constant": variant(X, W, 2.0),
    "a constant by name": variant(X, W, factor=2.0),
    "another constant": variant(X, W, factor=1.0),
    "a whole number": variant(X, W, factor=1),
    "a condition": variant(X, W, factor=True),
    "zero": variant(X, W, factor=0.0),
    "zero from below": variant(X, W, factor=-0.0),
    "no number": variant(X, W, factor=float("nan")),
    "a note": variant(X, W, note="a"),
    "another note": variant(X, W, note="b"),
    "a back end": variant(X, W, backend="reference"),
    "a back end asked for": variant(X, W, within=lambda: asked_for("reference")),
    "without gradients": variant(X, W, within=torch.no_grad),
    "in inference": variant(X, W, within=torch.inference_mode),
    "bfloat16": variant(X, W, within=autocast(torch.bfloat16)),
    "float16": variant(X, W, within=autocast(torch.float16)),
    "a tensor twice": variant(*[tensor(N, K)] * 2),
}  # fmt: skip


def found(program, within, args, kwargs):
    """The call that is found, and the one that the key of its arguments finds."""
    given = {**dict(zip(["x", "w"], args, strict=False)), **kwargs}
    with within():
        prepared, operands = program.calls.find(args, kwargs)
        by_key = program.calls._by_key(args, kwargs)
    assert operands[0] is given["x"]
    assert operands[1] is given["w"]
    return prepared, by_key.prepared


def test_a_call_after_any_other_is_found_as_its_key_finds_it():
    program, kept = scaled(), {}
    for first, second in itertools.product(VARIANTS, repeat=2):
        for name in (first, second):
            prepared, by_key = found(program, *VARIANTS[name])
            assert prepared is by_key, (first, second)
            assert kept.setdefault(name, prepared) is prepared, (first, second)
    assert len({*map(id, kept.values())}) == len(kept)


@pytest.fixture
def keys(monkeypatch):
    """Grows by one with every key that is made."""
    made, key = [], kinds._key
    monkeypatch.setattr(kinds, "_key", lambda *given: made.append(None) or key(*given))
    return made


@pytest.mark.parametrize("name", [n for n in VARIANTS if n not in ("no number", "a tensor twice")])
def test_a_call_that_is_repeated_needs_no_key(name, keys):
    """If this fails on a new torch, its guards are made otherwise: calls are right, but slow."""
    program, (within, args, kwargs) = scaled(), VARIANTS[name]
    for _ in range(3):
        with within():
            program(*args, **kwargs)
    assert len(keys) == 1


def test_many_kinds_in_turn_need_no_keys(keys):
    program = scaled()
    calls = [(tensor(rows, K), W) for rows in range(1, 13)]
    for call in calls * 3:
        program(*call)
    assert len(keys) == len(calls)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_without_torchs_guards_calls_are_the_same(case, monkeypatch):
    operands = case.operands((2, 3))
    expected = [values(case.call(operands)), gradients(case.call(operands), operands)]
    monkeypatch.delattr(GUARDS, "TensorGuards")
    monkeypatch.setattr(case.program, "calls", kinds.Calls(case.program._ready))
    for _ in range(2):
        outputs = values(case.call(operands))
        assert same([outputs, gradients(outputs, operands)], expected)


def test_a_layout_changes_no_kind(keys):
    program, x, w = scaled(), tensor(6, K), tensor(N, K)
    expected = program(x, w)
    assert same(program(x, w.detach().T.contiguous().T.requires_grad_()), expected)
    assert len(keys) == 1


def test_a_tensor_of_changed_facts_is_another_kind():
    program, x, w = scaled(), tensor(6, K, grad=False), torch.nn.Parameter(tensor(N, K))
    assert program(x, w).requires_grad
    w.requires_grad_(False)
    assert not program(x, w).requires_grad
    w.data = tensor(2 * N, K, grad=False)
    assert program(x, w).shape == (6, 2 * N)
    w.data = w.data.double()
    assert program(x.double(), w).dtype == torch.float64


def test_nothing_is_kept_alive():
    program = scaled()
    gc.disable()
    try:
        for _ in range(3):
            x, w = tensor(6, K), tensor(N, K)
            y = program(x, w)
            y.sum().backward()
            known = [weakref.ref(t) for t in (x, w, y)]
            del x, w, y
            assert [r() for r in known] == [None] * 3
    finally:
        gc.enable()


# --- tensors whose numbers are not in their memory ------------------------------------------------


@pytest.fixture
def read(monkeypatch):
    """Every tensor that a plan is given."""
    given, run = [], Executable.__call__

    def noted(executable, tensors, *more):
        given.extend(tensors)
        return run(executable, tensors, *more)

    monkeypatch.setattr(Executable, "__call__", noted)
    return given


def wrapped(x):
    """A tensor of torch.func, after the transform that made it."""
    leaked = []
    torch.func.grad(lambda t: leaked.append(t) or t.sum())(x)
    return leaked[0]


LAZY = {
    "negative": torch._neg_view,
    "zero": lambda x: torch._efficientzerotensor(x.shape),
    "wrapped": wrapped,
}
each_lazy = pytest.mark.parametrize("lazy", LAZY.values(), ids=LAZY)


@each_lazy
def test_a_lazy_operand_is_made_real_first(lazy, read):
    program, x, w = scaled(), tensor(6, K, grad=False), tensor(N, K)
    usual = program(x, w)
    assert usual.shape == (6, N)
    made = lazy(x)
    found = program(made, w)
    assert torch.allclose(found, made @ w.T)
    assert not any(map(kinds.is_lazy, read))


@each_lazy
def test_a_lazy_gradient_is_made_real_first(lazy, read):
    class Lazily(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return lazy(gradient)

    program, x, w = scaled(), tensor(6, K, grad=False), tensor(N, K)
    incoming = torch.randn(6, N)
    (found,) = torch.autograd.grad(Lazily.apply(program(x, w)), w, incoming)
    assert torch.allclose(found, lazy(incoming).mT @ x)
    assert not any(map(kinds.is_lazy, read))
