"""Programs as functions: `epilogue` and `block` turn an author's function into one.

The only bridge between the compiler and autograd. A call sorts its arguments into tensors and
constants and runs one operation of torch; everything else happens inside of that.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any, overload

import torch

from cadenza.backends import chosen
from cadenza.core import lang
from cadenza.core.errors import ProgramError
from cadenza.core.ir import Graph
from cadenza.core.ops import M
from cadenza.core.trace import location
from cadenza.library.autocast import autocast_dtype
from cadenza.library.eager import Prepared
from cadenza.library.identity import CONSTANTS, as_constant, register
from cadenza.library.kinds import Calls
from cadenza.library.operands import as_matrix, check_plain, checked_shapes, declared_dtypes
from cadenza.library.operator import PROGRAMS, find
from cadenza.library.specialize import Call, Specialization, Specializations

Tensor = torch.Tensor
Function = Callable[..., Any]
Shapes = Mapping[str, str] | None
OPEN = 16411  # stands for a number of rows that is open; a prime, which no weight's size is likely


class Program:
    """An author's function as a differentiable operation on tensors. Made by `block`.

    Called with the function's own arguments: tensors are operands; numbers, bools, strings and
    None are constants. `backend=` picks a back end for one call.
    """

    def __init__(self, function: Function, shapes: Shapes = None) -> None:
        self.parameters, self.defaults = _parameters(function)
        functools.update_wrapper(self, function)
        self.function = function
        self._name_operands()
        self.shapes = checked_shapes(shapes, self.parameters, location(function))
        self.dtypes = declared_dtypes(shapes)
        self.specializations = Specializations(self._traced(), function.__name__, self.shapes)
        self.key = register(function, self.shapes, self.specializations)
        self.calls = Calls(self._ready)
        self.has_tensors = any(isinstance(v, Tensor) for v in self.defaults.values())

    def __repr__(self) -> str:
        return f"<cadenza {type(self).__name__.lower()} {self.key}>"

    def __reduce__(self) -> str:
        return self.__qualname__  # as a function: copied to itself, pickled by its name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling() and not self.has_tensors:
            found = self.calls.find(args, kwargs)
            if found is not None:
                prepared, tensors = found
                return prepared(tensors)
        return self._dispatched(args, kwargs)

    def _ready(self, args: Any, kwargs: Any) -> tuple[Prepared, list[int]]:
        """The call, and where its tensors are among the arguments in the order they are given."""
        kwargs = dict(kwargs)
        given = [*self.parameters[: len(args)], *kwargs]
        backend = kwargs.pop("backend", None) if "backend" not in self.parameters else None
        names, tensors, constants = self._sorted(self._bound(args, kwargs))
        text = _encode(names, constants, autocast_dtype(tensors[0]), backend)
        needed = _needed(tensors)
        specialization, operands = find(self.key, tensors, text, needed)
        prepared = Prepared(specialization, operands, tensors, needed)
        return prepared, [given.index(name) for name in names]

    def _dispatched(self, args: Any, kwargs: Any) -> Any:
        """The call as an operation of torch's dispatcher."""
        backend = kwargs.pop("backend", None) if "backend" not in self.parameters else None
        names, tensors, constants = self._sorted(self._bound(args, kwargs))
        check_plain(names, tensors, f"{self.__name__}.plain(...)")
        text = _encode(names, constants, autocast_dtype(tensors[0]), backend)
        needed, content = _needed(tensors), ""
        if torch.compiler.is_dynamo_compiling():
            content = _content(self.key, _sizes(tensors), text, needed)
        results = torch.ops.cadenza.run(self.key, tensors, text, needed, content)
        structure, labels = _structure(self.key, text)
        if structure == "value":
            return results[0]
        if structure == "tuple":
            return tuple(results[: len(labels)])
        return dict(zip(labels, results, strict=False))

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """The same call as plain torch operations: differentiable by autograd, the oracle."""
        names, tensors, constants = self._sorted(self._bound(args, kwargs))
        text = _encode(names, constants, None, None)
        specialization, found = self.specializations.find(tensors, text, 0)
        rows = {i.attributes["name"]: i.type.rows for i in specialization.pair.program.inputs}
        matrices = {
            operand.name: as_matrix(
                tensor, found.rows if rows[operand.name] == M else rows[operand.name],
                operand.columns,
            )
            for operand, tensor in zip(found.operands, tensors, strict=True)
        }  # fmt: skip
        with _numbers_as_wide_as(tensors):
            returned = self.specializations.function(**matrices, **dict(constants))
        return _unflatten(returned, specialization, found.leading)

    def graph(self, *args: Any, **kwargs: Any) -> Graph:
        """The program that such a call runs, before differentiation."""
        return self._compiled(args, kwargs, 0).pair.program

    def backward_graph(self, *args: Any, **kwargs: Any) -> Graph | None:
        """The derived backward program of such a call, given which tensors require gradients."""
        _, tensors, _ = self._sorted(self._bound(args, kwargs))
        return self._compiled(args, kwargs, _needed(tensors)).pair.backward

    def _compiled(self, args: Any, kwargs: Any, needed: int) -> Specialization:
        names, tensors, constants = self._sorted(self._bound(args, kwargs))
        text = _encode(names, constants, autocast_dtype(tensors[0]), None)
        return self.specializations.find(tensors, text, needed)[0]

    def _traced(self) -> Function:
        """The function of all operands that is traced."""
        return self.function

    def _name_operands(self) -> None:
        """Makes `parameters` what a call takes."""

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Arguments by parameter, in the order of the parameters."""
        if len(args) > len(self.parameters):
            raise self._wrong_call(f"{len(args)} positional arguments")
        given = dict(zip(self.parameters, args, strict=False))
        for name, value in kwargs.items():
            if name not in self.parameters or name in given:
                known = name in given
                raise self._wrong_call(f"operand {name!r} twice" if known else f"unknown {name!r}")
            given[name] = value
        bound = {}
        for name in self.parameters:
            if name in given:
                bound[name] = given[name]
            elif name in self.defaults:
                bound[name] = self.defaults[name]
            else:
                raise self._wrong_call(f"no operand {name!r}")
        return bound

    def _wrong_call(self, found: str) -> ProgramError:
        return ProgramError(
            f"wrong arguments of {self.__name__}",
            found=found,
            expected=f"{self.__name__}({', '.join(self.parameters)})",
            write="each parameter once, by position or by name",
        )

    def _sorted(
        self, bound: Mapping[str, Any]
    ) -> tuple[tuple[str, ...], list[Tensor], tuple[tuple[str, Any], ...]]:
        """Names and tensors of the operands, and the constants."""
        names = tuple(n for n, v in bound.items() if isinstance(v, Tensor))
        given = [(n, v) for n, v in bound.items() if not isinstance(v, Tensor)]
        constants = tuple((n, as_constant(v)) for n, v in given)
        for name, value in constants:
            if not isinstance(value, CONSTANTS):
                raise ProgramError(
                    f"argument {name} of {self.__name__}",
                    found=f"a {type(value).__name__}",
                    expected="a tensor, or a number, bool, string or None as a constant",
                    write=f"a tensor for {name}, or several parameters",
                )
        if not names:
            raise self._wrong_call("no tensor")
        return names, [bound[n] for n in names], tuple((n, constant(v)) for n, v in constants)


class Epilogue(Program):
    """An author's function over one product, called as f(x, w, **operands). Made by `epilogue`.

    x is [..., K], w [N, K] as in nn.Linear; the function's first argument is x @ w.T, [M, N].
    """

    def __init__(self, function: Function, shapes: Shapes = None) -> None:
        own, _ = _parameters(function)
        if own[:2] in ((), ("x", "w")):
            rest = ", ".join(own[2:]) or "..."
            raise ProgramError(
                "an epilogue without an accumulator",
                found=f"{function.__name__}({', '.join(own)})",
                expected="a first parameter, for the product",
                write=f"def {function.__name__}(acc, {rest}); @cz.block is for one of x and w",
                where=location(function),
            )
        taken = set(own)
        self.product = tuple(name if name not in taken else f"{name}_" for name in ("x", "w"))
        super().__init__(function, shapes)

    def _name_operands(self) -> None:
        self.accumulator, *rest = self.parameters
        self.parameters = (*self.product, *rest)

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        if len(args) > 2:
            raise self._wrong_call(f"{len(args)} positional arguments")
        return super()._bound(args, kwargs)

    def _wrong_call(self, found: str) -> ProgramError:
        operands = "".join(f", {name}={name}" for name in self.parameters[2:])
        return ProgramError(
            f"wrong arguments of {self.__name__}",
            found=found,
            expected=f"{self.__name__}(x, w{operands})",
            write="x [..., K] and w [N, K] by position, every other operand by its name",
        )

    def _traced(self) -> Function:
        x, w = self.product
        function = self.function

        @functools.wraps(function)
        def with_product(**operands: Any) -> Any:
            acc = lang.linear(operands.pop(x), operands.pop(w))
            return function(acc, **operands)

        return with_product


def _parameters(function: Function) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Names and defaults of a function's parameters. Raises ProgramError for *args, **kwargs."""
    if not hasattr(function, "__code__"):
        raise ProgramError(
            "a program is made of a Python function",
            found=f"{function!r:.60}",
            expected="a function over cadenza.lang, written with def",
            write="@cz.block, @cz.epilogue or @cz.block(shapes={...}) above a def",
        )
    parameters = inspect.signature(function).parameters.values()
    for p in parameters:
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD, p.POSITIONAL_ONLY):
            raise ProgramError(
                f"parameters of {function.__name__} that can't be passed by name",
                found=f"{p}, {p.kind.description}",
                expected="parameters that can be passed by name",
                write="each operand as a parameter of its own",
                where=location(function),
            )
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    return tuple(p.name for p in parameters), defaults


@overload
def block(function: Function) -> Program: ...
@overload
def block(*, shapes: Shapes = None) -> Callable[[Function], Program]: ...


def block(function: Function | None = None, *, shapes: Shapes = None) -> Any:
    """A function over `cadenza.lang` as a differentiable program, called with its own arguments.

    `shapes` may declare operands' sizes, {"x": "M D", "w": "2*F D", "rstd": "M 1"}; M is the
    number of rows. "M 1 int64" (int32, bool) declares an operand that is no floating number.
    Raises ProgramError at the first call if the function is not a program.
    """
    if function is None:
        return lambda f: Program(f, shapes)
    return Program(function, shapes)


@overload
def epilogue(function: Function) -> Epilogue: ...
@overload
def epilogue(*, shapes: Shapes = None) -> Callable[[Function], Epilogue]: ...


def epilogue(function: Function | None = None, *, shapes: Shapes = None) -> Any:
    """A function f(acc, **operands) over one product, called as f(x, w, **operands).

    x [..., K], w [N, K], acc = x @ w.T [M, N]; `shapes` may declare sizes, those of x and w too.
    Raises ProgramError at the first call if the function is not a program.
    """
    if function is None:
        return lambda f: Epilogue(f, shapes)
    return Epilogue(function, shapes)


# --- what torch.compile sees as constants ---------------------------------------------------------


def constant(value: Any) -> Any:
    """The value itself, a constant to torch.compile too.

    It makes a symbol of a number that changed from call to call, and of a symbol a constant again
    where its hash is asked for.
    """
    (constant,) = {value}
    return constant


@torch._dynamo.assume_constant_result
def _encode(
    names: tuple[str, ...],
    constants: tuple[tuple[str, Any], ...],
    autocast: str | None,
    backend: str | None,
) -> str:
    return Call(names, constants, autocast, chosen(backend)).encode()


@contextlib.contextmanager
def _numbers_as_wide_as(tensors: list[Tensor]) -> Iterator[None]:
    """Python's numbers, and whole numbers in arithmetic, are float64 beside a float64 tensor."""
    usual = torch.get_default_dtype()
    double = any(tensor.dtype == torch.float64 for tensor in tensors)
    torch.set_default_dtype(torch.float64 if double else usual)
    try:
        yield
    finally:
        torch.set_default_dtype(usual)


def _needed(tensors: list[Tensor]) -> int:
    """The mask of tensors whose gradients are needed."""
    if not torch.is_grad_enabled():
        return 0
    mask = 0
    for position, tensor in enumerate(tensors):
        if tensor.requires_grad:
            mask |= 1 << position
    return mask


def _sizes(tensors: list[Tensor]) -> tuple[Any, ...]:
    """Dtypes and sizes, None for those that torch.compile keeps open: numbers of rows."""
    known = torch.fx.experimental.symbolic_shapes.has_static_value
    return tuple(
        (str(t.dtype), tuple(constant(s) if known(s) else None for s in t.shape)) for t in tensors
    )


@torch._dynamo.assume_constant_result
def _content(key: str, sizes: tuple[Any, ...], text: str, needed: int) -> str:
    """The digest of what a call runs, which torch.compile's caches on disk must depend on.

    Where it can't be told without the number of rows, a text that no cache has.
    """
    try:
        like = [
            torch.empty([OPEN if s is None else s for s in shape], dtype=getattr(torch, dtype[6:]),
                        device="meta")
            for dtype, shape in sizes
        ]  # fmt: skip
        return PROGRAMS[key].find(like, text, needed)[0].digest
    except ProgramError:
        return uuid.uuid4().hex


@torch._dynamo.assume_constant_result
def _structure(key: str, text: str) -> tuple[str, tuple[str, ...]]:
    return PROGRAMS[key].structures[text]


def _unflatten(returned: Any, specialization: Specialization, leading: tuple[Any, ...]) -> Any:
    structure, labels = specialization.structure
    nodes = specialization.pair.program.outputs
    values = [returned] if structure == "value" else list(
        returned.values() if structure == "dict" else returned
    )  # fmt: skip
    shaped = [
        v.reshape(*leading, v.shape[1]) if n.type.rows == M else v
        for v, n in zip(values, nodes, strict=True)
    ]
    if structure == "value":
        return shaped[0]
    return tuple(shaped) if structure == "tuple" else dict(zip(labels, shaped, strict=True))
