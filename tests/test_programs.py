"""The library's programs against stock torch: every variant, and options put together.

Values and every gradient at float64 to 1e-12; in bfloat16 within twice torch's own error. Then what
programs refuse, by message, and what they take: more dimensions, wide tables, other strides.
"""

import pytest
import stock_programs
import torch
from block_operands import cast
from programs import (
    assert_close,
    check_against,
    check_direction,
    double_copies,
    gradients_of,
    labelled,
)
from stock_programs import STOCK, operands
from test_blocks import with_gradients

import cadenza as cz
from cadenza.core.errors import ProgramError
from cadenza.library import programs
from cadenza.library.variants import VARIANTS

FROZEN = ("cos", "sin")


def rotary(rows, pairs, dtype=torch.float32):
    angles = torch.randn(rows, pairs, dtype=dtype)
    return {"cos": angles.cos(), "sin": angles.sin()}


def gain(columns):
    return 1.0 + 0.3 * torch.randn(columns)


def wide(arguments):
    """The arguments at float64, and what they are rounded to."""
    arguments = cast(arguments, torch.float64)
    return arguments | ({"dtype": "float64"} if "dtype" in arguments else {})


# --- values and gradients -------------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_equals_stock_torch(name):
    program = VARIANTS[name].program
    for rows in (7, 1):
        check_against(program, STOCK[program], wide(operands(name, rows)))


@pytest.mark.parametrize("name", ["linear-relu2", "qkv-row-norm", "decoder-both"])
def test_a_variant_equals_its_plain_and_its_differences(name):
    program, given = VARIANTS[name].program, operands(name, 9)
    check_against(program, program.plain, given)
    check_direction(program, given)


def test_every_program_of_the_library_has_a_variant():
    shown = {variant.program for variant in VARIANTS.values()}
    public = {getattr(cz.ops, name) for name in cz.ops.__all__ if hasattr(cz.ops, name)}
    ours = {program for program in public if hasattr(program, "plain")} - {cz.ops.square_sum}
    assert ours <= shown == set(STOCK)


def results(function, arguments, upstream):
    """Outputs and gradients of one call, by name; tables get none."""
    arguments = with_gradients(arguments)
    outputs = labelled(function(**arguments))
    given = {n: g.to(outputs[n].dtype) for n, g in upstream.items()}
    gradients = gradients_of(outputs, arguments, given)
    return outputs | {f"d {name}": g for name, g in gradients.items()}


@pytest.mark.parametrize("name", VARIANTS)
def test_error_in_bfloat16_is_at_most_twice_torchs(name):
    program, arguments = VARIANTS[name].program, cast(operands(name, 33), torch.bfloat16)
    outputs = labelled(program(**arguments))
    upstream = {n: torch.randn_like(y) for n, y in outputs.items()}
    actual = results(program, arguments, upstream)
    torch_result = results(STOCK[program], arguments, upstream)
    oracle = results(STOCK[program], wide(arguments), wide(upstream))
    for label, value in actual.items():
        assert_close(value, oracle[label], torch_result[label].to(value.dtype))


TOGETHER = {
    "linear": lambda: (cz.ops.linear, {
        "x": torch.randn(7, 12), "w": torch.randn(30, 12) / 3, "bias": torch.randn(30),
        "residual": torch.randn(7, 15), "norm_weight": gain(12) - 1.0, "output_norm": gain(15),
        "seed": torch.tensor(2**31 + 5), "activation": "geglu", "norm": "rms", "norm_offset": 1.0,
        "eps": 1e-3, "scale": 0.5, "softcap": 2.0, "dropout": 0.25,
    }),
    "linear after LayerNorm without bias": lambda: (cz.ops.linear, {
        "x": torch.randn(7, 12) + 3.0, "w": torch.randn(15, 12) / 3, "norm_weight": gain(12),
        "norm": "layer", "activation": "relu", "eps": 1e-3,
    }),
    "Gemma 3's queries": lambda: (cz.ops.qkv_projection, {
        "x": torch.randn(7, 12), "w": torch.randn(40, 12) / 3, "bias": torch.randn(40),
        "norm_weight": gain(12) - 1.0, "q_norm": gain(5) - 1.0, "k_norm": gain(5) - 1.0,
        **rotary(7, 2), "head_dim": 5, "heads": 4, "key_value_heads": 2, "norm": "rms",
        "norm_offset": 1.0, "eps": 1e-3,
    }),
    "queries alone normed, pairs side by side": lambda: (cz.ops.qkv_projection, {
        "x": torch.randn(7, 12), "w": torch.randn(24, 12) / 3, "norm_weight": gain(12),
        "norm_bias": torch.randn(12), "q_norm": gain(16), **rotary(7, 2), "head_dim": 4,
        "heads": 4, "key_value_heads": 1, "norm": "layer", "interleaved": True,
    }),
    "no rotary": lambda: (cz.ops.qkv_projection, {
        "x": torch.randn(7, 12), "w": torch.randn(24, 12) / 3, "bias": torch.randn(24),
        "head_dim": 4, "heads": 2, "key_value_heads": 2,
    }),
    "feed-forward": lambda: (cz.ops.feed_forward, {
        "x": torch.randn(7, 12), "w_up": torch.randn(30, 12) / 3, "b_up": torch.randn(30),
        "w_down": torch.randn(12, 15) / 4, "b_down": torch.randn(12), "output_norm": gain(12),
        "seed": torch.tensor(9), "activation": "reglu", "dropout": 0.5, "skip": True,
    }),
    "decoder in sequence": lambda: (cz.ops.decoder_block, {
        "x": torch.randn(7, 12), "y": torch.randn(7, 10), "w_output": torch.randn(12, 10) / 3,
        "b_output": torch.randn(12), "w_up": torch.randn(15, 12) / 3, "b_up": torch.randn(15),
        "w_down": torch.randn(12, 15) / 4, "b_down": torch.randn(12), "norm_weight": gain(12),
        "norm_bias": torch.randn(12), "norm": "layer", "activation": "gelu", "scale": 0.22,
        "dropout": 0.3, "seed": torch.tensor(3), "feed_forward_seed": torch.tensor(4),
    }),
    "decoder in parallel": lambda: (cz.ops.decoder_block, {
        "x": torch.randn(7, 12), "y": torch.randn(7, 10), "w_output": torch.randn(12, 10) / 3,
        "w_up": torch.randn(30, 12) / 3, "w_down": torch.randn(12, 15) / 4, "norm_weight": gain(12),
        "squares": 10.0 + torch.rand(7, 1), "attention_norm": gain(12),
        "feed_forward_norm": gain(12), "norm": "rms", "parallel": True, "eps": 1e-3,
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", TOGETHER)
def test_options_together_equal_stock_torch(name):
    program, given = TOGETHER[name]()
    check_against(program, STOCK[program], given)


def test_a_rotation_that_does_not_divide_the_head():
    given = {"x": torch.randn(5, 8), "w": torch.randn(40, 8), **rotary(5, 3), "head_dim": 10,
             "heads": 2, "key_value_heads": 1}  # fmt: skip
    check_against(cz.ops.qkv_projection, stock_programs.qkv_projection, given)


def test_one_seed_drops_the_same_and_another_seed_others():
    x, w = torch.ones(50, 8), torch.eye(8)
    drop = [cz.ops.linear(x, w, seed=torch.tensor(s), dropout=0.5) for s in (1, 1, 2)]
    assert torch.equal(drop[0], drop[1])
    assert not torch.equal(drop[0], drop[2])
    assert set(drop[0].unique().tolist()) == {0.0, 2.0}


def test_no_tokens_give_an_empty_result_and_zero_gradients():
    for name in ("linear-swiglu", "qkv-head-norm", "decoder-both"):
        program, given = VARIANTS[name].program, with_gradients(operands(name, 0))
        outputs = labelled(program(**given))
        sum(y.sum() for y in outputs.values()).backward()
        trained = [v for v in given.values() if isinstance(v, torch.Tensor) and v.requires_grad]
        assert all(v.grad is not None and not v.grad.any() for v in trained)
        assert all(y.shape[0] == 0 for y in outputs.values())


# --- what they take -------------------------------------------------------------------------------


def test_leading_dimensions_and_strides():
    x = torch.randn(12, 5, 2, dtype=torch.float64).T
    w, residual = torch.randn(12, 15).double().T, torch.randn(2, 5, 15).double()
    y = cz.ops.linear(x, w, torch.zeros(15).double(), residual=residual, activation="gelu")
    flat = cz.ops.linear(x.reshape(10, 12), w, residual=residual.reshape(10, 15), activation="gelu")
    torch.testing.assert_close(y.reshape(10, 15), flat)


@pytest.mark.parametrize("name", ["qkv", "qkv-interleaved", "qkv-partial", "qkv-head-norm"])
def test_float32_tables_leave_bfloat16_values_what_they_are(name):
    given = cast(operands(name, 11), torch.bfloat16)
    tables = {n: t.float() for n, t in operands(name, 11).items() if n in FROZEN}
    arguments = with_gradients(given | tables)
    y = cz.ops.qkv_projection(**arguments)
    y.sum().backward()
    assert y.dtype == arguments["w"].grad.dtype == torch.bfloat16
    oracle = stock_programs.qkv_projection(**wide(given | tables))
    assert_close(y, oracle, stock_programs.qkv_projection(**given))


def test_autocast_takes_its_dtype():
    given = operands("decoder-both", 6)
    with torch.autocast("cpu", torch.bfloat16):
        stream, squares = cz.ops.decoder_block(**given)
        y = cz.ops.linear(given["x"], given["w_up"])
    assert stream.dtype == squares.dtype == torch.float32
    assert y.dtype == torch.bfloat16


def test_a_frozen_weight_costs_no_product():
    given = double_copies(operands("feed-forward", 5))
    given = {n: v.detach() if str(n).startswith("w_") else v for n, v in given.items()}
    backward = cz.ops.feed_forward.backward_graph(**given)
    assert set(backward.labels) == {"x", "norm_weight"}
    assert sum(node.op.label == "matmul" for node in backward.nodes()) == 2


# --- what they refuse -----------------------------------------------------------------------------

X, W = torch.randn(4, 12), torch.randn(15, 12)
HEADS = {"head_dim": 4, "heads": 2, "key_value_heads": 1}
UP = (torch.randn(4, 12), torch.randn(30, 12), torch.randn(12, 15))
REFUSED = [
    (cz.ops.linear, (X, W), {"activation": "swish"}, "an activation of no name"),
    (cz.ops.linear, (X, W), {"activation": "swiglu"}, "15"),
    (cz.ops.linear, (X, W), {"norm_weight": gain(12)}, "a norm's weight that nothing uses"),
    (cz.ops.linear, (X, W), {"norm": "rms", "norm_bias": gain(12)}, "a norm's bias that nothing"),
    (cz.ops.linear, (X, W), {"norm": "group"}, "norm that nothing uses"),
    (cz.ops.linear, (X, W), {"norm": "layer", "norm_offset": 1.0}, "norm_offset that nothing"),
    (cz.ops.linear, (X, W), {"dropout": 0.1}, "dropout without seed"),
    (cz.ops.linear, (X, W), {"dropout": 1.0, "seed": torch.tensor(1)}, "dropout of all"),
    (cz.ops.linear, (X, W), {"residual": torch.randn(4, 1)}, "a residual of another width"),
    (cz.ops.linear, (X, W), {"residual": torch.randn(3, 15)}, "other leading dimensions"),
    (cz.ops.linear, (X, W, torch.randn(12)), {}, "operand bias has the wrong size"),
    (cz.ops.linear, (X, W), {"bais": torch.randn(15)}, "unknown 'bais'"),
    (cz.ops.linear, (X, W.double()), {}, "one dtype"),
    (cz.ops.norm, (X,), {"kind": "layer", "squares": torch.rand(4, 1)}, "a norm's squares that"),
    (cz.ops.norm, (X, torch.randn(5)), {}, "operand weight has the wrong size"),
    (cz.ops.qkv_projection, (X, W), HEADS, "heads that don't fit the weight"),
    (cz.ops.qkv_projection, (X, W), HEADS | {"heads": 3, "key_value_heads": 2}, "heads that don't"),
    (cz.ops.qkv_projection, (X, torch.randn(16, 12)), HEADS | {"q_norm": gain(5)}, "a norm of que"),
    (cz.ops.qkv_projection, (X, torch.randn(16, 12)), HEADS | {"cos": torch.randn(4, 2)},
     "one rotary table without the other"),
    (cz.ops.qkv_projection, (X, torch.randn(16, 12)), HEADS | rotary(4, 3), "rope with cos and"),
    (cz.ops.decoder_block, (X, X, torch.randn(12, 12), *UP[1:]), {"squares": torch.rand(4, 1)},
     "squares that nothing uses"),
    (cz.ops.decoder_block, (X, X, torch.randn(12, 12), *UP[1:]),
     {"dropout": 0.1, "seed": torch.tensor(1)}, "dropout without feed_forward_seed"),
    (cz.ops.feed_forward, UP, {"activation": "gelu"}, "30"),
]  # fmt: skip


@pytest.mark.parametrize(("program", "args", "named", "said"), REFUSED)
def test_what_does_not_fit_is_refused_at_the_callers_line(program, args, named, said):
    with pytest.raises(ProgramError) as error:
        program(*args, **named)
    assert said in str(error.value)
    assert str(error.value).startswith(__file__)


def test_a_scale_is_a_constant_of_the_program():
    one, two = (programs.linear.graph(X, W, scale=s) for s in (1.0, 0.5))
    assert len(one.nodes()) < len(two.nodes())
