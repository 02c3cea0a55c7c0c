"""`cz.nn` layers of every make beside their twins in stock torch, and the modules around them.

Parameter names, shapes and first values; streams and every gradient at float64; packed sequences;
dropout; saving and loading both ways; torch.compile.
"""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from programs import assert_same, error_of
from scores import seen_tokens
from stock_layers import MAKES, StockLayer
from torch import nn
from torch.utils.checkpoint import checkpoint

import cadenza as cz
from cadenza.core.errors import ProgramError
from cadenza.library.nn.architecture import ARCHITECTURES, Architecture

SIZES = {"width": 16, "heads": 4, "key_value_heads": 2, "head_dim": 6}
FEED_FORWARD = 20


def pair(make: str, eps: float = 1e-4) -> tuple[cz.nn.DecoderLayer, StockLayer]:
    """A layer and its twin at float64, of the same random weights."""
    layer = cz.nn.DecoderLayer(
        16, 4, 2, FEED_FORWARD, eps, architecture=make, head_dim=SIZES["head_dim"]
    ).double()
    twin = StockLayer(make, SIZES, FEED_FORWARD, eps).double()
    for weight in twin.parameters():
        nn.init.normal_(weight, std=0.5)
    layer.load_state_dict(twin.state_dict())
    return layer, twin


def tables_of(make: str, *positions: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Rotary tables `[1, S, R]`; of a part of a head for GPT-J, none for GPT-2."""
    if make == "gpt2":
        return None
    angles = torch.randn(*positions, 1 if make == "gptj" else 3, dtype=torch.float64)
    return angles.cos(), angles.sin()


def outcome(stream: torch.Tensor, module: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The stream, and the gradients of x and of every parameter by name."""
    torch.manual_seed(1)
    names, weights = zip(*module.named_parameters(), strict=True)
    found = torch.autograd.grad(stream, [x, *weights], torch.randn_like(stream))
    return {"stream": stream, "x": found[0]} | dict(zip(names, found[1:], strict=True))


def by_name(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return dict(sorted(found.items()))


def test_every_architecture_has_a_twin():
    assert set(MAKES) == set(ARCHITECTURES)


@pytest.mark.parametrize("make", MAKES)
def test_32_parameters_have_the_names_shapes_and_first_norms_of_the_twin(make):
    layer = cz.nn.DecoderLayer(16, 4, 2, FEED_FORWARD, architecture=make, head_dim=6)
    twin = StockLayer(make, SIZES, FEED_FORWARD, 1e-5)
    shapes = [{n: v.shape for n, v in m.state_dict().items()} for m in (layer, twin)]
    assert shapes[0] == shapes[1]
    assert {n for n, _ in layer.named_parameters()} == set(shapes[1])
    for name, value in twin.state_dict().items():
        assert "norm" not in name or torch.equal(layer.state_dict()[name], value), name


@pytest.mark.parametrize("make", MAKES)
def test_a_layer_equals_its_twin_in_value_and_every_gradient(make):
    layer, twin = pair(make)
    x = torch.randn(2, 5, 16, dtype=torch.float64, requires_grad=True)
    tables = tables_of(make, 2, 5)
    squares = x.square().sum(-1, keepdim=True)
    stream, handed_on = layer(x, squares, *(tables or ()))
    torch.testing.assert_close(handed_on, stream.square().sum(-1, keepdim=True))
    expected = outcome(twin(x, tables), twin, x)
    assert_same(by_name(outcome(stream, layer, x)), by_name(expected), floor=10.0)
    alone, _ = layer(x, None, *(tables or ()))
    torch.testing.assert_close(alone, stream, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("make", ["llama", "gemma2", "gptj"])
def test_layers_in_a_row_hand_their_sums_on(make):
    layers, twins = zip(*(pair(make) for _ in range(2)), strict=True)
    x = torch.randn(1, 4, 16, dtype=torch.float64)
    tables = tables_of(make, 1, 4)
    stream, squares = layers[0](x, None, *tables)
    stream, _ = layers[1](stream, squares, *tables)
    torch.testing.assert_close(stream, twins[1](twins[0](x, tables), tables))


LOOKING = {
    "mistral": {"attention_window": 3},
    "gemma2": {"attention_window": 3, "attention_softcap": 0.5},
    "gemma3": {"attention_window": 1},
    "llama": {"attention_softcap": 2.0},
}


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("make", LOOKING)
def test_windows_and_softcaps_are_the_twins(make, packed):
    layer, twin = pair(make)
    numbers = LOOKING[make]
    layer.self_attn.architecture = replace(layer.architecture, **numbers)
    twin.self_attn.softcap = numbers.get("attention_softcap")
    x = torch.randn(1 if packed else 2, 7, 16, dtype=torch.float64, requires_grad=True)
    sequence = torch.tensor([0, 0, 0, 0, 1, 1, 1]) if packed else None
    ends = {"cumulative_lengths": torch.tensor([0, 4, 7])} if packed else {}
    tables = tables_of(make, x.shape[0], 7)
    seen = seen_tokens(7, numbers.get("attention_window"), sequence)
    expected = outcome(twin(x, tables, seen), twin, x)
    found = outcome(layer(x, None, *tables, **ends)[0], layer, x)
    assert_same(by_name(found), by_name(expected), floor=10.0)
    assert not torch.allclose(expected["stream"], twin(x, tables_of(make, x.shape[0], 7)))


@pytest.mark.parametrize("number", [{"attention_window": 0}, {"attention_softcap": -1.0}], ids=str)
def test_windows_and_softcaps_that_mean_nothing(number):
    make = replace(Architecture.named("gemma2"), **number)
    layer = cz.nn.DecoderLayer(16, 4, 2, FEED_FORWARD, architecture=make, head_dim=6)
    with pytest.raises(ProgramError, match=next(iter(number)).removeprefix("attention_")):
        layer(torch.randn(1, 4, 16), None, *(t.float() for t in tables_of("gemma2", 1, 4)))


@pytest.mark.parametrize("make", ["llama", "olmo2"])
def test_packed_sequences_are_each_as_if_alone(make):
    layer, _ = pair(make)
    lengths, rotary = (3, 1, 4), cz.ops.Rotary(6)
    ends = F.pad(torch.tensor(lengths).cumsum(0), (1, 0))
    tables = cz.ops.rotary_tables(rotary, cz.ops.packed_positions(ends, 8)[None])
    x = torch.randn(1, 8, 16, dtype=torch.float64, requires_grad=True)
    tables = [table.double() for table in tables]
    packed = outcome(layer(x, None, *tables, cumulative_lengths=ends)[0], layer, x)
    streams = []
    for part in x.split(lengths, 1):
        own = cz.ops.rotary_tables(rotary, torch.arange(part.shape[1])[None])
        streams.append(layer(part, None, *(table.double() for table in own))[0])
    apart = outcome(torch.cat(streams, 1), layer, x)
    assert_same(packed, apart, floor=10.0)


@pytest.mark.parametrize("make", ["llama", "qwen3", "olmo2"])
def test_a_layer_whose_norms_are_stored_minus_one_is_the_same(make):
    layer, _ = pair(make)
    shifted = replace(Architecture.named(make), norm_offset=1.0)
    other = cz.nn.DecoderLayer(16, 4, 2, FEED_FORWARD, 1e-4, architecture=shifted, head_dim=6)
    state = {n: v - 1.0 if "norm" in n else v for n, v in layer.state_dict().items()}
    other.double().load_state_dict(state)
    x, tables = torch.randn(1, 4, 16).double(), tables_of(make, 1, 4)
    torch.testing.assert_close(other(x, None, *tables)[0], layer(x, None, *tables)[0])


def test_state_dicts_go_both_ways_and_copies_are_their_own():
    layer, twin = pair("qwen3")
    other = StockLayer("qwen3", SIZES, FEED_FORWARD, 1e-4).double()
    other.load_state_dict(layer.state_dict())
    assert all(
        torch.equal(a, b) for a, b in zip(other.parameters(), twin.parameters(), strict=True)
    )
    copied = copy.deepcopy(layer)
    copied.mlp.up_proj.weight.data.zero_()
    assert layer.mlp.up_proj.weight.any()


def test_half_precision_is_as_close_as_the_twins():
    layer, twin = pair("gemma2")
    x, tables = torch.randn(2, 9, 16).double(), tables_of("gemma2", 2, 9)
    oracle = twin(x, tables)
    low = [t.bfloat16() for t in (x, *tables)]
    ours = layer.bfloat16()(low[0], None, *low[1:])[0]
    theirs = twin.bfloat16()(low[0], low[1:])
    assert ours.dtype == torch.bfloat16
    assert error_of(ours, oracle) <= 2 * error_of(theirs, oracle)


# --- dropout --------------------------------------------------------------------------------------


def dropping(make: str = "llama") -> cz.nn.DecoderLayer:
    return cz.nn.DecoderLayer(16, 4, 2, FEED_FORWARD, architecture=make, head_dim=6, dropout=0.5)


def test_dropout_is_drawn_in_training_alone_and_again_each_call():
    layer, x = dropping(), torch.randn(1, 4, 16)
    tables = [t.float() for t in tables_of("llama", 1, 4)]
    first, second = (layer(x, None, *tables)[0] for _ in range(2))
    assert not torch.equal(first, second)
    layer.eval()
    still = dropping().eval()
    still.load_state_dict(layer.state_dict())
    still.dropout = 0.0
    assert torch.equal(layer(x, None, *tables)[0], still(x, None, *tables)[0])


@pytest.mark.parametrize("silent", ["self_attn.o_proj", "mlp.down_proj"])
def test_each_branch_draws_of_its_own(silent):
    layer, x = dropping(), torch.randn(1, 4, 16)
    nn.init.zeros_(layer.get_submodule(silent).weight)
    tables = [t.float() for t in tables_of("llama", 1, 4)]
    first, second = (layer(x, None, *tables)[0] for _ in range(2))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_dropout_recomputed_by_checkpointing_is_the_same(use_reentrant):
    layer, x = dropping(), torch.randn(1, 4, 16)
    tables = [t.float() for t in tables_of("llama", 1, 4)]
    gradients = []
    for run in (layer, lambda *given: checkpoint(layer, *given, use_reentrant=use_reentrant)):
        torch.manual_seed(3)
        leaf = x.clone().requires_grad_()
        run(leaf, None, *tables)[0].square().sum().backward()
        gradients.append(leaf.grad)
    assert torch.equal(*gradients)


# --- Linear, RMSNorm, FeedForward -----------------------------------------------------------------


def test_linear_starts_as_torchs_and_takes_its_state():
    torch.manual_seed(0)
    ours = cz.nn.Linear(12, 15)
    torch.manual_seed(0)
    stock = nn.Linear(12, 15)
    assert ours.state_dict().keys() == stock.state_dict().keys()
    assert all(
        torch.equal(a, b) for a, b in zip(ours.parameters(), stock.parameters(), strict=True)
    )
    x = torch.randn(2, 3, 12)
    torch.testing.assert_close(ours(x), stock(x))
    assert repr(ours).startswith("Linear(12, 15, bias=True, activation=None")


NORMS = {
    "LayerNorm": lambda: nn.LayerNorm(12),
    "RMSNorm of torch": lambda: nn.RMSNorm(12, eps=1e-3),
    "RMSNorm of Gemma": lambda: cz.nn.RMSNorm(12, 1e-3, offset=1.0),
}


@pytest.mark.parametrize("name", NORMS)
def test_linear_with_a_norm_an_activation_and_a_residual(name):
    norm = NORMS[name]()
    nn.init.normal_(norm.weight)
    module = cz.nn.Linear(12, 15, activation="geglu", norm=norm, scale=0.5, softcap=3.0).double()
    x, residual = torch.randn(2, 3, 12).double(), torch.randn(2, 3, 15).double()
    gate, up = F.linear(norm(x), module.weight, module.bias).chunk(2, -1)
    expected = 3.0 * torch.tanh(0.5 * F.gelu(gate) * up / 3.0) + residual
    torch.testing.assert_close(module(x, residual), expected)
    assert tuple(module.weight.shape) == (30, 12)
    assert {n for n in module.state_dict() if n.startswith("norm.")} == {
        f"norm.{n}" for n in norm.state_dict()
    }


def test_linear_drops_in_training_alone():
    module = cz.nn.Linear(12, 200, bias=False, dropout=0.5)
    x = torch.randn(3, 12)
    assert 0.3 < (module(x) == 0).float().mean() < 0.7
    assert not (module.eval()(x) == 0).any()


def test_rms_norm_with_and_without_sums_of_squares():
    norm = cz.nn.RMSNorm(12, 1e-3, offset=1.0).double()
    assert not norm.weight.any()
    nn.init.normal_(norm.weight)
    x = torch.randn(2, 3, 12, dtype=torch.float64)
    expected = F.rms_norm(x, (12,), norm.weight + 1.0, 1e-3)
    torch.testing.assert_close(norm(x), expected)
    torch.testing.assert_close(norm(x, x.square().sum(-1, keepdim=True)), expected)
    assert isinstance(norm, nn.RMSNorm)


def test_feed_forward_without_a_gate():
    module = cz.nn.FeedForward(16, 24, activation="relu2", bias=True).double()
    assert {n for n, _ in module.named_children()} == {"up_proj", "down_proj"}
    x = torch.randn(3, 16, dtype=torch.float64)
    torch.testing.assert_close(module(x), module.down_proj(F.relu(module.up_proj(x)) ** 2))


# --- what is refused ------------------------------------------------------------------------------

WRONG = [
    (lambda: cz.nn.DecoderLayer(16, 4, 3, 20), "4 heads for 3"),
    (lambda: cz.nn.DecoderLayer(18, 4, 2, 20), "width 18 is not divisible by 4"),
    (lambda: cz.nn.DecoderLayer(16, 4, 2, 20, architecture="lama"), "choose one of llama"),
    (lambda: Architecture(placement="between"), "'before', 'after'"),
    (lambda: Architecture(activation="swish"), "'swiglu'"),
    (lambda: Architecture(norm="layer", norm_offset=1.0), "belongs to RMSNorm"),
    (lambda: Architecture(norm="layer", placement="both"), "choose norm='rms'"),
    (lambda: Architecture(norm_bias=True), "belongs to LayerNorm"),
    (lambda: cz.nn.Linear(12, 15, norm=nn.BatchNorm1d(12)), "torch.nn.LayerNorm"),
    (lambda: cz.nn.Linear(12, 15, norm=nn.RMSNorm(12)), "give it one"),
    (lambda: cz.nn.Linear(12, 15, activation="swish"), "activation of no name"),
]


@pytest.mark.parametrize(("make", "said"), WRONG)
def test_what_does_not_fit_is_refused_when_it_is_made(make, said):
    with pytest.raises((ValueError, TypeError), match=said):
        make()


@pytest.mark.slow
@pytest.mark.parametrize("make", ["llama", "gemma2", "cohere"])
def test_a_layer_with_dropout_compiles_as_one_graph(make):
    layer, x = dropping(make), torch.randn(1, 4, 16)
    layer.dropout = 0.0
    tables = [t.float() for t in tables_of(make, 1, 4)]
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, None, *tables)[0], layer(x, None, *tables)[0])
    layer.dropout = 0.5
    compiled(x, None, *tables)[0].sum().backward()
    assert layer.self_attn.q_proj.weight.grad.any()
