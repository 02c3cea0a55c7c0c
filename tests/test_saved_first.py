"""Calls whose saved values go to hooks: what backward needs is made first, the rest maybe never.

A checkpointed layer that runs again for its backward ends where the last saved value is made.
"""

import planned
import pytest
import torch
from graphs import pair as pair_of
from hf_models import batch, outcome, pair
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import cadenza as cz
from cadenza import backends, lang
from cadenza.backends.triton import vectors
from cadenza.backends.triton.executable import Executable
from cadenza.backends.triton.launches import ProductLaunch
from cadenza.backends.triton.program import Program
from cadenza.library.blocks import BUILT_IN

ROWS = 19


def given_to(name):
    """A built-in block's forward plan, its inputs, and which of its outputs backward reads."""
    torch.manual_seed(0)
    made = planned.call(name, ROWS, torch.float32)
    pair = made.pair()
    inputs = [made.tensors[i.attributes["name"]] for i in pair.forward.inputs]
    return pair, inputs, [v for v in pair.values if isinstance(v, int)]


# --- plans ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_what_is_kept_is_there_before_the_rest_is_made(name):
    pair, inputs, kept = given_to(name)
    executable = Executable(pair.forward_plan)
    whole = executable(inputs, ROWS)
    outputs, rest = executable.begun(inputs, ROWS, kept)
    assert all(torch.equal(outputs[p], whole[p]) for p in kept)
    addresses = [output.data_ptr() for output in outputs]
    for output in outputs:
        output.resize_(1, *output.shape)  # as a caller may who wants another shape
    rest()
    assert addresses == [output.data_ptr() for output in outputs]
    assert all(torch.equal(o[0], w) for o, w in zip(outputs, whole, strict=True))


def test_only_what_saved_values_need_is_launched_first(monkeypatch):
    pair, inputs, kept = given_to("llama-mlp")
    executable = Executable(pair.forward_plan)
    launched = []
    run = ProductLaunch.run

    def heard(launch, memory):
        launched.append(launch)
        run(launch, memory)

    monkeypatch.setattr(ProductLaunch, "run", heard)
    _, rest = executable.begun(inputs, ROWS, kept)
    first = len(launched)
    rest()
    assert (first, len(launched)) == (pair.forward_plan.products - 1, pair.forward_plan.products)


def test_a_vector_of_many_is_looked_at_once_each(monkeypatch):
    """A sum that is read twice, and what is made of it again, and so on."""

    def deep(x, w):
        s = lang.column_sum(lang.linear(x, w))
        for _ in range(24):
            s = lang.tanh(s) * s
        return s

    shapes = {"x": "M 16", "w": "32 16"}
    made = cz.block(shapes=shapes)(deep)
    with torch.no_grad():
        found = made(torch.ones(4, 16), torch.ones(32, 16))
    assert torch.isfinite(found).all()
    looked = []
    original = vectors.is_ready

    def heard(node, there, known):
        looked.append(node)
        return original(node, there, known)

    monkeypatch.setattr(vectors, "is_ready", heard)
    pair = pair_of(deep, "x M 16", "w 32 16")
    Program(pair.forward_plan)
    assert len(looked) < 1000


def test_vectors_that_are_returned_are_made_before_later_products():
    pair, _, _ = given_to("llama-mlp")
    program = Program(pair.forward_plan)
    products = [n for n, step in enumerate(program.steps) if isinstance(step, ProductLaunch)]
    assert len(products) > 1
    assert products[-1] == len(program.steps) - 1


# --- calls ----------------------------------------------------------------------------------------


@pytest.fixture
def rests(monkeypatch):
    """On a CPU, outputs that are not kept hold NaN until the rest is done; the count of rests."""
    done = []

    def begun(executable, tensors, rows, kept):
        outputs = executable(tensors, rows)
        values = {p: o.clone() for p, o in enumerate(outputs) if p not in kept}
        places = {p: outputs[p].fill_(float("nan")).detach() for p in values}

        def rest():
            done.append(len(values))
            for position, value in values.items():
                places[position].copy_(value)

        return outputs, rest

    monkeypatch.setattr(backends.Executable, "begun", begun)
    return done


@cz.block(shapes={"x": "M K", "w": "N K", "v": "K N"})
def two(x, w, v):
    """Two products: the second's result is not saved."""
    return lang.linear(lang.relu(lang.linear(x, w)), v)


def operands(dtype=torch.float32):
    torch.manual_seed(0)
    shapes = {"x": (ROWS, 16), "w": (32, 16), "v": (16, 32)}
    return {n: torch.randn(s).to(dtype).requires_grad_() for n, s in shapes.items()}


def gradients(call, given):
    value = call(**given)
    value.sum().backward()
    return [value.detach(), *(tensor.grad for tensor in given.values())]


def same(found, expected):
    return all(torch.equal(f, e) for f, e in zip(found, expected, strict=True))


def checkpointed(**given):
    return checkpoint(two, *given.values(), use_reentrant=False)


def test_without_hooks_nothing_is_left_for_later(rests):
    assert same(gradients(two, operands()), gradients(two.plain, operands()))
    assert rests == []


def test_a_checkpointed_call_does_not_finish_a_second_time(rests):
    expected = gradients(two, operands())
    assert same(gradients(checkpointed, operands()), expected)
    assert rests == [1]


def test_a_checkpoint_that_may_not_stop_early_runs_all_of_it_again(rests):
    expected = gradients(two, operands())
    with set_checkpoint_early_stop(False):
        assert same(gradients(checkpointed, operands()), expected)
    assert rests == [1, 1]


def test_what_follows_in_the_checkpoint_gets_its_numbers(rests):
    def follow(x, w, v):
        return torch.exp(two(x, w, v)) * 2

    def called(**given):
        return checkpoint(follow, *given.values(), use_reentrant=False)

    expected = gradients(lambda **given: follow(**given), operands())
    assert same(gradients(called, operands()), expected)
    assert rests == [1, 1]


def test_saved_values_may_go_elsewhere(rests):
    expected = gradients(two, operands())
    with torch.autograd.graph.save_on_cpu():
        assert same(gradients(two, operands()), expected)
    assert rests == [1]


def test_autocast_is_off_in_the_rest_too(rests, monkeypatch):
    modes = []
    without = torch.is_autocast_enabled

    begun = backends.Executable.begun

    def heard(executable, tensors, rows, kept):
        outputs, rest = begun(executable, tensors, rows, kept)

        def told():
            modes.append((without("cpu"), torch.is_grad_enabled()))
            rest()

        return outputs, told

    monkeypatch.setattr(backends.Executable, "begun", heard)
    with torch.autocast("cpu", torch.bfloat16):
        expected = gradients(two, operands())
        assert same(gradients(checkpointed, operands()), expected)
    assert modes == [(False, False)]


def test_accelerated_layers_leave_their_last_product_out(rests):
    model, _ = pair("llama")
    cz.accelerate(model)
    plain = outcome(model, **batch())
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    found = outcome(model, **batch())
    layers = model.config.num_hidden_layers
    # Queries, keys and values are needed by attention in the second run too; the stream is not.
    assert sum(count > 0 for count in rests) == 3 * layers
    assert all(torch.equal(found[name], value) for name, value in plain.items())
