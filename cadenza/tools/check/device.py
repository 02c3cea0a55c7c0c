"""A program on a GPU: whether its kernels agree with float64, at ragged and at large sizes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from cadenza.backends import has_triton
from cadenza.core.errors import ProgramError
from cadenza.tools.check.agreement import (
    Problem,
    Results,
    lasting_problem,
    results,
    upstream_of,
)
from cadenza.tools.check.findings import Finding
from cadenza.tools.check.operands import cast, drawn, index_limits
from cadenza.tools.check.subject import Subject
from cadenza.tools.check.tracing import graph_of
from cadenza.tools.target import Target

RAGGED = (1, 127, 129)
LARGE_ROWS = 512  # of the sizes of a large model: float64 beside it has to fit the memory
NONE = "no GPU that Triton drives is here"


def usable_device() -> torch.device | None:
    """The GPU to run on, or None."""
    return torch.device("cuda") if torch.cuda.is_available() and has_triton() else None


def device_finding(subject: Subject, device: torch.device, backend: str = "triton") -> Finding:
    """Whether outputs and gradients on a device are as near to float64 as torch's own there."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    check, ran = f"agrees on {name}", []
    for target, rows in _cases(subject):
        problem = _disagreement(target, rows, device, backend)
        if problem:
            sizes = f"{rows} rows of {target.signature.operands[0].columns}"
            return Finding(check, False, f"{sizes}: {problem[0]} in {subject.dtype}", problem[1])
        ran.append(rows)
    return Finding(check, True, f"{', '.join(map(str, ran))} rows, outputs and gradients")


def _cases(subject: Subject) -> Iterator[tuple[Target, int]]:
    """Small sizes with ragged rows, odd sizes where they are allowed, and the large ones."""
    yield from ((subject.small(), rows) for rows in RAGGED)
    odd = subject.small(**subject.odd())
    try:
        graph_of(odd)
        yield odd, RAGGED[-1]
    except ProgramError:
        pass  # the sizes have to fit one another
    yield subject.large(), min(LARGE_ROWS, subject.large().rows)


def _disagreement(target: Target, rows: int, device: torch.device, backend: str) -> Problem | None:
    """The first value that is too far off, and the cure."""
    dtype = getattr(torch, next(o.dtype for o in target.signature.operands if "float" in o.dtype))
    limits = index_limits(graph_of(target))

    def draw(seed: int) -> tuple[Results, Results, Results]:
        low = cast(drawn(target, rows, limits, device, seed), dtype)
        upstream = upstream_of(target.program.plain, low)
        return (
            results(partial(target.program, backend=backend), low, upstream),
            results(target.program.plain, low, upstream),
            results(target.program.plain, cast(low, torch.float64), cast(upstream, torch.float64)),
        )

    first = draw(0)
    problem = lasting_problem(
        lambda seed: [found.outputs for found in draw(seed)], [found.outputs for found in first]
    )
    if problem:
        return f"output {problem[0]}", problem[1]
    problem = lasting_problem(
        lambda seed: [found.gradients for found in draw(seed)], [found.gradients for found in first]
    )
    return problem and (f"gradient of {problem[0]}", problem[1])
