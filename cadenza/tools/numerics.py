"""Rounding errors of every output and gradient, deferred beside textbook: docs/numerics.md.

    python -m cadenza.tools.numerics --write docs/numerics.md

Both forms are plans of the same program, run by the reference back end with the same rule (one
rounding where a value is stored); `torch` is the same function on tensors of the same dtype, where
every operation rounds. The oracle is that function in float64 on the same rounded operands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import typer

from cadenza.core.pipeline import differentiate_program
from cadenza.library.blocks import BUILT_IN
from cadenza.library.function import Program
from cadenza.library.specialize import Specialization
from cadenza.tools.numerics_text import Above, above_bar, document, ratio

Tensor = torch.Tensor
Operands = dict[str, Any]
Form = Callable[[Operands, Mapping[str, Tensor]], dict[str, Tensor]]

FROZEN = ("cos", "sin", "target")
STREAMS = ("x", "y", "bo")  # what the residual stream, which norms see, is made of
NORMED = ("w_gate_up", "w_up", "w_qkv", "w")  # weights whose product is scaled by a norm
POST_NORMED = ("gemma2",)
SIZES = {"M": 192, "D": 384, "F": 512, "V": 640, "head_dim": 64, "heads": 4, "key_value_heads": 2}
SEEDS = range(5)
REPEATS = range(5000)  # seeds for what is above the bar


class Errors(NamedTuple):
    """Relative errors of one value in three forms."""

    deferred: float
    textbook: float
    torch: float


class Case(NamedTuple):
    """What a block is run on: a name, a dtype, how the usual operands are changed, in words."""

    name: str
    dtype: torch.dtype
    change: Callable[[Operands], Operands]
    what: str


# --- operands -------------------------------------------------------------------------------------


def usual(name: str, sizes: Mapping[str, int]) -> Operands:
    """Operands of a built-in block, float32 and 2-D, from torch's generator."""
    query, key = sizes["heads"], sizes["key_value_heads"]
    columns = (query + 2 * key) * sizes["head_dim"]
    known = {**sizes, "N": columns, "A": query * sizes["head_dim"], "R": sizes["head_dim"] // 2}
    block = BUILT_IN[name]
    assert block.shapes is not None
    shapes = {n: [_size(part, known) for part in s.split()] for n, s in block.shapes.items()}
    operands: Operands = {n: _operand(n, *shapes[n]) for n in block.parameters if n in shapes}
    if name in POST_NORMED:  # these norms store their weights minus one
        operands |= {n: v - 1.0 for n, v in operands.items() if n.endswith("norm")}
    constants = {"head_dim": sizes["head_dim"], "key_value_heads": key}
    constants["heads"] = query if "key_value_heads" in block.parameters else query + key
    return operands | {n: v for n, v in constants.items() if n in block.parameters}


def _size(text: str, sizes: Mapping[str, int]) -> int:
    return math.prod(int(p) if p.isdigit() else sizes[p] for p in text.split("*"))


def _operand(name: str, rows: int, columns: int) -> Tensor:
    if name == "target":
        target = torch.randint(0, SIZES["V"], (rows, columns))
        target[::8] = -100
        return target
    if name in FROZEN:
        angles = torch.arange(rows)[:, None] / 1e4 ** torch.linspace(0, 1, columns)
        return angles.cos() if name == "cos" else angles.sin()
    if name.endswith("norm"):
        return 1.0 + 0.3 * torch.randn(rows, columns)
    random = torch.randn(rows, columns)
    return random * columns**-0.5 if name.startswith("w") else random


def scaled(operands: Operands, scale: float | Tensor) -> Operands:
    """Rows of the residual stream times `scale`."""
    least = scale.min() if isinstance(scale, Tensor) else scale
    return operands | {
        n: operands[n] * (least if n == "bo" else scale) for n in STREAMS if n in operands
    }


def _two_sizes(operands: Operands) -> Operands:
    """Rows of rms 1e-3 and 1e3 in turn."""
    odd = torch.arange(operands["x"].shape[0])[:, None] % 2 == 1
    return scaled(operands, torch.where(odd, 1e3, 1e-3))


def _far_mean(operands: Operands) -> Operands:
    """A mean of 16 standard deviations."""
    return operands | {"x": operands["x"] + 16.0}


def _outlier(operands: Operands) -> Operands:
    """One column 100 times as large as the others."""
    x = operands["x"].clone()
    x[:, 7] *= 100.0
    return operands | {"x": x}


def _near_range(operands: Operands) -> Operands:
    """Raw products of a normed stream pass 65504; without a norm, outputs come near it."""
    if not any(n.endswith("norm") for n in operands):
        return operands | {"x": operands["x"] * 16.0}
    large = {n: operands[n] * 8.0 for n in NORMED if n in operands}
    return operands | {"x": operands["x"] * 4e3} | large


CASES = (
    Case("usual", torch.bfloat16, dict, "no change"),
    Case("rms 1e-3", torch.bfloat16, partial(scaled, scale=1e-3), "rows of rms 1e-3"),
    Case("rms 1e3", torch.bfloat16, partial(scaled, scale=1e3), "rows of rms 1e3"),
    Case("rms 1e-3 and 1e3", torch.bfloat16, _two_sizes, "such rows in turn"),
    Case("mean of 16 deviations", torch.bfloat16, _far_mean,
         "x has a mean of 16 standard deviations"),
    Case("outlier column", torch.bfloat16, _outlier, "one column of x is 100 times as large"),
    Case("fp16", torch.float16, dict, "no change, in fp16"),
    Case("fp16 near its range", torch.float16, _near_range,
         "x of rms 4000 and, behind a norm, weights 8 times as large: products before the norm's"
         " factor have rms 32000 and pass 65504; without a norm, x of rms 16"),
)  # fmt: skip


# --- the three forms ------------------------------------------------------------------------------


def cast(operands: Operands, dtype: torch.dtype) -> Operands:
    """The operands with floating tensors in another dtype."""
    floats = {n: v for n, v in operands.items() if isinstance(v, Tensor) and v.is_floating_point()}
    return operands | {n: v.to(dtype) for n, v in floats.items()}


def wanted(operands: Operands) -> list[str]:
    """Names of the operands whose gradients are measured."""
    return [n for n, v in operands.items() if isinstance(v, Tensor) and n not in FROZEN]


def plain(block: Program, operands: Operands, adjoints: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Outputs and gradients by torch's own operations and autograd."""
    leaves = {n: operands[n].clone().requires_grad_() for n in wanted(operands)}
    found = _labelled(block.plain(**{**operands, **leaves}))
    given = [adjoints[n].to(y.dtype) for n, y in found.items()]
    gradients = torch.autograd.grad(list(found.values()), list(leaves.values()), given)
    named = {f"d {n}": g for n, g in zip(leaves, gradients, strict=True)}
    return {f"output {n}": y.detach() for n, y in found.items()} | named


def by_plan(block: Program, operands: Operands, deferral: bool | None) -> Form:
    """Outputs and gradients by a plan: as it is run (None), or without deferral (False)."""
    program = block.graph(**operands)
    pair = differentiate_program(program, wanted(operands), deferral=deferral)
    compiled = Specialization(pair, "reference", "")

    def form(operands: Operands, adjoints: Mapping[str, Tensor]) -> dict[str, Tensor]:
        named = {n: v for n, v in operands.items() if isinstance(v, Tensor)}
        rows = operands["x"].shape[0]
        results = compiled.forward_on(named, rows)
        own = dict(zip(program.labels, results, strict=False))
        given = [adjoints[n].to(y.dtype) for n, y in own.items()]
        gradients = compiled.backward_on(named, results, given, rows)
        return {f"output {n}": y for n, y in own.items()} | {
            f"d {n}": g for n, g in gradients.items()
        }

    return form


def forms(block: Program, operands: Operands) -> tuple[Form, ...]:
    """The three forms, in the order of Errors, compiled for operands like these."""
    plans = [by_plan(block, operands, deferral) for deferral in (None, False)]
    return *plans, partial(plain, block)


def _labelled(returned: Any) -> dict[str, Tensor]:
    values = returned if isinstance(returned, tuple) else (returned,)
    return {str(position): value for position, value in enumerate(values)}


# --- errors ---------------------------------------------------------------------------------------


def difference(actual: Tensor, oracle: Tensor) -> float:
    """The Frobenius norm of the difference; infinite if it isn't finite."""
    norm = (actual.double() - oracle).norm().item()
    return norm if math.isfinite(norm) else math.inf


def measured(block: Program, operands: Operands, given: Iterable[Form]) -> dict[str, list[float]]:
    """By value, its norm and the differences of forms from it, for random adjoints."""
    with torch.no_grad():
        exact = _labelled(block.plain(**cast(operands, torch.float64)))
    dtype = operands["x"].dtype
    wide = torch.float32  # columns are statistics, stored wide
    adjoints = {
        n: torch.randn(y.shape).to(dtype if y.shape[1] > 1 else wide) for n, y in exact.items()
    }
    oracle = plain(block, cast(operands, torch.float64), adjoints)
    found = [form(operands, adjoints) for form in given]
    return {
        n: [value.norm().item(), *(difference(f[n], value) for f in found)]
        for n, value in oracle.items()
    }


def errors(
    name: str,
    case: Case,
    sizes: Mapping[str, int] = SIZES,
    seeds: Iterable[int] = SEEDS,
    compiled: Callable[[Program, Operands], Iterable[Form]] = forms,
) -> dict[str, Errors]:
    """By value of a block, the errors of each form over all seeds together."""
    block, runs, given = BUILT_IN[name], [], None
    for seed in seeds:
        torch.manual_seed(seed)
        operands = cast(case.change(usual(name, sizes)), case.dtype)
        given = given or tuple(compiled(block, operands))
        runs.append(measured(block, operands, given))
    return {value: _relative([run[value] for run in runs]) for value in runs[0]}


def _relative(runs: Sequence[Sequence[float]]) -> Errors:
    """Root mean squares of differences over that of norms: one seed's norm may be near 0."""
    norm, *differences = (math.hypot(*column) for column in zip(*runs, strict=True))
    return Errors(*(found / norm if norm else found for found in differences))


def repeated(above: Sequence[Above], progress: Callable[[str], None] = str) -> list[Above]:
    """The same values above the bar, each with its ratio over many more seeds."""
    cases, known = {case.name: case for case in CASES}, {}
    for block, case in dict.fromkeys(a[:2] for a in above if math.isfinite(ratio(a.errors))):
        progress(f"{block}, {case}, {len(REPEATS)} seeds")
        known[block, case] = errors(block, cases[case], seeds=REPEATS)

    def again(a: Above) -> float:
        if not math.isfinite(ratio(a.errors)):
            return math.inf
        return ratio(known[a.block, a.case][a.value])

    return [a._replace(repeated=again(a)) for a in above]


def report(progress: Callable[[str], None] = str) -> dict[str, dict[str, dict[str, Errors]]]:
    """All errors: by block, case and value."""
    found: dict[str, dict[str, dict[str, Errors]]] = {}
    for name in BUILT_IN:
        found[name] = {}
        for case in CASES:
            progress(f"{name}, {case.name}")
            found[name][case.name] = errors(name, case)
    return found


def main(write: Path | None = None) -> None:
    """Measures everything; writes the document, or prints it."""
    progress = partial(typer.echo, err=True)
    found = report(progress)
    descriptions = {case.name: case.what for case in CASES}
    above = repeated(above_bar(found), progress)
    text = document(found, above, descriptions, SIZES, (len(SEEDS), len(REPEATS)))
    if write is None:
        typer.echo(text)
    else:
        write.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
