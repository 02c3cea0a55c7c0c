"""What the library's programs are put together from: functions over values of a program.

Each checks the options that it is given; an option that would change nothing raises. Weights that
are None are left out, so one program serves a layer with and without them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from cadenza.core import lang as L
from cadenza.core.arguments import dimensions, is_flag, is_number
from cadenza.core.errors import ProgramError
from cadenza.core.ir import Node
from cadenza.core.storage import storage_dtype

Value = Any
PLAIN = {
    "relu": L.relu,
    "relu2": L.relu2,
    "silu": L.silu,
    "gelu": L.gelu,
    "gelu_tanh": lambda x: L.gelu(x, "tanh"),
}
GATED = {
    "swiglu": L.swiglu,
    "geglu": L.geglu,
    "geglu_tanh": lambda x: L.geglu(x, "tanh"),
    "reglu": L.reglu,
}
NORMS = (None, "rms", "layer")


def is_gated(activation: str | None) -> bool:
    """Whether an activation takes gate and up side by side. Raises ProgramError for none."""
    if activation not in (None, *PLAIN, *GATED):
        raise ProgramError(
            "an activation of no name",
            found=f"activation={activation!r}",
            expected=f"None, {', '.join(PLAIN)}, or gated: {', '.join(GATED)}",
            write="activation='silu'; for another one a program of your own",
        )
    return activation in GATED


def activated(x: Value, activation: str | None) -> Value:
    """The activation of that name: [M, N] to [M, N], or a gated one to [M, N/2]."""
    if activation is None:
        return x
    return GATED[activation](x) if is_gated(activation) else PLAIN[activation](x)


def operand(value: Value, name: str) -> Value:
    """The value, or None. Raises ProgramError for what is neither, such as a number."""
    if value is None or dimensions(value) == 2:
        return value
    raise ProgramError(
        f"an operand {name} that is no tensor",
        found=f"{name}={value!r:.40}",
        expected="a tensor, or None where it may be left out",
        write=f"{name}=None",
    )


def check_flag(value: Any, name: str) -> None:
    """Raises ProgramError for what is neither True nor False."""
    if not is_flag(value):
        raise ProgramError(
            f"an option {name} that is no flag",
            found=f"{name}={value!r:.40}",
            expected="True or False",
            write=f"{name}=True, or nothing",
        )


class Norm(NamedTuple):
    """A norm of rows: its kind ("rms", "layer", None for none), weights, and what it adds.

    `squares` are the sums of squares of the rows, [M, 1], where RMSNorm need not take them again.
    """

    kind: str | None
    weight: Value = None
    bias: Value = None
    offset: float = 0.0
    eps: float = 1e-5
    squares: Value = None

    def __call__(self, x: Value) -> Value:
        """x [M, N] normalised, [M, N]. Raises ProgramError where its parts don't fit."""
        self._check()
        if self.kind is None:
            return x
        operand(self.squares, "squares")
        if self.kind == "layer":
            return L.layer_norm(x, self.weight, self.bias, self.eps)
        if self.squares is None:
            return L.rms_norm(x, self.weight, self.eps, self.offset)
        y = x * L.rsqrt(self.squares / x.shape[1] + self.eps)
        return y if self.weight is None else y * shifted(self.weight, self.offset)

    def of_output(self, x: Value, weight: Value) -> Value:
        """x by the same kind of norm and another weight; x itself without one."""
        if weight is None:
            return x
        return Norm(self.kind or "rms", weight, None, self.offset, self.eps)(x)

    def _check(self) -> None:
        if self.kind not in NORMS:
            raise _unused("norm", repr(self.kind), "'rms', 'layer' or None")
        given = {"weight": self.weight, "bias": self.bias, "squares": self.squares}
        taken = {None: (), "rms": ("weight", "squares"), "layer": ("weight", "bias")}[self.kind]
        for name, value in given.items():
            if value is not None and name not in taken:
                raise _unused(f"a norm's {name}", f"it with norm={self.kind!r}", _WANTED[name])
        if self.kind == "layer" and self.offset:
            raise _unused("norm_offset", f"{self.offset} with norm='layer'", "an RMSNorm")


_WANTED = {
    "weight": "norm='rms' or norm='layer'",
    "bias": "norm='layer'",
    "squares": "norm='rms'",
}


def _unused(what: str, found: str, expected: str) -> ProgramError:
    return ProgramError(
        f"{what} that nothing uses",
        found=found,
        expected=expected,
        write="norm='rms' for RMSNorm, norm='layer' for LayerNorm, or leave it out",
    )


def check_offset(offset: float, *weights: Value) -> None:
    """Raises ProgramError for an offset of norms' weights where no such weight is given."""
    if offset and all(weight is None for weight in weights):
        raise _unused("norm_offset", f"{offset} without a norm's weight", "an RMSNorm's weight")


def capped(x: Value, softcap: float | None) -> Value:
    """x within the cap; x itself without one. Raises ProgramError for a cap that is none."""
    if softcap is not None and not (is_number(softcap) and softcap > 0.0):
        raise ProgramError(
            "a cap of nothing",
            found=f"softcap={softcap!r:.40}",
            expected="a bound of the output, above 0",
            write="softcap=None where nothing is capped",
        )
    return x if softcap is None else L.softcap(x, softcap)


def shifted(weight: Value, offset: float) -> Value:
    """A norm's weight as it multiplies: Gemma stores it minus one."""
    return weight + offset if offset else weight


def dropped(x: Value, dropout: float, seed: Value, name: str = "seed") -> Value:
    """x after dropout with that seed. Raises ProgramError for a seed that is missing."""
    if dropout and seed is None:
        raise ProgramError(
            f"dropout without {name}",
            found=f"dropout={dropout}, {name}=None",
            expected="an int64 tensor of one element, another one each step",
            write=f"{name}=torch.randint(2**31, (), device=x.device)",
        )
    return L.dropout(x, dropout, seed) if dropout else x


def added(x: Value, residual: Value) -> Value:
    """residual + x; the same columns, since a residual is not broadcast."""
    if operand(residual, "residual") is None:
        return x
    if residual.shape[1] != x.shape[1]:
        raise ProgramError(
            "a residual of another width",
            found=f"{residual.shape[1]} columns beside an output of {x.shape[1]}",
            expected="a residual of the output's shape",
            write="residual=residual.expand(...)",
        )
    return residual + x


def kept_as(value: Value, like: Value) -> Value:
    """A value in the dtype of another one, which wider tables may not change."""
    if not isinstance(value, Node):
        return L.cast(value, like.dtype) if value.dtype != like.dtype else value
    dtype = storage_dtype(like)
    return value if storage_dtype(value) == dtype else L.cast(value, dtype)
