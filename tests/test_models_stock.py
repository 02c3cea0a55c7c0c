"""The stock twin against formulas written out here, and the sizes that a model may have."""

import math

import pytest
import torch
from torch.nn import functional as F

from cadenza.library.models import LlamaConfig, StockLlama
from cadenza.library.models.stock import rotary_tables, rotate_halves

SIZES = {
    "vocabulary": 50,
    "width": 32,
    "layers": 2,
    "heads": 4,
    "key_value_heads": 2,
    "feed_forward": 48,
    "context": 16,
}
CONFIG = LlamaConfig(**SIZES)


@pytest.fixture
def model():
    """A twin in float64 whose norms do something."""
    twin = StockLlama(CONFIG).double()
    for name, weight in twin.named_parameters():
        if name.endswith("norm.weight"):
            weight.data.uniform_(0.5, 1.5)
        else:
            weight.data.mul_(10)
    return twin


def test_parameters_have_the_names_and_shapes_of_hugging_face():
    layer = {
        "self_attn.q_proj": (32, 32),
        "self_attn.k_proj": (16, 32),
        "self_attn.v_proj": (16, 32),
        "self_attn.o_proj": (32, 32),
        "mlp.gate_proj": (48, 32),
        "mlp.up_proj": (48, 32),
        "mlp.down_proj": (32, 48),
        "input_layernorm": (32,),
        "post_attention_layernorm": (32,),
    }
    expected = {"model.embed_tokens": (50, 32), "model.norm": (32,), "lm_head": (50, 32)}
    for number in range(2):
        expected |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    found = {name: tuple(weight.shape) for name, weight in StockLlama(CONFIG).state_dict().items()}
    assert found == {f"{name}.weight": shape for name, shape in expected.items()}


def test_weights_start_normal_with_deviation_002_and_norms_at_one():
    config = LlamaConfig(256, 128, 1, 4, 2, 256, 16)
    for name, weight in StockLlama(config).named_parameters():
        if weight.dim() == 1:
            assert torch.equal(weight, torch.ones_like(weight)), name
        else:
            assert weight.std().item() == pytest.approx(0.02, rel=0.05), name
            assert abs(weight.mean().item()) < 0.002, name


def test_input_and_output_embeddings_are_not_tied():
    model = StockLlama(CONFIG)
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)


def test_rotation_is_that_of_complex_numbers():
    x = torch.randn(3, 7, 8, dtype=torch.float64)
    turned = rotate_halves(x, *rotary_tables(CONFIG, 7, like=x))
    for position in range(7):
        for column in range(4):
            angle = position * 10000.0 ** (-2 * column / 8)
            number = torch.complex(x[:, position, column], x[:, position, column + 4])
            expected = number * complex(math.cos(angle), math.sin(angle))
            found = torch.complex(turned[:, position, column], turned[:, position, column + 4])
            torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)


def rms_norm(x, weight):
    """As the paper has it."""
    return x / (x.square().mean(-1, keepdim=True) + CONFIG.eps).sqrt() * weight


def turn(head):
    """Rotary embedding of one head `[S, 8]` by rotation matrices."""
    rows = []
    for position, row in enumerate(head):
        matrix = torch.zeros(8, 8, dtype=torch.float64)
        for i in range(4):
            angle = position * 10000.0 ** (-i / 4)
            matrix[i, i] = matrix[i + 4, i + 4] = math.cos(angle)
            matrix[i, i + 4], matrix[i + 4, i] = -math.sin(angle), math.sin(angle)
        rows.append(matrix @ row)
    return torch.stack(rows)


def attention(x, weights, name):
    """Head by head: query head h reads key and value head h // 2."""
    query, key, value = (x @ weights[f"{name}.{one}_proj.weight"].T for one in "qkv")
    heads = []
    for h in range(4):
        kv = slice(8 * (h // 2), 8 * (h // 2) + 8)
        scores = turn(query[:, 8 * h : 8 * h + 8]) @ turn(key[:, kv]).T / math.sqrt(8)
        later = torch.ones_like(scores).triu(1).bool()
        heads.append(scores.masked_fill(later, -math.inf).softmax(-1) @ value[:, kv])
    return torch.cat(heads, -1) @ weights[f"{name}.o_proj.weight"].T


def written_out(tokens, weights):
    """Logits of one sequence, from nothing but products and element-by-element formulas."""
    x = weights["model.embed_tokens.weight"][tokens]
    for number in range(2):
        at = f"model.layers.{number}"
        normed = rms_norm(x, weights[f"{at}.input_layernorm.weight"])
        x = x + attention(normed, weights, f"{at}.self_attn")
        normed = rms_norm(x, weights[f"{at}.post_attention_layernorm.weight"])
        gate, up = (normed @ weights[f"{at}.mlp.{one}_proj.weight"].T for one in ("gate", "up"))
        x = x + (gate / (1 + (-gate).exp()) * up) @ weights[f"{at}.mlp.down_proj.weight"].T
    return rms_norm(x, weights["model.norm.weight"]) @ weights["lm_head.weight"].T


def test_logits_equal_the_model_written_out(model):
    tokens = torch.randint(50, (2, 11))
    weights = model.state_dict()
    expected = torch.stack([written_out(row, weights) for row in tokens])
    logits = model(tokens)
    assert logits.shape == (2, 11, 50)
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10)


def test_no_position_sees_a_later_one(model):
    tokens = torch.randint(50, (1, 12))
    changed = tokens.clone()
    changed[0, 7:] = (changed[0, 7:] + 1) % 50
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.equal(before[:, 7:], after[:, 7:])


def test_the_loss_is_the_mean_cross_entropy_of_targets_that_count(model):
    tokens, targets = torch.randint(50, (2, 2, 9)).unbind(0)
    targets[0, :4] = -100
    loss = model(tokens, targets)
    chances = model(tokens).softmax(-1)
    terms = [
        -chances[row, column, targets[row, column]].log()
        for row in range(2)
        for column in range(9)
        if targets[row, column] >= 0
    ]
    assert loss.shape == ()
    torch.testing.assert_close(loss, torch.stack(terms).mean())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_dtypes_of_logits_and_loss(dtype):
    model = StockLlama(CONFIG).to(dtype)
    tokens = torch.randint(50, (2, 16))
    assert model(tokens).dtype == dtype
    assert model(tokens, tokens).dtype == torch.promote_types(dtype, torch.float32)


def test_rotary_tables_are_rounded_once():
    exact = rotary_tables(CONFIG, 1000, like=torch.zeros((), dtype=torch.float64))
    short = rotary_tables(CONFIG, 1000, like=torch.zeros(()))
    assert exact[0].shape == (1000, 4)
    for wide, narrow in zip(exact, short, strict=True):
        assert torch.equal(wide.float(), narrow)


def test_attention_is_torchs_own_kernel(model, monkeypatch):
    asked = []
    kernel = F.scaled_dot_product_attention

    def observed(*tensors, **options):
        asked.append(options)
        return kernel(*tensors, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", observed)
    model(torch.randint(50, (1, 4)))
    assert asked == [{"is_causal": True, "enable_gqa": True}] * 2


def test_a_sequence_beyond_the_context_is_refused():
    with pytest.raises(ValueError, match="17 tokens don't fit in a context of 16: shorten"):
        StockLlama(CONFIG)(torch.zeros(1, 17, dtype=torch.int64))


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("size", [0, -1, 1.5])
def test_sizes_are_positive_whole_numbers(name, size):
    with pytest.raises(ValueError, match=rf"{name} is {size}, .*: choose 1 or more"):
        LlamaConfig(**SIZES | {name: size})


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"width": 30}, "width 30 is not divisible by heads 4: choose width .* as 32"),
        ({"key_value_heads": 3}, "heads 4 is not divisible by key_value_heads 3: .* as 6"),
        ({"width": 36}, "heads of 9 columns.*choose width a multiple of 8, as 40"),
        ({"rope_base": 0.0}, "rope_base 0.0 .* must be positive"),
        ({"eps": -1e-5}, "eps -1e-05 must be positive"),
    ],
)
def test_sizes_that_do_not_fit_name_the_cure(sizes, said):
    with pytest.raises(ValueError, match=said):
        LlamaConfig(**SIZES | sizes)


def test_a_config_is_frozen_and_knows_the_width_of_a_head():
    assert CONFIG.head_dim == 8
    with pytest.raises(AttributeError):
        CONFIG.width = 64
