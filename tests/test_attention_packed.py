"""Packed sequences and windows on a kernel of PyTorch's, which a formula stands for on a CPU."""

import gc
import logging
import weakref

import numpy
import pytest
import torch
from scores import by_formula
from torch._subclasses import FakeTensorMode
from torch.backends import cuda

from cadenza.core.errors import ProgramError
from cadenza.library import attention_packed as packed
from cadenza.library.attention import causal_attention
from cadenza.library.attention_heads import Heads

SIZES = {"heads": 4, "key_value_heads": 2}
HEADS = Heads(4, 2, 8)
ENDS, SEQUENCE = [0, 4, 4, 9, 10], [0] * 4 + [1] * 5 + [2]


class Kernel:
    """Computes what PyTorch's kernel does, sequence by sequence, and remembers how it was asked."""

    def __init__(self):
        self.calls = []

    def __call__(self, query, key, value, starts, ends, longest, longest_key, **options):
        self.calls.append((starts.tolist(), longest, options))
        assert starts is ends
        assert longest == longest_key
        assert starts.dtype == torch.int32
        heads, keys = query.shape[1], key.shape[1]
        assert options["enable_gqa"] == (heads != keys)
        before, after = options["window_size"]
        assert after == 0
        window = None if before < 0 else before + 1
        rows = torch.cat([part.flatten(1) for part in (query, key, value)], 1)
        apart = rows.tensor_split(starts[1:-1].tolist())
        parts = [
            by_formula(part[None], heads, keys, scale=options["scale"], window=window)[0]
            for part in apart
        ]
        return torch.cat(parts).unflatten(1, (heads, -1))


@pytest.fixture
def kernel(monkeypatch):
    """PyTorch's kernel, as if it served a CPU."""
    made = Kernel()
    monkeypatch.setattr(packed, "varlen_attn", made)
    monkeypatch.setattr(packed, "TAKES", frozenset({"scale", "window_size", "enable_gqa"}))
    monkeypatch.setattr(packed, "_failed", set())
    monkeypatch.setattr(packed, "_asked", lambda *given: None)
    monkeypatch.setattr(cuda, "can_use_flash_attention", lambda asked: True)
    monkeypatch.setattr(
        packed, "serves", lambda qkv, heads: packed._serves(qkv.device, qkv.dtype, *heads)
    )
    return made


def operands(*shape, key_value_heads=2):
    """Queries, keys and values of heads of 8 columns."""
    columns = (4 + 2 * key_value_heads) * 8
    return torch.randn(*shape, columns, dtype=torch.float64, requires_grad=True)


def agree(qkv, ours, expected):
    """Value and gradient."""
    upstream = torch.randn_like(expected)
    torch.testing.assert_close(ours, expected)
    found, wanted = (torch.autograd.grad(y, qkv, upstream)[0] for y in (ours, expected))
    torch.testing.assert_close(found, wanted)


OPTIONS = [{}, {"window": 2}, {"scale": 0.3}, {"window": 3, "scale": 0.3}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("key_value_heads", [4, 2])
def test_packed_sequences_take_no_mask(key_value_heads, options, kernel):
    qkv = operands(2, 5, key_value_heads=key_value_heads)
    sizes = {"heads": 4, "key_value_heads": key_value_heads, **options}
    ours = causal_attention(qkv, **sizes, cumulative_lengths=torch.tensor(ENDS))
    rows, sequence = qkv.reshape(1, 10, -1), torch.tensor(SEQUENCE)
    agree(qkv, ours, by_formula(rows, sequence=sequence, **sizes).reshape(2, 5, -1))
    [(ends, longest, asked)] = kernel.calls
    assert (ends, longest) == (ENDS, 5)
    assert asked["window_size"] == (options.get("window", 0) - 1, 0)


@pytest.mark.parametrize("window", [1, 3, 4])
def test_windows_take_no_mask(window, kernel):
    qkv = operands(3, 5)
    agree(
        qkv,
        causal_attention(qkv, **SIZES, window=window),
        by_formula(qkv, **SIZES, window=window),
    )
    [(ends, longest, asked)] = kernel.calls
    assert (ends, longest) == ([0, 5, 10, 15], 5)
    assert asked["window_size"] == (window - 1, 0)


OTHERWISE = [{"window": 5}, {"dropout": 0.1, "window": 3}, {"softcap": 2.0, "window": 3}]


@pytest.mark.parametrize("options", OTHERWISE, ids=str)
def test_what_the_kernel_does_not_do_is_not_asked_of_it(options, kernel):
    causal_attention(operands(2, 5), **SIZES, **options)
    assert not kernel.calls


def test_without_the_parameter_shared_heads_are_not_announced(kernel, monkeypatch):
    monkeypatch.setattr(packed, "TAKES", frozenset({"scale", "window_size"}))
    with pytest.raises(KeyError, match="enable_gqa"):  # which the formula here asks for
        causal_attention(operands(2, 5), **SIZES, window=3)


# --- what goes wrong ------------------------------------------------------------------------------


def test_a_kernel_that_refuses_is_asked_once(kernel, monkeypatch, caplog):
    asked = []

    def refuses(*given, **options):
        asked.append(options)
        raise RuntimeError("no such head")

    monkeypatch.setattr(packed, "varlen_attn", refuses)
    qkv, ends = operands(2, 5), torch.tensor(ENDS)
    with caplog.at_level(logging.WARNING, "cadenza"):
        for _ in range(2):
            found = causal_attention(qkv, **SIZES, cumulative_lengths=ends)
            causal_attention(qkv, **SIZES, window=3)
    expected = by_formula(qkv.reshape(1, 10, -1), **SIZES, sequence=torch.tensor(SEQUENCE))
    torch.testing.assert_close(found, expected.reshape(2, 5, -1))
    assert len(asked) == 1
    assert caplog.text.count("no such head") == 1


def test_memory_that_ran_out_is_no_refusal(kernel, monkeypatch):
    def full(*given, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(packed, "varlen_attn", full)
    with pytest.raises(torch.OutOfMemoryError):
        causal_attention(operands(2, 5), **SIZES, window=3)


@pytest.mark.parametrize("ends", [[1, 10], [0, 9], [0, 6, 4, 10], [0.0, 10.0], [[0, 10]], [10]])
def test_lengths_that_do_not_fit_are_refused(ends, kernel):
    with pytest.raises(ProgramError, match="for 10 tokens"):
        causal_attention(operands(2, 5), **SIZES, cumulative_lengths=torch.tensor(ends))
    assert not kernel.calls


def without(name):
    return "TAKES", frozenset({"scale", "window_size"}) - {name}


@pytest.mark.parametrize("changed", [without("scale"), without("window_size")], ids=str)
def test_a_release_whose_function_takes_less_is_not_asked(changed, kernel, monkeypatch):
    monkeypatch.setattr(packed, *changed)
    causal_attention(operands(2, 5), **SIZES, window=3)
    assert not kernel.calls


def test_a_release_without_the_function():
    assert packed.takes(None) == frozenset()


def test_heads_that_the_kernel_cannot_read(kernel, monkeypatch):
    qkv = torch.randn(2, 5, 48, requires_grad=True)
    agree(qkv, causal_attention(qkv, **SIZES, window=3), by_formula(qkv, **SIZES, window=3))
    monkeypatch.setattr(cuda, "can_use_flash_attention", lambda asked: False)
    causal_attention(operands(2, 5), **SIZES, window=3)
    assert not kernel.calls


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_only_a_gpu_is_served(device):
    assert not packed.serves(torch.empty(2, 5, 64, dtype=torch.bfloat16, device=device), HEADS)


# --- lengths --------------------------------------------------------------------------------------


@pytest.fixture
def read(monkeypatch):
    """The lengths that were read."""
    found, stock = [], packed.check_lengths

    def heard(lengths, total):
        found.append(lengths.tolist())
        return stock(lengths, total)

    monkeypatch.setattr(packed, "check_lengths", heard)
    return found


@pytest.fixture
def far(monkeypatch):
    """Lengths of a CPU are as those of a GPU, for which it is waited."""
    monkeypatch.setattr(packed, "_is_at_hand", lambda lengths: False)


def test_lengths_of_a_gpu_are_read_once_for_all_layers(kernel, read, far):
    qkv, ends = operands(2, 5), torch.tensor(ENDS)
    for _ in range(3):
        causal_attention(qkv, **SIZES, cumulative_lengths=ends)
    assert read == [ENDS]
    ends[1:3] = 6
    causal_attention(qkv, **SIZES, cumulative_lengths=ends)
    assert read == [ENDS, [0, 6, 6, 9, 10]]
    assert kernel.calls[-1][:2] == ([0, 6, 6, 9, 10], 6)
    with pytest.raises(ProgramError, match="for 5 tokens"):
        causal_attention(operands(1, 5), **SIZES, cumulative_lengths=ends)


def test_on_another_stream_they_are_read_again(kernel, read, far, monkeypatch):
    qkv, ends = operands(2, 5), torch.tensor(ENDS)
    for stream in (1, 1, 2):
        monkeypatch.setattr(packed, "_stream", lambda device, stream=stream: stream)
        causal_attention(qkv, **SIZES, cumulative_lengths=ends)
    assert read == [ENDS] * 2


def test_lengths_of_inference_mode_are_read_each_time(kernel, read, far):
    with torch.inference_mode():
        ends = torch.tensor(ENDS)
        for _ in range(2):
            causal_attention(operands(2, 5), **SIZES, cumulative_lengths=ends)
    assert read == [ENDS] * 2


def by_numpy(buffer, lengths):
    buffer[1:3] = 6


def by_data(buffer, lengths):
    lengths.data[1:3] = 6


@pytest.mark.parametrize("write", [by_numpy, by_data])
def test_lengths_of_a_cpu_are_those_of_now(write, kernel):
    buffer, qkv = numpy.array(ENDS), operands(2, 5)
    ends = torch.from_numpy(buffer)
    found = [packed.sequences_of(ends, 10, qkv.device) for _ in range(2)]
    assert found[0] is found[1], "a copy to a GPU for each layer"
    causal_attention(qkv, **SIZES, cumulative_lengths=ends)
    write(buffer, ends)
    ours = causal_attention(qkv, **SIZES, cumulative_lengths=ends)
    assert [given[:2] for given in kernel.calls] == [(ENDS, 5), ([0, 6, 6, 9, 10], 6)]
    sequence = torch.tensor([0] * 6 + [1] * 3 + [2])
    expected = by_formula(qkv.reshape(1, 10, -1), **SIZES, sequence=sequence)
    torch.testing.assert_close(ours, expected.reshape(2, 5, -1))


def test_lengths_that_inference_read_serve_training(kernel, read, far):
    ends, qkv = torch.tensor(ENDS), operands(2, 5)
    with torch.inference_mode():
        causal_attention(qkv, **SIZES, cumulative_lengths=ends)
    causal_attention(qkv, **SIZES, cumulative_lengths=ends).sum().backward()
    assert len(read) == 1
    assert not packed.sequences_of(ends, 10, qkv.device).ends.is_inference()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_what_was_read_does_not_keep_lengths_alive(dtype, kernel):
    ends = torch.tensor(ENDS, dtype=dtype)
    causal_attention(operands(2, 5), **SIZES, cumulative_lengths=ends)
    gone = weakref.ref(ends)
    del ends
    gc.collect()
    assert gone() is None
    assert not len(packed._READ)


BOUNDED = [
    (ENDS, [0, 0, 4, 4, 9, 10, 10]),
    ([3, 5], [0, 3, 5, 10]),
    ([0, -7, 20], [0, 0, 0, 10, 10]),
    ([0, 8, 2, 9], [0, 0, 8, 8, 9, 10]),
]


@pytest.mark.parametrize(("ends", "expected"), BOUNDED)
def test_lengths_that_nobody_read_stay_within_the_tokens(ends, expected):
    found = packed._bounded(torch.tensor(ends), 10)
    assert found.tolist() == expected
    assert found.dtype == torch.int32


# --- PyTorch's own function -----------------------------------------------------------------------


@pytest.mark.skipif(packed.varlen_attn is None, reason="this release of PyTorch has no such kernel")
@pytest.mark.parametrize("options", [*OPTIONS, {"packed": True}, {"packed": True, "window": 3}])
def test_pytorchs_function_takes_what_it_is_given(options, monkeypatch):
    monkeypatch.setattr(packed, "serves", lambda qkv, heads: True)
    given = {name: value for name, value in options.items() if name != "packed"}
    with FakeTensorMode():
        if "packed" in options:
            given["cumulative_lengths"] = torch.tensor(ENDS)
        qkv = torch.empty(2, 5, 64, dtype=torch.bfloat16, requires_grad=True)
        found = causal_attention(qkv, **SIZES, **given)
        [gradient] = torch.autograd.grad(found, qkv, torch.empty_like(found))
    assert (found.shape, found.dtype) == ((2, 5, 32), torch.bfloat16)
    assert gradient.shape == qkv.shape


@pytest.mark.skipif(packed.varlen_attn is None, reason="this release of PyTorch has no such kernel")
@pytest.mark.parametrize("options", [{"window": 3}, {"packed": True}], ids=str)
def test_it_is_compiled_in_one_graph(options, monkeypatch):
    monkeypatch.setattr(packed, "serves", lambda qkv, heads: True)
    nodes = []

    def backend(module, inputs):
        nodes.extend(node for node in module.graph.nodes if "_varlen_attn" in str(node.target))
        return lambda *given: [torch.zeros(2, given_length(given), 32)]

    def given_length(given):
        return next(t.shape[1] for t in given if isinstance(t, torch.Tensor) and t.dim() == 3)

    def call(qkv, ends):
        extra = {"cumulative_lengths": ends} if "packed" in options else options
        return causal_attention(qkv, **SIZES, **extra)

    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend=backend, dynamic=True)
    for length in (5, 6, 9):
        compiled(operands(2, length), torch.tensor([0, 2 * length]))
    assert len(nodes) == 1, "compiled anew when the length changes"
    assert (2 if "packed" not in options else -1) in nodes[0].args[9]


# --- how it is read -------------------------------------------------------------------------------


def test_rows_are_copied_only_where_the_kernel_could_not_read_them():
    rows = torch.randn(10, 64).bfloat16()
    for readable in (rows, rows[2:], rows[:, :32], rows[:, 8:40]):
        assert packed._readable(readable) is readable
    wide = torch.randn(10, 68).bfloat16()
    for other in (rows[:, 1:33], rows.T[:10], wide[:, :64], wide.flatten()[1:641].view(10, 64)):
        found = packed._readable(other)
        assert torch.equal(found, other)
        assert found.is_contiguous()
        assert found.storage_offset() == 0
