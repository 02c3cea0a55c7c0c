"""What stands around the projections of `cz.nn`: norms, dropout and residuals beside plain torch.

Values and every gradient at float64, names in state_dicts, and what is refused.
"""

import copy
from dataclasses import replace

import pytest
import torch
from programs import assert_same
from stock_programs import GATES, activated, dropped
from torch import nn
from torch.nn import functional as F

import cadenza as cz
from cadenza.core.errors import ProgramError

WIDTH, WIDE = 12, 16
# Norms before a projection, and a norm of its output that goes with each.
NORMS = {
    "none": (lambda n: None, lambda n: cz.nn.RMSNorm(n, 1e-3)),
    "rms": (lambda n: nn.RMSNorm(n, 1e-3), lambda n: cz.nn.RMSNorm(n, 1e-3)),
    "gemma": (lambda n: cz.nn.RMSNorm(n, 1e-3, 1.0), lambda n: cz.nn.RMSNorm(n, 1e-3, 1.0)),
    "layer": (lambda n: cz.nn.LayerNorm(n), lambda n: nn.LayerNorm(n, bias=False)),
}


def random_of(module):
    """The module at float64, with norms and biases that do something."""
    for weight in module.parameters():
        nn.init.normal_(weight, std=0.7)
    return module.double()


def tensor(*shape):
    """Random numbers at float64 that require a gradient."""
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def with_gradients(y, module, inputs):
    """A value, and the gradients of the inputs and of every parameter, by name."""
    torch.manual_seed(7)
    named = {f"x{place}": x for place, x in enumerate(inputs)} | dict(module.named_parameters())
    found = torch.autograd.grad(y, list(named.values()), torch.randn_like(y))
    return {"y": y} | dict(zip(named, found, strict=True))


def assert_is(module, oracle, *inputs):
    """A module is what torch's own operations make of its parameters, with every gradient."""
    torch.manual_seed(3)
    found = with_gradients(module(*inputs), module, inputs)
    assert_same(found, with_gradients(oracle(*inputs), module, inputs), floor=10.0)


def through(norm, x):
    """A norm of a module by torch's own function; x itself without one."""
    if norm is None:
        return x
    if isinstance(norm, nn.LayerNorm):
        return F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.eps)
    return F.rms_norm(x, x.shape[-1:], norm.weight + getattr(norm, "offset", 0.0), norm.eps)


def first_seed():
    """What a module draws right after `torch.manual_seed(3)`."""
    torch.manual_seed(3)
    return torch.randint(2**31 - 1, ())


# --- Linear ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("kind", NORMS)
def test_linear_with_all_that_may_stand_around_it(kind, dropout):
    before, after = NORMS[kind]
    module = random_of(
        cz.nn.Linear(WIDTH, WIDE, activation="geglu", norm=before(WIDTH), output_norm=after(WIDE),
                     dropout=dropout, scale=0.5, softcap=3.0)
    )  # fmt: skip

    def oracle(x, residual):
        z = F.linear(through(module.norm, x), module.weight, module.bias)
        z = 3.0 * torch.tanh(0.5 * activated(z, "geglu") / 3.0)
        return residual + dropped(through(module.output_norm, z), dropout, first_seed())

    x, residual = tensor(2, 5, WIDTH), tensor(2, 5, WIDE)
    assert_is(module, oracle, x, residual)
    module.eval()
    dropout = 0.0
    assert_is(module, oracle, x, residual)


def test_linear_has_its_norms_in_its_state():
    module = cz.nn.Linear(WIDTH, WIDE, norm=cz.nn.RMSNorm(WIDTH), output_norm=cz.nn.RMSNorm(WIDE))
    assert list(module.state_dict()) == ["weight", "bias", "norm.weight", "output_norm.weight"]
    assert (module.scale, module.softcap) == (1.0, None)
    assert list(cz.nn.Linear(WIDTH, WIDE).state_dict()) == ["weight", "bias"]


# --- FeedForward ----------------------------------------------------------------------------------


def feed_forward_oracle(module, dropout=0.0):
    """A feed-forward of the module's parameters in torch's own operations."""

    def oracle(x):
        h = through(module.norm, x)
        u = module.up_proj(h)
        if module.activation in GATES:
            u = torch.cat((module.gate_proj(h), u), -1)
        y = through(module.output_norm, module.down_proj(activated(u, module.activation)))
        y = dropped(y, dropout, first_seed())
        return x + y if module.skip else y

    return oracle


@pytest.mark.parametrize("skip", [False, True], ids=["alone", "skip"])
@pytest.mark.parametrize("activation", ["swiglu", "gelu", None])
@pytest.mark.parametrize("kind", NORMS)
def test_feed_forward_with_norms_and_its_input_added(kind, activation, skip):
    before, after = NORMS[kind]
    module = random_of(
        cz.nn.FeedForward(WIDTH, WIDE, activation=activation, bias=True, norm=before(WIDTH),
                          output_norm=after(WIDTH), skip=skip)
    )  # fmt: skip
    assert_is(module, feed_forward_oracle(module), tensor(2, 5, WIDTH))


def test_feed_forward_drops_in_training_alone():
    module = random_of(cz.nn.FeedForward(WIDTH, WIDE, dropout=0.4, skip=True))
    x = tensor(2, 5, WIDTH)
    assert_is(module, feed_forward_oracle(module, 0.4), x)
    assert not torch.equal(module(x), module(x))
    module.eval()
    assert_is(module, feed_forward_oracle(module), x)


def test_feed_forward_has_its_norms_in_its_state():
    module = cz.nn.FeedForward(
        WIDTH, WIDE, norm=nn.LayerNorm(WIDTH), output_norm=cz.nn.LayerNorm(WIDTH, bias=False)
    )
    names = ["gate_proj.weight", "up_proj.weight", "down_proj.weight", "norm.weight", "norm.bias",
             "output_norm.weight"]  # fmt: skip
    assert list(module.state_dict()) == names
    assert list(cz.nn.FeedForward(WIDTH, WIDE).state_dict()) == names[:3]
    copied, x = copy.deepcopy(module), torch.randn(3, WIDTH)
    assert torch.equal(copied(x), module(x))
    nn.init.zeros_(copied.output_norm.weight)
    assert module(x).any()
    assert not copied(x).any()


@pytest.mark.slow
def test_feed_forward_with_all_options_compiles_as_one_graph():
    module = cz.nn.FeedForward(
        WIDTH, WIDE, norm=cz.nn.RMSNorm(WIDTH), output_norm=cz.nn.RMSNorm(WIDTH), dropout=0.4,
        skip=True,
    )  # fmt: skip
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    x = torch.randn(3, WIDTH)
    compiled(x).sum().backward()
    module.eval()
    torch.testing.assert_close(compiled(x), module(x))


# --- norms ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
def test_layer_norm_is_torchs(bias):
    ours, stock = cz.nn.LayerNorm(WIDTH, 1e-3, bias=bias), nn.LayerNorm(WIDTH, 1e-3, bias=bias)
    assert isinstance(ours, nn.LayerNorm)
    assert list(ours.state_dict()) == list(stock.state_dict())
    assert all(
        torch.equal(a, b) for a, b in zip(ours.parameters(), stock.parameters(), strict=True)
    )
    assert repr(ours) == repr(stock)
    random_of(ours)
    assert_is(ours, lambda x: through(ours, x), tensor(2, 5, WIDTH))


WEIGHTLESS = {
    cz.nn.LayerNorm: lambda x: F.layer_norm(x, (WIDTH,)),
    cz.nn.RMSNorm: lambda x: F.rms_norm(x, (WIDTH,), eps=1e-6),
}


@pytest.mark.parametrize("kind", WEIGHTLESS)
def test_norms_without_parameters(kind):
    norm, oracle, x = kind(WIDTH, elementwise_affine=False), WEIGHTLESS[kind], tensor(2, 5, WIDTH)
    assert not norm.state_dict()
    assert_is(norm, oracle, x)
    module = random_of(cz.nn.Linear(WIDTH, WIDE, norm=norm))
    assert_is(module, lambda x: F.linear(oracle(x), module.weight, module.bias), x)


# --- attention ------------------------------------------------------------------------------------


def test_attention_drops_in_training_alone():
    module, qkv = cz.nn.Attention(WIDTH, 4, 2, head_dim=6, dropout=0.5), torch.randn(2, 7, 48)
    q, k, v = (z.unflatten(-1, (-1, 6)).transpose(1, 2) for z in qkv.split((24, 12, 12), -1))
    for p in (0.5, 0.0):
        torch.manual_seed(5)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p, enable_gqa=True)
        torch.manual_seed(5)
        torch.testing.assert_close(module(qkv), y.transpose(1, 2).flatten(2))
        module.eval()


# --- what is refused ------------------------------------------------------------------------------

RMS, LAYER = cz.nn.RMSNorm(WIDTH, 1e-3), nn.LayerNorm(WIDTH)
ODD_PAIRS = [
    (RMS, cz.nn.RMSNorm(WIDTH, 1e-4)),
    (RMS, cz.nn.RMSNorm(WIDTH, 1e-3, 1.0)),
    (RMS, nn.LayerNorm(WIDTH, 1e-3, bias=False)),
    (RMS, cz.nn.RMSNorm(WIDTH, 1e-3, elementwise_affine=False)),
    (LAYER, nn.LayerNorm(WIDTH)),
    (LAYER, cz.nn.RMSNorm(WIDTH, 1e-5)),
    (None, nn.LayerNorm(WIDTH, bias=False)),
]


@pytest.mark.parametrize(("norm", "output_norm"), ODD_PAIRS)
@pytest.mark.parametrize("kind", [cz.nn.Linear, cz.nn.FeedForward])
def test_a_norm_of_the_output_that_does_not_go_with_that_of_the_input(kind, norm, output_norm):
    with pytest.raises(ProgramError, match="a norm of the output that the program can't take"):
        kind(WIDTH, WIDTH, norm=norm, output_norm=output_norm)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"foo": 1.0}, "arguments of cz.nn.Linear\n.*unexpected keyword argument 'foo'"),
        ({"scale": None}, "argument scale of cz.nn.Linear\n.*scale=None\n.* a number\n"),
        ({"softcap": "a"}, "argument softcap of cz.nn.Linear\n.*softcap='a'\n.* a number or None"),
    ],
)
def test_numbers_of_a_projection_are_told_by_name(given, said):
    with pytest.raises(ProgramError, match=said):
        cz.nn.Linear(WIDTH, WIDE, **given)


def test_an_offset_needs_a_weight():
    with pytest.raises(ProgramError, match="norm_offset that nothing uses"):
        cz.nn.RMSNorm(WIDTH, offset=1.0, elementwise_affine=False)


@pytest.mark.parametrize("option", [{"norm": RMS}, {"output_norm": RMS}, {"dropout": 0.1},
                                    {"skip": True}])  # fmt: skip
def test_a_layer_does_not_leave_out_what_its_feed_forward_has(option):
    layer = cz.nn.DecoderLayer(WIDTH, 2, 1, WIDE)
    layer.mlp = cz.nn.FeedForward(WIDTH, WIDE, **option)
    with pytest.raises(
        ProgramError, match="a layer's feed-forward with what the layer does itself"
    ):
        layer(torch.randn(1, 3, WIDTH))


@pytest.mark.parametrize(
    ("make", "name"),
    [
        ("olmo2", "post_attention_layernorm"),
        ("gemma2", "post_feedforward_layernorm"),
        ("qwen3", "self_attn.k_norm"),
    ],
)
@pytest.mark.parametrize("other", [{"elementwise_affine": False}, {"eps": 0.5}], ids=str)
def test_a_layer_does_not_take_one_norm_for_another(make, name, other):
    layer = cz.nn.DecoderLayer(
        WIDTH, 2, 1, WIDE, architecture=replace(cz.nn.Architecture.named(make), norm_offset=0.0)
    )
    x = torch.randn(1, 3, WIDTH)
    layer(x)
    norm = layer.get_submodule(name)
    layer.set_submodule(name, nn.RMSNorm(norm.normalized_shape, **{"eps": norm.eps} | other))
    with pytest.raises(ProgramError, match="a norm in a layer whose program can't take it"):
        layer(x)


def test_a_layer_says_what_it_would_leave_out_of_its_feed_forward():
    """Its program takes the projections; what somebody waits for on the module would not come."""
    layer = cz.nn.DecoderLayer(32, 4, 4, 48)
    x = torch.randn(1, 8, 32)
    tables = [torch.rand(1, 8, 4) for _ in range(2)]
    squares = x.square().sum(-1, keepdim=True)
    handle = layer.mlp.register_forward_hook(lambda module, given, found: 0 * found)
    with pytest.raises(ProgramError, match=r"FeedForward with hooks(.|\n)*cz\.nn\.FeedForward"):
        layer(x, squares, *tables)
    handle.remove()
    layer(x, squares, *tables)
    layer.mlp.forward = lambda x: 0 * x
    with pytest.raises(ProgramError, match="FeedForward with a forward of its own"):
        layer(x, squares, *tables)
