"""The library on a GPU: every variant and make of layer against float64 by torch's own error."""

import pytest
import torch
from block_operands import cast
from calls import BRAIN, SINGLE, check_as_good_as_torch, launches, named, upstream_of
from programs import assert_close
from stock_layers import MAKES, StockLayer
from stock_programs import operands
from torch import nn

import cadenza as cz
from cadenza.library.variants import VARIANTS

pytestmark = pytest.mark.gpu
ALIGNED = {"D": 256, "F": 384, "H": 4, "KV": 2, "HD": 64, "V": 640}
TINY = {"D": 32, "F": 48, "H": 2, "KV": 1, "HD": 16, "V": 64}
# What rounds to a dtype of its own has a test of its own.
NAMES = [name for name in VARIANTS if name != "weight-gradient"]
each_dtype = pytest.mark.parametrize("dtype", [BRAIN, SINGLE], ids=str)


@pytest.mark.interpreted
@each_dtype
@pytest.mark.parametrize("name", NAMES)
def test_variants_are_as_good_as_torch(name, dtype, place):
    place.allows(dtype)
    program = VARIANTS[name].program
    with torch.device(place.device):
        made = operands(name, place.rows(129), TINY if place.interpreted else ALIGNED)
    arguments = cast(made, dtype)
    with launches() as found:
        check_as_good_as_torch(program, arguments, upstream_of(program.plain, arguments))
    assert len(found), "nothing ran by Triton"


@each_dtype
@pytest.mark.parametrize("make", MAKES)
def test_layers_are_as_good_as_their_twins(make, dtype, place):
    sizes = {"width": 256, "heads": 4, "key_value_heads": 2, "head_dim": 64}
    x = torch.randn(2, 65, 256, device=place.device)
    tables = cz.ops.rotary_tables(cz.ops.Rotary(64), torch.arange(65, device=place.device)[None])
    tables = None if make == "gpt2" else [t.expand(2, -1, -1).to(dtype) for t in tables]
    twin = StockLayer(make, sizes, 384, 1e-5).to(place.device)
    for weight in twin.parameters():
        nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
    layer = cz.nn.DecoderLayer(256, 4, 2, 384, architecture=make, head_dim=64).to(x)
    twin = twin.to(dtype)
    layer.load_state_dict(twin.state_dict())
    found = []
    for module, wanted in ((twin, torch.float64), (twin, dtype), (layer, dtype)):
        module = module.to(wanted)
        given = None if tables is None else [t.to(wanted) for t in tables]
        low = x.to(dtype).to(wanted).requires_grad_()
        ours = module is layer
        stream = module(low, None, *(given or ()))[0] if ours else module(low, given)
        stream.square().mean().backward()
        gradients = {name: weight.grad.clone() for name, weight in module.named_parameters()}
        found.append({"stream": stream.detach(), "x": low.grad, **gradients})
        module.zero_grad()
    exact, by_torch, actual = found
    if make == "gpt2":  # without rotation it shifts all scores of a query alike: its gradient is 0
        for values in found:
            del values["self_attn.k_proj.bias"]
    assert actual.keys() == exact.keys()
    for name, value in actual.items():
        with named(name):
            if dtype == BRAIN or name in ("stream", "x"):
                assert_close(value, exact[name], by_torch[name])
            else:  # of sums over 130 rows one order is as good as another
                assert (value - exact[name]).norm() <= 1e-5 * exact[name].norm()


def module_cases(device):
    """Modules that no layer holds beside their twins of torch, and their input."""
    x, target = torch.randn(2, 65, 256), torch.randint(640, (2, 65))
    linear, norm, head = nn.Linear(256, 384), nn.LayerNorm(256), nn.Linear(256, 640)
    gelu = cz.nn.Linear(256, 384, activation="gelu")

    def loss_of(x):
        z = head(x).to(torch.promote_types(x.dtype, SINGLE))
        return nn.functional.cross_entropy(z.flatten(0, 1), target.flatten())

    entropy = cz.nn.LinearCrossEntropy(256, 640, bias=True)
    cases = {
        "Linear": (gelu, linear, gelu, lambda x: nn.functional.gelu(linear(x))),
        "LayerNorm": (ours := cz.nn.LayerNorm(256), norm, ours, norm),
        "LinearCrossEntropy": (entropy, head, lambda x: entropy(x, target), loss_of),
    }
    return x.to(device), cases


@pytest.mark.parametrize("name", ["Linear", "LayerNorm", "LinearCrossEntropy"])
def test_modules_are_as_good_as_torchs(name, place):
    with torch.device(place.device):
        x, cases = module_cases(place.device)
    ours, twin, call, stock = cases[name]
    ours.load_state_dict(twin.state_dict())
    found = []
    for module, wanted, run in ((twin, torch.float64, stock), (twin, BRAIN, stock),
                                (ours, BRAIN, call)):  # fmt: skip
        module.to(BRAIN).to(wanted)
        low = x.to(BRAIN).to(wanted).requires_grad_()
        module.zero_grad()
        y = run(low)
        y.square().mean().backward()
        gradients = {n: weight.grad.clone() for n, weight in module.named_parameters()}
        found.append({"y": y.detach(), "x": low.grad, **gradients})
    exact, by_torch, actual = found
    for label, value in actual.items():
        with named(label):
            assert_close(value, exact[label], by_torch[label].to(value.dtype))


@pytest.mark.interpreted
@pytest.mark.parametrize("kept", [BRAIN, SINGLE], ids=str)
def test_weight_gradients_accumulate_in_place(kept, place):
    dtype = SINGLE if place.interpreted else BRAIN
    rows = place.rows(1000)
    x, dy = (torch.randn(rows, n, device=place.device).to(dtype) for n in (32, 48))
    gradient = torch.randn(48, 32, device=place.device).to(kept)
    oracle = gradient.double() + dy.double().T @ x.double()
    # By the same instructions: those of 16-bit operands add up in less than float32.
    options = {"out_dtype": SINGLE} if dtype == BRAIN else {}
    single = gradient.float() + torch.mm(dy.T, x, **options)
    cz.ops.accumulate_weight_gradient(gradient, x, dy)
    assert_close(gradient, oracle, single.to(kept))
