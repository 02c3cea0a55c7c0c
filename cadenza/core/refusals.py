"""What a traced value refuses to be, and what to write instead.

A value of a program has no data: it is no number, no container and no tensor, and it knows only
the operations of the language. Each refusal names the author's line and a cure.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any, NoReturn

from cadenza.core.errors import ProgramError, UnknownOperationError

NO_DATA = "a value of a program has no data while the function is traced; it stands for every row"
COMPOSITION = "a composition of the functions of cadenza.lang"
FIXED = "a value never changes, so give the new one a name"

CLAMP = "L.minimum(L.maximum(x, low), high)"
TAIL = "L.log(1.0 + L.exp(-L.abs(x)))"
GROUPS = "L.split, L.columns, L.group_sum, L.repeat or L.tile, which take columns in groups"
AFTERWARDS = "the value as an output: what comes back from the call is a tensor"
BROADCAST = "nothing: a value is [M, N], [M, 1] or [1, N], and broadcasts"

# What torch and NumPy call otherwise, or what the language does in another way.
INSTEAD = {
    "sum": "L.row_sum(x), L.column_sum(x) or L.group_sum(x, size)",
    "mean": "L.row_mean(x)",
    "var": "L.row_variance(x)",
    "std": "L.sqrt(L.row_variance(x)), which divides by the number of columns",
    "norm": "L.sqrt(L.row_sum(x ** 2))",
    "max": "L.row_max(x), L.column_max(x), or L.maximum(a, b)",
    "amax": "L.row_max(x), or L.column_max(x)",
    "min": "-L.row_max(-x), or L.minimum(a, b)",
    "amin": "-L.row_max(-x), or -L.column_max(-x)",
    "clamp": CLAMP,
    "clip": CLAMP,
    "hardtanh": CLAMP,
    "clamp_min": "L.maximum(x, low)",
    "clamp_max": "L.minimum(x, high)",
    "softmax": "L.exp(x - L.logsumexp(x))",
    "log_softmax": "x - L.logsumexp(x)",
    "softplus": f"L.maximum(x, 0.0) + {TAIL}",
    "mish": f"x * L.tanh(L.maximum(x, 0.0) + {TAIL})",
    "cross_entropy": "L.logsumexp(z, L.pick(z, target))",
    "logsigmoid": f"L.minimum(x, 0.0) - {TAIL}",
    "log_sigmoid": f"L.minimum(x, 0.0) - {TAIL}",
    "leaky_relu": "L.where(x > 0.0, x, slope * x)",
    "elu": "L.where(x > 0.0, x, L.exp(L.minimum(x, 0.0)) - 1.0)",
    "log1p": "L.log(1.0 + x)",
    "expm1": "L.exp(x) - 1.0",
    "exp2": "L.exp(x * math.log(2.0))",
    "log2": "L.log(x) / math.log(2.0)",
    "log10": "L.log(x) / math.log(10.0)",
    "reciprocal": "1.0 / x",
    "sign": "L.where(x > 0.0, 1.0, L.where(x < 0.0, -1.0, 0.0))",
    "square": "x ** 2",
    "pow": "x ** 2; for other exponents L.exp(p * L.log(x))",
    "masked_fill": "L.where(mask, value, x)",
    "cat": "L.concat(a, b)",
    "concatenate": "L.concat(a, b)",
    "chunk": "L.split(x), or L.columns(x, start, stop)",
    "gather": "L.pick(x, index)",
    "size": "x.shape[1] for the number of columns",
    **dict.fromkeys(("add", "sub", "mul", "div", "neg"), "Python's operators: a + b, a / b, -x"),
    **dict.fromkeys(("mm", "bmm", "einsum"), "L.linear(x, w) or L.matmul(a, b), in a @cz.block"),
    **dict.fromkeys(("view", "reshape", "unflatten", "flatten"), GROUPS),
    **dict.fromkeys(("contiguous", "clone"), "nothing: leave it out"),
    **dict.fromkeys(("squeeze", "unsqueeze"), BROADCAST),
    **dict.fromkeys(("item", "tolist", "numpy", "cpu", "topk", "argmax"), AFTERWARDS),
    **dict.fromkeys(
        ("to", "type", "dtype", "float", "double", "half", "bfloat16"),
        "L.cast(x, 'bfloat16'), or another floating dtype by name",
    ),
}

# NumPy's names of Python's operators: `np.sqrt(0.5) * x` is one, for NumPy's numbers come first.
NUMPY_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add, "subtract": operator.sub, "multiply": operator.mul,
    "divide": operator.truediv, "power": operator.pow, "matmul": operator.matmul,
    "less": operator.lt, "less_equal": operator.le, "greater": operator.gt,
    "greater_equal": operator.ge, "equal": operator.eq, "not_equal": operator.ne,
}  # fmt: skip


def unknown_operation(call: str, name: str) -> UnknownOperationError:
    """The error for an operation outside the closed set."""
    from cadenza.core import lang

    in_place = name.endswith("_") and not name.startswith("_")
    name = name.strip("_")
    near = [name] if name in lang.__all__ else get_close_matches(name, lang.__all__, 1, 0.8)
    cure = INSTEAD.get(name) or (f"L.{near[0]}(...)" if near else COMPOSITION)
    cure = f"{cure}; {FIXED}" if in_place else cure
    return UnknownOperationError(
        f"unknown operation {call}",
        found=call if call.startswith("L.") else f"{call} on a traced value",
        expected="operations of the language only, since they are what fuses",
        write=cure,
    )


def tensor_inside(found: str, where: str | None = None) -> ProgramError:
    """The error for a tensor that reached a program through a closure or a global."""
    return ProgramError(
        "a tensor in a closure or a global can't be part of a program",
        found=found,
        expected="tensors as operands; numbers, strings and None as constants",
        write="add a parameter to the function and pass the tensor in the call",
        where=where,
    )


def other_program(found: str, where: str | None = None) -> ProgramError:
    """The error for a value that another call of a function traced."""
    return ProgramError(
        "a value of one program was used in another",
        found=found,
        expected="values of this call of the function",
        write="return it from the first program, and pass the result as an operand",
        where=where,
    )


def _is_tensor(value: object) -> bool:
    return hasattr(value, "shape") and not isinstance(value, Refusals)


def _refused(sign: str, write: str = COMPOSITION) -> Any:
    def refuse(self: Any, *_: Any) -> NoReturn:
        raise ProgramError(
            f"unknown operation {sign}",
            found=f"{sign} on a traced value",
            expected="operations of the language only, since they are what fuses",
            write=write,
        )

    return refuse


def _no_number(write: str) -> Any:
    def refuse(self: Any, *_: Any, **__: Any) -> NoReturn:
        raise ProgramError(
            "a traced value is not a number",
            found=NO_DATA,
            expected="numbers that are known when the program is made",
            write=write,
        )

    return refuse


class Refusals:
    """What Python, NumPy and torch may ask of a traced value in vain."""

    __slots__ = ()

    __mod__ = __rmod__ = _refused("%")
    __floordiv__ = __rfloordiv__ = _refused("//")
    __rpow__ = _refused("number ** x", "L.exp(x * math.log(number))")
    __xor__ = __rxor__ = _refused("^", "a != b between conditions")
    __round__ = _refused("round")
    __setitem__ = _refused("assignment to a part", "L.where(condition, a, b) or L.concat(a, b)")

    def __bool__(self) -> bool:
        raise ProgramError(
            "`if`, `and`, `or`, `not` on a traced value",
            found=NO_DATA,
            expected="a constant argument, or a choice made element by element",
            write="L.where(condition, a, b), L.maximum(a, b); and `&`, `|`, `~` between conditions",
        )

    def __getitem__(self, _: object) -> NoReturn:
        raise ProgramError(
            "a traced value has no indexing",
            found=NO_DATA,
            expected="a range of columns, or one element a row",
            write="L.columns(x, start, stop), L.split(x, inner) or L.pick(x, index)",
        )

    def _iterated(self, *_: object) -> Any:
        raise ProgramError(
            "a traced value can't be iterated over or unpacked",
            found=NO_DATA,
            expected="a fixed number of parts of the columns",
            write="a, b = L.split(x), or L.columns(x, start, stop)",
        )

    __iter__ = __contains__ = __reversed__ = _iterated

    __float__ = __int__ = __complex__ = _no_number(
        "L.exp, L.log, L.sqrt for those of math, or pass the number as a constant argument"
    )
    __index__ = __array__ = _no_number(
        "keep it in the program, or pass the number as a constant argument"
    )
    __len__ = _no_number("x.shape[1] for the number of columns, that of rows as an argument")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise unknown_operation(f"value.{name}", name)

    @classmethod
    def __torch_function__(cls, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", str(function)).strip("_")
        for value in args:
            if _is_tensor(value):
                raise tensor_inside(f"a {type(value).__name__} in {name}")
        raise unknown_operation(f"torch.{name}", name)

    def __array_ufunc__(self, function: Any, method: str, *values: Any, **_: Any) -> Any:
        name = function.__name__
        if method != "__call__":
            raise unknown_operation(f"numpy.{name}.{method}", method)
        if name not in NUMPY_OPERATORS:
            raise unknown_operation(f"numpy.{name}", name)
        for value in values:
            if _is_tensor(value) and value.shape != ():
                raise tensor_inside(f"a {type(value).__name__} in {name}")
        return NUMPY_OPERATORS[name](*(v.item() if _is_tensor(v) else v for v in values))

    def __array_function__(self, function: Any, *_: Any) -> Any:
        name = function.__name__
        raise unknown_operation(f"numpy.{name}", name)
