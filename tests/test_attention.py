"""`cz.ops.causal_attention` against its formula: heads, scales, windows, softcap, sequences."""

import numpy
import pytest
import torch
import torch.nn.functional as F
from programs import assert_close
from scores import by_formula

from cadenza.core.errors import ProgramError
from cadenza.library import attention
from cadenza.library.attention import causal_attention

HEADS = {"heads": 4, "key_value_heads": 2}
ENDS, SEQUENCE = [0, 4, 4, 9, 10], [0] * 4 + [1] * 5 + [2]


def agree(qkv, ours, expected):
    """Value and gradient."""
    upstream = torch.randn_like(expected)
    torch.testing.assert_close(ours, expected)
    found, wanted = (torch.autograd.grad(y, qkv, upstream)[0] for y in (ours, expected))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("key_value_heads", [4, 2, 1])
def test_causal_attention_is_its_formula(key_value_heads, scale):
    parts = 4 + 2 * key_value_heads
    qkv = torch.randn(2, 7, parts * 6, dtype=torch.float64, requires_grad=True)
    sizes = {"heads": 4, "key_value_heads": key_value_heads, "scale": scale}
    agree(qkv, causal_attention(qkv, **sizes), by_formula(qkv, **sizes))


def test_key_and_value_heads_are_as_many_as_heads_by_default():
    qkv = torch.randn(1, 5, 36)
    assert torch.equal(
        causal_attention(qkv, heads=2), causal_attention(qkv, heads=2, key_value_heads=2)
    )


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(1, 10), (2, 5)])
def test_packed_sequences_see_themselves_alone(shape, dtype):
    qkv = torch.randn(*shape, 48, dtype=torch.float64, requires_grad=True)
    ends = torch.tensor(ENDS, dtype=dtype)
    flat = by_formula(qkv.reshape(1, 10, 48), **HEADS, sequence=torch.tensor(SEQUENCE))
    ours = causal_attention(qkv, **HEADS, cumulative_lengths=ends)
    agree(qkv, ours, flat.reshape(*shape, -1))


def test_one_sequence_packed_is_plain_causal_attention():
    qkv = torch.randn(1, 6, 48)
    packed = causal_attention(qkv, **HEADS, cumulative_lengths=torch.tensor([0, 6]))
    torch.testing.assert_close(packed, causal_attention(qkv, **HEADS))


def test_a_plain_batch_takes_no_mask(monkeypatch):
    asked = []
    attention = F.scaled_dot_product_attention

    def watched(*args, **named):
        asked.append(named)
        return attention(*args, **named)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    causal_attention(torch.randn(1, 6, 48), **HEADS)
    causal_attention(torch.randn(1, 6, 48), **HEADS, cumulative_lengths=torch.tensor([0, 6]))
    assert [(n.get("is_causal", False), "attn_mask" not in n) for n in asked] == [
        (True, True),
        (False, False),
    ]


@pytest.mark.parametrize("window", [1, 3, 6, 7, 100])
@pytest.mark.parametrize("key_value_heads", [4, 2])
def test_a_window_is_its_formula(key_value_heads, window):
    qkv = torch.randn(2, 7, (4 + 2 * key_value_heads) * 6, dtype=torch.float64, requires_grad=True)
    sizes = {"heads": 4, "key_value_heads": key_value_heads, "window": window}
    agree(qkv, causal_attention(qkv, **sizes), by_formula(qkv, **sizes))


def test_a_window_of_one_token_returns_the_values():
    qkv = torch.randn(2, 7, 48)
    value = qkv.unflatten(-1, (-1, 6))[:, :, 6:].repeat_interleave(2, 2).flatten(2)
    torch.testing.assert_close(causal_attention(qkv, **HEADS, window=1), value)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("scale", [None, 2.5])
@pytest.mark.parametrize("key_value_heads", [4, 2, 1])
def test_a_softcap_is_its_formula(key_value_heads, scale, window):
    qkv = torch.randn(2, 7, (4 + 2 * key_value_heads) * 6, dtype=torch.float64, requires_grad=True)
    options = {"heads": 4, "key_value_heads": key_value_heads, "scale": scale, "window": window}
    capped = causal_attention(qkv, **options, softcap=1.5)
    agree(qkv, capped, by_formula(qkv, **options, softcap=1.5))
    assert not torch.allclose(capped, causal_attention(qkv, **options))


@pytest.mark.parametrize(
    "options",
    [{"window": 2}, {"softcap": 1.5}, {"window": 3, "softcap": 1.5, "scale": 0.4}],
    ids=str,
)
def test_windows_and_softcaps_stay_in_their_sequence(options):
    qkv = torch.randn(2, 5, 48, dtype=torch.float64, requires_grad=True)
    flat = by_formula(qkv.reshape(1, 10, 48), **HEADS, **options, sequence=torch.tensor(SEQUENCE))
    ours = causal_attention(qkv, **HEADS, **options, cumulative_lengths=torch.tensor(ENDS))
    agree(qkv, ours, flat.reshape(2, 5, -1))


def test_a_softcap_that_nothing_reaches_is_plain_attention():
    qkv = torch.randn(2, 7, 48, dtype=torch.float64)
    torch.testing.assert_close(
        causal_attention(qkv, **HEADS, softcap=1e6), causal_attention(qkv, **HEADS)
    )


@pytest.mark.parametrize("softcap", [attention.LEAST, attention.MOST])
@pytest.mark.parametrize("scale", [-1e3, 1e-3, 1e3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_the_farthest_softcaps_make_numbers(dtype, scale, softcap):
    qkv = torch.randn(2, 7, 48).to(dtype).requires_grad_()
    found = causal_attention(qkv, **HEADS, softcap=softcap, scale=scale)
    (gradient,) = torch.autograd.grad(found.sum(), qkv)
    assert found.isfinite().all()
    assert gradient.isfinite().all()


def test_numbers_of_numpy_are_numbers():
    qkv, exact = torch.randn(2, 7, 48), {"window": 3, "softcap": 1.5, "scale": 0.25}
    heads = {name: numpy.int64(number) for name, number in HEADS.items()}
    given = {"window": numpy.int32(3), "softcap": numpy.float32(1.5), "scale": numpy.float32(0.25)}
    found = causal_attention(qkv, **heads, **given)
    assert torch.equal(found, causal_attention(qkv, **HEADS, **exact))
    given.pop("softcap")
    assert torch.isfinite(causal_attention(qkv, **heads, **given)).all()


@pytest.mark.parametrize("options", [{"softcap": 1.5}, {"softcap": 1.5, "window": 3}], ids=str)
def test_dropout_under_a_softcap_drops_weights(options):
    qkv = torch.randn(2, 7, 48, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(3)
    ours = causal_attention(qkv, **HEADS, **options, dropout=0.4)
    torch.manual_seed(3)
    agree(qkv, ours, by_formula(qkv, **HEADS, **options, dropout=0.4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("options", [{"softcap": 5.0}, {"window": 9}], ids=str)
def test_low_precision_is_as_good_as_torch(options, dtype):
    qkv = torch.randn(2, 33, 8 * 16).to(dtype)
    found = []
    for function, wanted in (
        (by_formula, torch.float64),
        (by_formula, dtype),
        (causal_attention, dtype),
    ):
        given = qkv.to(wanted).requires_grad_()
        y = function(given, **HEADS, **options)
        found.append((y, *torch.autograd.grad(y.square().sum(), given)))
    for oracle, stock, ours in zip(*found, strict=True):
        assert_close(ours, oracle, stock)


def test_a_softcap_under_autocast_has_its_dtype():
    qkv = torch.randn(2, 7, 48)
    with torch.autocast("cpu", torch.bfloat16):
        found = causal_attention(qkv, **HEADS, softcap=2.0)
    assert torch.equal(found, causal_attention(qkv.bfloat16(), **HEADS, softcap=2.0))


OPTIONS = [{}, {"window": 3}, {"softcap": 2.0}, {"window": 3, "softcap": 2.0}]


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.slow
def test_compiled_in_one_graph(options, packed):
    given = {"cumulative_lengths": torch.tensor(ENDS)} if packed else {}

    def call(qkv):
        return causal_attention(qkv, **HEADS, **options, **given)

    torch._dynamo.reset()
    qkv = torch.randn(2, 5, 48, dtype=torch.float64, requires_grad=True)
    agree(qkv, torch.compile(call, fullgraph=True, backend="aot_eager")(qkv), call(qkv))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_no_tokens(options):
    assert causal_attention(torch.randn(2, 0, 48), **HEADS, **options).shape == (2, 0, 24)


WRONG = [
    (torch.randn(2, 3, 47), HEADS, r"qkv \[2, 3, 47\]"),
    (torch.randn(3, 48), HEADS, r"qkv \[3, 48\]"),
    (torch.randn(2, 3, 48), {"heads": 3, "key_value_heads": 2}, "a multiple of"),
    (torch.randn(2, 3, 48), {"heads": 0}, "heads=0"),
    (torch.randn(2, 3, 48), {"heads": "4"}, "heads='4'"),
    (torch.randn(2, 3, 48), {"heads": 4, "key_value_heads": 2.0}, "key_value_heads=2.0"),
    (torch.randn(2, 3, 48), {"heads": True}, "heads=True"),
    (torch.randn(2, 3, 48), HEADS | {"window": 0}, "window=0"),
    (torch.randn(2, 3, 48), HEADS | {"window": 2.0}, "window=2.0"),
    (torch.randn(2, 3, 48), HEADS | {"window": True}, "window=True"),
    (torch.randn(2, 3, 48), HEADS | {"window": "4096"}, "window='4096'"),
    (torch.randn(2, 3, 48), HEADS | {"softcap": 0.0}, "softcap=0.0"),
    (torch.randn(2, 3, 48), HEADS | {"softcap": -50.0}, "softcap=-50.0"),
    (torch.randn(2, 3, 48), HEADS | {"softcap": "50"}, "softcap='50'"),
    (torch.randn(2, 3, 48), HEADS | {"softcap": True}, "softcap=True"),
    (torch.randn(2, 3, 48), HEADS | {"softcap": float("inf")}, "softcap=inf"),
    (torch.randn(2, 3, 48), HEADS | {"softcap": float("nan")}, "softcap=nan"),
    (torch.randn(2, 3, 48), HEADS | {"softcap": 1e300}, r"softcap=1e\+300"),
    (torch.randn(2, 3, 48), HEADS | {"softcap": 1e-300}, "softcap=1e-300"),
    (torch.randn(2, 3, 48), HEADS | {"scale": "0.1"}, "scale='0.1'"),
    (torch.randn(2, 3, 48), HEADS | {"scale": True}, "scale=True"),
    (torch.randn(2, 3, 48), HEADS | {"scale": float("inf")}, "scale=inf"),
    (torch.randn(2, 3, 48), HEADS | {"scale": float("nan")}, "scale=nan"),
    (torch.randn(2, 3, 48), HEADS | {"dropout": "0.1"}, "dropout='0.1'"),
    (torch.randn(2, 3, 48), HEADS | {"dropout": 1.5}, "dropout=1.5"),
    (torch.randn(2, 3, 48), HEADS | {"dropout": -0.1}, "dropout=-0.1"),
    (torch.randn(2, 3, 48), HEADS | {"dropout": None}, "dropout=None"),
    (torch.randn(2, 3, 48), HEADS | {"cumulative_lengths": torch.tensor([0, 5])}, "for 6 tokens"),
    (torch.randn(2, 3, 48), HEADS | {"cumulative_lengths": [0, 6]}, r"\[0, 6\], for 6 tokens"),
    *[
        (torch.randn(2, 3, 48), HEADS | {"cumulative_lengths": torch.tensor(ends)}, "for 6 tokens")
        for ends in ([1, 6], [0, 4, 2, 6], [0.0, 6.0], [[0, 6]], [6])
    ],
]


@pytest.mark.parametrize(("qkv", "named", "said"), WRONG)
def test_what_does_not_fit_is_refused(qkv, named, said):
    with pytest.raises(ProgramError, match=said):
        causal_attention(qkv, **named)
