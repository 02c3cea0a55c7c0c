"""What backward writes over: what forward saved for it alone, where nothing needs it later.

A plan's kernels give the same bits with and without, whichever template makes them; autograd lets
them only where a graph is used up and nobody else was handed its saved values.
"""

import planned
import pytest
import torch
from hf_models import LAYERS, assert_near, batch, outcome, pair
from hypothesis import given, settings
from hypothesis import strategies as st
from random_blocks import BlockRecipe, block_recipes
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from triton_plans import interpreted, quiet, trials_of

import cadenza as cz
from cadenza import lang as L
from cadenza.backends import NOTHING
from cadenza.backends.triton.executable import Executable
from cadenza.backends.triton.overwriting import takers
from cadenza.backends.triton.program import Program
from cadenza.backends.triton.target import INTERPRETER, Target
from cadenza.core.pipeline import compile_program
from cadenza.core.plan_text import PairText
from cadenza.core.trace import Operand, Signature
from cadenza.library.blocks import BUILT_IN

ROWS = 19
# The saved values that are written over, of those that have some at all: pre-activations.
WRITTEN = {
    "llama": "v3", "llama-mlp": "acc1", "gpt2": "v3", "qwen3": "v3", "gemma2": "v3",
    "parallel": "v4", "lm-head": "v2", "norm-qkv": None,
}  # fmt: skip


def own_values(pair):
    """Where among backward's inputs the values are that forward made for it alone."""
    return [p for p, v in enumerate(pair.values) if isinstance(v, int) and v >= pair.outputs]


def trial_of(name):
    """A built-in block's pair, and its backward plan on what forward has saved."""
    torch.manual_seed(0)
    made = planned.call(name, ROWS, torch.float32)
    pair = made.pair()
    return pair, list(trials_of(pair, made.tensors, ROWS))[1]


def written_over(run, trial, positions):
    """The inputs that a call with these positions spent changes; it gives the same outputs."""
    kept = [t.clone() for t in trial.inputs]
    expected = run(trial.inputs, trial.rows)
    assert unlike(trial.inputs, kept) == []
    found = run(trial.inputs, trial.rows, spent=positions)
    assert unlike(found, expected) == []
    return unlike(trial.inputs, kept)


def unlike(found, expected):
    """Where tensors differ in a bit."""
    pairs = zip(found, expected, strict=True)
    return [
        p for p, (a, b) in enumerate(pairs) if not torch.equal(a.nan_to_num(7), b.nan_to_num(7))
    ]


# --- plans ----------------------------------------------------------------------------------------


def test_every_block_is_told_of():
    assert WRITTEN.keys() == BUILT_IN.keys()


@interpreted
@quiet
@pytest.mark.parametrize("path", ["template", "library"])
@pytest.mark.parametrize("name", WRITTEN)
def test_a_pre_activation_is_written_over_and_nothing_else(name, path):
    pair, trial = trial_of(name)
    run = Executable(trial.plan)
    if path == "library":  # float32 is torch's there
        run.programs[INTERPRETER, run.rows] = Program(trial.plan, target=Target.named("sm_90"))
    written = written_over(run, trial, own_values(pair))
    assert tuple(written) == run.overwritten(own_values(pair))
    names = [PairText(pair).names[pair.backward.inputs[p]] for p in written]
    assert names == ([WRITTEN[name]] if WRITTEN[name] else [])


@interpreted
@quiet
@pytest.mark.slow
@settings(max_examples=settings.default.max_examples // 10)
@given(block_recipes(), st.data())
def test_random_blocks_give_the_same_bits(recipe: BlockRecipe, data):
    """Whichever inputs are spent, those of the author among them."""
    needed = [name for name in recipe.operands if name != "t"]
    pair = compile_program(recipe.function(), recipe.signature("float32"), needed=needed)
    tensors = {n: t.float() if t.is_floating_point() else t for n, t in recipe.tensors().items()}
    for trial in trials_of(pair, tensors, recipe.rows):
        apart = {t.data_ptr(): p for p, t in enumerate(trial.inputs)}.values()
        spent = [p for p in apart if data.draw(st.booleans())]
        written_over(Executable(trial.plan), trial, spent)


def plan_of(function, *dims, columns=64):
    """The forward plan of a function of operands that have so many rows, and these columns."""
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    operands = [Operand(n, rows, columns, "bfloat16") for n, rows in zip(names, dims, strict=True)]
    return compile_program(function, Signature(tuple(operands))).forward_plan


def gated(x, g, w):
    z = L.matmul(x, w)
    return L.stored(z) * 2, L.matmul(L.stored(g * z), w)


def product_alone(x, g, w):
    z = L.stored(L.matmul(x, w))
    return L.matmul(z, w), L.row_sum(z * g)


def operand_too(x, w):
    return L.matmul(L.stored(x * L.matmul(x, w)), w)


def other_pairs(x, w):
    left, right = L.split(x, inner=32)
    other, last = L.split(x, inner=16)
    return L.matmul(L.stored(L.join(left * other, right * last, inner=32)), w)


def column(x, s, w):
    return L.matmul(x, w) * s, L.row_sum(L.matmul(x, w)) * s


@pytest.mark.parametrize(
    ("function", "dims", "taken"),
    [
        (gated, "MM6", 1), (product_alone, "MM6", 0), (operand_too, "M6", 0),
        (other_pairs, "M6", 0), (column, "MM6", 0),
    ],
)  # fmt: skip
def test_what_is_not_made_of_it_in_its_place_takes_no_memory(function, dims, taken):
    rows = ["M" if d == "M" else 64 for d in dims]
    plan = plan_of(function, *rows)
    assert len(takers(plan, plan.graph.inputs)) == taken


# --- autograd -------------------------------------------------------------------------------------


@cz.block(shapes={"x": "M 16", "w": "32 16", "v": "16 16"})
def swiglu(x, w, v):
    return L.linear(L.swiglu(L.linear(x, w)), v)


@pytest.fixture
def spent(monkeypatch):
    """The inputs that were spent, of each call of a plan where some were."""
    heard, call = [], Executable.__call__

    def noted(own, tensors, rows, into=NOTHING, spent=()):
        heard.extend([tuple(spent)] if spent and not into else [])  # not a loss's chunk
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


@interpreted
@quiet
def test_what_hooks_were_handed_stays_as_it_is(spent):
    leaves, held = leaves_of(), []

    def pack(tensor):
        held.append(tensor)
        return tensor

    expected = gradients(leaves, retain_graph=True)
    methods = saved_tensors_hooks(torch.Tensor.detach, torch.Tensor.detach)  # of no module
    for hooks in (saved_tensors_hooks(pack, lambda t: t), save_on_cpu(), methods):
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

    def pack(tensor):
        held.append(tensor)
        return tensor

    expected = gradients(leaves, retain_graph=True)
    with saved_tensors_hooks(pack, lambda t: t):
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


def test_the_reference_back_end_writes_over_nothing():
    leaves = leaves_of()
    out = swiglu(*leaves, backend="reference")
    saved = [t for t in out.grad_fn.saved_tensors if t.shape == (ROWS, 32)]
    before = [t.clone() for t in saved]
    out.sum().backward()
    assert saved
    assert unlike(saved, before) == []


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
