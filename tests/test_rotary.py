"""Rotary tables against the formulas, one number at a time in Python, and packed positions."""

import math
from types import SimpleNamespace

import pytest
import torch

import cadenza as cz
from cadenza.library.rotary import Rotary, packed_positions, rotary_tables

LLAMA_3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def frequency(rotary: Rotary, pair: int) -> float:
    """Radians a position, as Llama 3.1 defines them by wavelengths."""
    plain = rotary.base ** (-2.0 * pair / rotary.columns)
    if rotary.scaling == "linear":
        return plain / rotary.factor
    if rotary.scaling == "default":
        return plain
    wavelength = 2.0 * math.pi / plain
    if wavelength < rotary.original_context / rotary.high_frequency_factor:
        return plain
    if wavelength > rotary.original_context / rotary.low_frequency_factor:
        return plain / rotary.factor
    low, high = rotary.low_frequency_factor, rotary.high_frequency_factor
    smooth = (rotary.original_context / wavelength - low) / (high - low)
    return (1.0 - smooth) * plain / rotary.factor + smooth * plain


ROTARIES = [
    Rotary(2),
    Rotary(16, 500000.0),
    Rotary(16, scaling="linear", factor=4.0),
    Rotary(32, 500000.0, "llama3", 8.0, 1.0, 4.0, 64),
    Rotary(32, 10000.0, "llama3", 32.0, 0.5, 3.0, 512),
]


@pytest.mark.parametrize("rotary", ROTARIES, ids=str)
def test_tables_follow_the_formulas(rotary):
    positions = torch.tensor([[0, 1, 2, 63], [7, 1000, 131071, 5]])
    tables = rotary_tables(rotary, positions, dtype=torch.float64)
    for table, function in zip(tables, (math.cos, math.sin), strict=True):
        assert table.shape == (2, 4, rotary.columns // 2)
        for place in ((0, 0), (0, 3), (1, 1), (1, 2)):
            position = int(positions[place])
            expected = [function(position * frequency(rotary, i)) for i in range(table.shape[-1])]
            torch.testing.assert_close(
                table[place], torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-10
            )


def test_llama_3_keeps_the_fast_and_slows_the_slow():
    scaled = Rotary.of({"head_dim": 32, "rope_theta": 500000.0, "rope_scaling": LLAMA_3})
    ratio = Rotary(32, 500000.0).frequencies() / scaled.frequencies()
    assert ratio[0] == 1.0
    assert ratio[-1] == 8.0
    assert ((ratio > 1.0) & (ratio < 8.0)).any()
    assert (ratio.diff() >= 0).all()


def test_tables_are_rounded_once_from_float64():
    positions = torch.tensor([100_003])
    exact = rotary_tables(Rotary(8), positions, dtype=torch.float64)
    for dtype in (torch.float32, torch.bfloat16):
        low = rotary_tables(Rotary(8), positions, dtype=dtype)
        assert all(torch.equal(a, b.to(dtype)) for a, b in zip(low, exact, strict=True))
    assert rotary_tables(Rotary(8), positions)[0].dtype == torch.float32


CONFIGURATIONS = [
    ({"head_dim": 16, "rope_theta": 5e5}, Rotary(16, 5e5)),
    ({"hidden_size": 64, "num_attention_heads": 4}, Rotary(16)),
    ({"head_dim": None, "hidden_size": 64, "num_attention_heads": 8}, Rotary(8)),
    ({"head_dim": 16, "partial_rotary_factor": 0.25}, Rotary(4)),
    ({"head_dim": 16, "rotary_dim": 6}, Rotary(6)),
    ({"head_dim": 16, "rope_scaling": None}, Rotary(16)),
    ({"head_dim": 16, "rope_scaling": {"type": "linear", "factor": 2.0}},
     Rotary(16, scaling="linear", factor=2.0)),
    ({"head_dim": 16, "rope_theta": 5e5, "rope_scaling": LLAMA_3},
     Rotary(16, 5e5, "llama3", 8.0, 1.0, 4.0, 64)),
    ({"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 3e4}},
     Rotary(16, 3e4)),
    ({"head_dim": 16, "rope_parameters": {**LLAMA_3, "rope_theta": 5e5,
                                          "partial_rotary_factor": 0.5}},
     Rotary(8, 5e5, "llama3", 8.0, 1.0, 4.0, 64)),
]  # fmt: skip


@pytest.mark.parametrize(("given", "expected"), CONFIGURATIONS)
def test_a_configuration_is_read_as_an_object_and_as_a_mapping(given, expected):
    assert Rotary.of(given) == expected
    assert Rotary.of(SimpleNamespace(**given)) == expected
    positions = torch.arange(3)
    ours, direct = rotary_tables(given, positions), rotary_tables(expected, positions)
    assert all(torch.equal(a, b) for a, b in zip(ours, direct, strict=True))


WRONG = [
    (lambda: Rotary(5), "choose an even number"),
    (lambda: Rotary(0), "choose an even number"),
    (lambda: Rotary(8, scaling="yarn"), "default, linear, llama3"),
    (lambda: Rotary(8, base=0.0), "must be positive"),
    (lambda: Rotary(8, low_frequency_factor=4.0), "below high_frequency_factor"),
    (lambda: Rotary.of({"hidden_size": 64}), "make a Rotary"),
    (lambda: Rotary.of({"head_dim": 8, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}}),
     "'yarn' is not supported"),
    (lambda: Rotary.of({"head_dim": 8, "rope_parameters": {"full_attention": {}}}),
     "one Rotary"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "said"), WRONG)
def test_what_is_no_rotary_embedding_is_refused(make, said):
    with pytest.raises(ValueError, match=said):
        make()


def test_positions_are_whole_numbers():
    with pytest.raises(TypeError, match=r"positions\.long\(\)"):
        cz.ops.rotary_tables(Rotary(8), torch.rand(3))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_packed_positions_count_in_each_sequence(dtype):
    ends = torch.tensor([0, 3, 3, 4, 7], dtype=dtype)
    assert packed_positions(ends, 9).tolist() == [0, 1, 2, 0, 0, 1, 2, 0, 1]
    assert packed_positions(ends, 0).tolist() == []
