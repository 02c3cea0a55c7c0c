"""Attention on a GPU: the kernel that was chosen, packed sequences, windows, softcaps."""

import json
import os
import subprocess
import sys
import time

import pytest
import torch
from calls import BRAIN, HALF, ROOT, SINGLE
from programs import assert_close
from scores import by_formula
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import cadenza as cz
from cadenza.backends.triton.tuning import records
from cadenza.library import attention, attention_choice, attention_packed
from cadenza.library.attention_choice import TABLE, chosen
from cadenza.library.attention_heads import Heads

pytestmark = pytest.mark.gpu
HEADS = Heads(8, 2, 64)
SIZES = {"heads": 8, "key_value_heads": 2}
ENDS = (0, 100, 100, 357, 900, 1026)
each_dtype = pytest.mark.parametrize("dtype", [BRAIN, HALF, SINGLE], ids=str)
each_low = pytest.mark.parametrize("dtype", [BRAIN, HALF], ids=str)


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """Nothing is known, and it may be measured."""
    monkeypatch.setenv("CADENZA_TUNE", "first")
    monkeypatch.setenv("CADENZA_CACHE", str(tmp_path))
    forget(monkeypatch)
    return tmp_path


def forget(monkeypatch):
    """As in another process."""
    for name in ("_decided", "_entries", "_planned"):
        monkeypatch.setattr(attention_choice, name, {})


def operands(place, dtype, *shape):
    """Random queries, keys and values, of which gradients are wanted."""
    columns = (HEADS.queries + 2 * HEADS.keys) * HEADS.columns
    qkv = torch.randn(*shape, columns, device=place.device).to(dtype)
    return qkv.requires_grad_()


def results(function, qkv, upstream, **options):
    """The value, and the gradient."""
    given = qkv.detach().requires_grad_()
    found = function(given, **SIZES, **options)
    found.backward(upstream.to(found.dtype))
    return found.detach(), given.grad


def check(qkv, stock, function=cz.ops.causal_attention, **options):
    """Ours errs at most twice as much as another way, by the formula in float64."""
    upstream = torch.randn(*qkv.shape[:2], HEADS.queries * HEADS.columns, device=qkv.device)
    whole = {name: value for name, value in options.items() if name != "cumulative_lengths"}
    rows, given = qkv.detach().double(), upstream
    if "cumulative_lengths" in options:
        ends, total = options["cumulative_lengths"].to(qkv.device), rows.shape[0] * rows.shape[1]
        places = torch.arange(total, device=qkv.device)
        whole["sequence"] = torch.searchsorted(ends, places, right=True)
        rows, given = rows.reshape(1, total, -1), given.reshape(1, total, -1)
    oracle = results(by_formula, rows, given, **whole)
    theirs, ours = stock(qkv, upstream), results(function, qkv, upstream, **options)
    for exact, other, found in zip(oracle, theirs, ours, strict=True):
        assert_close(found, exact.reshape(found.shape), other)


def by_math(qkv, upstream):
    """PyTorch's plain operations."""
    with sdpa_kernel(SDPBackend.MATH):
        return results(cz.ops.causal_attention, qkv, upstream)


# --- the kernel that was chosen -------------------------------------------------------------------


@each_dtype
@pytest.mark.parametrize("shape", [(2, 513), (3, 128), (1, 70)], ids=str)
def test_what_was_chosen_is_as_good_as_plain_operations(shape, dtype, place, cache):
    check(operands(place, dtype, *shape), by_math)
    [entry] = records.read(TABLE).values()
    times = [t for t in entry["microseconds"].values() if not isinstance(t, str)]
    assert len(times) >= 2, entry
    assert min(times) > 0


@each_low
def test_another_process_measures_nothing(dtype, place, cache):
    qkv = operands(place, dtype, 2, 300)
    order = chosen(qkv, HEADS)
    assert records.read(TABLE)
    text = (
        "import torch, json\n"
        "from cadenza.library import attention_choice\n"
        "from cadenza.library.attention_heads import Heads\n"
        "attention_choice.times_of = None\n"
        f"x = torch.zeros(2, 300, 768, device='cuda', dtype={dtype})\n"
        "print(json.dumps(attention_choice.chosen(x, Heads(8, 2, 64))))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, env=environment, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert tuple(json.loads(ran.stdout)) == order


@pytest.mark.alone
@each_low
def test_measuring_takes_a_moment(dtype, place, cache, monkeypatch):
    qkv = torch.empty(4, 4096, 48 * 128, dtype=dtype, device=place.device)
    torch.cuda.synchronize()
    start = time.perf_counter()
    chosen(qkv, Heads(32, 8, 128))
    print(f"with loading kernels and making plans: {time.perf_counter() - start:.2f} s")
    forget(monkeypatch)
    records.path(TABLE).unlink()
    start = time.perf_counter()
    chosen(qkv, Heads(32, 8, 128))
    assert time.perf_counter() - start < 1.0
    assert records.read(TABLE), "nothing was measured"
    start = time.perf_counter()
    for _ in range(1000):
        chosen(qkv, Heads(32, 8, 128))
    assert time.perf_counter() - start < 0.02


def test_measuring_draws_none_of_the_callers_numbers(place, cache):
    qkv = operands(place, BRAIN, 2, 300)
    torch.cuda.manual_seed(5)
    state = torch.cuda.get_rng_state()
    chosen(qkv, HEADS)
    assert torch.equal(state, torch.cuda.get_rng_state())
    assert records.read(TABLE)


def test_pytorchs_own_order_stays_as_it_was(place, cache):
    qkv = operands(place, BRAIN, 2, 300)
    F.scaled_dot_product_attention(*(torch.zeros(1, 1, 8, 8, device=place.device),) * 3)
    before = torch.nn.attention._cur_sdpa_kernel_backends(with_priority=True)
    cz.ops.causal_attention(qkv, **SIZES)
    assert torch.nn.attention._cur_sdpa_kernel_backends(with_priority=True) == before


def test_nothing_is_measured_while_a_graph_is_captured(place, cache, monkeypatch):
    qkv = operands(place, BRAIN, 2, 256).detach()
    other = torch.zeros(1, 600, qkv.shape[2], device=place.device, dtype=BRAIN)
    with torch.no_grad():
        expected = cz.ops.causal_attention(qkv, **SIZES)
        known = len(records.read(TABLE))
        monkeypatch.setenv("CADENZA_TUNE", "off")
        cz.ops.causal_attention(other, **SIZES)
        monkeypatch.setenv("CADENZA_TUNE", "first")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            cz.ops.causal_attention(other, **SIZES)
            found = cz.ops.causal_attention(qkv, **SIZES)
        graph.replay()
    torch.cuda.synchronize()
    assert len(records.read(TABLE)) == known == 1
    assert torch.equal(found, expected)


def test_what_another_process_measured_counts_in_a_capture(place, cache, monkeypatch):
    qkv = operands(place, BRAIN, 2, 256).detach()
    order = chosen(qkv, HEADS)
    with torch.no_grad():
        cz.ops.causal_attention(qkv, **SIZES)
        forget(monkeypatch)
        graph, found = torch.cuda.CUDAGraph(), []
        with torch.cuda.graph(graph):
            found.append(chosen(qkv, HEADS))
            cz.ops.causal_attention(qkv, **SIZES)
    assert found == [order]
    assert len(records.read(TABLE)) == 1


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not"])
def test_a_checkpointed_call_runs_again_on_its_kernel(reentrant, place, cache, monkeypatch):
    qkv, orders = operands(place, BRAIN, 2, 128), []
    stock = attention.chosen
    monkeypatch.setattr(
        attention, "chosen", lambda *given: orders.append(stock(*given)) or orders[-1]
    )

    def call(given, **sizes):
        return cz.ops.causal_attention(given, **SIZES)

    def again(given, **sizes):
        return checkpoint(call, given, use_reentrant=reentrant)

    check(qkv, by_math, again)
    assert torch.equal(again(qkv), call(qkv))
    assert len(records.read(TABLE)) == 1
    orders.clear()
    again(qkv).sum().backward()
    assert orders == [chosen(qkv, HEADS)] * 2


@each_dtype
def test_compiled_it_takes_what_is_known(dtype, place, cache, monkeypatch):
    qkv = operands(place, dtype, 2, 300)
    order = chosen(qkv, HEADS)
    forget(monkeypatch)
    monkeypatch.setattr(attention_choice, "times_of", None)  # it would fail
    assert attention_choice.known(qkv.device, dtype, *HEADS) == order
    torch._dynamo.reset()
    check(qkv, by_math, torch.compile(cz.ops.causal_attention, fullgraph=True))


# --- packed sequences and windows -----------------------------------------------------------------


def by_mask(monkeypatch, **options):
    """The path with a mask."""

    def stock(qkv, upstream):
        with monkeypatch.context() as patch:
            patch.setattr(attention_packed, "serves", lambda qkv, heads: False)
            return results(cz.ops.causal_attention, qkv, upstream, **options)

    return stock


@pytest.fixture
def asked(monkeypatch):
    """The calls of PyTorch's kernel without a mask."""
    if attention_packed.varlen_attn is None:
        pytest.skip("this release of PyTorch has no kernel for packed sequences")
    found, stock = [], attention_packed.varlen_attn

    def heard(*given, **options):
        found.append((given[5], options["window_size"]))
        return stock(*given, **options)

    monkeypatch.setattr(attention_packed, "varlen_attn", heard)
    monkeypatch.setattr(attention_packed, "_failed", set())
    return found


WINDOWS = pytest.mark.parametrize("window", [None, 1, 64, 200])


@WINDOWS
@each_low
@pytest.mark.parametrize("at", ["cpu", "cuda"])
def test_packed_sequences_need_no_mask(at, dtype, window, place, asked, monkeypatch):
    options = {"cumulative_lengths": torch.tensor(ENDS, device=at), "window": window}
    qkv = operands(place, dtype, 2, 513)
    check(qkv, by_mask(monkeypatch, **options), **options)
    assert asked == [(543, (-1 if window is None else window - 1, 0))]
    assert not attention_packed._failed


@WINDOWS
@each_low
def test_windows_need_no_mask(dtype, window, place, asked, monkeypatch):
    options = {"window": window}
    check(operands(place, dtype, 2, 513), by_mask(monkeypatch, **options), **options)
    assert asked == ([] if window is None else [(513, (window - 1, 0))])
    assert not attention_packed._failed


@WINDOWS
@pytest.mark.parametrize("packed", [True, False])
def test_in_float32_they_take_a_mask(packed, window, place, asked, monkeypatch):
    options = {"cumulative_lengths": torch.tensor(ENDS)} if packed else {}
    check(
        operands(place, SINGLE, 2, 513),
        by_mask(monkeypatch, **options, window=window),
        **options,
        window=window,
    )
    assert not asked


@WINDOWS
@each_low
def test_compiled_in_one_graph(dtype, window, place, monkeypatch):
    options = {"cumulative_lengths": torch.tensor(ENDS, device=place.device), "window": window}
    torch._dynamo.reset()
    compiled = torch.compile(cz.ops.causal_attention, fullgraph=True)
    check(operands(place, dtype, 2, 513), by_mask(monkeypatch, **options), compiled, **options)


def test_lengths_serve_several_streams(place, asked):
    qkv, ends = operands(place, BRAIN, 2, 513), torch.tensor(ENDS, device=place.device)
    expected = cz.ops.causal_attention(qkv, **SIZES, cumulative_lengths=ends)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = cz.ops.causal_attention(qkv, **SIZES, cumulative_lengths=ends)
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(found, expected)
    first, second = (attention_packed.sequences_of(ends, 1026, ends.device) for _ in range(2))
    assert first is second


def test_in_a_captured_graph_lengths_may_change(place, asked):
    qkv = operands(place, BRAIN, 1, 1026).detach()
    ends = torch.tensor(ENDS, device=place.device)
    with torch.no_grad():
        cz.ops.causal_attention(qkv, **SIZES, cumulative_lengths=ends)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = cz.ops.causal_attention(qkv, **SIZES, cumulative_lengths=ends)
        for new in (ENDS, (0, 1, 2, 3, 1000, 1026)):
            ends.copy_(torch.tensor(new))
            graph.replay()
            expected = cz.ops.causal_attention(qkv, **SIZES, cumulative_lengths=ends.clone())
            torch.testing.assert_close(found, expected)


@pytest.mark.alone
def test_packed_sequences_hold_no_mask(place, asked):
    qkv = operands(place, BRAIN, 1, 2**15)
    ends = torch.arange(0, 2**15 + 1, 2**10, device=place.device)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    cz.ops.causal_attention(qkv, **SIZES, cumulative_lengths=ends).sum().backward()
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < 2**30, "a mask of these tokens takes as much"
    assert asked == [(2**10, (-1, 0))]


def test_rows_that_the_kernel_could_not_read(place, asked):
    wide = torch.randn(2, 130, 769, device=place.device).to(BRAIN)
    qkv = wide[..., 1:]
    found = cz.ops.causal_attention(qkv, **SIZES, window=50)
    torch.cuda.synchronize()
    torch.testing.assert_close(found, cz.ops.causal_attention(qkv.contiguous(), **SIZES, window=50))
    assert len(asked) == 2


# --- softcaps -------------------------------------------------------------------------------------


@each_dtype
@pytest.mark.parametrize("options", [{}, {"window": 100}], ids=str)
def test_softcaps_are_as_good_as_the_formula(options, dtype, place):
    def stock(qkv, upstream):
        return results(by_formula, qkv, upstream, softcap=20.0, **options)

    check(operands(place, dtype, 2, 257), stock, softcap=20.0, **options)
