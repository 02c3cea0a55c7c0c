"""The checks that tests of programs share; each raises AssertionError and says what differs.

`check_program` holds a program to its own `plain` and to differences of itself, at float64.
`assert_close` is the tolerance of every other dtype. `check_round_trip` holds a graph to its
printed form. None of them has a bound that any result would pass: test_checkers proves it.
"""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from cadenza.core.ir import Graph, equal, verify
from cadenza.core.ops import Op, TypeRuleError
from cadenza.core.parse import parse
from cadenza.core.text import digest, show
from cadenza.library.function import Program

Tensor = torch.Tensor
Function = Callable[..., Any]
STEP = 1e-6  # of a central difference: its error is about STEP² of a value's third derivative


def units_in_the_last_place(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance from each value to the next number of `dtype`, at float64."""
    limits = torch.finfo(dtype)
    exponent = torch.frexp(values.double()).exponent - 1
    spacing = limits.eps * 2.0 ** exponent.double()
    least = limits.smallest_normal * limits.eps
    return torch.where(values.isfinite() & (values != 0), spacing, least).clamp_min(least)


def error_of(actual: Tensor, oracle: Tensor) -> float:
    """The Frobenius norm of the difference; infinite where one is not finite and the other is."""
    actual, oracle = actual.detach().double(), oracle.detach().double()
    same = (actual == oracle) | (actual.isnan() & oracle.isnan())
    difference = torch.where(same, 0.0, actual - oracle)
    return torch.where(difference.isfinite(), difference, torch.inf).norm().item()


def assert_close(actual: Tensor, oracle: Tensor, torch_result: Tensor) -> None:
    """An error at most twice torch's own at this dtype, plus one unit in the last place.

    `oracle` is the same computation at float64, `torch_result` by torch at the dtype of `actual`.
    """
    assert oracle.dtype == torch.float64, f"an oracle of {oracle.dtype}"
    for result in (oracle, torch_result):
        assert actual.shape == result.shape, f"{list(actual.shape)}, not {list(result.shape)}"
    assert actual.dtype == torch_result.dtype, f"{actual.dtype}, not {torch_result.dtype}"
    last_place = units_in_the_last_place(oracle.detach(), actual.dtype).norm().item()
    bound = 2 * error_of(torch_result, oracle) + last_place
    error = error_of(actual, oracle)
    assert error <= bound, f"error {error:.3g}, at most {bound:.3g} of {oracle.norm():.3g}"


def double_copies(operands: Mapping[str, Any]) -> dict[str, Any]:
    """The operands with every floating tensor as a float64 leaf that requires a gradient."""
    return {
        name: value.detach().double().clone().requires_grad_()
        if isinstance(value, Tensor) and value.is_floating_point()
        else value
        for name, value in operands.items()
    }


def labelled(returned: Any) -> dict[str, Tensor]:
    """What a program returned, by label."""
    if isinstance(returned, dict):
        return returned
    values = returned if isinstance(returned, tuple) else (returned,)
    return {str(position): value for position, value in enumerate(values)}


def upstream_of(outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A random incoming gradient for each output that has a derivative."""
    return {name: torch.randn_like(y) for name, y in outputs.items() if y.requires_grad}


def gradients_of(
    outputs: Mapping[str, Tensor], operands: Mapping[str, Any], upstream: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The gradient of each operand that requires one; zeros where none comes."""
    wanted = {n: v for n, v in operands.items() if isinstance(v, Tensor) and v.requires_grad}
    given = {n: g for n, g in upstream.items() if outputs[n].requires_grad}
    if not wanted or not given:
        return {name: torch.zeros_like(value) for name, value in wanted.items()}
    found = torch.autograd.grad(
        [outputs[name] for name in given], list(wanted.values()), list(given.values()),
        allow_unused=True,
    )  # fmt: skip
    return {
        name: torch.zeros_like(value) if gradient is None else gradient
        for (name, value), gradient in zip(wanted.items(), found, strict=True)
    }


def assert_same(
    actual: Mapping[str, Tensor], oracle: Mapping[str, Tensor], floor: float = 0.0
) -> None:
    """Equal names, shapes, dtypes, and values to 1e-12 of the norm.

    `floor` is the size of a value's summands where these can cancel: it is added to the root mean
    square of the oracle, so that rounding is no difference.
    """
    assert list(actual) == list(oracle), f"{list(actual)}, not {list(oracle)}"
    for name, value in actual.items():
        expected = oracle[name]
        assert value.shape == expected.shape, f"{name}: {value.shape}, not {expected.shape}"
        assert value.dtype == expected.dtype, f"{name}: {value.dtype}, not {expected.dtype}"
        error, finite = error_of(value, expected), expected.detach()[expected.isfinite()].double()
        bound = 1e-12 * (finite.norm().item() + floor * expected.numel() ** 0.5)
        assert error <= bound, f"{name}: error {error:.3g} of {finite.norm():.3g}\n{value}"


def check_against(
    program: Function, oracle: Function, operands: Mapping[str, Any], floor: float = 0.0
) -> None:
    """Outputs and gradients of two functions agree, for random incoming gradients."""
    operands = double_copies(operands)
    outputs, expected = labelled(program(**operands)), labelled(oracle(**operands))
    assert_same(outputs, expected, floor)
    upstream = upstream_of(expected)
    actual = gradients_of(outputs, operands, upstream)
    assert_same(actual, gradients_of(expected, operands, upstream), floor)


def check_direction(program: Function, operands: Mapping[str, Any]) -> None:
    """The gradient along one random direction equals a central difference of the program."""
    operands = double_copies(operands)
    outputs = labelled(program(**operands))
    upstream = upstream_of(outputs)
    gradients = gradients_of(outputs, operands, upstream)
    direction = {name: torch.randn_like(gradient) for name, gradient in gradients.items()}
    analytic = sum((gradients[n] * d).sum().item() for n, d in direction.items())
    sides = []
    for sign in (1.0, -1.0):
        moved = {name: operands[name].detach() + sign * STEP * d for name, d in direction.items()}
        sides.append(labelled(program(**{**operands, **moved})))
    slopes = {name: (sides[0][name] - sides[1][name]) / (2 * STEP) for name in upstream}
    numeric = sum((slopes[name] * g).sum().item() for name, g in upstream.items())
    size = sum(gradient.norm().item() for gradient in gradients.values())
    rounding = sum((outputs[name] * g).norm().item() for name, g in upstream.items())
    bound = 1e-6 * size + 1e-9 * rounding
    assert abs(numeric - analytic) <= bound, f"slope {numeric:.9g}, by gradients {analytic:.9g}"


def check_program(program: Program, *args: Any, **kwargs: Any) -> None:
    """A program equals its `plain` at float64, value and gradients, and differences of itself."""
    operands = dict(zip(program.parameters, args, strict=False)) | kwargs
    check_against(program, program.plain, operands)
    check_direction(program, operands)


def check_round_trip(graph: Graph) -> None:
    """Printing and parsing gives an equal graph of the same digest."""
    read = verify(parse(show(graph)))
    assert equal(read, graph), f"read back as\n{show(read)}from\n{show(graph)}"
    assert digest(read) == digest(graph), f"another digest of\n{show(graph)}"


def check_digest(graph: Graph) -> None:
    """Another value of any attribute of any node gives another digest."""
    own = digest(graph)
    for node in graph.nodes():
        original = node.attributes, node.type
        for name, value in node.attributes.items():
            node.attributes = original[0] | {name: _another(value)}
            with contextlib.suppress(TypeRuleError):
                node.type = node.op.infer(tuple(i.type for i in node.inputs), node.attributes)
            changed = digest(graph) != own
            node.attributes, node.type = original
            derived = (node.op, name) == (Op.INPUT, "kind")  # from the dtype, which is printed
            assert changed or derived, f"{name} of {node!r} is not in\n{show(graph)}"


def _another(value: Any) -> Any:
    """A different value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return f"{value}_"
    return value + 1 if value + 1 != value else 0.0


def check_rounding(program: Program, expected: Function, dtype: torch.dtype) -> None:
    """A program over x, y [127, 6] and w [4, 6] gives the numbers of `expected`, bit by bit.

    `expected` works in the compute type and rounds where the program should, but for its result.
    """
    x, y, w = (torch.randn(rows, 6, dtype=dtype) for rows in (127, 127, 4))
    compute = torch.promote_types(dtype, torch.float32)
    actual, plain = program(x, y, w), program.plain(x, y, w)
    assert actual.dtype == plain.dtype, f"{actual.dtype}, not {plain.dtype}"
    result = expected(*(v.to(compute) for v in (x, y, w)), dtype).to(plain.dtype)
    assert torch.equal(actual, result), f"{(actual != result).sum()} of {result.numel()} differ"
