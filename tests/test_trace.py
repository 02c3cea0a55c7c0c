"""How a function becomes a program: what is run, what is a constant, which operand has M rows.

The function is run on symbols once a signature and never read. Every program here is compared
with its own `plain`, values and gradients, so a wrong role shows as a wrong number.
"""

import functools
import math

import numpy
import pytest
import torch
from programs import check_against, labelled

from cadenza import block, epilogue
from cadenza import lang as L

Tensor = torch.Tensor


def tensor(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def agrees(program, **operands) -> dict[str, Tensor]:
    """Holds a call to `plain`, values and gradients; its outputs by label."""
    check_against(program, program.plain, operands)
    return labelled(program(**operands))


class Counted:
    """A block over a function that counts how often the function is run."""

    def __init__(self, function):
        self.runs = 0

        @functools.wraps(function)
        def counted(**given):
            self.runs += 1
            return function(**given)

        self.program = block(counted)

    def traced(self, *args, **kwargs) -> bool:
        """Whether a call ran the function."""
        before = self.runs
        self.program(*args, **kwargs)
        return self.runs > before


# --- Python around the operations ----------------------------------------------------------------


def halves_summed(value):
    first, second = L.split(value)
    return first + second


def test_helpers_and_methods_are_part_of_the_program():
    class Scale:
        factor = 3.0

        def apply(self, value):
            return value * self.factor

    scale = Scale()

    @block
    def f(x):
        return scale.apply(halves_summed(x))

    x = tensor(5, 6)
    assert torch.equal(agrees(f, x=x)["0"], (x[:, :3] + x[:, 3:]) * 3.0)


@pytest.mark.parametrize("depth", [0, 1, 4])
def test_loops_comprehensions_and_recursion_unroll(depth):
    def power_sum(value, n):
        return value if n == 0 else value * power_sum(value, n - 1)

    @block
    def f(x):
        terms = [x / math.factorial(k + 1) for k in range(depth)]
        return sum(terms, start=power_sum(x, depth))

    x = tensor(5, 6)
    expected = x ** (depth + 1) + sum(x / math.factorial(k + 1) for k in range(depth))
    torch.testing.assert_close(f(x), expected)
    agrees(f, x=x)


def test_decisions_by_constants_are_python():
    @block
    def f(x, activation="silu", bias=None, twice=False):
        h = L.silu(x) if activation == "silu" else L.tanh(x)
        h = h if bias is None else h + bias
        return h * 2 if twice else h

    x, bias = tensor(5, 6), tensor(6)
    torch.testing.assert_close(f(x), torch.nn.functional.silu(x))
    torch.testing.assert_close(f(x, "tanh", bias, True), 2 * (x.tanh() + bias))
    agrees(f, x=x, activation="tanh", bias=bias, twice=True)


def test_closures_over_numbers_are_read_once_a_signature():
    scale = 2.0

    @block
    def f(x):
        return x * scale

    x = tensor(5, 6)
    assert torch.equal(f(x), x * 2.0)
    scale = 3.0
    assert torch.equal(f(x), x * 2.0), "the program of this signature is made"
    other = tensor(5, 7)
    assert torch.equal(f(other), other * 3.0), "of this one it was not"


def test_two_closures_of_one_function_are_two_programs():
    def scaled(by):
        @block
        def f(x):
            return x * by

        return f

    x = tensor(5, 6)
    assert torch.equal(scaled(2.0)(x) * 1.5, scaled(3.0)(x))


# --- constants -----------------------------------------------------------------------------------


def scaled(x, constant):
    return x * (2.0 if constant in (None, "two") else constant)


CONSTANTS = [1, 1.0, True, 0, 0.0, -0.0, False, None, "two", 0.1, math.nextafter(0.1, 1),
             math.inf, math.nan, 2**60, 2**60 + 1]  # fmt: skip


def test_every_constant_is_a_program_of_its_own_once():
    counted = Counted(scaled)
    x = tensor(5, 6)
    assert all(counted.traced(x, constant) for constant in CONSTANTS)
    assert not any(counted.traced(x, constant) for constant in CONSTANTS)
    assert not any(counted.traced(constant=constant, x=tensor(5, 6)) for constant in CONSTANTS)


@pytest.mark.parametrize("constant", CONSTANTS)
def test_constants_keep_their_value(constant):
    x = tensor(5, 6)
    expected, found = scaled(x, constant), block(scaled)(x, constant)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(torch.signbit(found), torch.signbit(expected))


def test_defaults_are_constants_or_operands():
    weight = tensor(4, 6)

    @block
    def f(x, w=weight, scale=0.5, *, shift=1):
        return L.linear(x, w) * scale + shift

    x = tensor(5, 6)
    torch.testing.assert_close(f(x), x @ weight.T * 0.5 + 1)
    torch.testing.assert_close(f(x, weight * 2, shift=3), x @ weight.T + 3)


def test_numbers_of_numpy_are_numbers():
    @block
    def f(x):
        return numpy.sqrt(0.25) * x + x * numpy.float32(2) - numpy.int64(1) + x ** numpy.int64(2)

    x = tensor(5, 6)
    torch.testing.assert_close(f(x), 0.5 * x + x * 2 - 1 + x**2)


# --- what is returned ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (lambda x, y: x * y, Tensor),
        (lambda x, y: (x * y,), tuple),
        (lambda x, y: (x * y, x - y, L.row_sum(x)), tuple),
        (lambda x, y: {"product": x * y}, dict),
        (lambda x, y: {"a": x * y, "b": L.column_sum(y), "c": x < y}, dict),
    ],
)
def test_outputs_come_back_in_their_structure(function, kind):
    program = block(function)
    x, y = tensor(5, 6), tensor(5, 6)
    returned, plain = program(x, y), program.plain(x, y)
    assert type(returned) is type(plain) is kind
    assert list(labelled(returned)) == list(labelled(plain)), "in order"
    agrees(program, x=x, y=y)


def test_an_input_returned_and_a_value_returned_twice():
    @block
    def f(x, y):
        product = x * y
        return x, product, product, x

    x, y = tensor(5, 6).requires_grad_(), tensor(5, 6)
    outputs = f(x, y)
    assert torch.equal(outputs[0], x)
    assert len({o.data_ptr() for o in (*outputs, x)}) == 5, "memory of its own each"
    sum(o.sum() for o in outputs).backward()
    torch.testing.assert_close(x.grad, 2 + 2 * y)


def test_one_tensor_passed_twice():
    program = block(lambda a, b, c: L.linear(a, b) * c)
    square = tensor(4, 4).requires_grad_()
    result = program(square, square, square)
    torch.testing.assert_close(result, square @ square.T * square)
    result.sum().backward()
    expected = torch.autograd.grad((square @ square.T * square).sum(), square)[0]
    torch.testing.assert_close(square.grad, expected)


# --- which operand has M rows --------------------------------------------------------------------


@pytest.mark.parametrize("rows", [4, 5])
def test_a_weight_with_as_many_rows_as_x(rows):
    @epilogue
    def f(acc, residual):
        return acc + residual

    x, w, residual = tensor(rows, 6), tensor(4, 6), tensor(rows, 4)
    torch.testing.assert_close(f(x, w, residual=residual), x @ w.T + residual)
    agrees(f, x=x, w=w, residual=residual)


@pytest.mark.parametrize("rows", [3, 4])
def test_a_chain_of_weights_with_as_many_rows_as_x(rows):
    program = block(lambda x, w, v: L.linear(L.linear(x, w), v) + x)
    agrees(program, x=tensor(rows, 4), w=tensor(4, 4), v=tensor(4, 4))


def test_two_operands_with_the_rows_of_x_are_added_to_one_another_first():
    program = block(lambda x, a, b: x * (a + b) - (b - a))
    for columns in (6, 1):
        agrees(program, x=tensor(5, 6), a=tensor(5, 6), b=tensor(5, columns))


def test_weights_with_the_rows_of_x_that_are_added_to_one_another_first():
    program = block(lambda x, w, v: L.linear(x, w + v))
    for rows in (4, 5):
        agrees(program, x=tensor(rows, 6), w=tensor(4, 6), v=tensor(4, 6))


def test_an_operand_that_never_meets_x_has_the_rows_it_came_with():
    program = block(lambda x, table: (x * 2.0, L.column_sum(table), table + 1.0))
    for rows in (5, 4):
        agrees(program, x=tensor(rows, 6), table=tensor(5, 3))


@pytest.mark.parametrize("rows", [1, 5])
def test_an_operand_of_one_row_is_a_row(rows):
    agrees(block(lambda x, r: x * r + L.row_sum(r)), x=tensor(rows, 6), r=tensor(1, 6))


@pytest.mark.parametrize("shape", [(6,), (1, 6), (), (1,), (5, 1), (1, 1), (5, 6)])
def test_operands_of_every_rank_up_to_two(shape):
    program = block(lambda x, v: x * v + L.exp(v))
    x, v = tensor(5, 6), tensor(*shape)
    result = agrees(program, x=x, v=v)["0"]
    torch.testing.assert_close(result, x * v + v.exp())


def test_a_scalar_first_leaves_the_rows_to_the_next_operand():
    counted = Counted(lambda scale, x: scale * x)
    assert counted.traced(torch.tensor(2.0), torch.randn(5, 6))
    assert not counted.traced(torch.tensor(3.0), torch.randn(7, 6)), "M is open"
    assert counted.program(torch.tensor(3.0), torch.randn(2, 3, 6)).shape == (2, 3, 6)


@pytest.mark.parametrize("leading", [(2, 3), (2, 1, 3), (1, 5), (0, 3), (5,)])
def test_leading_dimensions_flatten_and_come_back(leading):
    @epilogue
    def f(acc, rstd, residual, gain):
        scaled = acc * rstd
        return scaled * gain + residual, L.row_sum(scaled), L.column_sum(scaled)

    x, w, gain = tensor(*leading, 6), tensor(4, 6), tensor(4)
    operands = {"rstd": tensor(*leading, 1), "residual": tensor(*leading, 4), "gain": gain}
    y, rows, columns = agrees(f, x=x, w=w, **operands).values()
    assert y.shape == (*leading, 4)
    assert rows.shape == (*leading, 1)
    assert columns.shape == (1, 4)
    expected = (x @ w.T) * operands["rstd"]
    torch.testing.assert_close(rows, expected.sum(-1, keepdim=True))


def test_a_vector_first_is_one_row():
    x, w = tensor(6), tensor(4, 6)
    y, total = epilogue(lambda acc: (acc * 2.0, L.row_sum(acc)))(x, w)
    torch.testing.assert_close(y, 2 * (w @ x))
    assert (y.shape, total.shape) == ((4,), (1,))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
@pytest.mark.parametrize("leading", [(2, 3), (6,)])
@pytest.mark.parametrize("column", [False, True])
def test_indices_come_as_the_leading_dimensions_or_as_a_column(dtype, leading, column):
    program = block(lambda x, index: L.pick(x, index))
    x = tensor(*leading, 5)
    index = torch.randint(5, (*leading, 1), dtype=dtype)
    picked = program(x, index if column else index[..., 0])
    torch.testing.assert_close(picked, x.gather(-1, index.long()))


# --- declared shapes -----------------------------------------------------------------------------

LINEAR = {"x": "M D", "w": "2*F D", "rstd": "M 1", "bias": "1 F"}


@block(shapes=LINEAR)
def declared(x, w, rstd, bias):
    return L.swiglu(L.linear(x, w) * rstd) + bias


@pytest.mark.parametrize("leading", [(5,), (8,), (2, 3), (0, 2)])
@pytest.mark.parametrize("column", [False, True])
def test_declared_shapes_and_columns_without_their_column(leading, column):
    rstd = tensor(*leading, 1)
    operands = {"x": tensor(*leading, 6), "w": tensor(8, 6), "bias": tensor(4)}
    result = agrees(declared, **operands, rstd=rstd if column else rstd[..., 0])["0"]
    assert result.shape == (*leading, 4)
    torch.testing.assert_close(result, declared(**operands, rstd=rstd))


def test_a_declared_column_may_come_first():
    program = block(shapes={"rstd": "M 1", "x": "M D"})(lambda rstd, x: x * rstd)
    rstd, x = tensor(2, 3), tensor(2, 3, 6)
    torch.testing.assert_close(program(rstd, x), x * rstd[..., None])
    torch.testing.assert_close(program(rstd[..., None], x), x * rstd[..., None])
    only = block(shapes={"rstd": "M 1"})(lambda rstd: rstd * 2.0)
    assert only(rstd[..., None]).shape == (2, 3, 1)


def test_a_declared_weight_may_come_first():
    program = block(shapes={"w": "N D", "x": "M D"})(lambda w, x: L.linear(x, w))
    agrees(program, w=tensor(4, 6), x=tensor(5, 6))
    agrees(program, w=tensor(4, 6), x=tensor(4, 6))


def test_declared_sizes_may_be_constants_of_the_call():
    program = block(shapes={"x": "M heads*head_dim"})(lambda x, heads, head_dim: x * 1.0)
    assert program(tensor(5, 6), heads=2, head_dim=3).shape == (5, 6)


# --- one program, many calls ---------------------------------------------------------------------


def test_another_number_of_rows_is_the_same_program():
    counted = Counted(lambda x, w, r: L.linear(x, w) + r)

    def call(*leading: int) -> bool:
        return counted.traced(tensor(*leading, 6), tensor(4, 6), tensor(*leading, 4))

    assert call(5)
    assert not any(call(rows) for rows in (6, 127, 129, 0, 2))
    call(2, 3)
    assert not any(call(*leading) for leading in ((3, 2), (1, 7), (0, 4)))


@pytest.mark.parametrize(("columns", "outer"), [(6, 3), (7, 4)])
def test_another_size_than_rows_is_another_program(columns, outer):
    counted = Counted(lambda x, w: L.linear(x, w))
    assert counted.traced(tensor(5, 6), tensor(4, 6))
    assert counted.traced(tensor(5, columns), tensor(outer, columns))
    assert not counted.traced(tensor(5, 6), tensor(4, 6)), "the first is still known"


def test_another_dtype_is_another_program_and_another_gradient_is_one():
    counted = Counted(lambda x: x * 2.0)
    assert counted.traced(torch.randn(5, 6))
    assert counted.traced(torch.randn(5, 6, dtype=torch.bfloat16))
    assert not counted.traced(torch.randn(3, 6))
    assert counted.traced(torch.randn(3, 6, requires_grad=True))
    assert not counted.traced(torch.randn(4, 6, requires_grad=True))


def test_rows_that_equal_a_size_by_chance_do_not_stick():
    counted = Counted(lambda x, w: L.linear(x, w))
    for rows in (4, 5, 4, 3):
        x, w = tensor(rows, 6), tensor(4, 6)
        torch.testing.assert_close(counted.program(x, w), x @ w.T)
    assert not counted.traced(tensor(4, 6), tensor(4, 6))
    assert counted.traced(tensor(3, 6), tensor(3, 6)), "now w has three rows"
