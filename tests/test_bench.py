"""`cadenza bench` from end to end on a CPU, where ours is the reference back end."""

import importlib.util
import json

import pytest
import torch
from small_runs import PNG, refusal

from cadenza.tools.bench import rivals, stage
from cadenza.tools.bench.measurement import HostWatch
from cadenza.tools.cli import main

KERNEL = "M=12,N=32,K=16"
SIZES = {
    "kernels": f"{KERNEL},HD=8",
    "layer": "M=8,D=32,F=48,HD=8",
    "loss": "M=8,D=16,V=40",
    "accuracy": f"{KERNEL},D=32,F=48,HD=8",
    "primitives": KERNEL,
    "host": f"{KERNEL},D=32,F=48,HD=8",
}


@pytest.fixture(autouse=True)
def _quickly(monkeypatch):
    """Between two cases, all garbage of this process need not be collected."""
    monkeypatch.setattr("cadenza.tools.bench.contest._let_go", lambda: None)


def bench(folder, suite, *more):
    """Runs a suite at tiny sizes for a moment; its exit code."""
    arguments = ["bench", suite, "--size", SIZES[suite], "--device", "cpu", "--seconds", "0.001"]
    return main([*arguments, "--out", str(folder), *more])


def records(folder, suite):
    """What is on record of a suite."""
    return json.loads((folder / f"{suite}.json").read_text())["records"]


def by_variant(found):
    """Records of one case by variant."""
    return {one["variant"]: one for one in found}


def test_the_kernels_side_by_side(tmp_path, capsys):
    only = "--only=swiglu,rms_backward"
    assert bench(tmp_path, "kernels", only, "--variants=ours,eager,bare,products") == 0
    found = records(tmp_path, "kernels")
    assert len(found) == 2 * 4
    assert len({one["run"] for one in found}) == 1
    for one in found:
        assert one["us"] > 0
        assert len(one["samples"]) >= 5
        assert one["quartiles"][0] <= one["us"] <= one["quartiles"][1]
        assert one["flops"] == 2 * 12 * 32 * 16
        assert one["first_call_s"] >= 0
    said = capsys.readouterr()
    assert "[2/2] rms_backward" in said.err
    assert "ours: first call" in said.err
    assert "eager µs, ÷ ours" in said.out
    (picture,) = tmp_path.glob("*.png")
    assert picture.read_bytes().startswith(PNG)


def test_the_layer_forward_and_with_backward(tmp_path):
    assert bench(tmp_path, "layer", "--variants=ours,eager,bare,products") == 0
    found = records(tmp_path, "layer")
    assert {one["pattern"] for one in found} == {"forward", "forward-backward"}
    for one in found:
        assert one["us"] > 0
        assert ("peak_bytes" in one) == (one["variant"] in ("ours", "eager"))
    flops = {one["pattern"]: one["flops"] for one in found}
    assert flops["forward-backward"] == 3 * flops["forward"]


def test_the_loss_default_and_lean(tmp_path):
    assert bench(tmp_path, "loss", "--variants=ours,lean,eager") == 0
    found = by_variant(records(tmp_path, "loss"))
    assert list(found) == ["ours", "lean", "eager"]
    assert all("us" in one and "peak_bytes" in one for one in found.values())


def test_the_accuracy_in_both_dtypes(tmp_path):
    assert bench(tmp_path, "accuracy", "--variants=ours,eager", "--only=layer,residual_rms") == 0
    found = records(tmp_path, "accuracy")
    assert {one["dtype"] for one in found} == {"bf16", "fp16"}
    layer = next(one for one in found if one["pattern"] == "layer")
    gradients = {name for name in layer["errors"] if name.startswith("d")}
    assert gradients == {"dx", "dy", "dwo", "dnorm", "dw_gate_up", "dw_down", "dnext_norm",
                         "dw_qkv"}  # fmt: skip
    for one in found:
        eps = torch.finfo(torch.bfloat16 if one["dtype"] == "bf16" else torch.float16).eps
        assert all(0.05 * eps < error < 5 * eps for error in one["errors"].values())


def test_primitives_over_one_product(tmp_path):
    only = "--only=bias,square-sum+paired-columns"
    assert bench(tmp_path, "primitives", only) == 0
    found = records(tmp_path, "primitives")
    assert {(one["pattern"], one["variant"]) for one in found} == {
        (pattern, variant)
        for pattern in ("bias", "square-sum+paired-columns")
        for variant in ("ours", "bare", "products")
    }


def test_the_host(tmp_path, monkeypatch):
    monkeypatch.setattr("cadenza.tools.bench.host.BATCHES", 5)
    monkeypatch.setattr("cadenza.tools.bench.host.PENDING", 10)
    assert bench(tmp_path, "host", "--variants=ours,eager,bare") == 0
    for one in records(tmp_path, "host"):
        if one["variant"] == "bare":
            assert one["failed"] == "host is of ours and of torch alone"
        else:
            assert all(figure > 0 for figure in one["host_us"].values())
            assert ("a kernel of forward" in one["host_us"]) == (one["variant"] == "ours")
    kernels = {r["pattern"]: r.get("kernels") for r in records(tmp_path, "host") if "kernels" in r}
    assert kernels == {"one-kernel": 1, "layer": 4}


# --- resuming -------------------------------------------------------------------------------------


def test_shards_make_up_the_suite_and_only_repeats_a_part(tmp_path):
    for shard in ("1/3", "2/3", "3/3"):
        assert bench(tmp_path, "kernels", "--variants=bare", f"--shard={shard}") == 0
    found = records(tmp_path, "kernels")
    runs = {one["pattern"]: one["run"] for one in found}
    assert len(found) == len(runs) == 8
    assert len(set(runs.values())) == 3
    assert runs["residual_rms"] == runs["rms_backward"] == runs["dx"]
    assert bench(tmp_path, "kernels", "--variants=bare", "--only=rope") == 0
    again = {one["pattern"]: one["run"] for one in records(tmp_path, "kernels")}
    assert {pattern for pattern in runs if runs[pattern] != again[pattern]} == {"rope"}


def test_results_of_another_folder_are_merged(tmp_path, capsys):
    one, other, both = tmp_path / "one", tmp_path / "other", tmp_path / "both"
    bench(one, "kernels", "--variants=bare", "--only=dx")
    bench(other, "kernels", "--variants=bare", "--only=dw")
    capsys.readouterr()
    assert main(["bench", "--merge", str(one), "--merge", str(other), "--out", str(both)]) == 0
    assert {r["pattern"] for r in records(both, "kernels")} == {"dx", "dw"}
    assert list(both.glob("*.png"))
    said = capsys.readouterr().out
    assert "dx" in said
    assert "dw" in said


def test_results_are_shown_without_measuring(tmp_path, capsys):
    bench(tmp_path, "kernels", "--variants=ours,bare", "--only=dx")
    written = (tmp_path / "kernels.json").read_bytes()
    first = capsys.readouterr().out
    assert main(["bench", "--show", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out == first
    assert main(["bench", "kernels", "--show", "--json", "--out", str(tmp_path)]) == 0
    (data,) = json.loads(capsys.readouterr().out)
    assert data["suite"] == "kernels"
    found = by_variant(data["records"])
    assert "samples" not in found["ours"]
    assert found["ours"]["ratios"]["bare"] > 0
    assert (tmp_path / "kernels.json").read_bytes() == written


@pytest.mark.slow
def test_a_burst_is_on_record_beside_the_sustained(tmp_path):
    for more in ((), ("--burst",), ("--alone",)):
        assert bench(tmp_path, "kernels", "--variants=bare", "--only=dx", *more) == 0
    assert [one["mode"] for one in records(tmp_path, "kernels")] == ["sustained", "burst", "alone"]


def test_two_ways_at_once_are_one_line(tmp_path, capsys):
    assert bench(tmp_path, "kernels", "--burst", "--alone") == 2
    assert "give one of them" in capsys.readouterr().err


# --- failures -------------------------------------------------------------------------------------


def absent(monkeypatch, *packages):
    """Makes packages look as if they weren't installed."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        rivals.importlib.util, "find_spec", lambda name: None if name in packages else find(name)
    )


def test_libraries_that_are_not_installed_are_on_record(tmp_path, monkeypatch, capsys):
    absent(monkeypatch, "liger_kernel", "flashinfer")
    variants = "--variants=bare,liger,flashinfer,lean"
    assert bench(tmp_path, "kernels", "--only=swiglu", variants) == 0
    found = by_variant(records(tmp_path, "kernels"))
    assert found["liger"]["failed"] == "liger_kernel is not installed"
    assert found["flashinfer"]["failed"] == "flashinfer is not installed"
    assert found["lean"]["failed"] == "the suite kernels has no variant lean"
    assert found["bare"]["us"] > 0
    assert "liger: liger_kernel is not installed [swiglu" in capsys.readouterr().out


def fails(function):
    raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 1 PiB")


@pytest.mark.slow
def test_a_variant_that_fails_is_on_record_and_stops_no_other(tmp_path, monkeypatch):
    monkeypatch.setitem(stage.TRANSFORMS, "compile", fails)
    for suite, only in (("kernels", "dx"), ("accuracy", "dx"), ("host", "one-kernel")):
        more = f"--only={only}", "--variants=ours,compile", "--dtype=bf16"
        assert bench(tmp_path, suite, *more) == 0
        found = by_variant(records(tmp_path, suite))
        expected = "OutOfMemoryError: CUDA out of memory. Tried to allocate 1 PiB"
        assert found["compile"]["failed"] == expected
        assert "failed" not in found["ours"]


def test_where_nothing_could_be_measured_the_command_fails(tmp_path, monkeypatch):
    monkeypatch.setitem(stage.TRANSFORMS, "compile", fails)
    assert bench(tmp_path, "kernels", "--only=dx", "--variants=compile") == 1


def test_a_gpu_that_has_failed_ends_the_run(tmp_path, monkeypatch, capsys):
    class Lost(HostWatch):
        def finish(self):
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr("cadenza.tools.bench.run.stopwatch", lambda _: Lost())
    assert bench(tmp_path, "kernels", "--only=dx,dw", "--variants=bare") == 0
    assert {one["pattern"] for one in records(tmp_path, "kernels")} == {"dw"}
    assert "answers this process no more" in capsys.readouterr().err


def test_operands_that_do_not_fit_are_every_variants_failure(tmp_path, monkeypatch):
    monkeypatch.setattr("cadenza.tools.bench.kernels.Kernel._draw", lambda *_: fails(None))
    assert bench(tmp_path, "kernels", "--only=dx", "--variants=ours,bare") == 1
    assert {one["failed"][:11] for one in records(tmp_path, "kernels")} == {"OutOfMemory"}


def test_variants_that_only_fail_together_are_on_record(tmp_path, monkeypatch):
    monkeypatch.setattr("cadenza.tools.bench.contest.measure", lambda *_: fails(None))
    assert bench(tmp_path, "kernels", "--only=dx", "--variants=ours,bare") == 1
    assert all("first_call_s" in one for one in records(tmp_path, "kernels"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("", "no suite was named: one of kernels, layer, loss"),
        ("speed", "there is no suite 'speed'"),
        ("kernels --only gelu", "'gelu' is none of the patterns residual_rms"),
        ("kernels --size Q=4", "kernels has no size 'Q': it has HD, K, M, N, heads"),
        ("kernels --size M", "'M' is no size"),
        ("kernels --shard 3/2", "write I/N"),
        ("kernels --shard half", "write I/N"),
        ("kernels --variants ours,theirs", "there is no variant 'theirs': one of ours"),
        ("kernels --dtype fp8", "unknown --dtype 'fp8': one of bf16, fp16"),
        ("kernels --device tpu", "unknown --device 'tpu'"),
        ("kernels --device cuda", "torch sees no GPU"),
        ("kernels --seconds 0", "no time to measure"),
        ("kernels --seconds nan", "no time to measure"),
        ("kernels --out there", "--out there is a file"),
        ("--show --out nowhere", "no results of kernels"),
        ("--merge nowhere", "--merge nowhere holds no results"),
        ("kernels --device cpu --out bad", "holds no results"),
    ],
)
def test_a_question_that_cannot_be_answered(capsys, tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "there").write_text("")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "kernels.json").write_text("{")
    assert said in refusal(capsys, tmp_path, ["bench", *arguments.split()])


@pytest.mark.slow
def test_compiled_variants(tmp_path):
    only = "--only=residual_rms,swiglu_backward,cross_entropy"
    assert bench(tmp_path, "kernels", only, "--variants=ours,compile") == 0
    assert bench(tmp_path, "layer", "--variants=compile", "--only=forward-backward") == 0
    for suite in ("kernels", "layer"):
        assert all("us" in one for one in records(tmp_path, suite))
