"""The library's programs in `cadenza explain`, what they compile to, and on the Triton back end.

The counts are those of an 8 B model's sizes; a change of the compiler that adds a kernel to any of
them shows here.
"""

import json

import pytest
import torch
from block_operands import FROZEN, cast
from planned import matrices_of
from stock_programs import operands
from torch import is_tensor
from triton_plans import check, interpreted, quiet, trials_of

from cadenza.core.pipeline import compile_program
from cadenza.core.plan_text import PairText
from cadenza.core.trace import Signature
from cadenza.library.operands import describe
from cadenza.library.variants import LOSSES, VARIANTS
from cadenza.tools.cli import main
from cadenza.tools.explain import explain
from cadenza.tools.target import find_target

# Products and pointwise kernels, forward and backward, and what is held beyond inputs and outputs.
PLANS = {
    "square-sum": ((0, 1), (0, 1), ""),
    "linear": ((1, 0), (2, 1), ""),
    "linear-swiglu": ((1, 0), (2, 1), "acc1"),
    "linear-residual": ((1, 0), (2, 1), ""),
    "linear-dropout": ((1, 0), (2, 1), ""),
    "linear-scale": ((1, 0), (2, 1), ""),
    "linear-softcap": ((1, 0), (2, 1), "v1"),
    "linear-rms-norm": ((1, 1), (2, 2), "r1"),
    "linear-gemma-norm": ((1, 1), (2, 2), "r2"),
    "linear-layer-norm": ((1, 1), (2, 2), "r1 r2"),
    "norm": ((0, 1), (0, 1), ""),
    "layer-norm": ((0, 1), (0, 1), "r1 r2"),
    "qkv": ((1, 1), (2, 1), ""),
    "qkv-bias": ((1, 1), (2, 1), ""),
    "qkv-interleaved": ((1, 1), (2, 1), ""),
    "qkv-partial": ((1, 1), (2, 1), ""),
    "qkv-head-norm": ((1, 1), (2, 1), "v2 v3"),
    "qkv-row-norm": ((1, 1), (2, 1), "v1 r1 v2 r2"),
    "feed-forward": ((2, 1), (4, 0), "r1 v3"),
    "feed-forward-gelu": ((2, 1), (4, 1), "s2 r1 g1 g2 v3"),
    "attention-output": ((1, 0), (2, 0), ""),
    "attention-output-norm": ((1, 1), (2, 1), "acc1 r1"),
    "decoder-before": ((3, 0), (6, 1), "x1 r1 v3"),
    "decoder-after": ((3, 2), (6, 2), "acc1 r1 acc2 acc3 r2"),
    "decoder-both": ((3, 2), (6, 2), "acc1 r1 r4 v3 acc3 r5"),
    "decoder-parallel": ((3, 1), (6, 1), "s2 r1 g1 g2 v4"),
    "weight-gradient": ((1, 0), (2, 1), ""),
}  # fmt: skip
EVEN = {"D": 32, "F": 32, "H": 4, "KV": 2, "HD": 8, "V": 64}  # heads of a power of two of columns
GATED = ("linear-geglu", "linear-geglu-tanh", "linear-reglu")
UNGATED = ("linear-relu", "linear-relu2", "linear-silu", "linear-gelu", "linear-gelu-tanh")
PLANS |= dict.fromkeys(GATED, PLANS["linear-swiglu"])
PLANS |= dict.fromkeys(UNGATED, PLANS["linear-softcap"])


OF_LOSSES = {
    "loss": ((1, 0), (2, 1), "logits s1 s2"),
    "loss-terms": ((1, 0), (2, 1), "logits s1 s2"),
    "loss-lean": ((1, 0), None, ""),
    "loss-lean-gradient": ((3, 0), None, ""),
}


def counted(text: PairText) -> tuple[tuple[int, int], tuple[int, int], str]:
    """What `PLANS` says of a compiled program."""
    kinds = [[kernel.kind for kernel in p.kernels] for p in (text.pair.forward_plan, _back(text))]
    forward, backward = ((k.count("product"), k.count("pointwise")) for k in kinds)
    return forward, backward, " ".join(held.name for held in text.held())


def _back(text: PairText):
    assert text.pair.backward_plan is not None
    return text.pair.backward_plan


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_compiles_to_these_kernels(name):
    assert counted(explain(find_target(name)).text) == PLANS[name]


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_compiles_to_these_kernels(name):
    """Of rows, and of classes, where nothing is derived: no kernel keeps logits for another."""
    text = explain(find_target(name, ("M=8192", "V=16384"))).text
    forward, backward, held = OF_LOSSES[name]
    assert (text.pair.backward_plan is None) == (backward is None)
    kinds = [kernel.kind for kernel in text.pair.forward_plan.kernels]
    assert (kinds.count("product"), kinds.count("pointwise")) == forward
    assert " ".join(value.name for value in text.held()) == held
    assert backward is None or counted(text)[1] == backward
    exact = [o.name for o in find_target(name).signature.operands if o.dtype == "float32"]
    assert sorted(exact) == sorted(LOSSES[name].exact)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_variants_of_other_dtypes_and_sizes_are_explained(dtype):
    for name in ("linear-geglu", "qkv-row-norm", "decoder-both"):
        target = find_target(name, ("M=512,D=256", "F=512,H=4,KV=2,HD=64"), dtype)
        assert explain(target).target.rows == 512


def test_the_command_knows_them(capsys):
    assert main(["explain", "linear-gelu", "--json", "--size", "M=4096"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [kernel["kind"] for kernel in found["forward"]] == ["product"]
    assert found["saved"] == [{"name": "v1", "shape": [4096, 14336], "bytes": 2 * 4096 * 14336}]
    assert main(["explain", "qkv", "--frozen", "w"]) == 0
    assert "qkv_projection" in capsys.readouterr().out
    assert main(["explain", "linear-gelo"]) == 2
    assert "linear-gelu" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_no_kernel_of_a_variant_falls_back(name):
    from cadenza.tools.emitted import emitted, fallen

    assert fallen(emitted(explain(find_target(name)).text, "h100")) == {}


def plans_of(name: str, rows: int, dtype: torch.dtype):
    """The plans of a variant, trained as a model trains it: rotary tables get no gradient."""
    given = cast(operands(name, rows, EVEN), dtype)
    program, named = VARIANTS[name].program, {n: v for n, v in given.items() if is_tensor(v)}
    constants = {n: v for n, v in given.items() if n not in named}
    described = describe(list(named), list(named.values()), program.shapes, constants)
    matrices, sizes = matrices_of(described, named)
    signature = Signature(described.operands, tuple(constants.items()))
    needed = [n for n, t in named.items() if t.is_floating_point() and n not in FROZEN]
    pair = compile_program(program.function, signature, sizes, needed)
    return trials_of(pair, matrices, rows)


@pytest.mark.slow
@interpreted
@quiet
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_on_triton_agrees_with_the_reference(name, dtype):
    for trial in plans_of(name, 37, dtype):
        assert check(trial).reasons == []
