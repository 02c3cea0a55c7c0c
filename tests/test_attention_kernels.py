"""Preferring a kernel of PyTorch's, and timing them: on a CPU, and on a pretended GPU."""

import random
import threading

import pytest
import torch
import torch.nn.functional as F
from pretended_gpu import CALL, GPU, HEADS, chosen_here, pretend_gpu
from torch._dynamo.backends.common import aot_autograd
from torch.nn.attention import SDPBackend
from torch.utils.checkpoint import checkpoint

from cadenza.backends.triton.tuning import timing
from cadenza.library import attention, attention_race
from cadenza.library.attention_choice import known, order_of
from cadenza.library.attention_heads import Heads
from cadenza.library.attention_race import ALL, BACK_ENDS, EXPANDED, OWN, Call, listed, preferring


@pytest.fixture(autouse=True)
def watch(monkeypatch, tmp_path):
    """A pretended GPU whose cache is empty."""
    return pretend_gpu(monkeypatch, tmp_path)


# --- sizes that are run ---------------------------------------------------------------------------

SIZES = [(1, 1), (2, 300), (64, 100), (5000, 64), (1, 131072), (8, 4096), (1, 10**6)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "heads", [Heads(32, 8, 128), Heads(1, 1, 8), Heads(128, 128, 256)], ids=str
)
@pytest.mark.parametrize(("batch", "length"), SIZES)
def test_rounded_sizes_take_a_bounded_time(batch, length, heads, dtype):
    found = Call(GPU, dtype, heads, batch, length, True).rounded()
    assert found.rounded() == found
    assert found.length >= attention_race.LEAST
    assert found.batch * found.length <= attention_race.TOKENS
    least = (found.batch, found.length) == (1, attention_race.LEAST)
    work = 7 * found.batch * found.length**2 * heads.queries * heads.columns
    assert least or work <= attention_race.WORK[dtype.itemsize]


def test_sizes_are_rounded_to_the_next_power_of_two():
    assert CALL.rounded()[3:5] == (2, 512)
    assert CALL._replace(batch=5, length=128).rounded()[3:5] == (8, 128)


# --- the race, on a CPU ---------------------------------------------------------------------------


@pytest.fixture
def race(monkeypatch):
    """A race on a CPU: flash serves, cuDNN does not, the efficient kernel raises when it runs."""
    call = Call(torch.device("cpu"), torch.float32, HEADS, 2, 16, True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    serves = {"flash": True, "cudnn": False, "efficient": True, EXPANDED: True}
    monkeypatch.setattr(
        attention_race, "SERVES", {name: lambda asked, it=it: it for name, it in serves.items()}
    )
    ran = attention_race._Race.run

    def run(self, name):
        if name == "efficient":
            raise RuntimeError("no kernel image\nis available")
        ran(self, name)

    def timed(runs, seconds):
        for each in runs.values():
            each()
        return dict.fromkeys(runs, 1.0)

    monkeypatch.setattr(attention_race._Race, "run", run)
    monkeypatch.setattr(timing, "timed", timed)
    return call


def test_what_raises_or_does_not_serve_is_out(race):
    found = attention_race._measured(race, 0.0)
    assert found == {
        OWN: 1.0,
        "flash": 1.0,
        EXPANDED: 1.0,
        "cudnn": "RuntimeError: it does not serve such calls",
        "efficient": "RuntimeError: no kernel image",
    }


def test_heads_that_nobody_shares_are_not_expanded(race):
    found = attention_race._measured(race._replace(heads=Heads(4, 4, 16)), 0.0)
    assert "as many heads" in found[EXPANDED]


def test_measuring_draws_no_random_numbers_of_the_callers(race):
    torch.manual_seed(1)
    random.seed(1)
    before = torch.get_rng_state(), random.getstate()
    attention_race._elsewhere(lambda: attention_race._measured(race, 0.0))
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()


def test_measuring_has_none_of_the_callers_modes():
    found = []

    def look():
        found.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
        found.append(torch.is_inference_mode_enabled())

    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        attention_race._elsewhere(look)
    assert found == [(True, False), False]


# --- preferring -----------------------------------------------------------------------------------


def in_order():
    """PyTorch's kernels as it would try them now."""
    return torch.nn.attention._cur_sdpa_kernel_backends(with_priority=True)


@pytest.mark.parametrize("name", BACK_ENDS)
def test_a_kernel_is_preferred_and_none_is_out(name):
    before = in_order()
    with preferring((name,)):
        assert in_order()[0] == BACK_ENDS[name]
        assert set(in_order()) == {*ALL}
        assert listed((name,))[-1] == SDPBackend.MATH
    assert in_order() == before


def test_what_raises_within_leaves_the_order_as_it_was():
    before = in_order()
    with pytest.raises(KeyError), preferring(("cudnn",)):
        raise KeyError
    assert in_order() == before
    assert not attention_race.is_inside()


def test_nothing_is_measured_within(watch):
    with preferring(("cudnn",)):
        assert order_of(CALL) == ()
    assert order_of(CALL)


def test_one_thread_at_a_time_prefers():
    before, orders = in_order(), []

    def other():
        with preferring(("efficient",)):
            orders.append(in_order()[0])

    thread = threading.Thread(target=other)
    with preferring(("cudnn",)):
        thread.start()
        thread.join(0.1)
        assert thread.is_alive()
        assert in_order()[0] == SDPBackend.CUDNN_ATTENTION
    thread.join()
    assert orders == [SDPBackend.EFFICIENT_ATTENTION]
    assert in_order() == before


# --- in a call ------------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch):
    """What PyTorch's function was called with, and which kernel came first."""
    heard, stock = [], F.scaled_dot_product_attention

    def watched(query, key, value, **named):
        heard.append((in_order()[0], key.shape[1], named["enable_gqa"]))
        return stock(query, key, value, **named)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    return heard


def call(qkv, **options):
    """A call of grouped heads."""
    return attention.causal_attention(qkv, heads=4, key_value_heads=2, **options)


ORDERS = [
    ((), SDPBackend.FLASH_ATTENTION, 2, True),
    (("cudnn",), SDPBackend.CUDNN_ATTENTION, 2, True),
    (("efficient", "flash"), SDPBackend.EFFICIENT_ATTENTION, 2, True),
    ((EXPANDED,), SDPBackend.EFFICIENT_ATTENTION, 4, False),
]


@pytest.mark.parametrize(("order", "first", "keys", "grouped"), ORDERS)
def test_a_plain_call_prefers_what_was_chosen(order, first, keys, grouped, asked, monkeypatch):
    qkv = torch.randn(2, 7, 128, dtype=torch.float64)
    expected = call(qkv)
    monkeypatch.setattr(attention, "chosen", lambda x, heads: order)
    torch.testing.assert_close(call(qkv), expected)
    assert asked[-1] == (first, keys, grouped)


@pytest.mark.parametrize("options", [{"dropout": 0.5}, {"window": 3}], ids=str)
def test_other_calls_are_left_to_pytorch(options, asked, monkeypatch):
    monkeypatch.setattr(attention, "chosen", None)
    call(torch.randn(2, 7, 128), **options)
    assert asked[-1][0] == SDPBackend.FLASH_ATTENTION


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_call_runs_again_on_the_same_kernel(reentrant, watch, asked, monkeypatch):
    monkeypatch.setattr(attention, "chosen", chosen_here)
    qkv = torch.randn(2, 7, 128, requires_grad=True)
    checkpoint(call, qkv, use_reentrant=reentrant).sum().backward()
    assert [first for first, *_ in asked] == [SDPBackend.CUDNN_ATTENTION] * 2
    assert len(watch.calls) == 1


def in_graph(node):
    """The kernels that a node of a compiled graph names."""
    return node.args[0] if "_backend_from_string" in str(node.target) else ""


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
    monkeypatch.setattr(attention_race, "listed", lambda order: [first])
    torch._dynamo.reset()
    before, qkv = in_order(), torch.randn(2, 7, 128, requires_grad=True)
    compiled = torch.compile(call, fullgraph=True, backend=aot_autograd(fw_compiler=keep))
    torch.testing.assert_close(compiled(qkv), call(qkv))
    flash = any("flash_attention" in name for name in traced)
    assert flash == (first == SDPBackend.FLASH_ATTENTION), traced
    assert in_order() == before
