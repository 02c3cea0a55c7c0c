"""What an audit counts: FLOPs against closed formulas, bytes against counts by hand."""

import json
from pathlib import Path

import pytest
import torch
from audited import (
    BATCH,
    SEQUENCE,
    TOKENS,
    decoder,
    each,
    flops,
    of_layers,
    parts,
    predicted,
    subject,
)
from torch import nn
from torch.nn import functional as F

from cadenza.core.cost import GPUS, kernel_work
from cadenza.core.storage import dtypes_of
from cadenza.library.cross_entropy import CHUNK_ELEMENTS
from cadenza.tools.audit.attention import pairs
from cadenza.tools.audit.compiled import compiled
from cadenza.tools.audit.configs import decoder_of
from cadenza.tools.audit.counting import Launch
from cadenza.tools.audit.fakes import default_dtype, fake
from cadenza.tools.audit.parts import REST, WHOLE, Model
from cadenza.tools.audit.prediction import VARIANTS, predict
from cadenza.tools.audit.rates import EIGHT, Rates, rates_of
from cadenza.tools.audit.sizes import SIZES
from cadenza.tools.audit.stock import StockDecoder
from cadenza.tools.audit.subject import DecoderSubject
from cadenza.tools.audit.trace import traced, updated
from cadenza.tools.bench.stock import layer as bench_layer
from cadenza.tools.explain import explain
from cadenza.tools.target import find_target

FAMILIES = (
    "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "olmo2", "gpt2",
)  # fmt: skip
MEASURED = Path(__file__).resolve().parent.parent / "benchmarks" / "results" / "layer.json"
HALF = 2  # bytes of a bfloat16
H100 = rates_of("h100", None, None, None)


def linear_weights(model):
    """Numbers in the weights of linear layers."""
    return sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))


# --- FLOPs ----------------------------------------------------------------------------------------


def check_products(found, model):
    """Products take 2 FLOPs a weight and token forward, and 4 backward, whoever runs them."""
    assert set(found.variants) == set(VARIANTS), found.missing
    for variant in found.variants.values():
        counted = sum(part.count * flops(part.step) for part in variant)
        assert counted == 6 * linear_weights(model.module) * TOKENS


@pytest.mark.slow
def test_products_take_six_flops_a_weight_and_token_before_and_after():
    with fake():
        check_products(predicted(), subject().before())


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAMILIES)
def test_products_of_other_families_do_so_too(kind):
    with fake():
        found = predict(H100, subject(kind).before, subject(kind).after)
        check_products(found, subject(kind).before())


@pytest.mark.parametrize("run", [traced, compiled])
@pytest.mark.slow
def test_attention_takes_two_products_forward_and_five_backward(run):
    with fake():
        step = run(parts(subject().before())["layer"])
    one = 2 * BATCH * 4 * (SEQUENCE * (SEQUENCE + 1) // 2) * 16
    assert [x.flops for x in step["forward"] if x.kind == "attention"] == [2 * one]
    assert [x.flops for x in step["backward"] if x.kind == "attention"] == [5 * one]


def test_a_window_hides_tokens_from_attention_alone():
    with fake():
        narrow = traced(
            parts(subject("mistral", sliding_window=8).before())["layer with a window of 8"]
        )
        wide = traced(parts(subject("mistral", sliding_window=None).before())["layer"])
    seen = sum(min(n, 8) for n in range(1, SEQUENCE + 1))
    whole = SEQUENCE * (SEQUENCE + 1) // 2
    assert flops(narrow, "attention") == pytest.approx(flops(wide, "attention") * seen / whole)
    assert flops(narrow) == flops(wide)


@pytest.mark.parametrize(
    ("queries", "keys", "causal", "window", "seen"),
    [(4, 4, True, None, 10), (4, 4, False, None, 16), (2, 5, True, None, 9), (4, 4, True, 2, 7)],
)
def test_pairs_of_tokens(queries, keys, causal, window, seen):
    assert pairs(queries, keys, causal, window) == seen


# What these models are published with; a layer has as many as all of them less the rest.
PUBLISHED = {
    "llama3-8b": 8_030_261_248, "llama3-1b": 1_235_814_400, "llama3-70b": 70_553_706_496,
    "mistral-7b": 7_248_023_552, "qwen3-0.6b": 596_049_920, "qwen3-8b": 8_190_735_360,
    "qwen2.5-0.5b": 494_032_768, "gemma2-2b": 2_614_341_888, "gemma2-9b": 9_241_705_984,
    "gemma3-1b": 999_885_952, "phi3-mini": 3_821_079_552, "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_models_have_as_many_parameters_as_published(name):
    found = decoder_of(SIZES[name], name)
    with torch.device("meta"):
        sizes = [
            sum(p.numel() for p in StockDecoder(of_layers(found, n), 64).parameters())
            for n in (1, 2)
        ]
    assert sizes[0] + (found.layers - 1) * (sizes[1] - sizes[0]) == PUBLISHED[name]


# --- bytes ----------------------------------------------------------------------------------------


def launches(run, *modules, args):
    """Forward and backward of a module whose arguments need gradients, in bfloat16."""
    with fake(), default_dtype(torch.bfloat16):
        model = nn.Sequential(*modules) if len(modules) > 1 else modules[0]()
        (part,) = Model(model, tuple(torch.empty(a, requires_grad=True) for a in args), {}).parts()
        assert part.name == WHOLE
        return run(part)


class Swiglu(nn.Module):
    def forward(self, gate, up):
        return F.silu(gate) * up


class Norm(nn.Module):
    """A residual sum and its RMSNorm, each needed outside, as Hugging Face's models write it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, x, y):
        x = x + y
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return x, self.weight * normed.to(x.dtype)


def test_single_operations_read_their_arguments_and_write_their_results():
    step = launches(traced, Swiglu, args=[(32, 64), (32, 64)])
    matrix = 32 * 64 * HALF
    assert [(x.name, x.bytes) for x in step["forward"]] == [
        ("silu", 2 * matrix),
        ("mul", 3 * matrix),
    ]
    # The adjoints of the product's two factors, then silu's derivative: each two read, one written.
    assert [x.bytes for x in step["backward"]] == [3 * matrix] * 3
    assert {x.kind for x in each(step)} == {"memory"}


def test_a_fused_kernel_reads_what_comes_in_and_writes_what_goes_out():
    step = launches(compiled, Swiglu, args=[(32, 64), (32, 64)])
    matrix = 32 * 64 * HALF
    assert [x.bytes for x in step["forward"]] == [3 * matrix]
    assert [x.bytes for x in step["backward"]] == [5 * matrix]  # gate, up, du; dgate, dup


def test_a_norm_is_one_kernel_and_the_gradient_of_its_weight_another():
    step = launches(compiled, Norm, args=[(32, 64), (32, 64)])
    matrix, column, row = 32 * 64 * HALF, 32 * 4, 64 * HALF
    # x, y and the weight; their sum, the norm, and the factor of rows that backward needs.
    assert [x.bytes for x in step["forward"]] == [4 * matrix + column + row]
    # Both adjoints, the sum, factor and weight to one adjoint; for the weight's gradient the norm's
    # adjoint, the sum and the factor again.
    both = column + row
    assert sorted(x.bytes for x in step["backward"]) == [2 * matrix + both, 4 * matrix + both]


def test_eager_norms_move_what_their_operations_do():
    step = launches(traced, Norm, args=[(32, 64), (32, 64)])
    matrix, column, row = 32 * 64 * HALF, 32 * 4, 64 * HALF
    wide = 2 * matrix
    assert [x.bytes for x in step["forward"]] == [
        3 * matrix, matrix + wide, 2 * wide, wide + column, 2 * column, 2 * column,
        2 * wide + column, wide + matrix, 2 * matrix + row,
    ]  # fmt: skip


class Lookup(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(100, 16)

    def forward(self, rows):
        return self.table(rows)


def test_a_lookup_reads_rows_and_not_the_table():
    with fake(), default_dtype(torch.bfloat16):
        rows = torch.zeros(6, dtype=torch.long)
        step = traced(Model(Lookup(), (rows,), {}).parts()[0])
    assert [x.bytes for x in step["forward"]] == [2 * 6 * 16 * HALF + 6 * 8]


def test_a_product_moves_its_operands_and_its_result_once():
    step = launches(traced, lambda: nn.Linear(64, 96, bias=False), args=[(32, 64)])
    (product,) = step["forward"]
    assert product == Launch(
        "mm 32 × 96 × 64", "products", 2 * 32 * 96 * 64, HALF * (32 * 64 + 96 * 64 + 32 * 96),
        "bfloat16", (32 * 64 + 96 * 64) // 2, narrow=True,
    )  # fmt: skip


def test_adam_reads_and_writes_parameters_and_moments_and_reads_gradients():
    with fake():
        layer = parts(subject().before())["layer"]
        numbers = sum(weight.numel() for weight in layer.trained)
        assert [x.bytes for x in updated(layer)] == [7 * HALF * numbers]


def test_what_a_model_keeps_frozen_is_not_updated():
    with fake():
        model = subject().before()
        model.module.requires_grad_(False)
        found = parts(model)
        assert [updated(part) for part in found.values()] == [[], []]
        assert each(traced(found["layer"]), "products")
        assert traced(found["layer"])["backward"] == []


# --- Cadenza --------------------------------------------------------------------------------------


def test_a_program_is_the_kernels_that_explain_shows():
    with fake():
        step = traced(parts(subject().after())["layer"])
    sizes = [f"M={TOKENS},D=64,F=96,H=4,KV=2,HD=16"]
    plans = explain(find_target("decoder-before", sizes)).plans
    for name, plan in plans.items():
        dtypes = dtypes_of(plan.plan.graph)
        expected = sorted(kernel_work(k.kernel, dtypes, TOKENS).bytes for k in plan.kernels)
        own = [x for x in step[name] if x.name.startswith("decoder_block")]
        assert sorted(x.bytes for x in own) == expected


@pytest.mark.slow
def test_the_layers_of_cadenza_move_less():
    moved = {
        name: sum(x.bytes for x in each(variant[0].step, "memory"))
        for name, variant in predicted().variants.items()
    }
    assert moved["cadenza"] < moved["compiled"] < moved["eager"]


def test_a_loss_in_chunks_runs_its_program_chunk_by_chunk():
    small = DecoderSubject(decoder(vocab_size=2**22, num_hidden_layers=1), 1, 300)
    with fake():
        step = traced(parts(small.after())[REST])
    products = each(step, "products")
    chunks = -(-300 // max(128, CHUNK_ELEMENTS // 2**22))
    assert chunks > 1
    assert len(products) == 3 * chunks
    assert sum(x.flops for x in products) == 6 * 300 * 64 * 2**22


# --- time -----------------------------------------------------------------------------------------


def test_a_kernel_takes_what_computing_or_moving_takes():
    gpu = GPUS["h100"]
    product = Launch("mm", "products", 10**15, 10**9, cast=10**6, narrow=True)
    (timed,) = H100.timed(product, "bf16")
    assert timed.seconds == 10**15 / gpu.flops("bfloat16")
    (moved,) = H100.timed(product._replace(flops=1), "bf16")
    assert moved.seconds == 10**9 / gpu.bytes
    cast, eight = H100.timed(product, EIGHT)
    assert eight.seconds == timed.seconds / 2
    assert (cast.kind, cast.bytes) == ("memory", 4 * 10**6)
    assert H100.timed(product._replace(narrow=False), EIGHT) == [timed]
    (updated,) = H100.timed(product._replace(kind="optimizer", flops=1), "bf16")
    assert updated.seconds == pytest.approx(moved.seconds / 0.55)
    (seen,) = H100.timed(product._replace(kind="attention", narrow=False), EIGHT)
    assert seen.seconds == 10**15 / (gpu.half * 1e12 * 0.4)


def test_a_step_is_its_layers_and_the_rest():
    found = predicted()
    for variant, cost in found.variants.items():
        total = sum(part.count * found.part(part, "bf16").total for part in cost)
        assert found.step(variant, "bf16").total == pytest.approx(total)
    assert [part.count for part in found.variants["eager"]] == [3, 1]
    assert found.precisions == ["bf16", "fp8"]
    assert Rates("a100", GPUS["a100"]).has_eight is False
    after, before = (found.step(v, "bf16").total for v in ("cadenza", "compiled"))
    assert found.saved("bf16") == pytest.approx(1 - after / before)


class BenchedLayer(nn.Module):
    """PyTorch's side of `cadenza bench layer`, at the size of Llama-3-8B."""

    def __init__(self):
        super().__init__()
        shapes = {
            "wo": (4096, 4096), "norm": (4096,), "w_gate_up": (28672, 4096),
            "w_down": (4096, 14336), "next_norm": (4096,), "w_qkv": (6144, 4096),
        }  # fmt: skip
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))

    def forward(self, x, y, cos, sin):
        return bench_layer(x, y, dict(self.named_parameters()), (cos, sin), 40)


def test_predictions_are_within_15_percent_of_what_the_repository_has_measured():
    """At the rate that the bare products of the same run sustained."""
    case = ("NVIDIA H200", "forward", "llama-3-8b", "sustained")
    records = {
        r["variant"]: r
        for r in json.loads(MEASURED.read_text(encoding="utf-8"))["records"]
        if (r["device"], r["pattern"], r["size"], r["mode"]) == case and "us" in r
    }
    bare = records["bare"]
    computing = bare["flops"] / bare["us"] / 1e6 / GPUS["h200"].half
    rates = rates_of("h200", computing, None, None)
    with fake(), default_dtype(torch.bfloat16):
        widths = (4096, 4096, 128, 128)
        args = tuple(torch.empty(16384, width, requires_grad=width > 128) for width in widths)
        forward = compiled(Model(BenchedLayer(), args, {}).parts()[0])["forward"]
    predicted_us = 1e6 * sum(one.seconds for x in forward for one in rates.timed(x, "bf16"))
    assert predicted_us == pytest.approx(records["compile"]["us"], rel=0.15)
    ours = sum(
        w.seconds(rates.gpu, "bfloat16") for w in explain(find_target("llama")).fused("forward")
    )
    assert 1e6 * ours == pytest.approx(records["ours"]["us"], rel=0.15)
