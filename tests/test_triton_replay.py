"""What is repeated without a GPU: places in a workspace, what a recording may be repeated for.

And the library path: every product by torch, its epilogue by a pointwise kernel, values as those of
the reference back end.
"""

import itertools
import os
import subprocess
import sys
import weakref
from contextlib import nullcontext
from functools import partial

import planned
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_blocks import BlockRecipe

from cadenza.backends import reference
from cadenza.backends.triton import launch
from cadenza.backends.triton import replay as repeating
from cadenza.backends.triton.executable import Executable
from cadenza.backends.triton.fallbacks import LibraryProduct, ReferenceKernel
from cadenza.backends.triton.launch import Descriptor
from cadenza.backends.triton.memory import Memory
from cadenza.backends.triton.program import Program
from cadenza.backends.triton.replay import (
    ALIGNMENT,
    Noted,
    Recording,
    Span,
    placed,
    replay,
)
from cadenza.backends.triton.target import INTERPRETER, Target
from cadenza.core.pipeline import compile_program
from cadenza.library.blocks import BUILT_IN

DEVICE = torch.device("cpu")
spans = st.builds(
    lambda size, first, length: Span(size * ALIGNMENT, first, first + length),
    st.integers(0, 9), st.integers(0, 12), st.integers(0, 6),
)  # fmt: skip


@settings(max_examples=300)
@given(st.lists(spans, max_size=12))
def test_what_is_in_use_together_never_overlaps(given):
    offsets, total = placed(given)
    for (a, x), (b, y) in itertools.combinations(zip(offsets, given, strict=True), 2):
        if x.first <= y.last and y.first <= x.last:
            assert a + x.size <= b or b + y.size <= a
    assert all(o % ALIGNMENT == 0 for o in offsets)
    assert all(o + s.size <= total for o, s in zip(offsets, given, strict=True))
    assert total <= sum(s.size for s in given)


def test_what_is_not_in_use_together_shares_a_place():
    offsets, total = placed([Span(512, 0, 1), Span(512, 2, 3), Span(1024, 1, 2)])
    assert offsets[0] == offsets[1]
    assert total == 1536


class Launcher:
    """Stands for a function with a compiled launcher."""

    def __init__(self, direct):
        self.made = direct

    def direct(self, given, device):
        return self.made


class Direct:
    """Stands for a compiled launcher."""

    blanks, head = (None, None), ("kernel",)

    def __init__(self):
        self.launched, self.encoded = [], 0

    def raw(self, *given):
        self.launched.append(given)

    def map_at(self, pointer, number, descriptor):
        self.encoded += 1
        return f"map of {pointer}"


def recorded(direct=Direct, usable=True):
    """A kernel that reads an input by a descriptor, a second that reads what the first wrote."""
    x, inner, out = (torch.zeros(4, 8) for _ in range(3))
    box = Descriptor(x, x.shape, x.stride(), (4, 8))
    made = direct() if direct else None
    launches = [
        Noted(Launcher(made), (1, 1), [box, inner, 8]),
        Noted(Launcher(made), (2, 1), [inner, out, 7]),
    ]
    return Recording([inner, out], launches, usable), x, inner, out


def test_a_recording_becomes_addresses_relative_to_bases():
    recording, x, _, out = recorded()
    found = replay(recording, [x], [out], [2], DEVICE)
    first, second = found.launches
    assert first.template == (None, 4, 8, 8, 1, None, 8, None, None)
    assert [m[:4] for m in first.maps] == [(0, 1, 0, 0)]  # the input
    assert first.pointers == ((5, 0, 0),)  # the workspace
    assert second.pointers == ((0, 0, 0), (1, 2, 0))
    assert (found.workspace, found.outputs) == (ALIGNMENT, [((4, 8), (8, 1), torch.float32)])


def test_addresses_that_come_back_are_put_in_once():
    direct = Direct()
    recording, x, _, out = recorded(lambda: direct)
    found = replay(recording, [x], [out], [2], DEVICE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 5, raising=False)
        for bases in [(1000, 1, 2), (1000, 1, 2), (1000, 3, 2)]:
            found._run(bases, ())
    first = (1, 1, 1, 5, "kernel", "map of 1", 4, 8, 8, 1, 1000, 8, None, None)
    assert direct.launched[:2] == [first, (2, 1, 1, 5, "kernel", 1000, 2, 7, None, None)]
    assert direct.launched[2:4] == direct.launched[:2]
    assert direct.launched[4][5] == "map of 3"
    assert direct.encoded == 2


@pytest.mark.parametrize("allocate", ["as Inductor does", "by the dispatcher"])
def test_a_replay_gives_new_outputs_of_inputs_at_addresses(allocate, monkeypatch):
    direct = Direct()
    recording, x, _, out = recorded(lambda: direct)
    empty = torch._C._dynamo.guards._empty_strided_cpu
    if allocate == "by the dispatcher":
        monkeypatch.setattr(torch, "empty_strided", partial(on_a_cpu, torch.empty_strided))
        empty = repeating._by_dispatcher
    monkeypatch.setattr(repeating, "_empty", empty)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 5, raising=False)
    found = replay(recording, [x], [out], [2], DEVICE)
    (first,), (second,) = found([1000], [x]), found([1000], [x])
    assert first.data_ptr() != second.data_ptr()
    for made, launched in ((first, direct.launched[1]), (second, direct.launched[3])):
        assert (made.shape, made.stride(), made.dtype) == (out.shape, out.stride(), out.dtype)
        assert launched[6] == made.data_ptr()
    assert direct.launched[0][5] == "map of 1000"


def test_launches_that_some_outputs_need_are_made_first(monkeypatch):
    """The first output after one of two launches; the workspace lives until all are made."""
    direct, (x, out, other) = Direct(), (torch.zeros(4, 8) for _ in range(3))
    launches = [
        Noted(Launcher(direct), (1, 1), [x, out]), Noted(Launcher(direct), (2, 1), [out, other])
    ]  # fmt: skip
    recording = Recording([out, other])
    for launch_made, value in zip(launches, "ab", strict=True):
        recording.launches.append(launch_made)
        recording.note(["x", value] if value == "a" else ["x", "a", value])
    assert recording.done(["a", "b", "elsewhere"]) == [1, 2, 0]
    found = replay(recording, [x], [out, other], recording.done("ab"), DEVICE)
    monkeypatch.setattr(repeating, "_empty", torch._C._dynamo.guards._empty_strided_cpu)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 5, raising=False)
    for kept, first in (((0,), 1), ((1,), 2), ((0, 1), 2), ((), 0)):
        direct.launched.clear()
        made, rest = found.begun([1000], [x], kept)
        assert len(direct.launched) == first
        rest()
        assert [given[0] for given in direct.launched] == [1, 2]
        assert direct.launched[1][5:7] == tuple(m.data_ptr() for m in made)
    made, rest = found.begun([1000], [x], (0,))
    held = {tensor.data_ptr() for tensor in made}
    assert held <= {tensor.data_ptr() for tensor in rest.args[1]}, "later launches write there"
    kept = weakref.ref(rest.args[1][0])
    rest()
    del rest
    assert kept() is None


class Multiplied:
    """Stands for the node of a product."""

    def __init__(self, *inputs, turned):
        self.inputs, self.attributes = inputs, {"transpose_a": False, "transpose_b": turned}


def product_step(name, memory, left, right, out=None):
    """A step of a plan that is torch's product, of values that a memory has by these names."""
    node = Multiplied(left, right.removesuffix(".T"), turned=right.endswith(".T"))
    step = LibraryProduct(node, memory.values[left].dtype if out is None else out, "")
    step.run(memory)
    memory.recording.usable &= step.recorded
    memory.values[name] = memory.values.pop(node)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gap", [0, 8], ids=["whole", "of wider rows"])
def test_library_products_are_repeated_on_other_inputs(dtype, gap, monkeypatch):
    """Between the inputs, the workspace and the outputs, transposed or not."""
    monkeypatch.setattr(repeating, "_empty", torch._C._dynamo.guards._empty_strided_cpu)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 5, raising=False)

    def drawn():
        x, w = (torch.randn(n, 8 + gap).to(dtype)[:, :8] for n in (4, 8))
        return {"x": x, "w": w}

    memory = Memory(4, DEVICE, drawn(), recording=Recording())
    inputs = [memory.values[name] for name in "xw"]
    product_step("inner", memory, "x", "w.T")
    product_step("out", memory, "inner", "w")
    found = replay(memory.recording, inputs, [memory.values["out"]], [2], DEVICE)
    for _ in range(3):
        x, w = drawn().values()
        (out,) = found([x.data_ptr(), w.data_ptr()], [x, w])
        assert torch.equal(out, torch.mm(torch.mm(x, w.T), w))
    made, rest = found.begun([x.data_ptr(), w.data_ptr()], [x, w], ())
    made[0].resize_(2, 2, 8)  # as a caller does whose tensors have more dimensions
    rest()
    assert torch.equal(made[0], out.view(2, 2, 8))


def test_a_product_that_torch_makes_in_steps_is_not_repeated():
    values = {"x": torch.ones(4, 8, dtype=torch.bfloat16), "w": torch.ones(8, 8)}
    memory = Memory(4, DEVICE, values, recording=Recording())
    product_step("out", memory, "x", "w", torch.float32)
    assert torch.equal(memory.values["out"], torch.full((4, 8), 8.0))
    assert replay(memory.recording, [*values.values()], [memory.values["out"]], [1], DEVICE) is None


def on_a_cpu(empty_strided, *given, device, **named):
    """Memory of a CPU instead of a GPU's."""
    assert device == "cuda"
    return empty_strided(*given, **named)


def test_a_value_that_is_written_over_an_input_lies_with_it():
    """A launch that reads and writes one input, then one that reads what was written there."""
    x, out = (torch.zeros(4, 8) for _ in range(2))
    box, made = Descriptor(x, x.shape, x.stride(), (4, 8)), Direct()
    launches = [
        Noted(Launcher(made), (1, 1), [box, x, 8]),
        Noted(Launcher(made), (2, 1), [x, out, 7]),
    ]
    found = replay(Recording([out], launches), [x], [out], [2], DEVICE)
    first, second = found.launches
    assert [m[:4] for m in first.maps] == [(0, 1, 0, 0)]
    assert first.pointers == ((5, 1, 0),)
    assert second.pointers == ((0, 1, 0), (1, 2, 0))
    assert found.workspace == 0


def test_what_can_not_be_repeated():
    recording, x, _, out = recorded()
    assert replay(recording, [x], [x], [0], DEVICE) is None  # an input is returned
    assert replay(recording, [x], [out, out], [2, 2], DEVICE) is None
    assert replay(recording, [], [out], [2], DEVICE) is None  # a tensor from elsewhere
    recording, x, _, out = recorded(usable=False)
    assert replay(recording, [x], [out], [2], DEVICE) is None
    recording, x, _, out = recorded(direct=None)
    assert replay(recording, [x], [out], [2], DEVICE) is None


@pytest.mark.parametrize("name", sorted(BUILT_IN))
@pytest.mark.slow
def test_the_library_path_gives_the_same_values(name):
    torch.manual_seed(0)
    made = planned.call(name, 19, torch.float32)
    pair = made.pair()
    forward = [made.tensors[i.attributes["name"]] for i in pair.forward.inputs]
    results = reference.compile_plan(pair.forward_plan)(forward, 19)
    adjoints = planned.adjoints_of(pair.program, 19, torch.float32)
    backward = [results[v] if isinstance(v, int) else made.tensors[v] for v in pair.values]
    backward += [adjoints[p] for p in pair.adjoints]
    for plan, inputs in ((pair.forward_plan, forward), (pair.backward_plan, backward)):
        by_library = Executable(plan)
        program = Program(plan, target=Target.named("sm_90"))  # float32 is torch's there
        by_library.programs[INTERPRETER, by_library.rows] = program
        assert sum(isinstance(step, LibraryProduct) for step in program.steps) == plan.products
        expected = reference.compile_plan(plan)(inputs, 19)
        for found, exact in zip(by_library(inputs, 19), expected, strict=True):
            torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-5)
        assert by_library.program is program


@pytest.mark.parametrize("release", ["3.5.1", "3.7.0", "3.9.0", "4.0.0"])
def test_a_launcher_of_another_release_is_never_called_directly(release, monkeypatch):
    class CudaLauncher:
        launch = staticmethod(print)  # a function in C

    class Kernel:
        run, metadata = CudaLauncher(), None

    monkeypatch.setattr(launch, "version", lambda: "3.6.0")
    assert launch._raw(Kernel) == (print, ())
    monkeypatch.setattr(launch, "version", lambda: release)
    assert launch._raw(Kernel) == (None, ())


def test_what_no_template_makes_is_logged_with_its_reason(caplog):
    pair = planned.call("qwen3", 5, torch.float32).pair()
    with caplog.at_level("INFO", logger="cadenza"):
        Program(pair.forward_plan)
    reason = "groups of 6 columns: not a power of two"
    assert caplog.messages == [f"program: a ReferenceKernel: {reason}"]


@pytest.mark.slow
def test_the_log_is_said_where_the_environment_asks_for_it():
    code = "import logging, cadenza.backends; logging.getLogger('cadenza').info('heard')"
    said = [
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "CADENZA_LOG": level}, check=True,
            capture_output=True, text=True,
        ).stderr
        for level in ("info", "warning", "")
    ]  # fmt: skip
    assert said == ["heard\n", "", ""]


def test_a_kernel_may_reduce_by_what_it_reduces_itself():
    """A variance by a mean of the same product, in a kernel that no template makes."""
    sizes = {
        "x": "M 16", "g1": "1 16", "w3": "3 16", "t": "M 1", "w5": "16 8", "b6": "1 16",
        "w7": "32 3", "b8": "1 32",
    }  # fmt: skip
    lines = [
        "h0 = x - 0.5 * g1", "h2 = L.reglu(h0)", "h3 = L.linear(x, w3)",
        "h4 = L.logsumexp(h3, L.pick(h3, t))", "h6 = L.linear(h2, w5, b6)", "h8 = x + h6",
        "h10 = L.layer_norm(h3, None, eps=0.25)", "h11 = L.linear(h10, w7, b8)",
    ]  # fmt: skip
    recipe = BlockRecipe(sizes, lines, "{'a': h11, 'b': h8, 'c': h4}", 3)
    needed = [name for name in sizes if name != "t"]
    pair = compile_program(recipe.function(), recipe.signature("float32"), needed=needed)
    torch.manual_seed(0)
    shapes = {n: [5 if d == "M" else int(d) for d in s.split()] for n, s in sizes.items()}
    named = {name: torch.randn(shape) for name, shape in shapes.items()}
    named["t"] = torch.randint(0, 3, (5, 1))
    inputs = [named[i.attributes["name"]] for i in pair.forward.inputs]
    executable = Executable(pair.forward_plan)
    expected = reference.compile_plan(pair.forward_plan)(inputs, 5)
    for found, exact in zip(executable(inputs, 5), expected, strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-5)
    assert isinstance(executable.program.steps[0], ReferenceKernel)


def test_a_library_product_is_written_where_it_is_wanted():
    pair = planned.call("llama-mlp", 19, torch.float32).pair()
    products = [k.product for k in pair.forward_plan.kernels]
    step = LibraryProduct(products[-1], torch.float32, "")
    sizes = [[19 if d == "M" else int(d) for d in i.type[:2]] for i in products[-1].inputs]
    values = [torch.randn(size) for size in sizes]
    memory = Memory(19, DEVICE, dict(zip(products[-1].inputs, values, strict=True)))
    step.run(memory)
    expected = memory.values.pop(products[-1])
    place = memory.places[products[-1]] = torch.full_like(expected, float("nan"))
    step.run(memory)
    assert memory.values[products[-1]] is place
    assert torch.equal(place, expected)
    memory.places[products[-1]] = place.bfloat16()
    step.run(memory)
    assert torch.equal(memory.values[products[-1]], expected), "another dtype, so it is copied"
