"""Whatever is given to a function of the language, it is taken or refused in the author's words.

What each refusal says is in test_errors and docs/errors.md. No other error may come: it would name
a line of Cadenza's own, and no cure.
"""

import contextlib
import dataclasses
import inspect
import math
import traceback
from fractions import Fraction
from pathlib import Path

import numpy
import pytest
import torch

import cadenza as cz
from cadenza import block, nn, ops
from cadenza import lang as L
from cadenza.core.errors import CadenzaError, ProgramError

X = torch.randn(5, 8)
ODD = [None, "a", [1], {}, 3.5, math.nan, -1, 0, True, object(), 1j, b"x", torch.float32,
       torch.ones(2), numpy.ones(3), numpy.float32(2), numpy.int64(2),
       Fraction(1, 2), 10**400, torch.tensor(1.0), torch.Tensor, lambda: 0]  # fmt: skip


def arguments(function):
    """Something odd in each place in turn, beside values, and beside numbers."""
    parameters = inspect.signature(function).parameters.values()
    count = sum(p.kind is not p.KEYWORD_ONLY for p in parameters)
    for place in range(count):
        for given in ([X] * count, [X, *[2] * count][:count]):
            for odd in ODD:
                yield [*given[:place], odd, *given[place + 1 :]]


def called_with(function, given):
    """A function of x that calls another: with x where X stands."""
    return lambda x: function(*(x if one is X else one for one in given))


@pytest.mark.slow
@pytest.mark.parametrize("name", L.__all__)
def test_in_a_program(name):
    for given in arguments(getattr(L, name)):
        with contextlib.suppress(CadenzaError):
            block(called_with(getattr(L, name), given))(X)


@pytest.mark.parametrize(
    "call",
    [
        lambda: L.row_sum(torch.ones(2, 3, 8)),  # torch would add up what stands in dimension 1
        lambda: L.column_max(torch.ones(8)),
        lambda: L.logsumexp(X, torch.ones(5)),  # torch would take a row for a column
        lambda: L.columns(torch.ones(2, 3, 8), 0, 2),
        lambda: L.matmul(torch.ones(2, 3, 8), X, transpose_b=True),
        lambda: L.random(torch.ones(8), 3),
        lambda: L.where(X, X, 0.0),
        lambda: L.cast(X, torch.int8),
    ],
)
def test_on_tensors(call):
    with pytest.raises(ProgramError):
        call()


def test_a_seed_is_a_tensor_of_any_shape():
    for seed in (torch.tensor(3), torch.tensor([3]), torch.tensor([[3]])):
        assert torch.equal(L.random(X, seed), L.random(X, 3))


# --- the library ----------------------------------------------------------------------------------


def tensor(*shape):
    """Random numbers in float32."""
    return torch.randn(shape)


NORMED = {"norm_weight": tensor(16), "norm_bias": None, "norm": "rms", "norm_offset": 0.0,
          "eps": 1e-5}  # fmt: skip
FED = {"w_up": tensor(48, 16), "w_down": tensor(16, 24), "activation": "swiglu", "dropout": 0.1}
LAYER = {"width": 16, "heads": 2, "key_value_heads": 1, "head_dim": 8, "architecture": "llama",
         "eps": 1e-6}  # fmt: skip
CALLS = {
    ops.linear: {**NORMED, "x": tensor(4, 16), "w": tensor(24, 16), "bias": tensor(24),
                 "residual": tensor(4, 24), "activation": "gelu", "seed": 3, "dropout": 0.1,
                 "scale": 1.0, "softcap": None, "output_norm": None},
    ops.feed_forward: {**NORMED, **FED, "x": tensor(4, 16), "b_up": None, "b_down": None,
                       "output_norm": None, "seed": 3, "skip": True},
    ops.decoder_block: {**NORMED, **FED, "x": tensor(4, 16), "y": tensor(4, 16),
                        "w_output": tensor(16, 16), "squares": None, "attention_norm": None,
                        "feed_forward_norm": None, "seed": 3, "feed_forward_seed": 4,
                        "scale": 1.0, "parallel": False},
    ops.norm: {"x": tensor(4, 16), "weight": tensor(16), "bias": None, "squares": None,
               "kind": "rms", "offset": 0.0, "eps": 1e-5},
    ops.qkv_projection: {**NORMED, "x": tensor(4, 16), "w": tensor(32, 16), "bias": None,
                         "squares": None, "q_norm": tensor(8), "k_norm": tensor(8),
                         "cos": tensor(4, 4), "sin": tensor(4, 4), "head_dim": 8, "heads": 2,
                         "key_value_heads": 1, "interleaved": False},
    ops.square_sum: {"x": tensor(4, 16)},
    ops.linear_cross_entropy: {
        "x": tensor(4, 16), "w": tensor(30, 16), "target": torch.arange(4), "bias": tensor(30),
        "weight": tensor(30).abs(), "size_average": None, "ignore_index": -100, "reduce": None,
        "reduction": "mean", "label_smoothing": 0.1, "z_loss": 0.1, "softcap": 30.0,
        "token_weights": tensor(4), "num_items_in_batch": None, "chunk": None, "lean": False},
    ops.causal_attention: {"qkv": tensor(2, 6, 32), "heads": 2, "key_value_heads": 1,
                           "cumulative_lengths": None, "window": None, "softcap": None,
                           "scale": None, "dropout": 0.0},
    ops.packed_positions: {"cumulative_lengths": torch.tensor([0, 3, 6]), "total": 6},
    ops.accumulate_weight_gradient: {"gradient": tensor(24, 16), "x": tensor(4, 16),
                                     "dy": tensor(4, 24)},
    ops.Rotary: {"columns": 8, "base": 1e4, "scaling": "llama3", "factor": 1.0,
                 "low_frequency_factor": 1.0, "high_frequency_factor": 4.0,
                 "original_context": 8192},
    ops.rotary_tables: {"config": ops.Rotary(8), "positions": torch.arange(4),
                        "dtype": torch.float32},
    nn.RMSNorm: {"width": 8, "eps": 1e-6, "offset": 0.0, "elementwise_affine": True},
    nn.LayerNorm: {"width": 8, "eps": 1e-5, "elementwise_affine": True, "bias": True},
    nn.Linear: {"in_features": 8, "out_features": 8, "bias": True, "activation": None,
                "norm": None, "output_norm": None, "scale": 1.0, "softcap": None, "dropout": 0.0},
    nn.FeedForward: {"width": 8, "feed_forward": 16, "activation": "swiglu", "bias": False,
                     "norm": None, "output_norm": None, "dropout": 0.0, "skip": False},
    nn.Attention: {**LAYER, "dropout": 0.0},
    nn.DecoderLayer: {**LAYER, "feed_forward": 24, "dropout": 0.0},
    nn.LinearCrossEntropy: {"width": 16, "vocabulary": 30, "bias": False, "class_weight": None,
                            "dtype": None},
    nn.Architecture: dataclasses.asdict(nn.Architecture()),
    cz.accelerate: {"model": torch.nn.Linear(2, 2), "logits": True},
    cz.revert: {"model": torch.nn.Linear(2, 2)},
    cz.block: {"function": L.exp, "shapes": None},
    cz.epilogue: {"function": L.exp, "shapes": None},
}  # fmt: skip
ODDER = [*ODD, torch.zeros(3, dtype=torch.long), torch.tensor(1.0), tensor(0, 16),
         tensor(4, 16).double(), tensor(4, 16).to("meta"), tensor(4, 16).to_sparse(),
         tensor(2, 3, 4, 5), torch.ones(4, 16, dtype=torch.long), torch.nn.Linear(2, 2), 10**30,
         -(10**30), math.inf]  # fmt: skip


def untold(function, arguments):
    """The error of a call that isn't one of Cadenza's own, in words of its own; None if none is."""
    try:
        function(**arguments)
    except CadenzaError:
        return None
    except Exception as error:  # noqa: BLE001  # whatever comes is judged
        last = traceback.extract_tb(error.__traceback__)[-1]
        ours = last.filename.startswith(str(Path(cz.__file__).parent))
        return None if ours and last.line.startswith("raise ") else error
    return None


def test_all_of_the_library_is_here():
    public = {getattr(home, name) for home in (ops, nn) for name in home.__all__}
    assert public <= CALLS.keys()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("function", CALLS, ids=lambda function: function.__name__)
def test_in_the_library(function):
    """Each argument in turn is something odd; what is not taken is refused in Cadenza's words."""
    usual = CALLS[function]
    function(**usual)
    for name in usual:
        for odd in ODDER:
            assert untold(function, {**usual, name: odd}) is None, f"{name}={odd!r:.40}"


@pytest.mark.slow
@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_a_total_that_torch_compile_has_left_open():
    ends, expected = torch.tensor([0, 3, 5]), torch.tensor([0, 1, 2, 0, 1])
    compiled = torch.compile(
        lambda ends: ops.packed_positions(ends, ends[-1].item()), fullgraph=True, backend="eager"
    )
    assert torch.equal(compiled(ends), expected)
    assert torch.equal(ops.packed_positions(ends, ends[-1]), expected)


def test_what_torch_takes_for_a_flag_or_a_size():
    assert nn.RMSNorm((8,)).weight.shape == (8,)
    assert nn.Linear(8, 4, bias=None).bias is None
    assert nn.Linear(8, 4, bias=numpy.bool_(True)).bias is not None
    assert nn.Architecture(qkv_bias=1).qkv_bias
    assert torch.equal(L.rms_norm(X, 2.0), L.rms_norm(X, None) * 2.0)
    assert torch.equal(L.linear(X, X, 1.0), X @ X.T + 1.0)
    assert torch.equal(L.relu(torch.tensor(3.0)), torch.tensor(3.0))
    loss = {"x": tensor(4, 16), "w": tensor(30, 16), "target": torch.arange(4)}
    assert torch.equal(
        ops.linear_cross_entropy(**loss, ignore_index=numpy.int64(2), lean=1),
        ops.linear_cross_entropy(**loss, ignore_index=2, lean=True),
    )


NUMBERS = [(numpy.float32(2.5), 2.5), (numpy.float64(2.5), 2.5), (numpy.int64(2), 2),
           (numpy.bool_(True), True), (Fraction(1, 2), 0.5)]  # fmt: skip


@pytest.mark.parametrize(("number", "same"), NUMBERS, ids=lambda value: type(value).__name__)
def test_numbers_of_other_libraries_are_constants(number, same):
    scaled = block(lambda x, scale: L.silu(x) * scale)
    for _ in range(2):  # the second call finds the first one's kind
        assert torch.equal(scaled(X, number), scaled(X, same))
    assert torch.equal(scaled.plain(X, number), scaled.plain(X, same))
    assert str(scaled.graph(X, number)) == str(scaled.graph(X, same))


def test_a_module_takes_numbers_of_other_libraries():
    norm = nn.RMSNorm(numpy.int64(8), eps=numpy.float32(0.5))
    assert torch.equal(norm(X), nn.RMSNorm(8, eps=0.5)(X))
