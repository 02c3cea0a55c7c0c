"""What `cadenza bench` compares computes the same: programs, torch's functions, bare products."""

import pytest
import torch

from cadenza.backends import chosen
from cadenza.library.specialize import Call
from cadenza.tools.bench.case import Unavailable
from cadenza.tools.bench.draw import Draw
from cadenza.tools.bench.kernels import (
    BY_NAME,
    KERNELS,
    PRIMITIVE,
    Kernel,
    Primitive,
    kernel_sizes,
)
from cadenza.tools.bench.layer import BACKWARD_PRODUCTS, FORWARD_PRODUCTS, LAYER, LayerStage
from cadenza.tools.bench.loss import Loss
from cadenza.tools.bench.model import Training
from cadenza.tools.bench.patterns import LLAMA
from cadenza.tools.bench.primitives import PRIMITIVES, primitives
from cadenza.tools.bench.stage import VARIANTS, copies_for
from cadenza.tools.bench.subject import Layer, OneKernel
from cadenza.tools.bench.suites import SUITES, Case

CPU = torch.device("cpu")
SMALL = {"M": 12, "N": 32, "K": 16}
LAYER_SIZES = {"M": 11, "D": 24, "F": 20, "H": 3, "KV": 1, "HD": 8}


def draw(seed=0, dtype=torch.float64):
    return Draw(dtype, CPU, seed)


def drawn(name, **given):
    sizes = kernel_sizes(name, {**SMALL, **({"HD": 8} if name == "rope" else {}), **given})
    return BY_NAME[name].draw(draw(), sizes)


@pytest.mark.parametrize("name", BY_NAME)
def test_a_pattern_and_torchs_function_compute_the_same(name):
    pattern, operands = BY_NAME[name], drawn(name)
    ours = pattern.aligned(operands.ours, pattern.program(**operands.ours))
    theirs = pattern.stock(operands.stock)
    assert set(ours) == set(theirs) - ({"n"} if name == "rms_backward" else set())
    for output, value in ours.items():
        torch.testing.assert_close(value, theirs[output], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", BY_NAME)
def test_a_pattern_computes_what_its_own_function_does(name):
    pattern, operands = BY_NAME[name], drawn(name)
    plain = pattern.program.plain(**operands.ours)
    for output, value in pattern.program(**operands.ours).items():
        torch.testing.assert_close(value, plain[output], rtol=1e-9, atol=1e-9)


def test_the_normalised_activation_of_the_backward_is_the_norms():
    operands = drawn("rms_backward").stock
    n = BY_NAME["rms_backward"].stock(operands)["n"]
    torch.testing.assert_close(n, operands["x"] * operands["r"] * operands["g"])


@pytest.mark.parametrize("name", BY_NAME)
def test_a_pattern_is_one_kernel_of_one_product(name):
    plan = plan_of(BY_NAME[name].program, drawn(name).ours)
    assert [kernel.kind for kernel in plan.kernels] == ["product"]
    assert not plan.vector_products


def plan_of(program, operands):
    """The plan of a call of a program without gradients."""
    given = [(name, operands[name]) for name in program.parameters if name in operands]
    tensors = [(n, v) for n, v in given if isinstance(v, torch.Tensor)]
    constants = tuple((n, v) for n, v in given if not isinstance(v, torch.Tensor))
    text = Call(tuple(n for n, _ in tensors), constants, None, chosen(None)).encode()
    found, _ = program.specializations.find([v for _, v in tensors], text, 0)
    return found.pair.forward_plan


@pytest.mark.parametrize("name", BY_NAME)
def test_the_bare_product_is_the_patterns(name):
    pattern, operands = BY_NAME[name], drawn(name).ours
    a, b = pattern.product.matrices(operands)
    sizes = kernel_sizes(name, SMALL)
    assert (*a.shape, b.shape[1]) == (sizes["M"], sizes["K"], sizes["N"])
    assert pattern.product.flops(operands) == 2 * sizes["M"] * sizes["N"] * sizes["K"]
    (product,) = plan_of(pattern.program, operands).kernels
    rows, columns = product.product.type[:2]
    assert columns == sizes["N"]
    assert rows in ("M", sizes["M"])


@pytest.mark.parametrize("name", BY_NAME)
def test_both_sides_start_from_the_same_numbers(name):
    """In bfloat16 the operands of the two differ by factors that round nothing."""
    pattern = BY_NAME[name]
    sizes = kernel_sizes(name, {**SMALL, **({"HD": 8} if name == "rope" else {})})
    operands = pattern.draw(draw(dtype=torch.bfloat16), sizes)
    wide = [
        {n: v.double() if getattr(v, "is_floating_point", bool)() else v for n, v in side.items()}
        for side in operands
    ]
    if "dtype" in wide[0]:
        wide[0]["dtype"] = "float64"
    ours = pattern.aligned(wide[0], pattern.program(**wide[0]))
    theirs = pattern.stock(wide[1])
    for output, value in ours.items():
        torch.testing.assert_close(value, theirs[output], rtol=1e-6, atol=1e-6)


def test_operands_are_fresh_and_never_zeros():
    first, again, other = draw(0).normal(64, 64), draw(0).normal(64, 64), draw(1).normal(64, 64)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.std() == pytest.approx(1.0, abs=0.05)
    assert set(draw().powers(100).tolist()) == {0.5, 1.0, 2.0}


def test_sizes_of_llama_are_those_of_the_model():
    for name, pattern in BY_NAME.items():
        sizes = KERNELS.sizes(name)[LLAMA]
        assert sizes is pattern.sizes
        work = sizes["M"] * sizes["N"] * sizes["K"]
        assert work in {16384 * 4096 * n for n in (4096, 6144, 14336, 28672)} | {
            8192 * 4096 * 128256
        }
    widths = {d: LAYER.sizes("forward")[f"D={d}"]["F"] for d in (2048, 4096, 8192)}
    assert widths == {2048: 5632, 4096: 11008, 8192: 22016}


@pytest.mark.parametrize("subject", [Layer, OneKernel])
def test_a_subject_and_torchs_function_compute_the_same(subject):
    sizes = LAYER_SIZES if subject is Layer else SMALL
    made = subject.drawn(draw(), sizes)
    ours, theirs = made.ours(), made.stock(subject.function)
    found, wanted = (made.named(forward.call()) for forward in (ours, theirs))
    for output, value in found.items():
        torch.testing.assert_close(value, wanted[output], rtol=1e-9, atol=1e-9)
    for mine, stock in zip(ours.both(), theirs.both(), strict=True):
        torch.testing.assert_close(mine, stock, rtol=1e-8, atol=1e-8)


def test_a_widened_layer_has_the_same_numbers():
    narrow = Layer.drawn(draw(dtype=torch.bfloat16), LAYER_SIZES)
    wide = narrow.widened()
    assert wide.operands["wo"].dtype == torch.float64
    assert torch.equal(wide.operands["wo"], narrow.operands["wo"].double())
    assert wide.operands["wo"].requires_grad


@pytest.mark.parametrize("pattern", ["forward", "forward-backward"])
def test_the_bare_products_of_a_layer_are_all_of_its_products(pattern):
    case = Case("layer", pattern, "small", LAYER_SIZES, "bf16")
    stage = LayerStage(case, CPU)
    ((operands, products),) = stage.bare_products()
    expected = FORWARD_PRODUCTS + (BACKWARD_PRODUCTS if stage.gradients else ())
    assert products == expected
    assert sum(p.flops(operands) for p in products) == stage.work().flops
    for variant in ("bare", "products"):
        stage.calls(variant)[0]()


@pytest.mark.parametrize("parts", PRIMITIVE.patterns)
def test_primitives_alone_and_in_pairs_are_one_kernel(parts):
    operands = primitive_operands(parts)
    plan = plan_of(primitives, operands)
    assert [kernel.kind for kernel in plan.kernels] == ["product"]
    plain = primitives.plain(**operands)
    for output, value in primitives(**operands).items():
        torch.testing.assert_close(value, plain[output])


def primitive_operands(parts):
    made, (m, n, k) = draw(), SMALL.values()
    matrices = {"x": made.normal(m, k), "w": made.weight(n, k), "residual": made.normal(m, n)}
    vectors = {"r": made.powers(m)[:, None], "g": made.row(n), "bias": made.row(n)}
    return {**matrices, **vectors, "parts": parts}


def test_each_primitive_changes_what_is_computed():
    results = {}
    for parts in PRIMITIVES:
        outputs = primitives(**primitive_operands(parts))
        results[parts] = tuple(float(v.double().sum()) for v in outputs.values())
    assert len(set(results.values())) == len(PRIMITIVES)


def test_every_suite_has_cases_and_variants():
    programs = ["kernels", "layer", "loss", "accuracy", "primitives", "host"]
    assert list(SUITES) == [*programs, "model", "model-accuracy", "model-loss"]
    for suite in SUITES.values():
        assert suite.variants[0] == "ours"
        assert all(suite.sizes(pattern) for pattern in suite.patterns)
    assert {name for suite in SUITES.values() for name in suite.variants} == set(VARIANTS)


STAGES = {
    "kernels": Kernel,
    "layer": LayerStage,
    "loss": Loss,
    "primitives": Primitive,
    "model": Training,
}


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_makes_all_variants_of_its_suite_and_refuses_others(name):
    stage = object.__new__(STAGES[name])
    stage.case = Case(name, "any", "any", {}, "bf16")
    assert set(SUITES[name].variants) <= stage.makers().keys() <= set(VARIANTS)
    for other in set(VARIANTS) - stage.makers().keys():
        with pytest.raises(Unavailable, match=f"^the suite {name} has no variant {other}$"):
            stage.calls(other)


def test_one_copy_is_enough_where_nothing_caches_it():
    assert copies_for(1, CPU) == 1
