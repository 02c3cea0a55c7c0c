"""Faults of other libraries' kernels, by numbers of docs/reliability.md, on a GPU.

Blocks have suites of their own beside this file; here are the programs of the library: results that
later calls must leave alone, every candidate of tuning, several consumers, strides, gradients that
are needed or not, sizes past 2**31, memory.
"""

import pytest
import torch
from block_operands import cast
from calls import BRAIN, SINGLE, check_same, launches, results, upstream_of
from plans import DIRECTIONS, SMALL, Given, attempt, check_agrees
from programs import gradients_of, labelled
from stock_programs import operands
from test_gpu_memory import free_bytes
from triton_plans import trials

import cadenza as cz
from cadenza.backends.triton.configuration import Facts, default, family, shrunk
from cadenza.backends.triton.launches import ProductLaunch
from cadenza.backends.triton.program import Program
from cadenza.backends.triton.target import Target
from cadenza.backends.triton.tuning.candidates import LISTS
from cadenza.library import models
from cadenza.library.variants import VARIANTS

pytestmark = pytest.mark.gpu
PAST = 2**31
NAMES = sorted(set(VARIANTS) - {"weight-gradient"})
ALIGNED = {"D": 256, "F": 384, "H": 4, "KV": 2, "HD": 64, "V": 640}
TINY = {"D": 32, "F": 48, "H": 2, "KV": 1, "HD": 16, "V": 64}


@pytest.mark.interpreted
@pytest.mark.parametrize("name", NAMES)
def test_08_results_stay_what_they_are_while_later_calls_run(name, place):
    """What lives between the kernels of a plan has one place, which later calls take again."""
    first, second = (variant(name, place) for _ in range(2))
    program = VARIANTS[name].program
    upstream = upstream_of(program.plain, first)
    for _ in range(3):  # the third call repeats a recording
        found = results(program, first, upstream)
    kept = {n: v.clone() for n, v in found.items()}
    results(program, second, upstream)
    check_same(found, kept, "after another call")


def variant(name, place, dtype=None, rows=129):
    """Operands of a program of the library."""
    dtype = dtype or (SINGLE if place.interpreted else BRAIN)
    with torch.device(place.device):
        made = operands(name, place.rows(rows), TINY if place.interpreted else ALIGNED)
    return cast(made, dtype)


# --- every candidate ------------------------------------------------------------------------------


@pytest.mark.interpreted
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", NAMES)
def test_11_programs_of_the_library_agree_under_every_candidate(name, direction, place):
    """The default, and every third that tuning would measure: the next program takes the next."""
    given = given_of(name, place)[DIRECTIONS.index(direction)]
    target = Target.of(place.device)
    program = Program(given.plan, target=target)
    steps = [step for step in program.steps if isinstance(step, ProductLaunch)]
    options = {step.product: candidates_of(program, step, target, place) for step in steps}
    most = max(map(len, options.values()), default=1)
    for number in (0, *range(1 + NAMES.index(name) % 3, most, 3)):
        used = {product: found[number % len(found)] for product, found in options.items()}
        try:
            found = attempt(given, lambda kernel, used=used: used.get(kernel.product))
            check_agrees(given, found.outputs, place)
        except Exception as error:
            error.add_note(f"by {', '.join(sorted(map(str, used.values())))}")
            raise


def candidates_of(program, step, target, place):
    """The default and the short list, as shrunk to a product; few where all is slow."""
    facts = Facts.of(step.source, step.product, program.dtypes[step.operands[0]].itemsize)
    if place.interpreted:
        return [default(facts, target), SMALL]
    short, _ = LISTS[family(target)]
    cuts = [shrunk(cut, facts) for cut in short]
    return list(dict.fromkeys([default(facts, target), *cuts]))


def given_of(name, place):
    """The plans of a program for a call, both directions, beside the reference back end."""
    made = variant(name, place, rows=300)
    with torch.device(place.device):
        return [Given(*trial, None) for trial in trials(VARIANTS[name].program, made)]


# --- what is needed of a call's gradients ---------------------------------------------------------

SOME = ["linear-layer-norm", "qkv-head-norm", "feed-forward", "decoder-both"]


def turned(arguments):
    """Operands whose rows are apart in memory."""
    return {
        n: v.T.contiguous().T if isinstance(v, torch.Tensor) and v.dim() == 2 else v
        for n, v in arguments.items()
    }


def trained(arguments):
    """The names of operands that a model trains: not the tables of angles."""
    return [
        n for n, v in arguments.items()
        if isinstance(v, torch.Tensor) and v.is_floating_point() and n not in ("cos", "sin")
    ]  # fmt: skip


def needed(program, arguments, names, upstream):
    """The gradients that a call needs, by operand, and how many emitted kernels backward ran."""
    leaves = {
        n: v.detach().requires_grad_(n in names) if isinstance(v, torch.Tensor) else v
        for n, v in arguments.items()
    }
    outputs = labelled(program(**leaves))
    with launches() as made:
        found = gradients_of(outputs, leaves, upstream)
    return found, len(made)


@pytest.mark.interpreted
@pytest.mark.parametrize("name", SOME)
def test_12_a_result_with_two_consumers_gets_the_sum(name, place):
    """Of two random incoming gradients, which meet at each result; programs are linear in them."""
    program, arguments = VARIANTS[name].program, variant(name, place, SINGLE)
    first, second = (upstream_of(program.plain, arguments) for _ in range(2))
    both = {n: first[n] + second[n] for n in first}
    leaves = {n: v.requires_grad_() for n, v in arguments.items() if n in trained(arguments)}
    outputs = labelled(program(**arguments))
    consumed = sum((y * first[n]).sum() + (second[n] * y).sum() for n, y in outputs.items())
    found = torch.autograd.grad(consumed, list(leaves.values()))
    expected = results(program, arguments, both)
    for label, value in zip(leaves, found, strict=True):
        exact = expected[f"d {label}"].double()
        assert (value.double() - exact).norm() <= 1e-5 * exact.norm(), label


@pytest.mark.interpreted
@pytest.mark.parametrize("name", SOME)
def test_15_an_operand_that_is_copied_gets_its_gradient(name, place):
    """Each operand as the only one that needs one, all of them apart in memory."""
    program, arguments = VARIANTS[name].program, turned(variant(name, place))
    upstream = upstream_of(program.plain, arguments)
    every, _ = needed(program, arguments, trained(arguments), upstream)
    for alone in trained(arguments):
        found, _ = needed(program, arguments, [alone], upstream)
        error = (found[alone].double() - every[alone].double()).norm()
        assert every[alone].any(), alone
        assert error <= 2.0**-7 * every[alone].double().norm(), alone


@pytest.mark.interpreted
@pytest.mark.parametrize("name", SOME)
def test_19_a_gradient_that_nobody_needs_costs_no_kernel(name, place):
    program, arguments = VARIANTS[name].program, variant(name, place)
    upstream = upstream_of(program.plain, arguments)
    every, most = needed(program, arguments, trained(arguments), upstream)
    weights = [n for n in every if n.startswith("w")]
    assert weights
    without, fewer = needed(program, arguments, [n for n in every if n not in weights], upstream)
    assert fewer <= most - len(weights)
    for label, value in without.items():
        error = (value.double() - every[label].double()).norm()
        assert error <= 2.0**-7 * every[label].double().norm(), label


# --- layouts and sizes ----------------------------------------------------------------------------


@pytest.mark.interpreted
@pytest.mark.parametrize("name", NAMES)
def test_13_operands_of_any_strides(name, place):
    """Rows that are turned or apart, and incoming gradients that a sum or a mask would hand on."""
    program, arguments = VARIANTS[name].program, variant(name, place)
    upstream = upstream_of(program.plain, arguments)
    apart = {n: torch.cat((g, g), -1)[..., : g.shape[-1]] for n, g in upstream.items()}
    found = results(program, turned(arguments), apart)
    expected = results(program, arguments, upstream)
    for label, value in found.items():
        error = (value.double() - expected[label].double()).norm()
        assert error <= 2.0**-7 * expected[label].double().norm(), label
    ones = {n: torch.ones_like(g) for n, g in upstream.items()}
    flat = {n: g.new_ones(()).expand_as(g) for n, g in upstream.items()}
    check_same(results(program, arguments, flat), results(program, arguments, ones), "expanded")


@pytest.mark.alone
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_16_a_norm_of_more_than_2_to_the_31_elements(kind, place):
    rows, width = 540_000, 4096
    if free_bytes() < 40e9:
        pytest.skip("needs 40 GB of a GPU's memory")
    x = torch.empty(rows, width, dtype=BRAIN, device=place.device).normal_().requires_grad_()
    gain = torch.rand(width, device=place.device).to(BRAIN)
    assert x.numel() > PAST
    y = cz.ops.norm(x, gain, kind=kind)
    (dx,) = torch.autograd.grad(y, x, x.detach())
    sample = torch.tensor([0, PAST // width - 1, PAST // width + 1, rows - 1], device=place.device)
    few = x.detach()[sample].double().requires_grad_()
    expected = cz.ops.norm.plain(few, gain.double(), kind=kind)
    (gradient,) = torch.autograd.grad(expected, few, few.detach())
    for found, exact in ((y, expected), (dx, gradient)):
        error = (found[sample].double() - exact).norm(dim=1)
        assert (error <= 2.0**-7 * exact.norm(dim=1)).all()


@pytest.mark.alone
def test_38_a_model_keeps_for_backward_what_its_layers_formula_says(place):
    """M rows of qkv, attention's output, x1, the stream, raw gate and up; attention keeps a float32
    number a head and row of its own. Weights of one product lie together: no copy of them.
    """
    config = models.LlamaConfig(
        vocabulary=512, width=1024, layers=2, heads=16, key_value_heads=8, feed_forward=3072,
        context=2048,
    )  # fmt: skip
    model = models.Llama(config).to(place.device, BRAIN)
    tokens = torch.randint(512, (4, 2048), device=place.device)
    model(tokens, tokens).backward()
    model.zero_grad()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    loss = model(tokens, tokens)
    kept = torch.cuda.memory_allocated() - before
    rows, columns = tokens.numel(), (16 + 2 * 8) * 64
    layer = 2 * rows * (columns + 1024 + 2 * 1024 + 2 * 3072) + 4 * rows * (16 + 4)
    ends = 2 * rows * 1024 * 3 + 2 * 2 * rows * 64 * 2 + (4 + 2) * 512 * 1024
    assert loss.isfinite()
    assert kept <= 1.1 * (2 * layer + ends)
