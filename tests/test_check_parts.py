"""The parts of `cadenza check`: its own tolerance, faults planted below it, compiling, devices."""

import functools
import re
import shutil
from pathlib import Path

import pytest
import torch
from planted import forget

import cadenza as cz
from cadenza import lang as L
from cadenza.backends import meaning
from cadenza.backends.triton.compiled import Report
from cadenza.backends.triton.configuration import Configuration
from cadenza.backends.triton.target import Target
from cadenza.core import vjp
from cadenza.core.errors import ProgramError
from cadenza.core.ops import Op
from cadenza.library.variants import Variant
from cadenza.tools.check import agreement, compiling, device, timing
from cadenza.tools.check.agreement import Results
from cadenza.tools.check.kernels import CURES, OTHERWISE, cure_of, plan_findings
from cadenza.tools.check.operands import drawn
from cadenza.tools.check.run import judge
from cadenza.tools.check.subject import Subject
from cadenza.tools.explain import explain

CPU = torch.device("cpu")
SIZES = {"M": 64, "D": 48, "F": 32, "N": 32}


def subject(function, shapes, given=SIZES, dtype="bfloat16"):
    """An epilogue as a subject, for kernels at small sizes, too."""
    program = cz.epilogue(function, shapes=shapes)
    return Subject(function.__name__, Variant(program, program.shapes, {}), given, dtype)


def swish(acc, bias):
    z = acc + bias
    return z * L.sigmoid(z)


def bounded(acc, bias):
    return L.softcap(acc + bias, 2.0), L.row_sum(acc**2)


SWISH = {"x": "M D", "w": "F D", "bias": "1 F"}


def failing(judgement):
    return {f.check: f.cure for f in judgement.findings if f.holds is False}


# --- faults below it ------------------------------------------------------------------------------


def test_a_derivative_that_is_off_by_a_little_fails_every_gradient(monkeypatch):
    forget(monkeypatch)
    off = (lambda g, y, x: g * y * (1.0005 - y),)
    monkeypatch.setitem(vjp.DERIVATIVES, Op.SIGMOID, off)
    found = failing(judge(subject(swish, SWISH), []))
    assert {"gradient of x", "gradient of w", "gradient of bias", "ragged rows"} <= set(found)
    assert all("a fault of Cadenza's" in cure for cure in found.values())


def test_a_value_that_is_off_by_a_little_fails(monkeypatch):
    forget(monkeypatch)
    monkeypatch.setitem(meaning.MEANING, Op.SIGMOID, lambda x: torch.sigmoid(x) * (1 + 1e-9))
    found = failing(judge(subject(swish, SWISH), []))
    assert "a fault of Cadenza's" in found["value"]


def test_differences_catch_a_gradient_that_is_off_by_a_little():
    x = torch.randn(20, dtype=torch.float64)
    upstream = {"0": torch.randn(20, dtype=torch.float64)}

    def cubes(x):
        return x**3

    for factor, holds in ((1.0, True), (1.0005, False)):
        found = Results({"0": x**3}, {"x": factor * 3 * x**2 * upstream["0"]})
        said, apart = agreement.slopes_agree(cubes, {"x": x}, "x", found, upstream)
        assert said is holds
        assert (apart > 1e-5) is not holds


def test_in_low_precision_twice_torchs_error_is_allowed_and_no_more():
    oracle = torch.randn(1000, dtype=torch.float64)
    noise = 1e-2 * torch.randn(1000, dtype=torch.float64)
    stock = oracle + noise
    assert agreement.is_as_good((oracle + 1.9 * noise).float(), oracle, stock)
    assert not agreement.is_as_good((oracle + 2.1 * noise).float(), oracle, stock)
    assert agreement.is_as_good(oracle.bfloat16(), oracle, oracle), "one rounding"
    assert not agreement.is_as_good(oracle.bfloat16() * 1.02, oracle, oracle)


def test_an_unlucky_number_is_judged_by_several_draws():
    """One number errs by more than twice another's as often as not, though both err alike."""
    generator = torch.Generator().manual_seed(0)
    errors = torch.randn((2, agreement.DRAWS), dtype=torch.float64, generator=generator)
    errors[:, 0] = torch.tensor([0.9, 0.1])

    def draw(seed, worse=1.0):
        ours, stock = (1.0 + 0.1 * errors[:, seed] * torch.tensor([worse, 1.0])).tolist()
        three = (torch.tensor([v], dtype=torch.float64) for v in (ours, stock, 1.0))
        first, second, exact = ({"slope": v} for v in three)
        narrow = {"slope": first["slope"].bfloat16()}
        return narrow, {"slope": second["slope"].bfloat16()}, exact

    assert agreement.problem_of(*draw(0)), "the first draw alone fails"
    assert agreement.lasting_problem(draw, draw(0)) is None
    worse = functools.partial(draw, worse=6.0)
    assert "slope is" in agreement.lasting_problem(worse, worse(0))[0]


def test_what_is_not_finite_is_a_problem_without_other_draws():
    one, exact = {"y": torch.tensor([torch.inf])}, {"y": torch.tensor([1e6], dtype=torch.float64)}
    assert agreement.lasting_problem(None, (one, one, exact)) == (
        "y is not finite", agreement.RANGE,
    )  # fmt: skip


def test_infinity_agrees_with_nothing_finite():
    one, other = torch.tensor([1.0, torch.inf]), torch.tensor([1.0, 2.0])
    assert agreement.difference(one, one) == 0.0
    assert agreement.difference(one, other) == torch.inf
    assert not agreement.is_rounding(one[:1], other)


# --- operands -------------------------------------------------------------------------------------


def test_operands_are_what_their_declaration_says():
    program = cz.block(lambda x, w, b, s, t, seed, m: L.where(m, x * b * s, 0.0), shapes={
        "x": "M D", "w": "V D", "b": "1 D", "s": "1 1", "t": "M 1 int64", "seed": "1 1 int64",
        "m": "M D bool",
    })  # fmt: skip
    target = Subject("f", Variant(program, program.shapes, {}), {}, "float16").small()
    made = drawn(target, 1000, {"t": 3})
    shapes = {name: tuple(value.shape) for name, value in made.items()}
    assert shapes == {
        "x": (1000, 64), "w": (80, 64), "b": (64,), "s": (), "t": (1000,), "seed": (),
        "m": (1000, 64),
    }  # fmt: skip
    assert set(made["t"].tolist()) == {0, 1, 2}
    assert made["m"].dtype == torch.bool
    assert 0.5 <= made["b"].min() <= made["b"].max() <= 1.5
    assert made["x"].dtype == torch.float64
    assert all(torch.equal(v, drawn(target, 1000, {"t": 3})[n]) for n, v in made.items())
    assert [o.dtype for o in target.signature.operands][:5] == ["float16"] * 4 + ["int64"]
    assert target.needed == ("x", "w", "b", "s")


def test_a_third_word_of_a_shape_is_a_dtype_of_what_is_no_float():
    program = cz.block(lambda x, t: L.pick(x, t), shapes={"x": "M D", "t": "M 1 int32"})
    assert program.shapes == {"x": "M D", "t": "M 1"}
    assert program.dtypes == {"t": "int32"}
    x, t = torch.randn(3, 5), torch.tensor([1, 0, 4])
    assert torch.equal(program(x, t)[:, 0], x[torch.arange(3), t])
    for word in ("float32", "D", "int64 1"):
        with pytest.raises(ProgramError, match="shapes that don't declare operands"):
            cz.block(lambda x: x, shapes={"x": f"M D {word}"})


# --- kernels --------------------------------------------------------------------------------------


def test_forward_that_moves_more_than_the_unfused_program_fails():
    found = explain(subject(swish, SWISH).large())
    forward, *_ = plan_findings(found, "h100")
    assert forward.holds
    found.unfused["forward"] = found.unfused["forward"][:1]
    forward, *_ = plan_findings(found, "h100")
    assert not forward.holds
    assert "programs of its parts" in forward.cure


def test_every_refusal_of_a_template_has_a_cure_of_its_own():
    folder = Path(compiling.ROOT / "cadenza/backends/triton")
    raised = r"Unsupported\(\s*f?[\"'](.+?)[\"']"
    texts = [t for p in folder.glob("*.py") for t in re.findall(raised, p.read_text("utf-8"))]
    ours = (
        "a product of", "a plain kernel with", "pairs at", "float32 is multiplied", "tiles of", "{",
    )  # fmt: skip
    asked = [t for t in texts if not t.startswith(ours)]
    assert len(asked) >= 10
    assert [t for t in asked if cure_of(t) == OTHERWISE] == []
    assert [part for part in CURES if not any(part in t for t in texts)] == []


# --- compiling ------------------------------------------------------------------------------------


def emitted(name="F1", tile=None):
    return compiling.Emitted(name, compiling.Kernel("text", {}, {}, {}), tile)


def test_what_does_not_fit_is_named_with_its_cure():
    fits = compiling.Compiled(emitted("B1"), Report(80, 0, 1024))
    spilled = compiling.Compiled(emitted(), Report(255, 64, 1024))
    large = compiling.Compiled(emitted("F2"), Report(100, 0, 300_000))
    broken = compiling.Compiled(emitted("F3"), "the compiler crashed")
    held = compiling.compile_finding([fits], "h100")
    assert held == ("compiles for h100", True, "1 kernels, at most 80 registers and 1 KiB of "
                    "shared memory", "")  # fmt: skip
    found = compiling.compile_finding([fits, spilled, large, broken], "h100")
    assert found.holds is False
    assert found.figure.splitlines() == [
        "F1: 64 bytes a thread spilled at 255 registers",
        "F2: 300000 bytes of shared memory, at most 232448",
        "F3: the compiler crashed",
    ]
    assert found.cure == compiling.LIGHTER
    assert compiling.compile_finding([large], "h100").cure == compiling.SMALLER
    assert compiling.compile_finding([broken], "h100").cure == compiling.REPORT
    assert compiling.compile_finding([], "h100").holds is None


def test_a_tile_half_as_wide_spares_a_kernel_that_spills():
    tile = Configuration(128, 256, 64)
    spilled, fits = Report(255, 64, 1024), Report(128, 0, 1024)
    spared = compiling.Compiled(emitted(tile=tile), spilled, fits)
    found = compiling.compile_finding([spared], "h100")
    assert found.holds
    assert "F1 spills 64 bytes by its default tile, none by one half as wide" in found.figure
    assert spared.as_json("h100")["tile"] == [128, 256, 64]
    assert spared.as_json("h100")["half as wide"]["spilled"] == 0
    assert not compiling.compile_finding([spared._replace(narrow=spilled)], "h100").holds
    assert not compiling.compile_finding([spared._replace(narrow="no")], "h100").holds


def test_kernels_survive_the_way_to_another_process():
    found = explain(subject(swish, SWISH).large())
    kernels = compiling.emitted_kernels(found, "h100")
    assert {e.name for e in kernels} >= {"F1", "B1", "B2", "B3"}
    for one in kernels:
        assert compiling.Kernel(**compiling.json.loads(one.kernel.line)).line == one.kernel.line
    narrow = compiling.emitted_kernels(found, "h100", {"F1": Configuration(BN=64)})
    tiles = {e.name: e.tile.BN for e in narrow if e.tile}
    assert tiles["F1"] != {e.name: e.tile.BN for e in kernels if e.tile}["F1"]


@pytest.fixture
def caches(tmp_path, monkeypatch):
    """Compiled kernels go to a folder of the test."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("CADENZA_CACHE", str(tmp_path / "kernels"))
    monkeypatch.setattr(compiling, "_REPORTS", {})


@pytest.mark.slow
def test_kernels_are_compiled_for_the_gpus_that_are_named(caches):
    judgement = judge(subject(swish, SWISH), ["h100", "a100"])
    assert judgement.holds, judgement.findings
    data = judgement.compiled
    assert {d["target"] for d in data} == {"sm_90", "sm_80"}
    assert {d["kernel"] for d in data} >= {"F1", "B1", "B2", "B3"}
    assert all(0 < d["registers"] <= 255 and d["spilled"] == 0 for d in data)


@pytest.mark.slow
def test_a_kernel_that_spills_is_told_from_one_that_does_not(caches):
    found = explain(subject(swish, SWISH, {}).large())
    crowded = Configuration(128, 256, 64, warps=4, stages=3)  # 256 sums a thread
    made = [
        next(e for e in compiling.emitted_kernels(found, "h100", tiles) if e.name == "F1")
        for tiles in ({"F1": crowded}, {})
    ]
    target = Target.named("sm_90")
    spilled, fits = compiling._reports([e.kernel for e in made], target)
    assert spilled.spilled > 0
    assert fits.spilled == 0
    found = compiling.compile_finding([compiling.Compiled(made[0], spilled)], "h100")
    assert found.holds is False
    assert found.cure == compiling.LIGHTER


def test_a_compiler_that_crashes_is_a_finding(caches, monkeypatch):
    monkeypatch.setattr(compiling.sys, "executable", shutil.which("false"))
    found = explain(subject(swish, SWISH).large())
    finding = compiling.compile_finding(compiling.compiled(found, "h100"), "h100")
    assert finding.holds is False
    assert "F1: the compiler crashed" in finding.figure


# --- a device -------------------------------------------------------------------------------------


def test_a_device_agrees_at_ragged_and_large_sizes():
    found = device.device_finding(subject(bounded, SWISH), CPU, "reference")
    assert found == ("agrees on cpu", True, "1, 127, 129, 129, 64 rows, outputs and gradients", "")


def test_a_device_that_is_off_fails(monkeypatch):
    one = subject(bounded, SWISH)
    plain = one.program.plain

    def ours(*_, backend, **operands):
        found = plain(**operands)
        return found[0] * 1.1, found[1]

    monkeypatch.setattr(type(one.program), "__call__", ours)
    found = device.device_finding(one, CPU, "reference")
    assert found.holds is False
    assert found.figure.startswith("1 rows of 48: output 0 is 1.0e-01 off")


@pytest.mark.slow
def test_times_are_taken_side_by_side(monkeypatch):
    monkeypatch.setattr(timing, "VARIANTS", ("ours", "eager", "bare"))
    monkeypatch.setattr(timing, "SECONDS", 0.02)
    one = subject(bounded, SWISH)
    found, records = timing.timed(one, explain(one.large()), CPU, str)
    assert [f.check for f in found] == ["time, forward", "time, forward and backward"]
    assert all("x the bare products" in f.figure for f in found)
    assert {(r["run"], r["variant"]) for r in records} == {
        (run, variant)
        for run in ("forward", "forward and backward")
        for variant in ("ours", "eager", "bare")
    }
    assert all(r["us"] > 0 and r["flops"] > 0 for r in records)


def test_the_bare_products_are_those_of_the_plans():
    one = subject(bounded, SWISH)
    found = explain(one.large())
    for name, flops in (("forward", 1), ("forward and backward", 3)):
        case = timing.Case("check", name, "given", {}, "bfloat16")
        stage = timing.Timed(case, CPU, found)
        ((operands, products),) = stage.bare_products()
        assert sum(p.flops(operands) for p in products) == flops * 2 * 64 * 48 * 32
        assert stage.work().flops == flops * 2 * 64 * 48 * 32


def test_a_device_that_fails_is_a_finding(monkeypatch):
    def failing_device(*_):
        raise RuntimeError("out of\nmemory")

    monkeypatch.setattr("cadenza.tools.check.run.usable_device", lambda: CPU)
    monkeypatch.setattr("cadenza.tools.check.run.device_finding", failing_device)
    last = judge(subject(bounded, SWISH), []).findings[-1]
    assert last[:3] == ("runs on the GPU", False, "RuntimeError: out of memory")
    assert "--size" in last.cure


@pytest.mark.slow
def test_a_device_is_asked_for_values_and_times(monkeypatch):
    monkeypatch.setattr("cadenza.tools.check.run.usable_device", lambda: CPU)
    by_reference = functools.partial(device.device_finding, backend="reference")
    monkeypatch.setattr("cadenza.tools.check.run.device_finding", by_reference)
    monkeypatch.setattr(timing, "VARIANTS", ("ours", "bare"))
    monkeypatch.setattr(timing, "SECONDS", 0.02)
    judgement = judge(subject(bounded, SWISH), [])
    checks = [f.check for f in judgement.findings][-3:]
    assert checks == ["agrees on cpu", "time, forward", "time, forward and backward"]
    assert len(judgement.times) == 4


def test_without_triton_nothing_is_compiled(monkeypatch):
    monkeypatch.setattr("cadenza.tools.check.run.has_triton", lambda: False)
    found = {f.check: f for f in judge(subject(bounded, SWISH), ["h100"]).findings}
    assert found["compiles"][1:3] == (None, "Triton is not installed")


def record(variant, *microseconds):
    samples = {"samples": list(microseconds), "us": sorted(microseconds)[len(microseconds) // 2]}
    return {"variant": variant, "run": "forward", **samples}


def test_a_program_slower_than_compiled_fails_with_the_cure():
    ours, bare = record("ours", 100.0, 110.0, 120.0), record("bare", 100.0, 100.0, 100.0)
    fast = {"ours": ours, "compile": record("compile", 200.0, 200.0, 200.0), "bare": bare}
    found = timing.time_finding("f", "forward", fast)
    assert found == ("time, forward", True, "110.0 us, 1.10 x the bare products, "
                     "0.55 x torch.compile", "")  # fmt: skip
    slow = fast | {"compile": record("compile", 90.0, 90.0, 90.0)}
    found = timing.time_finding("f", "forward", slow)
    assert found.holds is False
    assert found.cure.startswith("cadenza tune f --full")
    failed = fast | {"compile": {"variant": "compile", "failed": "no compiler"}}
    assert timing.time_finding("f", "forward", failed).figure.endswith("torch.compile: no compiler")
    broken = {"ours": {"variant": "ours", "failed": "out of memory"}}
    assert timing.time_finding("f", "forward", broken)[1:3] == (False, "out of memory")
