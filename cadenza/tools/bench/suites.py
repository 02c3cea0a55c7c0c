"""The suites by name, and which of a suite's cases a command asks for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from cadenza.tools.bench.accuracy import ACCURACY
from cadenza.tools.bench.case import DTYPES, Case, Suite
from cadenza.tools.bench.host import HOST
from cadenza.tools.bench.kernels import KERNELS, PRIMITIVE
from cadenza.tools.bench.layer import LAYER
from cadenza.tools.bench.loss import LOSS
from cadenza.tools.bench.model import MODEL
from cadenza.tools.bench.model_accuracy import MODEL_ACCURACY
from cadenza.tools.bench.model_loss import MODEL_LOSS
from cadenza.tools.bench.options import Options, split
from cadenza.tools.bench.stage import VARIANTS
from cadenza.tools.fault import Fault
from cadenza.tools.target import parse_sizes

OF_PROGRAMS = (KERNELS, LAYER, LOSS, ACCURACY, PRIMITIVE, HOST)
OF_MODELS = (MODEL, MODEL_ACCURACY, MODEL_LOSS)
SUITES: dict[str, Suite] = {suite.name: suite for suite in (*OF_PROGRAMS, *OF_MODELS)}


def find_suite(name: str | None) -> Suite:
    """The suite of a name. Raises Fault where there is none."""
    if name not in SUITES:
        asked = "no suite was named" if name is None else f"there is no suite {name!r}"
        raise Fault(f"{asked}: one of {', '.join(SUITES)}")
    return SUITES[name]


def chosen_cases(suite: Suite, options: Options) -> list[Case]:
    """The cases that options ask for, in order. Raises Fault for what a suite hasn't."""
    given = parse_sizes(options.size or [])
    dtypes = suite.dtypes if options.dtype is None else (_dtype(options.dtype),)
    every = [
        Case(suite.name, pattern, name, sizes, dtype)
        for dtype in dtypes
        for pattern in suite.patterns
        for name, sizes in _sizes_of(suite, pattern, given).items()
    ]
    found = [case for case in every if _matches(case, split(options.only), every)]
    first, step = _shard(options.shard)
    return found[first - 1 :: step]


def _sizes_of(
    suite: Suite, pattern: str, given: Mapping[str, int]
) -> Mapping[str, Mapping[str, int]]:
    if not given:
        return suite.sizes(pattern)
    known = {name for one in suite.patterns for name in suite.changed(one, {})}
    for name in given:
        if name not in known:
            raise Fault(f"{suite.name} has no size {name!r}: it has {', '.join(sorted(known))}")
    sizes = suite.changed(pattern, given)
    return {" ".join(f"{name}={size}" for name, size in sizes.items()): sizes}


def _matches(case: Case, only: Sequence[str], every: Sequence[Case]) -> bool:
    for name in only:
        if not any(name in _names(one) for one in every):
            patterns = ", ".join(dict.fromkeys(one.pattern for one in every))
            sizes = ", ".join(dict.fromkeys(one.size for one in every))
            raise Fault(f"--only {name!r} is none of the patterns {patterns} or sizes {sizes}")
    return not only or any(name in _names(case) for name in only)


def _names(case: Case) -> tuple[str, ...]:
    return case.pattern, case.size, f"{case.pattern}/{case.size}"


def _shard(text: str | None) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)/(\d+)", text or "1/1")
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise Fault(f"--shard {text!r} is no shard: write I/N, from 1/N to N/N")
    return int(found[1]), int(found[2])


def _dtype(name: str) -> str:
    if name not in DTYPES:
        raise Fault(f"unknown --dtype {name!r}: one of {', '.join(DTYPES)}")
    return name


def chosen_variants(suite: Suite, options: Options) -> tuple[str, ...]:
    """The variants that options ask for. Raises Fault for one that there isn't."""
    asked = split(options.variants)
    for name in asked:
        if name not in VARIANTS:
            raise Fault(f"there is no variant {name!r}: one of {', '.join(VARIANTS)}")
    return tuple(dict.fromkeys(asked)) or suite.variants
