"""PyTorch's kernels of attention on a GPU, each called by its name."""

import pytest
import torch
from calls import BRAIN, SINGLE
from test_gpu_attention import HEADS, SIZES, by_math, check, each_dtype, operands
from torch.nn import functional as F
from torch.nn.attention import sdpa_kernel

import cadenza as cz
from cadenza.library import attention
from cadenza.library.attention_heads import Heads
from cadenza.library.attention_kernels import (
    EXPANDED,
    KERNELS,
    attend,
    expanded,
    is_free,
    preferring,
    serves,
)

pytestmark = pytest.mark.gpu


def served(name, qkv, heads=HEADS):
    """The operands of a kernel, by heads; skips where it does not serve them."""
    operands = heads.by_head(qkv)
    if "efficient" in name:
        operands = expanded(*operands)
    if not serves(name, *operands):
        pytest.skip(f"{name} does not serve such calls here")
    return operands


@pytest.mark.parametrize("name", KERNELS)
@each_dtype
def test_each_kernel_is_as_good_as_plain_operations(dtype, name, place, monkeypatch):
    qkv = operands(place, dtype, 2, 513)
    served(name, qkv)
    order = (EXPANDED if "efficient" in name else name,)
    monkeypatch.setattr(attention, "chosen", lambda x, heads: order)
    check(qkv, by_math)


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("heads", [Heads(4, 4, 64), Heads(8, 2, 128), Heads(4, 1, 80)], ids=str)
@pytest.mark.parametrize("name", ["flash", "cudnn", "efficient"])
@each_dtype
def test_operators_compute_what_pytorchs_function_does(dtype, name, heads, scale, place):
    """Bit for bit, where its kernel is the only one that the process has."""
    width = (heads.queries + 2 * heads.keys) * heads.columns
    qkv = torch.randn(2, 257, width, device=place.device).to(dtype).requires_grad_()
    given = served(name, qkv, heads)
    grouped = given[0].shape[1] != given[1].shape[1]
    with sdpa_kernel(KERNELS[name].back_end):
        stock = F.scaled_dot_product_attention(
            *given, is_causal=True, scale=scale, enable_gqa=grouped
        )
    ours = attend(*given, (name,), scale)
    assert torch.equal(ours, stock)
    upstream = torch.randn_like(stock)
    gradients = (torch.autograd.grad(y, qkv, upstream, retain_graph=True)[0] for y in (ours, stock))
    # Backward adds up in the order in which blocks of threads come.
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("name", KERNELS)
def test_under_autocast_and_in_a_captured_graph(name, place, monkeypatch):
    qkv = operands(place, SINGLE, 2, 256).detach()
    served(name, qkv.to(BRAIN))
    order = (EXPANDED if "efficient" in name else name,)
    monkeypatch.setattr(attention, "chosen", lambda x, heads: order)
    with torch.no_grad(), torch.autocast("cuda", BRAIN):
        expected = cz.ops.causal_attention(qkv, **SIZES)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = cz.ops.causal_attention(qkv, **SIZES)
        graph.replay()
    assert expected.dtype == BRAIN
    torch.cuda.synchronize()
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ["flash", "cudnn", EXPANDED])
def test_what_a_model_calls_runs_on_what_is_preferred(name, place):
    qkv = operands(place, BRAIN, 2, 257)
    served(name, qkv)
    given = HEADS.by_head(qkv)
    with torch.profiler.profile() as seen, preferring((name,)):
        F.scaled_dot_product_attention(*given, is_causal=True, enable_gqa=True)
    kernel = name.partition(",")[0]
    assert f"aten::_scaled_dot_product_{kernel}_attention" in {e.name for e in seen.events()}


def test_pytorchs_own_order_says_nothing_of_kernels(place):
    """Also once its first call has set it, if it is one of those that are known."""
    F.scaled_dot_product_attention(*(torch.zeros(1, 1, 8, 8, device=place.device),) * 3)
    assert is_free(), torch._C._get_sdp_priority_order()
