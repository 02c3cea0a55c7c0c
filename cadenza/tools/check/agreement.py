"""What two functions give for the same arguments, outputs and gradients, and how far they differ.

In float64 a difference is rounding, or a fault. In other dtypes a program may be off by twice what
PyTorch's own operations are off at that dtype, plus one unit in the last place. The error of a few
numbers is a matter of luck: what fails on one draw of operands is judged by several together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from cadenza.tools.check.operands import is_float

Tensor = torch.Tensor
Tensors = dict[str, Tensor]
Function = Callable[..., Any]
Problem = tuple[str, str]  # what is wrong, and the cure
ROUNDING = 1e-12  # of a value's size, in float64
# Of central differences, each along a direction of its own: one that crosses a jump tells nothing,
# a short one less of steep functions; a wrong gradient is wrong along each.
STEPS = (1e-6, 1e-6, 1e-7)
SLOPE = 1e-5  # of a gradient's size
DRAWS = 8  # of operands, where the first one fails


class Results(NamedTuple):
    """Outputs by label, and gradients by operand."""

    outputs: Tensors
    gradients: Tensors


def labelled(returned: Any) -> Tensors:
    """What a program returned, by label."""
    if isinstance(returned, dict):
        return returned
    values = returned if isinstance(returned, tuple) else (returned,)
    return {str(position): value for position, value in enumerate(values)}


def leaves_of(arguments: Mapping[str, Any]) -> Tensors:
    """Fresh leaves for all floating operands."""
    return {n: v.detach().clone().requires_grad_() for n, v in arguments.items() if is_float(v)}


def upstream_of(function: Function, arguments: Mapping[str, Any]) -> Tensors:
    """A random incoming gradient for each output that has a derivative, in its dtype."""
    outputs = labelled(function(**{**arguments, **leaves_of(arguments)}))
    outputs = {name: y for name, y in outputs.items() if y.requires_grad}
    return {name: _normal(y, seed) for seed, (name, y) in enumerate(outputs.items(), 1)}


def _normal(like: Tensor, seed: int) -> Tensor:
    generator = torch.Generator(like.device).manual_seed(seed)
    options = {"dtype": torch.float64, "device": like.device, "generator": generator}
    return torch.randn(like.shape, **options).to(like.dtype)


def results(
    function: Function, arguments: Mapping[str, Any], upstream: Mapping[str, Tensor]
) -> Results:
    """Outputs and gradients of all floating operands, zeros where none comes."""
    leaves = leaves_of(arguments)
    outputs = labelled(function(**{**arguments, **leaves}))
    given = {n: g for n, g in upstream.items() if n in outputs and outputs[n].requires_grad}
    gradients = {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    if given and leaves:
        adjoints = [g.to(outputs[n].dtype) for n, g in given.items()]
        sources = [outputs[n] for n in given]
        found = torch.autograd.grad(sources, list(leaves.values()), adjoints, allow_unused=True)
        gradients |= {n: g for n, g in zip(leaves, found, strict=True) if g is not None}
    return Results({n: y.detach() for n, y in outputs.items()}, gradients)


def difference(actual: Tensor, oracle: Tensor) -> float:
    """The Frobenius norm of the difference; infinite where only one is finite, or shapes differ."""
    if actual.shape != oracle.shape:
        return float("inf")
    actual, oracle = actual.detach().double(), oracle.detach().double()
    same = (actual == oracle) | (actual.isnan() & oracle.isnan())
    apart = torch.where(same, 0.0, actual - oracle)
    return torch.where(apart.isfinite(), apart, torch.inf).norm().item()


def size_of(value: Tensor) -> float:
    """The Frobenius norm of what is finite."""
    value = value.detach().double()
    return torch.where(value.isfinite(), value, 0.0).norm().item()


def relative(actual: Tensor, oracle: Tensor) -> float:
    """The difference over the size of the oracle; the difference itself where that is nothing."""
    return difference(actual, oracle) / (size_of(oracle) or 1.0)


def is_rounding(actual: Tensor, oracle: Tensor, allowed: float = ROUNDING) -> bool:
    """Whether two values of float64 are the same but for rounding."""
    floor = size_of(oracle) + oracle.numel() ** 0.5
    return difference(actual, oracle) <= allowed * floor


def last_place(oracle: Tensor, dtype: torch.dtype) -> float:
    """The size of one unit in the last place of a dtype, in every element of a value."""
    limits = torch.finfo(dtype)
    exponent = torch.frexp(oracle.double()).exponent - 1
    spacing = limits.eps * 2.0 ** exponent.double()
    least = limits.smallest_normal * limits.eps
    known = oracle.isfinite() & (oracle != 0)
    return torch.where(known, spacing, least).clamp_min(least).norm().item()


WIDER = "L.cast(value, 'float32') for what is stored, or a form in which less cancels"
RANGE = "a value that no scale has reduced yet passes the dtype's range: scale before storing"


def problem_of(ours: Tensors, by_torch: Tensors, oracle: Tensors) -> Problem | None:
    """The first value that is too far off in a dtype, by how much, and the cure."""
    for label, exact in oracle.items():
        if exact.isfinite().all() and not ours[label].isfinite().all():
            return f"{label} is not finite", RANGE
        if not is_as_good(ours[label], exact, by_torch[label]):
            own, other = (relative(v[label], exact) for v in (ours, by_torch))
            return f"{label} is {own:.1e} off, PyTorch's {other:.1e}", WIDER
    return None


def lasting_problem(
    draw: Callable[[int], Sequence[Tensors]], first: Sequence[Tensors]
) -> Problem | None:
    """What is too far off in a dtype, by this program, by PyTorch and exactly: over all draws.

    `draw(seed)` gives all three for other operands; `first` is that of seed 0.
    """
    problem = problem_of(*first)
    if problem is None or problem[1] == RANGE:
        return problem
    drawn = [first, *(draw(seed) for seed in range(1, DRAWS))]
    together = [
        {label: torch.stack([each[label] for each in one]) for label in one[0]}
        for one in zip(*drawn, strict=True)
    ]
    return problem_of(*together)


def worst_of(ours: Tensors, by_torch: Tensors, oracle: Tensors) -> str:
    """How far off the worst value is, and the same by torch's operations."""
    errors = [(relative(ours[n], y), relative(by_torch[n], y)) for n, y in oracle.items()]
    own, other = max(errors, default=(0.0, 0.0))
    return f"{own:.1e}, PyTorch {other:.1e}"


def is_as_good(actual: Tensor, oracle: Tensor, by_torch: Tensor) -> bool:
    """Whether a value is off by at most twice what torch's is, plus one unit in the last place."""
    if not actual.is_floating_point():
        return True  # a condition, which rounding may turn
    stock = difference(by_torch.to(actual.dtype), oracle)
    return difference(actual, oracle) <= 2 * stock + last_place(oracle, actual.dtype)


def slopes_agree(
    function: Function, arguments: Mapping[str, Any], name: str, found: Results,
    upstream: Mapping[str, Tensor],
) -> tuple[bool, float]:  # fmt: skip
    """Whether central differences along one operand confirm its gradient; the least deviation.

    A deviation is relative to the gradient's size.
    """
    gradient = found.gradients[name]
    floor = 1e-9 * sum(size_of(found.outputs[n] * g) for n, g in upstream.items())
    bound = SLOPE * gradient.norm().item() + floor
    apart = []
    for seed, step in enumerate(STEPS):
        direction = _normal(gradient, seed)
        moved = [{**arguments, name: arguments[name] + s * direction} for s in (step, -step)]
        slope = _difference_of(function, moved, upstream) / (2 * step)
        apart.append(abs(slope - (gradient * direction).sum()))
    least = float(min(apart, default=0.0))
    return least <= bound, least / (gradient.norm().item() or 1.0)


def _difference_of(
    function: Function, sides: Sequence[Mapping[str, Any]], upstream: Mapping[str, Tensor]
) -> Tensor:
    """How much the sum of outputs, each times what comes back to it, differs between two calls."""
    with torch.no_grad():
        first, second = (labelled(function(**arguments)) for arguments in sides)
    return torch.stack([((first[n] - second[n]) * g).sum() for n, g in upstream.items()]).sum()
