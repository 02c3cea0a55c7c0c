"""What each operation says in an emitted kernel: one text an operation, over the texts of inputs.

Blocks broadcast as in the language. Operations on columns choose which columns of their inputs are
read, so they have no text of their own: `columns.py` does that.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable

from cadenza.core.ops import Op

Text = Callable[..., str]
SMALLEST, LARGEST = 2.0**-126, 2.0**128 - 2.0**104  # of float32's normal numbers


def _power(x: str, exponent: int) -> str:
    size = abs(exponent)
    if size == 0:
        return f"({x} * 0.0 + 1.0)"
    product = " * ".join([x] * size)
    return f"({product})" if exponent > 0 else f"(1.0 / ({product}))"


def _rounded(x: str, dtype: str) -> str:
    name = DTYPES[dtype]
    return f"{x}.to({name}).to(tl.float32)" if name else x


# What is computed in float32 is not rounded to wider dtypes.
DTYPES = {
    "bfloat16": "tl.bfloat16", "float16": "tl.float16", "float32": "", "float64": "",
    "float8_e4m3fn": "tl.float8e4nv", "float8_e5m2": "tl.float8e5",
}  # fmt: skip

ELEMENTWISE: dict[Op, Text] = {
    Op.ADD: "({} + {})".format,
    Op.SUB: "({} - {})".format,
    Op.MUL: "({} * {})".format,
    Op.DIV: "({} / {})".format,
    Op.NEG: "(-{})".format,
    Op.POWER: _power,
    Op.ABS: "tl.abs({})".format,
    Op.MAXIMUM: "device.maximum({}, {})".format,
    Op.MINIMUM: "device.minimum({}, {})".format,
    Op.EXP: "tl.exp({})".format,
    Op.LOG: "tl.log({})".format,
    Op.SQRT: "tl.sqrt({})".format,
    Op.RSQRT: "tl.rsqrt({})".format,
    Op.SIGMOID: "tl.sigmoid({})".format,
    Op.TANH: "device.tanh({})".format,
    Op.ERF: "tl.erf({})".format,
    Op.COMPARE: lambda a, b, relation: f"({a} {relation} {b})",
    Op.WHERE: "tl.where({}, {}, {})".format,
    Op.CAST: _rounded,
}


def number(value: float) -> str:
    """A constant, as float32 has it: Triton takes one outside of that range for a float64."""
    if isinstance(value, float) and not SMALLEST <= abs(value) <= LARGEST:
        value = _in_float32(value)
    if value == 0 and math.copysign(1.0, value) < 0:
        return "device.negative_zero()"
    if 0 < abs(value) < SMALLEST:
        return f"tl.cast({value!r}, tl.float32)"
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    return repr(value) if value >= 0 and not str(value).startswith("-") else f"({value!r})"


def _in_float32(value: float) -> float:
    try:
        rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)
    return rounded
