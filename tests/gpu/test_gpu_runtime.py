"""Living on a GPU: determinism, streams, devices, synchronisation and the direct launcher.

Two runs are equal bit by bit, whatever memory held before. Work goes to the current stream of the
tensors' device, the host waits for nothing, and the current device stays what it was. By the plain
template and by Hopper's.
"""

from functools import partial

import pytest
import torch
from calls import (
    ALIGNED,
    BRAIN,
    EXAMPLES,
    NAMES,
    SINGLE,
    check_same,
    example,
    example_operands,
    launches,
    operands,
    poison_free_memory,
    results,
    upstream_of,
    with_gradients,
)
from plans import DIRECTIONS, attempt, check_agrees, trials
from programs import labelled
from template_choice import each_block_by_a_template
from torch.utils.checkpoint import checkpoint

from cadenza.backends.triton import launch
from cadenza.library.blocks import BUILT_IN

pytestmark = pytest.mark.gpu
CYCLES = 50_000_000  # some 30 ms of a GPU: longer than the host needs to launch everything
each_block = pytest.mark.parametrize("name", NAMES)


def call_of(name, place, rows=129):
    """A built-in block, its arguments and incoming gradients."""
    block, arguments = BUILT_IN[name], operands(name, rows, place, BRAIN, ALIGNED)
    return block, arguments, upstream_of(block.plain, arguments)


# --- determinism ----------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [129, 2048])
@each_block_by_a_template
def test_runs_are_equal_bit_by_bit_whatever_memory_held(name, rows, template, place):
    block, arguments, upstream = call_of(name, place, rows)
    first = results(block, arguments, upstream)
    for _ in range(3):
        poison_free_memory(place.device)
        check_same(results(block, arguments, upstream), first, "a later run")


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_are_equal_bit_by_bit(name, template, place):
    program = getattr(example(name), name)
    arguments = example_operands(name, 129, place, BRAIN)
    upstream = upstream_of(program.plain, arguments)
    first = results(program, arguments, upstream)
    poison_free_memory(place.device)
    check_same(results(program, arguments, upstream), first, "a later run")


# --- launching ------------------------------------------------------------------------------------


@each_block_by_a_template
def test_direct_launches_and_replays_give_what_the_public_interface_gives(
    name, template, place, monkeypatch, capsys
):
    for direction, given in zip(DIRECTIONS, trials(name, 129, place, ALIGNED), strict=True):
        executable = attempt(given).executable
        kept = known_launchers(executable)
        assert kept, "no emitted kernel was launched"
        missing = [launcher.function for launcher, found in kept if found is None]
        assert not missing, f"launched by the public interface: {missing}"
        replayed = executable(given.inputs, given.rows)
        if not any(executable.replays.values()):
            reasons = {type(s).__name__ for s in executable.program.steps if not s.recorded}
            with capsys.disabled():
                print(f"\n{name} {direction}: no replay, because of {reasons}", end="")
        executable.replays.clear()
        direct = executable(given.inputs, given.rows)
        with monkeypatch.context() as patch:
            patch.setattr(launch, "_direct", lambda *_: None)
            slow = attempt(given).executable
            public = slow(given.inputs, given.rows)
        assert all(found is None for _, found in known_launchers(slow))
        assert not any(slow.replays.values())
        check_same(dict(enumerate(direct)), dict(enumerate(public)), "direct and public")
        check_same(dict(enumerate(replayed)), dict(enumerate(public)), "replayed and public")
        check_agrees(given, direct, place)


def known_launchers(executable):
    """Every launcher of an executable with what it launches by: None for the public interface."""
    launchers = [
        launcher
        for step in executable.program.steps
        for launcher in getattr(step, "launchers", {}).values()
    ]
    return [(launcher, found) for launcher in launchers for found in launcher._known.values()]


def run_again(function, **arguments):
    """The program as a checkpointed layer."""
    names, tensors = list(arguments), list(arguments.values())

    def call(*given):
        return labelled(function(**dict(zip(names, given, strict=True))))

    return checkpoint(call, *tensors, use_reentrant=False)


@pytest.mark.interpreted
@each_block
def test_a_checkpointed_call_makes_what_backward_needs_alone_the_second_time(name, place):
    block, arguments = BUILT_IN[name], operands(name, 129, place, SINGLE, ALIGNED)
    upstream = upstream_of(block.plain, arguments)
    expected = results(block, arguments, upstream)
    results(block, arguments, upstream)
    leaves = with_gradients(arguments)
    with launches() as forward:
        block(**leaves)
    with launches() as once:
        check_same(results(block, arguments, upstream), expected, "a later call")
    for _ in range(2):
        poison_free_memory(place.device)
        with launches() as twice:
            found = results(partial(run_again, block), arguments, upstream)
        check_same(found, expected, "a checkpointed call")
        assert len(once) <= len(twice) <= len(once) + len(forward)
    if name == "llama-mlp":  # whose last product nothing but the output needs
        assert len(twice) < len(once) + len(forward)


@each_block_by_a_template
def test_warm_calls_never_wait_for_the_gpu(name, template, place):
    block, arguments, upstream = call_of(name, place)
    expected = results(block, arguments, upstream)
    results(block, arguments, upstream)
    leaves = with_gradients(arguments)
    needed = [v for v in leaves.values() if isinstance(v, torch.Tensor) and v.requires_grad]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        outputs = labelled(block(**leaves))
        found = torch.autograd.grad(list(outputs.values()), needed, list(upstream.values()))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    check_same(outputs, {n: expected[n] for n in outputs}, "without waiting")
    assert all(gradient.isfinite().all() for gradient in found)


# --- streams and devices --------------------------------------------------------------------------


@each_block_by_a_template
def test_work_goes_to_the_current_stream(name, template, place):
    block, arguments, upstream = call_of(name, place)
    expected = results(block, arguments, upstream)
    leaves = with_gradients(arguments)
    needed = {n: v for n, v in leaves.items() if isinstance(v, torch.Tensor) and v.requires_grad}
    late = {n: torch.full_like(g, float("nan")) for n, g in upstream.items()}
    with torch.no_grad():
        for leaf in needed.values():
            leaf.fill_(float("nan"))
    side = torch.cuda.Stream(place.device)
    side.wait_stream(torch.cuda.current_stream(place.device))
    with torch.cuda.stream(side):
        torch.cuda._sleep(CYCLES)  # who launches on another stream reads NaN
        with torch.no_grad():
            for label, leaf in needed.items():
                leaf.copy_(arguments[label])
        outputs = labelled(block(**leaves))
        torch.cuda._sleep(CYCLES)
        for label, gradient in late.items():
            gradient.copy_(upstream[label])
        found = torch.autograd.grad(
            list(outputs.values()), list(needed.values()), list(late.values())
        )
    torch.cuda.current_stream(place.device).wait_stream(side)
    actual = outputs | {f"d {n}": g for n, g in zip(needed, found, strict=True)}
    check_same(actual, expected, "on a side stream")


def test_the_current_device_stays(place):
    before = torch.cuda.current_device()
    block, arguments, upstream = call_of("llama", place)
    results(block, arguments, upstream)
    assert torch.cuda.current_device() == before


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("warm", [True, False], ids=["after cuda:0", "first of all"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "lm-head"])
def test_31_tensors_on_another_gpu_than_the_current_one(name, warm, template, place):
    block, arguments, upstream = call_of(name, place, rows=65 if warm else 66)
    if warm:
        results(block, arguments, upstream)

    def moved(values):
        return {n: v.to("cuda:1") if isinstance(v, torch.Tensor) else v for n, v in values.items()}

    with torch.cuda.device(0):
        actual = results(block, moved(arguments), moved(upstream))
        assert torch.cuda.current_device() == 0
    assert {value.device.index for value in actual.values()} == {1}
    back = {n: v.to(place.device) for n, v in actual.items()}
    check_same(back, results(block, arguments, upstream), "on cuda:1")


# --- autocast -------------------------------------------------------------------------------------


def test_27_autocast_computes_in_bfloat16_and_gives_gradients_of_the_weights_dtype(template, place):
    block, arguments = BUILT_IN["llama"], operands("llama", 129, place, torch.float32, ALIGNED)
    arguments |= {n: arguments[n].to(BRAIN) for n in ("cos", "sin")}  # wider, they would widen
    leaves = with_gradients(arguments)
    with torch.autocast("cuda", torch.bfloat16):
        outputs = block(**leaves)
    weights = [leaves["wo"], leaves["w_gate_up"], leaves["w_qkv"]]
    found = torch.autograd.grad([y.float().sum() for y in outputs], weights)
    assert outputs[1].dtype == BRAIN
    assert [g.dtype for g in found] == [torch.float32] * 3
    narrow = block(**operands_as(arguments, BRAIN))
    error = (outputs[1].double() - narrow[1].double()).norm()
    assert error <= 2.0**-6 * narrow[1].double().norm()


def operands_as(arguments, dtype):
    """The arguments with floating tensors in another dtype."""
    return {
        n: v.to(dtype) if isinstance(v, torch.Tensor) and v.is_floating_point() else v
        for n, v in arguments.items()
    }
