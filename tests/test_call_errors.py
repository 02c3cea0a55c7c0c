"""What a caller reads: wrong operands, dtypes, devices, outputs, tensors inside, declarations.

Every message word for word, at the line of the call, or of the function where the fault is there.
"""

import functools

import numpy
import pytest
import torch
from messages import assert_raises, line_of, message, tensor

from cadenza import block, epilogue
from cadenza import lang as L
from cadenza.core.errors import BackEndError, ProgramError, UnknownOperationError

X, W, R = tensor(5, 8), tensor(12, 8), tensor(5, 1)
PARAMETER = ("tensors as operands; numbers, strings and None as constants",
             "add a parameter to the function and pass the tensor in the call")  # fmt: skip
INSIDE = "a tensor in a closure or a global can't be part of a program"
RETURN = ("a value, a tuple of values or a dict of values by strings",
          "return y, or return a, b, or return {'a': a, 'b': b}")  # fmt: skip
OUTPUT = "an output that is not a value of the program"
CONSTANT = "a tensor, or a number, bool, string or None as a constant"
FLOATS = "float64, float32, bfloat16, float16, float8_e4m3fn, float8_e5m2, whole numbers or bool"
ONE_DTYPE = "one floating dtype, as in torch.nn.functional.linear"
SHAPES = "shapes={'x': 'M D', 'w': '2*F D', 'rstd': 'M 1', 'bias': '1 N'}"
DEFINITION = ("a function over cadenza.lang, written with def",
              "@cz.block, @cz.epilogue or @cz.block(shapes={...}) above a def")  # fmt: skip
PARAMETERS = ("parameters that can be passed by name", "each operand as a parameter of its own")
OTHER_PROGRAM = ("values of this call of the function",
                 "return it from the first program, and pass the result as an operand")  # fmt: skip


@epilogue
def normed(acc, rstd, bias=None):
    return acc * rstd if bias is None else acc * rstd + bias


@block
def doubled(x, factor):
    return x * factor * 2


@block
def multiplied(x, w):
    return L.linear(x, w)


def wrong_normed(found: str) -> tuple[str, str, str, str]:
    return ("wrong arguments of normed", found, "normed(x, w, rstd=rstd, bias=bias)",
            "x [..., K] and w [N, K] by position, every other operand by its name")  # fmt: skip


def wrong_doubled(found: str) -> tuple[str, str, str, str]:
    return ("wrong arguments of doubled", found, "doubled(x, factor)",
            "each parameter once, by position or by name")  # fmt: skip


def kind(name: str, function: str, found: str) -> tuple[str, str, str, str]:
    return (
        f"argument {name} of {function}",
        found,
        CONSTANT,
        f"a tensor for {name}, or several parameters",
    )


def dtypes(found: str, write: str) -> tuple[str, str, str, str]:
    return "a product needs operands of one dtype", found, ONE_DTYPE, f"{write}, or autocast"


def refused(name: str, found: str) -> tuple[str, str, str, str]:
    return (f"operand {name} has a dtype that no program takes", found, FLOATS,
            f"{name}.to(...) before the call; a complex one as two real operands")  # fmt: skip


def leading(name: str, found: str, expected: str) -> tuple[str, str, str, str]:
    problem = f"operand {name} has other leading dimensions than the first operand"
    write = f"{name}.expand(...) or reshape it, so that every operand with M rows has the same"
    return problem, found, expected, write


CALLS = [
    (lambda: normed(X, W), wrong_normed("no operand 'rstd'")),
    (lambda: normed(X), wrong_normed("no operand 'w'")),
    (lambda: normed(X, W, rstd=R, gain=R), wrong_normed("unknown 'gain'")),
    (lambda: normed(X, W, rstd=R, acc=R), wrong_normed("unknown 'acc'")),
    (lambda: normed(X, W, x=X, rstd=R), wrong_normed("operand 'x' twice")),
    (lambda: normed(X, W, R), wrong_normed("3 positional arguments")),
    (lambda: doubled(X), wrong_doubled("no operand 'factor'")),
    (lambda: doubled(X, 1.0, 2.0), wrong_doubled("3 positional arguments")),
    (lambda: doubled(X, 1.0, x=X), wrong_doubled("operand 'x' twice")),
    (lambda: doubled(X, scale=1.0), wrong_doubled("unknown 'scale'")),
    (lambda: doubled(1.0, factor=2.0), wrong_doubled("no tensor")),
    (lambda: doubled(X, [1.0]), kind("factor", "doubled", "a list")),
    (lambda: doubled(X, (1.0, 2.0)), kind("factor", "doubled", "a tuple")),
    (lambda: doubled(X, numpy.ones(8)), kind("factor", "doubled", "a ndarray")),
    (lambda: doubled(X, torch.float32), kind("factor", "doubled", "a dtype")),
    (lambda: normed(X, torch.nn.Linear(8, 12), rstd=R), kind("w", "normed", "a Linear")),
    (lambda: normed(X, W.bfloat16(), rstd=R),
     dtypes("x of float32 and w of bfloat16", "w.to(torch.float32) before the call")),
    (lambda: normed(X.double(), W, rstd=R),
     dtypes("x of float64 and w of float32", "w.to(torch.float64) before the call")),
    (lambda: normed(X.long(), W, rstd=R),
     dtypes("x of int64 and w of float32", "x.to(torch.float32) before the call")),
    (lambda: normed(X.long(), W.long(), rstd=R),
     dtypes("x of int64 and w of int64", "x.to(torch.float32) before the call")),
    (lambda: normed(X.to(torch.complex64), W, rstd=R), refused("x", "complex64")),
    (lambda: doubled(X, torch.ones(8, dtype=torch.complex128)), refused("factor", "complex128")),
    (lambda: normed(X, W.to("meta"), rstd=R),
     ("operands on two devices", "x on cpu, w on meta", "one device", "w.to(x.device)")),
    (lambda: normed(X, W, rstd=R.to("meta")),
     ("operands on two devices", "x on cpu, rstd on meta", "one device", "rstd.to(x.device)")),
    (lambda: normed(X.to_sparse(), W, rstd=R),
     ("operand x is not stored densely", "a layout torch.sparse_coo", "a tensor with strides",
      "x.to_dense()")),
    (lambda: normed(X, tensor(2, 12, 8), rstd=R), leading("w", "[2, 12, 8]", "[5, columns]")),
    (lambda: normed(tensor(2, 5, 8), W, rstd=tensor(5, 2, 1)),
     leading("rstd", "[5, 2, 1]", "[2, 5, columns]")),
]  # fmt: skip


@pytest.mark.parametrize(("call", "parts"), CALLS)
def test_a_wrong_call_is_named_where_it_is(call, parts):
    assert_raises(ProgramError, call, message(line_of(call), parts))


@pytest.mark.parametrize("name", ["plain", "graph", "backward_graph"])
def test_the_other_ways_to_call_say_the_same(name):
    call = lambda: getattr(normed, name)(X, W)  # noqa: E731 (line is named)
    assert_raises(ProgramError, call, message(line_of(call), wrong_normed("no operand 'rstd'")))


def test_a_product_inside_of_a_block_is_named_inside():
    parts = dtypes("x of float32 and w of float16", "w.to(torch.float32) before the call")
    text = message(line_of(multiplied.function, 2), parts)
    assert_raises(ProgramError, lambda: multiplied(X, W.half()), text)
    cast = lambda x, w: L.linear(L.silu(x), L.exp(w))  # noqa: E731 (line is named)
    parts = dtypes("a value of float32 and a value of float16", "L.cast(value, 'float32')")
    assert_raises(ProgramError, lambda: block(cast)(X, W.half()), message(line_of(cast), parts))


# --- outputs -------------------------------------------------------------------------------------


def missing(label: str, found: str) -> tuple[str, str, str, str]:
    return (
        f"output {label} does not depend on the inputs",
        found,
        "outputs computed from the operands",
        "compute the constant outside of the program",
    )


OUTPUTS = [
    (lambda x: None, (OUTPUT, "output 0, a NoneType None", *RETURN)),
    (lambda x: 1.0, (OUTPUT, "output 0, a float 1.0", *RETURN)),
    (lambda x: [x, x], (OUTPUT, "output 0, a list", *RETURN)),
    (lambda x: (x, (x, x)), (OUTPUT, "output 1, a tuple", *RETURN)),
    (lambda x: {"a": x, "b": {"c": x}}, (OUTPUT, "output b, a dict", *RETURN)),
    (lambda x: {1: x}, (OUTPUT, "a dict with the key 1", *RETURN)),
    (lambda x: (), (OUTPUT, "no output", *RETURN)),
    (lambda x: {}, (OUTPUT, "no output", *RETURN)),
    (lambda x: (x, L.column_index(x) * 2.0), missing("1", "a constant [1, 8]")),
    (lambda x: {"one": L.random(x, 7)}, missing("one", "a constant [M, 8]")),
    (lambda x: (x, torch.ones(3)), (INSIDE, "output 1, a Tensor", *PARAMETER)),
]  # fmt: skip


@pytest.mark.parametrize(("function", "parts"), OUTPUTS)
def test_a_wrong_output(function, parts):
    text = message(line_of(function), parts)
    assert_raises(ProgramError, lambda: block(function)(X), text)


@epilogue
def returns_a_number(acc):
    if acc.shape[1] > 100:
        return acc
    return 1.0


@epilogue
def returns_once(acc):
    total = L.row_sum(acc)
    return (
        total,
        None,
    )


def test_a_wrong_output_is_named_at_the_return_or_at_the_definition():
    parts = (OUTPUT, "output 1, a NoneType None", *RETURN)
    text = message(line_of(returns_once.function, 3), parts)
    assert_raises(ProgramError, lambda: returns_once(X, W), text)
    text = message(line_of(returns_a_number.function), (OUTPUT, "output 0, a float 1.0", *RETURN))
    assert_raises(ProgramError, lambda: returns_a_number(X, W), text)


# --- tensors and values from elsewhere -----------------------------------------------------------

GLOBAL = tensor(8)
LIST = [tensor(8)]
MODULE = torch.nn.Linear(8, 8)


def helper(x):
    return x + GLOBAL


def global_in_a_helper(x):
    return helper(x)


def global_inside(x):
    scale = 2.0
    return x * scale * GLOBAL


def global_in_torch(x):
    return torch.mul(x, LIST[0])


ELSEWHERE = [
    (global_inside, (global_inside, 2), "GLOBAL, a Tensor"),
    (global_in_a_helper, (helper, 1), "a Tensor in add"),
    (global_in_torch, (global_in_torch, 1), "a Tensor in mul"),
    (lambda x: x - LIST[0], None, "a Tensor in sub"),
    (lambda x: LIST[0] - x, None, "a Tensor in sub"),
    (lambda x: LIST[0] / x, None, "a Tensor in div"),
    (lambda x: LIST[0] @ x, None, "a Tensor in matmul"),
    (lambda x: (LIST[0] > 0) & (x > 0), None, "a Tensor in mul"),
    (lambda x: LIST[0] < x, None, "a Tensor in compare"),
    (lambda x: L.linear(x, MODULE.weight), None, "a Parameter in matmul"),
    (lambda x: L.maximum(x, torch.tensor(2.0)), None, "a Tensor in maximum"),
    (lambda x: torch.nn.functional.linear(x, LIST[0]), None, "a Tensor in linear"),
    (lambda x: x * numpy.ones(8), None, "a ndarray in mul"),
    (lambda x: numpy.ones(8) * x, None, "a ndarray in multiply"),
]


@pytest.mark.parametrize(("function", "place", "found"), ELSEWHERE)
def test_a_tensor_from_elsewhere(function, place, found):
    text = message(line_of(*(place or (function,))), (INSIDE, found, *PARAMETER))
    assert_raises(ProgramError, lambda: block(function)(X), text)


def test_a_tensor_in_a_closure():
    weight = tensor(8)

    def closed(x):
        y = x * 2.0
        return y * weight

    text = message(line_of(closed, 2), (INSIDE, "weight, a Tensor", *PARAMETER))
    assert_raises(ProgramError, lambda: block(closed)(X), text)
    text = message(line_of(closed, 2), (INSIDE, "weight, a Tensor", *PARAMETER))
    assert_raises(ProgramError, lambda: epilogue(closed)(X, tensor(8, 8)), text)


def test_a_tensor_in_a_default_is_an_operand():
    @block
    def scaled(x, weight=LIST[0]):
        return x * weight

    assert torch.equal(scaled(X), X * LIST[0])


def test_a_value_of_another_call():
    kept = []
    block(lambda x: kept.append(x) or x)(X)
    problem = "a value of one program was used in another"
    for function, found in [
        (lambda x: x * kept[0], "mul of values that two calls traced"),
        (lambda x: kept[0] * x, "mul of values that two calls traced"),
        (lambda x: kept[0] * 2.0, "output 0, a value that another call traced"),
        (lambda x: (x, kept[0]), "output 1, a value that another call traced"),
    ]:
        text = message(line_of(function), (problem, found, *OTHER_PROGRAM))
        assert_raises(ProgramError, functools.partial(block(function), X), text)


# --- definitions and declarations ----------------------------------------------------------------


def sizes(found: str, parameters: str = "x, w") -> tuple[str, str, str, str]:
    expected = (
        f"two sizes, a space between, for some of {parameters}: numbers, names, their products"
    )
    return "shapes that don't declare operands", found, expected, SHAPES


DECLARATIONS = [
    ({"y": "M D"}, sizes("'y': 'M D'")),
    ({"x": "M"}, sizes("'x': 'M'")),
    ({"x": "M D E"}, sizes("'x': 'M D E'")),
    ({"x": "M D", "w": "N D-1"}, sizes("'w': 'N D-1'")),
    ({"x": "M D//2"}, sizes("'x': 'M D//2'")),
    ({"x": "M (D"}, sizes("'x': 'M (D'")),
    ({"x": "M f(D)"}, sizes("'x': 'M f(D)'")),
    ({"x": "M 1.5"}, sizes("'x': 'M 1.5'")),
    ({"x": ("M", "D")}, sizes("'x': ('M', 'D')")),
    ("M D", sizes("'M D'")),
    (["M D"], sizes("['M D']")),
]


@pytest.mark.parametrize(("shapes", "parts"), DECLARATIONS)
def test_shapes_that_declare_nothing(shapes, parts):
    function = lambda x, w: L.linear(x, w)  # noqa: E731 (line is named)
    text = message(line_of(function), parts)
    assert_raises(ProgramError, lambda: block(shapes=shapes)(function), text)


def test_shapes_of_an_epilogue_are_those_of_its_call():
    function = lambda acc: acc * 2.0  # noqa: E731 (line is named)
    text = message(line_of(function), sizes("'acc': 'M N'"))
    assert_raises(ProgramError, lambda: epilogue(shapes={"acc": "M N"})(function), text)


@block(shapes={"x": "M D", "w": "2*F D", "r": "M 1", "b": "1 F"})
def declared(x, w, r=1.0, b=1.0):
    return L.swiglu(L.linear(x, w) * r) * b


def wrong_size(name: str, found: str, expected: str, *others: str) -> tuple[str, str, str, str]:
    write = f"another tensor for {' or '.join([name, *others])}, or other shapes="
    return f"operand {name} has the wrong size", found, expected, write


SIZES = [
    (lambda: declared(X, tensor(12, 9)),
     wrong_size("w", "[12, 9]", "[2*F, D] with D = 8, as x has it", "x")),
    (lambda: declared(X, tensor(13, 8)), wrong_size("w", "[13, 8]", "[2*F, D] with 2*F = 12")),
    (lambda: declared(X, W, b=tensor(5)),
     wrong_size("w", "[12, 8]", "[2*F, D] with 2*F = 10, as b has it", "b")),
    (lambda: declared(X, W, tensor(5, 2)), wrong_size("r", "[M, 2]", "[M, 1]")),
    (lambda: declared(X, W, b=tensor(2, 6)), wrong_size("b", "[2, 6]", "[1, F]")),
    (lambda: declared(X, W, tensor(4)), leading("r", "[4]", "[5, columns]")),
    (lambda: declared(tensor(2, 3, 8), W, tensor(6, 1)), leading("r", "[6, 1]", "[2, 3, columns]")),
    (lambda: declared(X, tensor(8)),
     ("operand w has the wrong rank", "a shape [8]", "[2*F, D]", "w.reshape(...) before the call")),
    (lambda: declared(X, tensor(1, 12, 8)),
     ("operand w has the wrong rank", "a shape [1, 12, 8]", "[2*F, D]",
      "w.reshape(...) before the call")),
]  # fmt: skip


@pytest.mark.parametrize(("call", "parts"), SIZES)
def test_sizes_that_are_not_the_declared_ones(call, parts):
    assert_raises(ProgramError, call, message(line_of(call), parts))


PROBLEM = "parameters of <lambda> that can't be passed by name"
DEFINITIONS = [
    (lambda *x: x[0], (PROBLEM, "*x, variadic positional", *PARAMETERS)),
    (lambda **x: x["x"], (PROBLEM, "**x, variadic keyword", *PARAMETERS)),
    (lambda x, /: x, (PROBLEM, "x, positional-only", *PARAMETERS)),
]


@pytest.mark.parametrize(("function", "parts"), DEFINITIONS)
@pytest.mark.parametrize("made", [block, epilogue, block(shapes={"x": "M D"})])
def test_parameters_that_have_no_name(made, function, parts):
    assert_raises(ProgramError, lambda: made(function), message(line_of(function), parts))


@pytest.mark.parametrize("made", [block, epilogue])
@pytest.mark.parametrize("function", [3, {"x": "M D"}, torch.sin, functools.partial(int, base=2)])
def test_what_is_no_function(made, function):
    call = lambda: made(function)  # noqa: E731 (line is named)
    parts = ("a program is made of a Python function", f"{function!r:.60}", *DEFINITION)
    assert_raises(ProgramError, call, message(line_of(call), parts))


def test_an_unknown_back_end(monkeypatch):
    call = lambda: doubled(X, 2.0, backend="tritn")  # noqa: E731 (line is named)
    rest = "no such back end\n  found:    'tritn'\n  expected: one of auto, reference, triton"
    assert_raises(BackEndError, call, f"{line_of(call)}: {rest}")
    monkeypatch.setenv("CADENZA_BACKEND", "tritn")
    assert_raises(BackEndError, lambda: doubled(X, 2.0), f"CADENZA_BACKEND: {rest}")
    assert torch.equal(doubled(X, 2.0, backend="reference"), X * 4)


def test_a_failed_call_leaves_the_program_usable():
    program = block(lambda x, kind: torch.sin(x) if kind == "sin" else x * 2.0)
    for _ in range(2):
        with pytest.raises(UnknownOperationError, match=r"unknown operation torch\.sin"):
            program(X, "sin")
        assert torch.equal(program(X, "other"), X * 2)
