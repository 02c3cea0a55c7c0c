"""Configurations as `cadenza audit` reads them: sizes, defaults of families, what is refused."""

import json

import pytest
import torch
from audited import LLAMA, config, decoder

from cadenza.tools.audit.configs import FAMILIES, decoder_at, decoder_of
from cadenza.tools.audit.sizes import SIZES
from cadenza.tools.audit.stock import StockDecoder
from cadenza.tools.audit.twin import TwinDecoder
from cadenza.tools.fault import Fault


def test_a_directory_stands_for_the_configuration_in_it(tmp_path):
    place = tmp_path / "config.json"
    place.write_text(json.dumps(LLAMA), encoding="utf-8")
    assert decoder_at(tmp_path) == decoder_of(LLAMA, str(tmp_path))
    assert decoder_at(place) == decoder_of(LLAMA, str(place))


def test_what_a_configuration_leaves_out_follows():
    found = decoder_of(LLAMA, "a")
    assert (found.head_dim, found.rotary, found.eps, found.tied) == (16, 16, 1e-5, False)
    assert decoder_of({**LLAMA, "num_key_value_heads": None}, "a").key_value_heads == 4
    small = decoder("gpt2")
    assert (small.feed_forward, small.positions, small.rotary, small.tied) == (256, 64, 0, True)
    assert decoder("gpt2", n_inner=100).feed_forward == 100
    assert decoder("phi3", partial_rotary_factor=0.5).rotary == 8
    assert decoder("gemma2").softcap == 30.0
    assert decoder("gemma2", final_logit_softcapping=None).softcap is None


@pytest.mark.parametrize(
    ("kind", "changed", "windows"),
    [
        ("llama", {}, (None,) * 3),
        ("mistral", {}, (4096,) * 3),
        ("mistral", {"sliding_window": None}, (None,) * 3),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": False}, (None,) * 3),
        (
            "qwen2",
            {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2},
            (None, None, 8),
        ),
        ("gemma2", {"sliding_window": 8}, (8, None, 8)),
        ("gemma3_text", {"sliding_window": 8, "sliding_window_pattern": 3}, (8, 8, None)),
        (
            "qwen3",
            {
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            },
            (None, 8, None),
        ),
    ],
)
def test_which_layers_have_a_window(kind, changed, windows):
    assert decoder(kind, **changed).windows == windows


def test_a_window_as_long_as_the_sequence_hides_nothing():
    assert decoder("mistral", sliding_window=8).windows_within(8) == (None,) * 3
    assert decoder("mistral", sliding_window=8).windows_within(9) == (8,) * 3


def test_the_text_model_of_a_larger_one():
    inner = config("gemma3_text")
    assert decoder_of({"model_type": "gemma3", "text_config": inner}, "a").vocabulary == 640


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"model_type": "mamba"}, "unknown model_type 'mamba': one of llama"),
        ({"model_type": None}, "unknown model_type None"),
        ({"num_hidden_layers": None}, "the configuration of a llama lacks num_hidden_layers"),
        ({"hidden_size": "64"}, "hidden_size is '64': it must be a whole number"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 must be a multiple"),
        ({"hidden_act": "snake"}, "unknown activation 'snake': one of silu"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small'"),
        ({"head_dim": 15}, "15 columns of each head rotate"),
    ],
)
def test_a_configuration_that_makes_no_sense(changed, said):
    with pytest.raises(Fault) as error:
        decoder_of({**LLAMA, **changed}, "here")
    assert str(error.value).startswith("here: ")
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [("{", "is no JSON"), ("[1]", "holds no configuration"), (None, "cannot be read")],
)
def test_a_file_that_holds_none(tmp_path, text, said):
    if text is not None:
        (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(Fault, match=said):
        decoder_at(tmp_path)


def test_every_size_is_one_of_a_known_family():
    kinds = {decoder_of(config, name).layers > 0 and config["model_type"]
             for name, config in SIZES.items()}  # fmt: skip
    assert kinds <= set(FAMILIES)


@pytest.mark.parametrize("kind", FAMILIES)
def test_cadenzas_twin_computes_what_the_stock_decoder_does(kind):
    found = decoder(kind, num_hidden_layers=2, hidden_size=32, intermediate_size=48, vocab_size=50)
    tokens, targets = torch.randint(50, (2, 2, 6))
    stock = StockDecoder(found, 6).double()
    torch.nn.init.normal_(stock.embed_tokens.weight, std=0.3)
    twin = TwinDecoder(found, 6).double()
    twin.load_state_dict(renamed(stock.state_dict(), found))
    expected, computed = stock(tokens, targets), twin(tokens, targets)
    # The stock decoder takes its logits and norms to float32, and so does its loss.
    torch.testing.assert_close(computed.float(), expected, rtol=2e-5, atol=2e-6)


def renamed(state, found):
    """The stock decoder's weights by the twin's names: joined ones apart."""
    sizes = [n * found.head_dim for n in (found.heads, found.key_value_heads)]
    parts = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    rows = {"qkv_proj": (sizes[0], sizes[1], sizes[1]), "gate_up_proj": 2 * (found.feed_forward,)}
    apart = {}
    for name, value in state.items():
        joined = next((part for part in parts if f".{part}." in name), None)
        if joined is None:
            apart[name] = value
            continue
        for own, piece in zip(parts[joined], value.split(rows[joined]), strict=True):
            apart[name.replace(joined, own)] = piece
    return apart
