"""The published sizes of Llama 3 and Qwen 3: their parameters, counted without memory for them."""

import math
from dataclasses import replace
from functools import cache

import pytest
import torch

import cadenza as cz

PUBLISHED = {  # parameters, as the models' pages have them
    "llama3 1B": 1.24e9, "llama3 3B": 3.21e9, "llama3 8B": 8.03e9, "llama3 70B": 70.6e9,
    "llama3 405B": 405.85e9,
    "qwen3 0.6B": 0.596e9, "qwen3 1.7B": 1.72e9, "qwen3 4B": 4.02e9, "qwen3 8B": 8.19e9,
    "qwen3 14B": 14.77e9, "qwen3 32B": 32.76e9,
}  # fmt: skip


def named(text, **options):
    """The model of a family and a size."""
    family, size = text.split()
    return getattr(cz.models, family)(size, **options)


@cache
def counted(text):
    """The model of a family and a size, without memory for it."""
    return named(text, device="meta")


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.slow
def test_parameters_are_as_many_as_published(name):
    model = counted(name)
    count = sum(weight.numel() for weight in model.parameters())
    assert count == pytest.approx(PUBLISHED[name], rel=0.005)
    assert all(weight.is_meta for weight in model.parameters())


def test_every_size_is_counted():
    sizes = {"llama3": cz.models.LLAMA3, "qwen3": cz.models.QWEN3}
    assert [f"{family} {size}" for family, known in sizes.items() for size in known] == [*PUBLISHED]


@pytest.mark.parametrize(
    ("name", "tied"),
    [
        ("llama3 1B", True), ("llama3 3B", True), ("llama3 8B", False), ("llama3 70B", False),
        ("llama3 405B", False), ("qwen3 0.6B", True), ("qwen3 1.7B", True), ("qwen3 4B", True),
        ("qwen3 8B", False), ("qwen3 14B", False), ("qwen3 32B", False),
    ],
)  # fmt: skip
@pytest.mark.slow
def test_the_small_ones_share_embedding_and_output_layer(name, tied):
    model = counted(name)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


def test_the_largest_llama_has_the_shapes_of_its_checkpoint():
    config = cz.models.LLAMA3["405B"]
    with torch.device("meta"):
        model = cz.models.Decoder(replace(config, layers=1))
    shapes = {n: tuple(w.shape) for n, w in model.named_parameters()}
    layer = {n: shape for n, shape in shapes.items() if "layers.0" in n}
    assert {n.rsplit(".", 2)[1]: shape for n, shape in layer.items()} == {
        "q_proj": (16384, 16384), "k_proj": (1024, 16384), "v_proj": (1024, 16384),
        "o_proj": (16384, 16384), "gate_proj": (53248, 16384), "up_proj": (53248, 16384),
        "down_proj": (16384, 53248), "input_layernorm": (16384,),
        "post_attention_layernorm": (16384,),
    }  # fmt: skip
    one, rest = (sum(map(math.prod, found.values())) for found in (layer, shapes))
    assert rest + (config.layers - 1) * one == 405_853_388_800
    assert (config.vocabulary, config.context, config.eps) == (128256, 131072, 1e-5)


def test_rotary_frequencies_are_those_of_each_release():
    factors = {"1B": 32.0, "3B": 32.0, "8B": 8.0, "70B": 8.0, "405B": 8.0}
    assert factors.keys() == cz.models.LLAMA3.keys()
    for size, factor in factors.items():
        rotary = cz.models.LLAMA3[size].rotary
        assert (rotary.base, rotary.scaling, rotary.factor) == (500000.0, "llama3", factor)
        assert rotary.original_context == 8192
    for config in cz.models.QWEN3.values():
        assert config.rotary == cz.ops.Rotary(128, 1e6)


def test_a_layer_has_the_names_and_shapes_of_hugging_face():
    at = "model.layers.0."
    shapes = {n: tuple(w.shape) for n, w in counted("qwen3 0.6B").named_parameters()}
    assert {n.removeprefix(at): shape for n, shape in shapes.items() if n.startswith(at)} == {
        "self_attn.q_proj.weight": (2048, 1024),
        "self_attn.k_proj.weight": (1024, 1024),
        "self_attn.v_proj.weight": (1024, 1024),
        "self_attn.o_proj.weight": (1024, 2048),
        "self_attn.q_norm.weight": (128,),
        "self_attn.k_norm.weight": (128,),
        "mlp.gate_proj.weight": (3072, 1024),
        "mlp.up_proj.weight": (3072, 1024),
        "mlp.down_proj.weight": (1024, 3072),
        "input_layernorm.weight": (1024,),
        "post_attention_layernorm.weight": (1024,),
    }
    rest = {name for name in shapes if "layers" not in name}
    assert rest == {"model.embed_tokens.weight", "model.norm.weight"}


def test_device_and_dtype_are_torchs_own_by_default():
    with torch.device("meta"):
        assert named("llama3 1B").lm_head.weight.is_meta
    model = named("qwen3 0.6B", device="meta", dtype=torch.bfloat16)
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("family", ["llama3", "qwen3"])
def test_an_unknown_size_is_refused_by_the_names_of_the_others(family):
    names = ", ".join(getattr(cz.models, family.upper()))
    with pytest.raises(ValueError, match=f"no {family} of size '2B': choose one of {names}"):
        named(f"{family} 2B")
