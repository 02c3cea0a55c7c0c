"""CUDA graphs and torch.compile on a GPU, and torch.library's own checks of the operations.

A captured training step replays what the eager one does. Nothing is compiled while a graph is
captured: a first call then raises and says what to do. By the plain template and by Hopper's.
"""

import pytest
import torch
from calls import (
    ALIGNED,
    BRAIN,
    check_same,
    operands,
    results,
    upstream_of,
    with_gradients,
)
from citizens import CASES, RUN, RUN_BACKWARD, Calls
from plans import watched
from programs import gradients_of, labelled
from template_choice import FEW, PINGPONG, PLAIN, forget_programs

import cadenza as cz
from cadenza.core.errors import BackEndError
from cadenza.library.blocks import BUILT_IN

pytestmark = pytest.mark.gpu
STREAMS = ("x", "y")


# --- CUDA graphs ----------------------------------------------------------------------------------


class Training:
    """A block whose weights are trained by AdamW on inputs that are copied in."""

    def __init__(self, name, arguments):
        self.block, self.arguments = BUILT_IN[name], with_gradients(arguments)
        self.inputs = {n: self.arguments[n] for n in STREAMS if n in arguments}
        self.weights = {
            n: v
            for n, v in self.arguments.items()
            if isinstance(v, torch.Tensor) and v.requires_grad and n not in STREAMS
        }
        for value in self.inputs.values():
            value.requires_grad_(False)
        options = {"lr": 1e-2, "capturable": True}
        self.optimizer = torch.optim.AdamW(list(self.weights.values()), **options)

    def step(self):
        """Forward, loss, backward and update; the loss."""
        self.optimizer.zero_grad(set_to_none=True)
        outputs = labelled(self.block(**self.arguments)).values()
        loss = sum(y.float().square().mean() for y in outputs)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def feed(self, batch):
        """Copies new inputs in."""
        for name, value in self.inputs.items():
            value.copy_(batch[name])


@pytest.mark.parametrize("name", FEW)
def test_a_captured_training_step_replays_the_eager_one(name, template, place):
    arguments = operands(name, 129, place, BRAIN, ALIGNED)
    batches = [{n: torch.randn_like(arguments[n]) for n in STREAMS if n in arguments}
               for _ in range(4)]  # fmt: skip
    captured, eager = Training(name, arguments), Training(name, arguments)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            captured.step()
    torch.cuda.current_stream().wait_stream(side)
    for _ in range(3):
        eager.step()
    graph = torch.cuda.CUDAGraph()
    captured.optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        loss = captured.step()
    for batch in batches:
        captured.feed(batch)
        eager.feed(batch)
        graph.replay()
        check_same({"loss": loss}, {"loss": eager.step()}, "the captured step")
        check_same(captured.weights, eager.weights, "the captured step")


def fresh_program(shift):
    """A program that nobody has called: its constant is its own."""

    @cz.epilogue
    def fresh(acc, by=shift):
        return acc * 0.5 + by

    return fresh


def test_a_first_call_while_a_graph_is_captured_raises_and_tells_the_cure(template, place):
    program = fresh_program(0.3125)
    x, w = (torch.randn(n, 64, dtype=BRAIN, device=place.device) for n in (129, 96))
    torch.cuda.synchronize()
    with (
        pytest.raises(BackEndError, match="call it once before"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        program(x, w)
    expected = program(x, w)  # the cure
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = program(x, w)
    graph.replay()
    check_same({"y": y}, {"y": expected}, "captured")
    x.copy_(torch.randn_like(x))
    graph.replay()
    check_same({"y": y}, {"y": program(x, w)}, "captured, on new inputs")


# --- torch.compile --------------------------------------------------------------------------------


@pytest.fixture
def compiler(monkeypatch, tmp_path):
    """torch.compile without what other tests have compiled, in this process alone."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setattr(torch._inductor.config, "compile_threads", 1)
    torch._dynamo.reset()
    yield torch.compile
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("backend", "template"),
    [("aot_eager", PLAIN), ("inductor", PLAIN), ("aot_eager", PINGPONG)],
    indirect=["template"],
)
@pytest.mark.parametrize("name", FEW)
def test_a_compiled_function_equals_eager_bit_by_bit(name, backend, template, place, compiler):
    block = BUILT_IN[name]
    compiled = compiler(lambda **given: block(**given), fullgraph=True, backend=backend)
    for rows in (127, 129, 257):
        arguments = operands(name, rows, place, BRAIN, ALIGNED)
        upstream = upstream_of(block.plain, arguments)
        expected = results(block, arguments, upstream)
        check_same(results(compiled, arguments, upstream), expected, f"compiled, {rows} rows")


def test_a_program_between_compiled_operations(place, compiler):
    block = BUILT_IN["llama"]

    def function(x, **rest):
        x, qkv = block(x=torch.nn.functional.layer_norm(x, x.shape[-1:]) * 2.0, **rest)
        return x.tanh(), qkv.float().square().mean(-1, keepdim=True)

    compiled = compiler(function, fullgraph=True)
    for rows in (127, 129):
        arguments = operands("llama", rows, place, torch.float32, ALIGNED)
        leaves = with_gradients(arguments)
        upstream = upstream_of(function, arguments)
        outputs, expected = labelled(compiled(**leaves)), labelled(function(**leaves))
        found = gradients_of(outputs, leaves, upstream) | outputs
        for label, value in (gradients_of(expected, leaves, upstream) | expected).items():
            torch.testing.assert_close(found[label], value, rtol=1e-4, atol=1e-4, msg=label)


# --- torch.library --------------------------------------------------------------------------------


def moved(given, device):
    """Operands of a case of `citizens` as leaves on a device."""
    return {n: v.detach().to(device).requires_grad_(v.requires_grad) for n, v in given.items()}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_24_opcheck_of_both_operations(case, place):
    given = moved(case.operands((3, 5), dtype=BRAIN), place.device)
    forget_programs()
    with watched() as products, Calls() as calls:
        loss = sum(
            (v.double() * torch.arange(1, v.numel() + 1, device=v.device).view(v.shape).cos()).sum()
            for v in outputs_of(case.call(given))
        )
        loss.backward()
    (arguments,) = calls.of(RUN)
    assert set(torch.library.opcheck(RUN, arguments).values()) == {"SUCCESS"}
    assert products or case is CASES["pointwise"], "no product ran by Triton"
    ((program, saved, adjoints, rows),) = calls.of(RUN_BACKWARD)
    detached = [v.detach() for v in saved], [a.detach() for a in adjoints]
    checked = torch.library.opcheck(RUN_BACKWARD, (program, *detached, rows))
    assert set(checked.values()) == {"SUCCESS"}


def outputs_of(returned):
    """The outputs of a program that have a gradient."""
    return [value for value in labelled(returned).values() if value.requires_grad]
