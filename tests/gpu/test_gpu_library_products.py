"""Plans whose products are torch's are repeated as others are: with new inputs, begun and ended."""

import planned
import pytest
import torch
from calls import BRAIN, HALF

from cadenza.backends import reference
from cadenza.backends.triton.executable import Executable
from cadenza.backends.triton.fallbacks import LibraryProduct
from cadenza.backends.triton.replay import Replay
from cadenza.backends.triton.tuning.candidates import LIBRARY

pytestmark = pytest.mark.gpu
ROWS = 19


def drawn(plan, call, dtype):
    """A plan's inputs on the GPU, with new numbers."""
    named = {name: tensor.cuda() for name, tensor in call.tensors.items()}
    return [
        torch.randn_like(t, dtype=torch.float32).to(dtype) if t.is_floating_point() else t
        for t in (named[i.attributes["name"]] for i in plan.graph.inputs)
    ]


@pytest.mark.parametrize("dtype", [BRAIN, HALF, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["llama-mlp", "gpt2", "lm-head"])
def test_library_products_are_repeated(name, dtype, place):
    call = planned.call(name, ROWS, dtype)
    plan = call.pair().forward_plan
    run = Executable(plan, lambda kernel: LIBRARY if kernel.product is not None else None)
    plain = reference.Executable(plan)
    for _ in range(4):  # one is recorded, the others repeat it
        inputs = drawn(plan, call, dtype)
        found = run(inputs, ROWS)
        for ours, theirs in zip(found, plain(inputs, ROWS), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)
    assert any(isinstance(step, LibraryProduct) for step in run.program.steps)
    (replay,) = run.replays.values()
    assert isinstance(replay, Replay)
    begun, rest = run.begun(inputs, ROWS, [0])
    assert torch.equal(begun[0], found[0])
    for output in begun:  # as a caller does whose tensors have more dimensions
        output.resize_(1, *output.shape)
    rest()
    assert all(torch.equal(a[0], b) for a, b in zip(begun, found, strict=True))
