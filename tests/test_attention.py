"""`cz.ops.causal_attention` against its formula: grouped heads, scales, packed sequences."""

import pytest
import torch
import torch.nn.functional as F

from cadenza.core.errors import ProgramError
from cadenza.library.attention import causal_attention

HEADS = {"heads": 4, "key_value_heads": 2}


def by_formula(qkv, heads, key_value_heads, sequence=None, scale=None):
    """softmax(scale · q · kᵀ) · v of each head, over what a token sees."""
    head_dim = qkv.shape[-1] // (heads + 2 * key_value_heads)
    apart = qkv.unflatten(-1, (-1, head_dim)).transpose(1, 2)
    query = apart[:, :heads]
    key, value = apart[:, heads : heads + key_value_heads], apart[:, heads + key_value_heads :]
    key, value = (z.repeat_interleave(heads // key_value_heads, 1) for z in (key, value))
    scores = query @ key.mT * (head_dim**-0.5 if scale is None else scale)
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if sequence is not None:
        seen = seen & (sequence[:, None] == sequence)
    mixed = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value
    return mixed.transpose(1, 2).flatten(-2)


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
    ends = torch.tensor([0, 4, 4, 9, 10], dtype=dtype)
    sequence = torch.tensor([0] * 4 + [1] * 5 + [2])
    flat = by_formula(qkv.reshape(1, 10, 48), **HEADS, sequence=sequence)
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
    assert [(n["is_causal"], n["attn_mask"] is None) for n in asked] == [
        (True, True),
        (False, False),
    ]


WRONG = [
    (torch.randn(2, 3, 47), HEADS, r"qkv \[2, 3, 47\]"),
    (torch.randn(3, 48), HEADS, r"qkv \[3, 48\]"),
    (torch.randn(2, 3, 48), {"heads": 3, "key_value_heads": 2}, "a multiple of"),
    (torch.randn(2, 3, 48), {"heads": 0}, "heads=0"),
    (torch.randn(2, 3, 48), HEADS | {"cumulative_lengths": torch.tensor([0, 5])}, "for 6 tokens"),
    *[
        (torch.randn(2, 3, 48), HEADS | {"cumulative_lengths": torch.tensor(ends)}, "for 6 tokens")
        for ends in ([1, 6], [0, 4, 2, 6], [0.0, 6.0], [[0, 6]], [6])
    ],
]


@pytest.mark.parametrize(("qkv", "named", "said"), WRONG)
def test_what_does_not_fit_is_refused(qkv, named, said):
    with pytest.raises(ProgramError, match=said):
        causal_attention(qkv, **named)
