"""The document docs/numerics.md, from measured errors: what is above the bar is always named."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

BAR = 1.1  # deferred may be this much worse than textbook
COMMAND = "python -m cadenza.tools.numerics --write docs/numerics.md"

Report = Mapping[str, Mapping[str, Mapping[str, Any]]]


class Above(NamedTuple):
    """A value above the bar; `repeated` is its ratio over many more seeds."""

    block: str
    case: str
    value: str
    errors: Any
    repeated: float = math.nan

    @property
    def by_chance(self) -> bool:
        """Whether many more seeds bring it back under the bar."""
        return self.repeated <= BAR


class Cause(NamedTuple):
    """Why values of some blocks (all if empty) on some inputs are above the bar; none infinite."""

    title: str
    reason: str
    blocks: tuple[str, ...]
    cases: tuple[str, ...]
    values: tuple[str, ...]

    def explains(self, above: Above) -> bool:
        """Whether it is the reason for this value."""
        sides = zip((self.blocks, self.cases, self.values), above[:3], strict=True)
        fits = all(not known or found in known for known, found in sides)
        return fits and math.isfinite(above.errors.deferred)


CAUSES = (
    Cause(
        "An exact adjoint is rounded when `r` is multiplied in",
        "The incoming gradient is stored exactly, and textbook uses it as an operand as it is (for "
        "rotary heads, all but the values). Deferral stores `dqkv · r`, rounded once, and takes "
        "the gradients of the norm's weight and bias from its product.",
        ("gpt2", "norm-qkv"), (), ("d next_norm_bias", "d next_norm", "d norm"),
    ),
    Cause(
        "LayerNorm's mean is subtracted after rounding",
        "Backward subtracts the mean's part of `dW` from `(dz · r)ᵀ @ x1`: the product is of the "
        "stored, rounded `dz · r`, the part to subtract of the exact one, so they don't cancel.",
        ("gpt2",), ("mean of 16 deviations",), (),
    ),
)  # fmt: skip


def ratio(errors: Any) -> float:
    """Deferred over textbook; 1 where both are infinite or both are 0."""
    if errors.deferred == errors.textbook:
        return 1.0
    return errors.deferred / errors.textbook if errors.textbook else math.inf


def above_bar(report: Report) -> list[Above]:
    """The values whose ratio is above the bar."""
    return [
        Above(block, case, value, errors)
        for block, cases in report.items()
        for case, values in cases.items()
        for value, errors in values.items()
        if not ratio(errors) <= BAR
    ]


def document(
    report: Report, above: Sequence[Above], descriptions: Mapping[str, str],
    sizes: Mapping[str, int], counts: tuple[int, int],
) -> str:  # fmt: skip
    """The whole document; counts are those of seeds, and of seeds for what is above the bar."""
    seeds, repeats = counts
    size = ", ".join(f"{name} {number}" for name, number in sizes.items())
    parts = [
        INTRODUCTION.format(command=COMMAND, size=size, seeds=seeds, bar=BAR),
        _table(["input", "what it is"], descriptions.items()),
        f"## Block by block\n\n{SUMMARY}",
        _table(SUMMARY_HEADER, _summary(report, above)),
        "## Where deferred is worse",
        EXCEPTIONS.format(bar=BAR, seeds=seeds, repeats=repeats),
        *_exceptions(above),
        f"## Every value\n\n{VALUES}",
    ]
    for block, cases in report.items():
        parts += [f"### {block}", _table(["value", *cases], _values(cases))]
    return "\n\n".join(parts) + "\n"


def _summary(report: Report, above: Sequence[Above]) -> Iterator[list[str]]:
    for block, cases in report.items():
        for case, values in cases.items():
            worst = max(values, key=lambda v: ratio(values[v]))
            largest = [percent(max(e[form] for e in values.values())) for form in range(3)]
            over = [a for a in above if (a.block, a.case) == (block, case)]
            yield [block, case, *largest, f"{ratio(values[worst]):.2f}", worst, _verdict(over)]


def _verdict(above: Sequence[Above]) -> str:
    known = [a for a in above if not a.by_chance]
    if known:
        return f"**{len(known)} above**"
    return "holds over more seeds" if above else "holds"


def _exceptions(above: Sequence[Above]) -> Iterator[str]:
    remaining = list(above)
    for cause in (*CAUSES, UNEXPLAINED):
        found = [
            a for a in remaining if not a.by_chance and (cause is UNEXPLAINED or cause.explains(a))
        ]
        remaining = [a for a in remaining if a not in found]
        if found:
            yield f"### {cause.title}\n\n{cause.reason}"
            yield _table(EXCEPTION_HEADER, map(_exception, found))
    if remaining:
        yield f"### Under the bar over more seeds\n\n{CHANCE}"
        yield _table(EXCEPTION_HEADER, map(_exception, remaining))


def _exception(above: Above) -> list[str]:
    errors = [percent(error) for error in above.errors]
    ratios = [f"{ratio(above.errors):.2f}", f"{above.repeated:.2f}"]
    return [above.block, above.case, above.value, *errors, *ratios]


def _values(cases: Mapping[str, Mapping[str, Any]]) -> Iterator[list[str]]:
    for value in next(iter(cases.values())):
        yield [value, *(" / ".join(map(percent, values[value])) for values in cases.values())]


def percent(error: float) -> str:
    """Three digits of an error in per cent."""
    return f"{100 * error:#.3g}" if math.isfinite(error) else "inf"


def _table(header: Sequence[str], rows: Any) -> str:
    lines = [list(header), ["---"] * len(header), *map(list, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


SUMMARY_HEADER = (
    "block", "input", "deferred %", "textbook %", "torch %", "largest ratio", "of", "bar",
)  # fmt: skip
EXCEPTION_HEADER = (
    "block", "input", "value", "deferred %", "textbook %", "torch %", "ratio", "repeated",
)  # fmt: skip
UNEXPLAINED = Cause("Not explained", "No cause is known for these.", (), (), ())

INTRODUCTION = """# Numerics

How far is a stored result from the exact one? This page compares the deferred plan, which is what
Cadenza runs, with the textbook program (no factor leaves a product, no Euler's rule), and with
PyTorch. It is generated:

```
{command}
```

An error is the Frobenius norm of the difference from the oracle over that of the oracle: the same
function in float64, by PyTorch's autograd, on the same operands after they were rounded. Operands,
incoming gradients and stored matrices are bfloat16 (fp16 where the input says so); arithmetic is
float32 and rounds once where a value is stored, in deferred and textbook alike, both run by the
reference back end. `torch` is the author's function on tensors of the same dtype, one operation
after the other, each rounding its result.

Sizes: {size}.
Random operands of unit scale, weights that keep it; each figure is the median over
{seeds} seeds. The bar: deferred is at most {bar} times textbook for every output and gradient."""

SUMMARY = """The first three figures are the largest error of any output or gradient. The ratio is
deferred over textbook, for the value where it is largest."""

EXCEPTIONS = """Every value whose ratio over {seeds} seeds is above {bar}. The last column is the
ratio of root mean square errors over {repeats} seeds."""

CHANCE = """The norm of such a value is that of a few numbers (of one, where one column is large):
its error is that of a few roundings, and five seeds are few."""

VALUES = "Errors in per cent: deferred / textbook / torch. `d w` is the gradient of `w`."
