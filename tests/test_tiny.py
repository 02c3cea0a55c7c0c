"""The first file to read: what Cadenza does, on examples small enough to see whole.

A plain Python function over `cadenza.lang` becomes a program; its gradients are derived. Read from
top to bottom. `docs/language.md` says what each operation means, `examples/` has more epilogues.
"""

import functools
import inspect

import pytest
import torch

import cadenza as cz
from cadenza import lang as L
from cadenza.core.errors import ProgramError
from cadenza.core.text import show

# 1. An epilogue is what happens to a product x @ w.T before anything is written to memory. Here the
#    product is scaled row by row (a norm that was put off), then gated. Two lines of arithmetic.


@cz.epilogue(shapes={"x": "M D", "w": "2*F D", "rstd": "M 1"})
def norm_swiglu(acc, rstd):  # acc [M, 2F], rstd [M, 1]
    gate, up = L.split(acc * rstd)  # halves of the columns
    return L.silu(gate) * up  # [M, F]


# 2. A block is the same thing with as many products as you like: from the output of attention to
#    the next layer's queries, keys and values. It is ordinary Python: `x` is assigned again and
#    again, `L.rms_norm` is a function of two lines.


@cz.block
def llama_block(x, y, wo, norm, w_gate_up, w_down, next_norm, w_qkv, cos, sin, *,
                head_dim, heads, eps=1e-5):  # fmt: skip
    x = x + L.linear(y, wo)
    x = x + L.linear(L.swiglu(L.linear(L.rms_norm(x, norm, eps), w_gate_up)), w_down)
    qkv = L.linear(L.rms_norm(x, next_norm, eps), w_qkv)
    return x, L.rope(qkv, cos, sin, head_dim, heads=heads)  # query and key heads rotate


# Everything below runs in float64, so that "equal" can mean twelve digits.

equal = functools.partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)


def tensor(*shape):
    """Random numbers that want a gradient, of a size that keeps products near one."""
    return (torch.randn(shape, dtype=torch.float64) / shape[-1] ** 0.5).requires_grad_()


def epilogue_operands():
    """x [2, 3, 8], w [12, 8] (gate and up, F = 6) and rstd [2, 3, 1]."""
    return tensor(2, 3, 8), tensor(12, 8), tensor(2, 3, 1)


def block_operands(rows=5, width=8, ffn=6, head_dim=4):
    """The operands of `llama_block`: two query heads, one key head, one value head."""
    stream = tensor(rows, width), tensor(rows, width)
    mlp = tensor(width, width), tensor(width), tensor(2 * ffn, width), tensor(width, ffn)
    next_layer = tensor(width), tensor(4 * head_dim, width)
    angles = torch.randn(rows, head_dim // 2, dtype=torch.float64)
    return *stream, *mlp, *next_layer, angles.cos(), angles.sin()


def gradients(outputs, operands):
    """The gradients of a sum of all outputs, each element with a weight of its own."""
    torch.manual_seed(1)
    loss = sum((output * torch.randn_like(output)).sum() for output in outputs)
    return torch.autograd.grad(loss, [o for o in operands if o.requires_grad])


# 3. `plain` is the same function run on the tensors by PyTorch, with PyTorch's autograd. A program
#    and its plain form share no compiler and no derivative; they must agree, in value …


def test_an_epilogue_gives_what_plain_gives():
    x, w, rstd = epilogue_operands()
    y = norm_swiglu(x, w, rstd=rstd)
    assert y.shape == (2, 3, 6)  # leading dimensions stay; M is their product, 6
    equal(y, norm_swiglu.plain(x, w, rstd=rstd))


# … and in every gradient. Nobody wrote a backward: it is derived from the graph.


def test_the_gradients_are_those_of_plain():
    x, w, rstd = epilogue_operands()
    derived = gradients([norm_swiglu(x, w, rstd=rstd)], (x, w, rstd))
    expected = gradients([norm_swiglu.plain(x, w, rstd=rstd)], (x, w, rstd))
    equal(derived, expected)


def test_a_block_gives_what_plain_gives_and_so_do_its_gradients():
    operands = block_operands()
    outputs = llama_block(*operands, head_dim=4, heads=3)
    plain = llama_block.plain(*operands, head_dim=4, heads=3)
    equal(outputs, plain)
    equal(gradients(outputs, operands), gradients(plain, operands))


# 4. The function was run once, on symbols. What came of it can be printed: M is symbolic, every
#    other size is known, and one line is one product or one value that is used twice.

FORWARD = """\
def norm_swiglu(x: float64[M, 8], w: float64[12, 8], rstd: float64[M, 1]):
    acc1 = x @ w.T
    v1 = acc1 * rstd
    v2 = split(v1, part=0, inner=6)
    return v2 * sigmoid(v2) * split(v1, part=1, inner=6)
"""

# Backward is a program like any other. `saved0` is the raw product: forward kept it, because
# everything else can be computed from it again.

BACKWARD = """\
def norm_swiglu_backward(
    x: float64[M, 8],
    w: float64[12, 8],
    rstd: float64[M, 1],
    saved0: float64[M, 12],
    d_0: float64[M, 6],
):
    v1 = saved0 * rstd
    v2 = d_0 * split(v1, part=1, inner=6)
    v3 = split(v1, part=0, inner=6)
    v4 = sigmoid(v3)
    v5 = join(v2 * v4 + v2 * v3 * (v4 * (1.0 - v4)), d_0 * (v3 * v4), inner=6)
    v6 = v5 * rstd
    acc1 = v6 @ w
    acc2 = v6.T @ x
    return {'x': acc1, 'w': acc2, 'rstd': row_sum(v5 * saved0)}
"""


def test_both_programs_can_be_printed():
    x, w, rstd = epilogue_operands()
    assert show(norm_swiglu.graph(x, w, rstd=rstd)) == FORWARD
    assert show(norm_swiglu.backward_graph(x, w, rstd=rstd)) == BACKWARD


# 5. Only what is needed is derived. With the weight frozen its gradient, a whole product, is gone.


def test_a_frozen_weight_costs_no_work():
    x, w, rstd = epilogue_operands()
    w.requires_grad_(False)
    norm_swiglu(x, w, rstd=rstd).sum().backward()
    assert x.grad is not None
    assert w.grad is None
    backward = show(norm_swiglu.backward_graph(x, w, rstd=rstd))
    assert backward.count("@") == 1
    assert "'w'" not in backward


# 6. A mistake is explained once, at the first call: your own line, what was found, what was
#    expected, what to write.


@cz.epilogue
def shifted_sine(acc, shift):
    return torch.sin(acc + shift)


SINE = """\
{line}: unknown operation torch.sin
  found:    torch.sin on a traced value
  expected: operations of the language only, since they are what fuses
  write:    a composition of the functions of cadenza.lang"""

WIDTH = """\
{line}: operand w has the wrong size
  found:    [12, 8]
  expected: [2*F, D] with D = 7, as x has it
  write:    another tensor for w or x, or other shapes="""


def test_an_error_names_the_line_and_the_cure():
    x, w, _ = epilogue_operands()
    line = inspect.getsourcelines(shifted_sine.function)[1] + 2
    with pytest.raises(ProgramError) as error:
        shifted_sine(x, w, shift=1.0)
    assert str(error.value) == SINE.format(line=f"{__file__}:{line}")


def test_an_error_in_the_call_names_the_call():
    x, w, rstd = epilogue_operands()
    line = inspect.currentframe().f_lineno + 2
    with pytest.raises(ProgramError) as error:
        norm_swiglu(x[..., :7], w, rstd=rstd)
    assert str(error.value) == WIDTH.format(line=f"{__file__}:{line}")
