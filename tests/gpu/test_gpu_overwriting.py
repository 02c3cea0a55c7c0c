"""Backward that writes over what forward saved for it: the same bits on a GPU, in less memory.

Recorded and then repeated, by the plain template and by Hopper's; not where launches are captured.
"""

import pytest
import torch
from calls import ALIGNED, BRAIN, HEADS, RAGGED, check_same, operands, with_gradients
from plans import attempt, trials
from programs import labelled
from template_choice import each_block_by_a_template

from cadenza.backends.triton.overwriting import takers
from cadenza.library.blocks import BUILT_IN

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("asked_for")]
TURNS = 3  # one that is recorded, and some that repeat it


@pytest.fixture
def asked_for(monkeypatch):
    """Backward may write over what was saved."""
    monkeypatch.setenv("CADENZA_OVERWRITE", "1")


@pytest.mark.interpreted
@pytest.mark.parametrize("sizes", [ALIGNED, RAGGED, None], ids=["aligned", "ragged", "odd"])
@each_block_by_a_template
def test_saved_values_are_written_over_and_nothing_else(name, sizes, template, place):
    check(trials(name, place.rows(129), place, sizes)[1], TURNS)


@pytest.mark.parametrize("name", ["llama", "llama-mlp", "gpt2"])
def test_tiles_beside_one_another_do_not_meet(name, template, place):
    """Hundreds of them, many at a time, with edges inside of tiles."""
    sizes = {"D": 1024, "F": 2840, **HEADS}
    check(trials(name, 2037, place, sizes)[1], 20)


def check(trial, turns):
    """The same bits as with nothing spent, whatever can be being written over."""
    made = attempt(trial)
    inputs = trial.plan.graph.inputs
    taken = set(takers(made.executable.program, inputs).values())
    spent = [p for p, node in enumerate(inputs) if node in taken]
    expected = dict(enumerate(made.outputs))
    for turn in range(turns):
        inputs = [tensor.clone() for tensor in trial.inputs]
        found = made.executable(inputs, trial.rows, spent=spent)
        check_same(dict(enumerate(found)), expected, f"turn {turn}")
        pairs = enumerate(zip(inputs, trial.inputs, strict=True))
        assert [p for p, (a, b) in pairs if not torch.equal(a, b)] == spent
    again = made.executable(trial.inputs, trial.rows)
    check_same(dict(enumerate(again)), expected, "with nothing spent")


def loss_of(name, arguments):
    """A sum of a block's outputs."""
    outputs = labelled(BUILT_IN[name](**arguments)).values()
    return sum(y.float().square().mean() for y in outputs)


def leaves_of(arguments):
    return [v for v in arguments.values() if isinstance(v, torch.Tensor) and v.requires_grad]


def test_backward_needs_less_memory_by_what_it_writes_over(place):
    rows, width = 8192, 2048
    arguments = with_gradients(operands("llama-mlp", rows, place, BRAIN, {"D": 512, "F": width}))
    leaves, peaks, found = leaves_of(arguments), {}, {}
    for kept in (True, False, True, False):  # kernels are compiled in the first turns
        loss = loss_of("llama-mlp", arguments)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        found[kept] = torch.autograd.grad(loss, leaves, retain_graph=kept)
        torch.cuda.synchronize()
        peaks[kept] = torch.cuda.max_memory_allocated()
        del loss
    saved = rows * 2 * width * BRAIN.itemsize  # the pre-activations
    assert peaks[True] - peaks[False] >= 0.99 * saved
    check_same(dict(enumerate(found[False])), dict(enumerate(found[True])), "gradients")


def test_a_captured_backward_may_be_repeated_without_its_forward(place):
    arguments = with_gradients(operands("llama", 129, place, BRAIN, ALIGNED))
    leaves = leaves_of(arguments)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(TURNS):
            expected = torch.autograd.grad(loss_of("llama", arguments), leaves)
    torch.cuda.current_stream().wait_stream(side)
    forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(forward):
        loss = loss_of("llama", arguments)
    with torch.cuda.graph(backward, pool=forward.pool()):
        found = torch.autograd.grad(loss, leaves)
    forward.replay()
    for turn in range(TURNS):
        backward.replay()
        torch.cuda.synchronize()
        check_same(dict(enumerate(found)), dict(enumerate(expected)), f"replay {turn}")
