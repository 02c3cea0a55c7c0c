"""What an author reads who writes something that is no program: every message, word for word.

Each names the author's own file and line, what was found, what was expected and what to write.
`test_call_errors` does the same for calls and declarations.
"""

import math

import numpy
import pytest
import torch
import torch.nn.functional as F
from messages import assert_raises, line_of, message, tensor

from cadenza import block, epilogue
from cadenza import lang as L
from cadenza.core.errors import ProgramError, UnknownOperationError
from cadenza.core.refusals import INSTEAD

SIZES = "sizes that broadcast; L.columns, L.split, L.repeat and L.tile change columns"
LAYOUT = "x [..., K] and w [N, K] (nn.Linear's layout) with the same K"
SPLIT = "L.split(x, inner) with columns = outer * 2 * inner"
POWER = "x ** 2; for other exponents L.exp(p * L.log(x)), L.sqrt or L.rsqrt"
SEED = "L.dropout(x, p, seed) with a whole number, or an int64 tensor of one element"
NO_DATA = "a value of a program has no data while the function is traced; it stands for every row"
CHOICE = ("`if`, `and`, `or`, `not` on a traced value", NO_DATA,
          "a constant argument, or a choice made element by element",
          "L.where(condition, a, b), L.maximum(a, b); and `&`, `|`, `~` between conditions",
          )  # fmt: skip
ITERATION = ("a traced value can't be iterated over or unpacked", NO_DATA,
             "a fixed number of parts of the columns",
             "a, b = L.split(x), or L.columns(x, start, stop)")  # fmt: skip
INDEXING = ("a traced value has no indexing", NO_DATA, "a range of columns, or one element a row",
            "L.columns(x, start, stop), L.split(x, inner) or L.pick(x, index)")  # fmt: skip
KNOWN = "numbers that are known when the program is made"
NO_NUMBER = "a traced value is not a number"
NUMBER = (NO_NUMBER, NO_DATA, KNOWN,
          "L.exp, L.log, L.sqrt for those of math, or pass the number as a constant argument",
          )  # fmt: skip
LENGTH = (NO_NUMBER, NO_DATA, KNOWN,
          "x.shape[1] for the number of columns, that of rows as an argument")  # fmt: skip
INDEX = (NO_NUMBER, NO_DATA, KNOWN,
         "keep it in the program, or pass the number as a constant argument")  # fmt: skip
OPERATIONS = "operations of the language only, since they are what fuses"
COMPOSITION = "a composition of the functions of cadenza.lang"
FIXED = "a value never changes, so give the new one a name"
PLAIN = "Python's operators: a + b, a / b, -x"
CLAMP = "L.minimum(L.maximum(x, low), high)"
SUMS = "L.row_sum(x), L.column_sum(x) or L.group_sum(x, size)"
GROUPS = "L.split, L.columns, L.group_sum, L.repeat or L.tile, which take columns in groups"
BROADCAST = "nothing: a value is [M, N], [M, 1] or [1, N], and broadcasts"
AFTERWARDS = "the value as an output: what comes back from the call is a tensor"
CAST = "L.cast(x, 'bfloat16'), or another floating dtype by name"
VALUE = "a value of the program or a number"
OPERAND = "the tensor as an operand, the number (of rows, too) as a constant argument"
LANGUAGE = ("a value of the program, or a tensor",
            "one value an argument; for numbers alone Python's math")  # fmt: skip
HEADS = ("columns that divide by head_dim, and heads * head_dim of them at most",
         "head_dim=columns // heads")  # fmt: skip
TABLES = ("rope with cos and sin that don't fit the heads",
          "rotary_dim / 2 columns each; rotary_dim even and at most head_dim",
          "L.rope(x, cos, sin, head_dim, rotary_dim=2 * cos.shape[1])")  # fmt: skip

X, Y, W = (5, 8), (5, 9), (12, 8)
HALF = (5, 2)

# Functions with the shapes of their operands and the four parts of the message.
SHAPES = [
    (lambda x, y: x + y, [X, Y],
     ("add of x [M, 8] and y [M, 9]", "8 and 9 columns", "as many columns, or 1", SIZES)),
    (lambda x, y: x * y, [X, (4, 8)],
     ("mul of x [M, 8] and y [4, 8]", "M and 4 rows", "as many rows, or 1", SIZES)),
    (lambda x, y: L.exp(x) < y, [X, (9,)],
     ("compare of [M, 8] and y [1, 9]", "8 and 9 columns", "as many columns, or 1", SIZES)),
    (lambda x, y: L.where(x < 0, y, x), [X, Y],
     ("where of [M, 8] and y [M, 9] and x [M, 8]", "8 and 9 columns", "as many columns, or 1",
      "L.where(a < b, ...)")),
    (lambda x, w: L.linear(x, w), [X, (12, 9)],
     ("matmul of x [M, 8] and w [12, 9]", "[M, 8] @ [12, 9].T", "equal contracted sizes", LAYOUT)),
    (lambda x, w: L.linear(x, w), [X, (5, 9)],
     ("matmul of x [M, 8] and w [5, 9]", "[M, 8] @ [5, 9].T", "equal contracted sizes", LAYOUT)),
    (lambda x, w: x @ w, [X, (12, 8)],
     ("matmul of x [M, 8] and w [12, 8]", "[M, 8] @ [12, 8]", "equal contracted sizes", LAYOUT)),
    (lambda x: L.linear(x, x), [X],
     ("matmul of x [M, 8] and x [M, 8]", "columns of the product of size M",
      "a size known when tracing", LAYOUT)),
    (lambda x, w, b: L.linear(x, w, b), [X, W, (8,)],
     ("add of [M, 12] and b [1, 8]", "12 and 8 columns", "as many columns, or 1", SIZES)),
    (lambda x: L.split(x), [Y], ("split of x [M, 9]", "9 columns, inner=4",
                                 "columns that divide by 2 * inner", SPLIT)),
    (lambda x: L.split(x, 3), [X], ("split of x [M, 8]", "8 columns, inner=3",
                                    "columns that divide by 2 * inner", SPLIT)),
    (lambda x: L.split(x, 0), [X], ("split of x [M, 8]", "8 columns, inner=0",
                                    "columns that divide by 2 * inner", SPLIT)),
    (lambda x: L.swiglu(L.exp(x)), [Y], ("split of [M, 9]", "9 columns, inner=4",
                                         "columns that divide by 2 * inner", SPLIT)),
    (lambda x, y: L.join(x, y), [X, Y],
     ("join of x [M, 8] and y [5, 9]", "[M, 8] and [5, 9]", "two values with as many columns",
      "L.join(a, b, inner) of two values with the same columns, a multiple of inner")),
    (lambda x: L.columns(x, 3, 20), [X],
     ("columns of x [M, 8]", "range 3:20", "a range within 0:8",
      "L.columns(x, start, stop) with 0 <= start < stop <= columns")),
    (lambda x, y: L.concat(x, y), [X, (3, 8)],
     ("concat of x [M, 8] and y [3, 8]", "M and 3 rows", "as many rows, or 1", SIZES)),
    (lambda x: L.repeat(x, 0), [X],
     ("repeat of x [M, 8]", "times=0", "a positive whole number",
      "L.repeat(x, times) with a whole number from 1 on")),
    (lambda x: L.group_sum(x, 3), [X],
     ("group_sum of x [M, 8]", "8 columns in groups of 3", "columns that divide by the group",
      "L.group_sum(x, size) with a size that divides the columns")),
    (lambda x: x.T, [X],
     ("a matrix [M, 8] has no transpose of its own", "value.T", "a column or a row",
      "L.matmul(a, b, transpose_a=..., transpose_b=...), or L.linear(x, w)")),
    (lambda x: L.row_sum(x).T, [X],
     ("transpose of [M, 1]", "columns of the transpose of size M", "a size known when tracing",
      "v.T of a row [1, n], or of a column with a known number of rows")),
    (lambda x, i: L.pick(x, i), [X, (4,)],
     ("pick at an index that is not one number a row", "an index [1, 4]",
      "whole numbers of the leading dimensions of x, [...] or [..., 1]",
      "L.pick(x, index) with as many indices as x has rows")),
    (lambda x, c, s: L.rope(x, c, s, 4, heads=3), [X, HALF, HALF],
     ("heads that don't fit the columns", "8 columns, heads=3, head_dim=4", *HEADS)),
    (lambda x, c, s: L.rope(x, c, s, 0), [X, HALF, HALF],
     ("heads that don't fit the columns", "8 columns, heads=8, head_dim=0", *HEADS)),
    (lambda x, c, s: L.rope(x, c, s, 3), [X, HALF, HALF],
     ("heads that don't fit the columns", "8 columns, heads=2, head_dim=3", *HEADS)),
    (lambda x, w: L.qk_norm(x, w, 16), [X, W],
     ("heads that don't fit the columns", "8 columns, heads=0, head_dim=16", *HEADS)),
    (lambda x, c, s: L.rope(x, c, s, 4), [X, (5, 4), HALF],
     (TABLES[0], "4 and 2 columns, head_dim=4, rotary_dim=4", *TABLES[1:])),
    (lambda x, c, s: L.rope(x, c, s, 4, rotary_dim=6), [X, (5, 3), (5, 3)],
     (TABLES[0], "3 and 3 columns, head_dim=4, rotary_dim=6", *TABLES[1:])),
    (lambda x, w: L.qk_norm(x, w, 4), [X, (5,)],
     ("qk_norm with a weight that doesn't fit the heads", "5 columns, heads=2, head_dim=4",
      "4 columns, shared by the heads, or 8", "L.qk_norm(x, w, head_dim) with w [1, head_dim]")),
]  # fmt: skip


def argument(function, name, found, expected, parameters):
    return (
        f"argument {name} of L.{function}",
        f"{name}={found}",
        expected,
        f"L.{function}({parameters})",
    )


ARGUMENTS = [
    (lambda x: x**2.5, ("power of x [M, 8]", "exponent 2.5", "a whole number", POWER)),
    (lambda x: x**x, ("power of x [M, 8]", "exponent <value input [M, 8]>", "a whole number",
                      POWER)),
    (lambda x: L.where(x, x, 0.0),
     ("where of x [M, 8] and x [M, 8] and [1, 1]", "a real condition", "a comparison",
      "L.where(a < b, ...)")),
    (lambda x: L.cast(x, torch.int8),
     ("cast of x [M, 8]", "dtype 'int8'",
      "one of float64, float32, bfloat16, float16, float8_e4m3fn, float8_e5m2",
      "L.cast(x, 'float32'), or another floating dtype by name")),
    (lambda x: L.gelu(x, "fast"),
     ("gelu", "approximate='fast'", "'none' or 'tanh'", "L.gelu(x)")),
    (lambda x: L.dropout(x, 1.5, 3),
     ("dropout of all or less than nothing", "p=1.5", "0 <= p < 1", "L.dropout(x, 0.1, seed)")),
    (lambda x: L.dropout(x, 0.5, 3.5),
     ("random of [1, 1]", "a real seed [1, 1]", "one whole number", SEED)),
    (lambda x: L.dropout(x, "a", 3), argument("dropout", "p", "'a'", "a number", "x, p, seed")),
    (lambda x: L.columns(x, 0.0, 4),
     argument("columns", "start", "0.0", "a whole number", "x, start, stop")),
    (lambda x: L.relu(3), argument("relu", "x", "3", "a value of the program", "x")),
    (lambda x: L.rms_norm(x, "w"),
     argument("rms_norm", "w", "'w'", "a value of the program or a number or None",
              "x, w, eps=1e-06, offset=0.0")),
    (lambda x: L.matmul(x, x, transpose_b="b"),
     argument("matmul", "transpose_b", "'b'", "True or False",
              "a, b, transpose_a=False, transpose_b=False")),
    (lambda x: L.gelu(x, aproximate="tanh"),
     ("arguments of L.gelu", "got an unexpected keyword argument 'aproximate'",
      "those of the function", "L.gelu(x, approximate='none')")),
    (lambda x: L.rms_norm(x),
     ("arguments of L.rms_norm", "missing a required argument: 'w'", "those of the function",
      "L.rms_norm(x, w, eps=1e-06, offset=0.0)")),
    (lambda x: L.name(x, None), argument("name", "label", "None", "a text", "value, label")),
    (lambda x: L.name(x, "a b"),
     ("a value's name that is not a name in Python", "'a b'",
      "letters, digits and underscores, no keyword", "L.name(x, 'x1')")),
    (lambda x: L.logsumexp(x, x),
     ("logsumexp of x [M, 8] and x [M, 8]", "a shift [M, 8]", "one number a row, or one number",
      "L.logsumexp(x, shift) with a shift [M, 1]")),
    (lambda x: L.logsumexp(x, -1),
     ("logsumexp over a dimension", "-1",
      "a shift [M, 1], or a float; the sum is over the columns of each row", "L.logsumexp(x)")),
    (lambda x: x + "a", ("add of a str", "'a'", VALUE, OPERAND)),
    (lambda x: x * None, ("mul of a NoneType", "None", VALUE, OPERAND)),
    (lambda x: x / x.shape[0], ("div of a str", "'M'", VALUE, OPERAND)),
    (lambda x: x - [1.0], ("sub of a list", "[1.0]", VALUE, OPERAND)),
    (lambda x: 1j * x, ("mul of a complex", "1j", VALUE, OPERAND)),
    (lambda x: x * L.exp(2.0), ("exp of a float", "2.0", *LANGUAGE)),
    (lambda x: L.concat(), ("concat of nothing", "no value", *LANGUAGE)),
    (lambda x: L.concat([1.0, 2.0]), ("concat of a list", "[1.0, 2.0]", *LANGUAGE)),
]  # fmt: skip

PYTHON = [
    (lambda x: x if x > 0 else -x, CHOICE),
    (lambda x: (x > 0) and x, CHOICE),
    (lambda x: (x > 0) or x, CHOICE),
    (lambda x: not x, CHOICE),
    (lambda x: 0 < x < 1, CHOICE),
    (lambda x: max(x, 0.0), CHOICE),
    (lambda x: [row * 2.0 for row in x], ITERATION),
    (lambda x: [*x], ITERATION),
    (lambda x: 1.0 in x, ITERATION),
    (lambda x: x[0], INDEXING),
    (lambda x: x[:, :4], INDEXING),
    (lambda x: x * float(x), NUMBER),
    (lambda x: x * int(x), NUMBER),
    (lambda x: math.sqrt(x), NUMBER),
    (lambda x: x * len(x), LENGTH),
    (lambda x: range(x), INDEX),
    (lambda x: numpy.asarray(x), INDEX),
]  # fmt: skip


def unknown(call, write=COMPOSITION, found=None):
    return (f"unknown operation {call}", found or f"{call} on a traced value", OPERATIONS, write)


UNKNOWN = [
    (lambda x: torch.sin(x), unknown("torch.sin")),
    (lambda x: torch.exp(x), unknown("torch.exp", "L.exp(...)")),
    (lambda x: torch.matmul(x, x), unknown("torch.matmul", "L.matmul(...)")),
    (lambda x: torch.sum(x, -1), unknown("torch.sum", SUMS)),
    (lambda x: F.silu(x), unknown("torch.silu", "L.silu(...)")),
    (lambda x: F.softmax(x, -1), unknown("torch.softmax", "L.exp(x - L.logsumexp(x))")),
    (lambda x: torch.cat([x, x], -1), unknown("torch.cat", "L.concat(a, b)")),
    (lambda x: x.sin(), unknown("value.sin")),
    (lambda x: x.tanh(), unknown("value.tanh", "L.tanh(...)")),
    (lambda x: x.mean(-1), unknown("value.mean", "L.row_mean(x)")),
    (lambda x: x.to(torch.bfloat16), unknown("value.to", CAST)),
    (lambda x: x.dtype, unknown("value.dtype", CAST)),
    (lambda x: x.size(1), unknown("value.size", "x.shape[1] for the number of columns")),
    (lambda x: x.add_(1.0), unknown("value.add_", f"{PLAIN}; {FIXED}")),
    (lambda x: x.clamp_(0.0, 1.0), unknown("value.clamp_", f"{CLAMP}; {FIXED}")),
    (lambda x: x.erfinv_(), unknown("value.erfinv_", f"{COMPOSITION}; {FIXED}")),
    (lambda x: torch.add(x, x), unknown("torch.add", PLAIN)),
    (lambda x: L.log1p(x), unknown("L.log1p", "L.log(1.0 + x)", "L.log1p")),
    (lambda x: x.view(-1, 2), unknown("value.view", GROUPS)),
    (lambda x: x.unsqueeze(0), unknown("value.unsqueeze", BROADCAST)),
    (lambda x: x.sum().item(), unknown("value.sum", SUMS)),
    (lambda x: x.item(), unknown("value.item", AFTERWARDS)),
    (lambda x: L.sine(x), unknown("L.sine", found="L.sine")),
    (lambda x: L.softmax(x), unknown("L.softmax", "L.exp(x - L.logsumexp(x))", "L.softmax")),
    (lambda x: L.swigl(x), unknown("L.swigl", "L.swiglu(...)", "L.swigl")),
    (lambda x: numpy.sin(x), unknown("numpy.sin")),
    (lambda x: numpy.tanh(x), unknown("numpy.tanh", "L.tanh(...)")),
    (lambda x: numpy.mean(x), unknown("numpy.mean", "L.row_mean(x)")),
    (lambda x: numpy.add.reduce(x), unknown("numpy.add.reduce")),
    (lambda x: numpy.concatenate([x, x]), unknown("numpy.concatenate", "L.concat(a, b)")),
]  # fmt: skip

OPERATORS = [
    (lambda x: x % 2, unknown("%")),
    (lambda x: 2 // x, unknown("//")),
    (lambda x: 2**x, unknown("number ** x", "L.exp(x * math.log(number))")),
    (lambda x: (x > 0) ^ (x < 1), unknown("^", "a != b between conditions")),
    (lambda x: round(x), unknown("round")),
    (lambda x: x.__setitem__(0, 1.0),
     unknown("assignment to a part", "L.where(condition, a, b) or L.concat(a, b)")),
]  # fmt: skip


@pytest.mark.parametrize(("function", "shapes", "parts"), SHAPES)
def test_shapes_that_do_not_fit(function, shapes, parts):
    operands = [tensor(*shape) for shape in shapes]
    text = message(line_of(function), parts)
    assert_raises(ProgramError, lambda: block(function)(*operands), text)


@pytest.mark.parametrize(("function", "parts"), ARGUMENTS + PYTHON + OPERATORS)
def test_what_python_allows_and_no_program_does(function, parts):
    text = message(line_of(function), parts)
    assert_raises(ProgramError, lambda: block(function)(tensor(*X)), text)


@pytest.mark.parametrize(("function", "parts"), UNKNOWN)
def test_operations_outside_of_the_language(function, parts):
    text = message(line_of(function), parts)
    assert_raises(UnknownOperationError, lambda: block(function)(tensor(*X)), text)


# Cures that are one expression of x, with what torch makes of it.
FORMULAS = {
    "softplus": F.softplus, "mish": F.mish, "logsigmoid": F.logsigmoid, "elu": F.elu,
    "log1p": torch.log1p, "expm1": torch.expm1, "exp2": torch.exp2, "log2": torch.log2,
    "log10": torch.log10, "reciprocal": torch.reciprocal, "sign": torch.sign,
    "square": torch.square, "softmax": lambda x: F.softmax(x, -1),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "norm": lambda x: x.norm(dim=-1, keepdim=True), "mean": lambda x: x.mean(-1, keepdim=True),
    "var": lambda x: x.var(-1, correction=0, keepdim=True),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMULAS)
def test_what_is_to_be_written_is_what_was_meant(name):
    positive = name in ("log2", "log10", "reciprocal", "log1p")
    x = torch.randn(*X, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x = x.abs() + 0.1 if positive else torch.cat([x, torch.zeros(1, X[1])])
    found = eval(INSTEAD[name], {"L": L, "math": math, "x": x})
    torch.testing.assert_close(found.double(), FORMULAS[name](x), rtol=1e-12, atol=1e-12)


def test_an_unknown_operation_is_no_attribute():
    assert not hasattr(L, "sine")
    assert not hasattr(L, "__wrapped__")


# --- the line ------------------------------------------------------------------------------------


@block
def several_lines(x, w):
    h = L.linear(
        x,
        w,
    )
    h = L.silu(h)
    return h + L.exp(x)


def helper(x):
    scaled = x * 2.0
    return torch.sin(scaled)


@block
def through_a_helper(x):
    return sum(helper(x) for _ in range(2))


@epilogue
def over_a_product(acc, shift):

    return acc + L.concat(shift, shift)


def test_the_line_is_where_the_statement_fails():
    parts = ("add of [M, 12] and [M, 8]", "12 and 8 columns", "as many columns, or 1", SIZES)
    text = message(line_of(several_lines.function, 7), parts)
    assert_raises(ProgramError, lambda: several_lines(tensor(*X), tensor(*W)), text)


def test_the_line_is_the_innermost_of_the_authors_own():
    text = message(line_of(helper, 2), unknown("torch.sin"))
    assert_raises(UnknownOperationError, lambda: through_a_helper(tensor(*X)), text)


def test_the_line_of_an_epilogue():
    parts = ("add of [M, 12] and [1, 16]", "12 and 16 columns", "as many columns, or 1", SIZES)
    text = message(line_of(over_a_product.function, 3), parts)
    x, w, shift = tensor(*X), tensor(*W), tensor(8)
    call = lambda: over_a_product(x, w, shift=shift)  # noqa: E731 (line is named)
    assert_raises(ProgramError, call, text)


def test_a_product_of_an_epilogue_fails_at_the_call():
    x, w, shift = tensor(*Y), tensor(*W), tensor(8)
    call = lambda: over_a_product(x, w, shift=shift)  # noqa: E731 (line is named)
    parts = ("matmul of x [M, 9] and w [12, 8]", "[M, 9] @ [12, 8].T", "equal contracted sizes")
    assert_raises(ProgramError, call, message(line_of(call), (*parts, LAYOUT)))


@pytest.mark.parametrize(
    ("function", "found", "write"),
    [
        (lambda: 1.0, "<lambda>()", "def <lambda>(acc, ...)"),
        (lambda x, w: L.linear(x, w), "<lambda>(x, w)", "def <lambda>(acc, ...)"),
        (lambda x, w, b: L.linear(x, w) + b, "<lambda>(x, w, b)", "def <lambda>(acc, b)"),
    ],
)
def test_an_epilogue_needs_its_product(function, found, write):
    cure = f"{write}; @cz.block is for one of x and w"
    parts = (
        "an epilogue without an accumulator", found, "a first parameter, for the product", cure,
    )  # fmt: skip
    assert_raises(ProgramError, lambda: epilogue(function), message(line_of(function), parts))


def test_an_operand_of_an_epilogue_may_be_called_as_its_product_is():
    scaled = epilogue(lambda acc, x, w: acc * x + w)
    y = scaled(tensor(*X), tensor(*W), x=tensor(12), w=tensor(12))
    assert y.shape == (5, 12)
