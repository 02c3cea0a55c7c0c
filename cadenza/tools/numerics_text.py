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
    for known, (title, reason) in ((False, WORSE), (True, CHANCE)):
        found = [a for a in above if a.by_chance == known]
        if found:
            yield f"### {title}\n\n{reason}"
            yield _table(EXCEPTION_HEADER, map(_exception, found))
    if not above:
        yield "None."


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
WORSE = "Above the bar", "More seeds do not bring these under it."
CHANCE = (
    "Under the bar over more seeds",
    "Such a value is a few numbers (one, where one column is large): its error is that of a few "
    "roundings.",
)

INTRODUCTION = """# Numerics

How far is a stored result from the exact one? This page compares the plan that Cadenza runs, which
is deferred, with the textbook program (no factor leaves a product, no Euler's rule), and with
PyTorch. In fp16 Cadenza runs the textbook form, since a value that a norm has not scaled yet may be
outside of its range. The page is generated:

```
{command}
```

An error is the Frobenius norm of the difference from the oracle over that of the oracle, both over
all seeds together. The oracle is the same function in float64, by PyTorch's autograd, on the same
operands after they were rounded. Operands, incoming gradients and stored matrices are bfloat16
(fp16 where the input says so); arithmetic is float32 and rounds once where a value is stored, in
deferred and textbook alike, both run by the reference back end. `torch` is the author's function on
tensors of the same dtype, one operation after the other, each rounding its result.

Sizes: {size}.
Random operands of unit scale, weights that keep it; {seeds} seeds. The bar: deferred is at most
{bar} times textbook for every output and gradient."""

SUMMARY = """The first three figures are the largest error of any output or gradient. The ratio is
deferred over textbook, for the value where it is largest."""

EXCEPTIONS = """Every value whose ratio over {seeds} seeds is above {bar}. The last column is the
ratio over {repeats} seeds."""

VALUES = "Errors in per cent: deferred / textbook / torch. `d w` is the gradient of `w`."
