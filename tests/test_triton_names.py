"""Names of an author's own in emitted kernels: whatever operands are called, values agree."""

import pytest
import torch
from triton_plans import SMALL, assert_agrees, trials_of

from cadenza import lang as L
from cadenza.backends.triton.executable import Executable
from cadenza.core.pipeline import compile_program
from cadenza.core.plan_text import PairText
from cadenza.core.trace import Operand, Signature

ROWS, WIDTH = 21, 48
NAMES = [
    ("rows", "row_ok", "acc", "c"),  # a template's own
    ("x", "x_in", "x_out", "x_stride"),  # as pointers are called
    ("e1", "b1", "s1", "m1"),  # as values without a name are
    ("v1", "acc1", "r1", "t1"),  # as a plan calls them
    ("tl", "device", "range", "float"),
    ("BM", "W", "ROWS", "N"),
    ("lambda_", "triton", "h_ok", "c0"),
    ("c_0", "v3_0", "v3_1", "g64"),
]


def block(x, w, r, b):
    gate, up = L.split(L.linear(x, w) * L.rsqrt(L.row_mean(x * x) + 1e-5))
    return L.silu(gate) * up * r + b, L.row_sum(gate)


@pytest.mark.parametrize("names", NAMES, ids="-".join)
@pytest.mark.slow
def test_names_clash_with_nothing(names):
    shapes = [("M", WIDTH), (2 * WIDTH, WIDTH), ("M", 1), (1, WIDTH)]
    operands = tuple(Operand(n, *s, "float32") for n, s in zip(names, shapes, strict=True))

    named = {"block": block}
    exec(f"def program({', '.join(names)}): return block({', '.join(names)})", named)
    pair = compile_program(named["program"], Signature(operands, ()), needed=names, name="block")
    tensors = {o.name: torch.randn(ROWS if o.rows == "M" else o.rows, o.columns) for o in operands}
    for trial in trials_of(pair, tensors, ROWS):
        run = Executable(trial.plan, lambda kernel: SMALL, described=lambda: PairText(pair))
        for actual, expected in zip(run(list(trial.inputs), ROWS), trial.expected, strict=True):
            assert_agrees(actual, expected, 2e-6, floor=1e-5)
