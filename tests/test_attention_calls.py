"""Which kernel a call of `causal_attention` runs on: eager, checkpointed, captured, compiled."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from pretended_gpu import (
    CALL,
    GPU,
    HEADS,
    another_process,
    chosen_here,
    pretend_gpu,
    pretend_kernels,
)
from torch._dynamo.backends.common import aot_autograd
from torch.nn.attention import SDPBackend
from torch.utils.checkpoint import checkpoint

from cadenza.library import attention, attention_kernels
from cadenza.library.attention_choice import known, order_of
from cadenza.library.attention_kernels import EXPANDED, OWN
from cadenza.tools.bench import hugging_face


@pytest.fixture(autouse=True)
def watch(monkeypatch, tmp_path):
    """A pretended GPU whose cache is empty."""
    return pretend_gpu(monkeypatch, tmp_path)


@pytest.fixture
def ran(monkeypatch):
    """The kernels that ran, and in which dtype; all of them serve."""
    return pretend_kernels(monkeypatch)


def in_order():
    """PyTorch's kernels as it would try them now."""
    return torch.nn.attention._cur_sdpa_kernel_backends(with_priority=True)


def call(qkv, **options):
    """A call of grouped heads."""
    return attention.causal_attention(qkv, heads=4, key_value_heads=2, **options)


@pytest.mark.parametrize(
    ("order", "expected"),
    [((), []), (("cudnn",), ["cudnn, shared"]), ((EXPANDED, "flash"), [EXPANDED])],
)
def test_a_plain_call_runs_on_what_was_chosen(order, expected, ran, monkeypatch):
    qkv = torch.randn(2, 7, 128, dtype=torch.float64)
    wanted = call(qkv, scale=0.3)
    monkeypatch.setattr(attention, "chosen", lambda x, heads: order)
    torch.testing.assert_close(call(qkv, scale=0.3), wanted)
    assert [name for name, _ in ran] == expected


@pytest.mark.parametrize("options", [{"dropout": 0.5}, {"window": 3}, {"softcap": 2.0}], ids=str)
def test_other_calls_are_left_to_pytorch(options, ran, monkeypatch):
    monkeypatch.setattr(attention, "chosen", None)
    call(torch.randn(2, 7, 128), **options)
    assert not ran


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_call_runs_again_on_the_same_kernel(reentrant, watch, ran, monkeypatch):
    monkeypatch.setattr(attention, "chosen", chosen_here)
    qkv = torch.randn(2, 7, 128, requires_grad=True)
    checkpoint(call, qkv, use_reentrant=reentrant).sum().backward()
    assert [name for name, _ in ran] == ["cudnn, shared"] * 2
    assert len(watch.calls) == 1


@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_of_a_capture_runs_again_on_the_same_kernel(
    reentrant, warm, watch, ran, monkeypatch
):
    monkeypatch.setattr(attention, "chosen", chosen_here)
    near = CALL._replace(length=8)
    if warm:
        order_of(near)
        another_process(monkeypatch)
    qkv = torch.randn(2, 7, 128, requires_grad=True)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        found = checkpoint(call, qkv, use_reentrant=reentrant)
    order_of(near)  # as another thread does meanwhile
    found.sum().backward()
    assert [name for name, _ in ran] == (["cudnn, shared"] * 2 if warm else [])


def in_graph(node):
    """The kernels that a node of a compiled graph names."""
    return node.args[0] if "_backend_from_string" in str(node.target) else ""


@pytest.mark.slow
def test_a_compiled_call_takes_what_is_known_in_one_graph(watch, monkeypatch):
    first = []

    def backend(module, inputs):
        first.append(next(filter(None, map(in_graph, module.graph.nodes)), ""))
        return module

    monkeypatch.setattr(attention, "chosen", lambda x, heads: known(GPU, torch.bfloat16, *heads))
    for expected in ("", "CUDNN_ATTENTION"):
        torch._dynamo.reset()
        compiled = torch.compile(call, fullgraph=True, backend=backend, dynamic=True)
        for length in (7, 8, 21):
            qkv = torch.randn(2, length, 128, dtype=torch.float64)
            torch.testing.assert_close(compiled(qkv), call(qkv))
        assert first == [expected], "compiled anew, or with another kernel"
        first.clear()
        assert not watch.calls or expected
        order_of(CALL)


@pytest.mark.parametrize(
    ("order", "expected"), [((EXPANDED, "cudnn"), "CUDNN_ATTENTION"), ((EXPANDED,), "")]
)
def test_in_a_graph_a_model_keeps_its_heads(order, expected):
    first, operands = [], [torch.randn(2, heads, 7, 16) for heads in (4, 2, 2)]

    def backend(module, inputs):
        first.append(next(filter(None, map(in_graph, module.graph.nodes)), ""))
        return module

    def model(*given):
        with attention_kernels.preferring(order):
            return F.scaled_dot_product_attention(*given, is_causal=True, enable_gqa=True)

    torch._dynamo.reset()
    found = torch.compile(model, fullgraph=True, backend=backend)(*operands)
    torch.testing.assert_close(found, model(*operands))
    assert first == [expected]


def test_variants_of_a_benchmark_share_a_kernel_that_serves_compiled_ones(monkeypatch):
    monkeypatch.setattr(hugging_face, "chosen", lambda x, heads: (EXPANDED, "cudnn", "flash"))
    sizes = {"B": 2, "S": 7, "H": 4, "KV": 2, "HD": 16}
    case = SimpleNamespace(sizes=sizes, torch_dtype=torch.bfloat16)
    assert hugging_face.fastest(case, torch.device("cpu")) == ("cudnn", "flash")


def test_of_what_is_known_the_longest_counts_in_a_compiled_call(watch):
    order_of(CALL._replace(length=2000))
    watch.times = {OWN: 10.0, "flash": 5.0}
    order_of(CALL)
    order_of(CALL._replace(dtype=torch.float16))
    assert known(GPU, torch.bfloat16, *HEADS) == ("cudnn", "efficient")
    assert known(GPU, torch.float16, *HEADS) == ("flash",)
    assert known(GPU, torch.bfloat16, 4, 4, 16) == ()


@pytest.mark.parametrize("first", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
def test_a_preference_reaches_what_is_compiled(first, monkeypatch):
    traced = []

    def keep(graph, inputs):
        traced.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    monkeypatch.setattr(attention, "chosen", lambda x, heads: ("cudnn",))
    monkeypatch.setattr(attention_kernels, "listed", lambda order: [first])
    torch._dynamo.reset()
    before, qkv = in_order(), torch.randn(2, 7, 128, requires_grad=True)
    compiled = torch.compile(call, fullgraph=True, backend=aot_autograd(fw_compiler=keep))
    torch.testing.assert_close(compiled(qkv), call(qkv))
    flash = any("flash_attention" in name for name in traced)
    assert flash == (first == SDPBackend.FLASH_ATTENTION), traced
    assert in_order() == before
