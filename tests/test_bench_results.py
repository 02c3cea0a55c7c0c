"""Results of `cadenza bench`: merging, ratios, tables and pictures, on synthetic records."""

import io
import json
import subprocess
import sys
import threading
from itertools import permutations
from pathlib import Path

import matplotlib.image
import pytest
from rich.console import Console

from cadenza.tools.bench import pictures, results, tables
from cadenza.tools.bench.machine import Meter, commit, known_gpu, new_run
from cadenza.tools.bench.measurement import torch
from cadenza.tools.bench.results import Results, ratio
from cadenza.tools.fault import Fault

ROOT = Path(__file__).resolve().parent.parent
PNG = b"\x89PNG\r\n\x1a\n"
COMMON = {"device": "NVIDIA H200", "dtype": "bf16", "mode": "sustained", "flops": 2**37,
          "bytes": 2**26}  # fmt: skip


def record(variant, samples=None, run="first", pattern="swiglu", size="4096", **more):
    """A record with a time for each round, or why it has none."""
    middle = sorted(samples or [0])[len(samples or [0]) // 2]
    times = {"us": middle, "quartiles": [0.99 * middle, 1.01 * middle], "samples": samples}
    made = {**COMMON, "pattern": pattern, "size": size, "variant": variant, "run": run, **more}
    return made | (times if samples else {})


def some(*records, dates=("2026-01-01", "2026-01-02")):
    names = ("first", "second")
    runs = {name: {"date": date} for name, date in zip(names, dates, strict=True)}
    used = {one["run"] for one in records}
    return Results("kernels", {n: r for n, r in runs.items() if n in used}, list(records))


def test_a_ratio_is_the_median_over_rounds_not_of_medians():
    ours = record("ours", [1.0, 2.0, 4.0])
    other = record("compile", [3.0, 2.0, 8.0])
    assert ratio(other, ours) == 2.0  # of 3, 1, 2; the medians' ratio is 1.5
    assert ratio(ours, other) == 0.5


def test_there_is_no_ratio_between_runs_or_of_failures():
    ours = record("ours", [1.0, 2.0])
    assert ratio(ours, record("compile", [1.0, 2.0], run="second")) is None
    assert ratio(ours, record("compile", failed="no")) is None
    assert ratio(record("ours", failed="no"), ours) is None


def test_a_repeated_case_replaces_its_records_and_no_others():
    kept = some(record("ours", [1.0]), record("ours", [5.0], size="2048"))
    kept.merge(some(record("ours", [2.0], run="second")))
    assert [(r["size"], r["us"], r["run"]) for r in kept.records] == [
        ("4096", 2.0, "second"),
        ("2048", 5.0, "first"),
    ]
    kept.merge(some(record("ours", [3.0], size="2048", run="second")))
    assert set(kept.runs) == {"second"}


@pytest.mark.parametrize(
    "other", [{"mode": "burst"}, {"dtype": "fp16"}, {"device": "H100"}, {"variant": "eager"}]
)
def test_what_is_about_something_else_is_kept_beside(other):
    kept = some(record("ours", [1.0]))
    kept.merge(some({**record("ours", [2.0]), **other}))
    assert len(kept.records) == 2


def test_an_older_run_does_not_replace_a_newer():
    newer = some(record("ours", [2.0], run="second"))
    newer.merge(some(record("ours", [1.0])))
    assert newer.records[0]["us"] == 2.0
    assert set(newer.runs) == {"second"}


def test_a_failure_takes_no_figure_away(tmp_path):
    kept = some(record("ours", [1.0]), record("compile", failed="first"))
    kept.merge(some(record("ours", failed="no room", run="second")))
    kept.merge(some(record("compile", failed="second", run="second")))
    ours, compiled = kept.records
    assert (ours["us"], ours["run"]) == (1.0, "first")
    assert ours["failed_since"] == {"date": "2026-01-02", "reason": "no room"}
    assert (compiled["failed"], compiled["run"]) == ("second", "second")
    assert "ours: no room [swiglu 4096]" in printed(ours)
    assert "1.0" not in printed(ours), "an earlier figure looks like one that stands"
    assert pictures.draw_pictures(some(ours), tmp_path) == []


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_merged_in_any_order(order):
    """A figure, a later figure, and a failure before, between or after them."""
    dates = {"first": "2026-01-01", "second": "2026-01-02", "third": "2026-01-03"}
    for failing in dates:
        samples = iter([1.0, 2.0])
        made = [
            record("ours", run=run, failed="no room")
            if run == failing
            else record("ours", [next(samples)], run=run)
            for run in dates
        ]
        kept = Results("kernels")
        for place in order:
            one = made[place]
            kept.merge(Results("kernels", {one["run"]: {"date": dates[one["run"]]}}, [one]))
        assert kept.records[0]["us"] == 2.0
        assert ("failed_since" in kept.records[0]) == (failing == "third")


def test_results_are_read_as_they_were_written(tmp_path):
    first = some(record("ours", [1.0, 2.0]), record("liger", failed='no "x" ÷'))
    assert results.add(tmp_path, first) == first
    assert results.load(tmp_path, "kernels") == first
    assert json.loads((tmp_path / "kernels.json").read_text())["suite"] == "kernels"
    results.add(tmp_path, some(record("ours", [3.0], run="second")))
    found = results.load(tmp_path, "kernels")
    assert {r["variant"]: r["run"] for r in found.records} == {"ours": "second", "liger": "first"}
    assert [path.name for path in tmp_path.iterdir()] == ["kernels.json"]


@pytest.mark.slow
def test_processes_that_write_at_once_lose_nothing(tmp_path):
    makes = f"""
import sys
from cadenza.tools.bench.results import Results, add
from pathlib import Path
for size in range(5):
    one = {record("ours", [1.0])!r} | {{"size": f"{{sys.argv[1]}} {{size}}"}}
    add(Path({str(tmp_path)!r}), Results("kernels", {{"first": {{"date": "1"}}}}, [one]))
"""
    command = [sys.executable, "-c", makes]
    started = [subprocess.Popen([*command, str(k)], cwd=ROOT) for k in range(2)]
    assert [process.wait(60) for process in started] == [0, 0]
    assert len(results.load(tmp_path, "kernels").records) == 10


def test_one_line_holds_one_record(tmp_path):
    lines = some(record("ours", [1.0]), record("bare", [2.0])).text().splitlines()
    assert sum('"variant"' in line for line in lines) == 2


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"suite": "kernels", "runs": {}, "records": [{"run": "gone"}]}', '{"suite'],
)
def test_a_file_that_holds_no_results_is_refused(tmp_path, text):
    (tmp_path / "kernels.json").write_text(text)
    with pytest.raises(Fault, match=r"kernels\.json holds no results"):
        results.load(tmp_path, "kernels")


def printed(*records):
    """What the tables of some records say."""
    console = Console(file=io.StringIO(), width=250)
    console.is_terminal  # noqa: B018 (asked before the width is set, as in use)
    tables.show(some(*records), console)
    return console.file.getvalue()


def test_a_table_has_times_and_ratios_the_right_way_round():
    text = printed(
        record("ours", [100.0, 102.0, 101.0]),
        record("compile", [150.0, 153.0, 151.5]),
        record("autotune", [125.0, 127.5, 126.25]),
        record("bare", [80.0, 81.6, 80.8]),
        record("liger", failed="liger_kernel is not installed"),
    )
    assert "kernels, bf16, sustained, NVIDIA H200" in text
    assert "101.0 ±1.0%" in text
    assert "151.5  1.500" in text  # compile over ours
    assert "126.2  1.250" in text
    assert "80.8  1.250" in text  # ours over bare
    (row,) = [line for line in text.splitlines() if "101.0 ±" in line]
    assert row.split("│")[8].strip() == "1.250"  # the better of both, over ours
    assert "liger: liger_kernel is not installed [swiglu 4096]" in text


def test_a_table_shows_rates_against_the_roofline():
    text = printed(record("ours", [200.0]))
    rate = 2**37 / 200e-6 / 1e12
    assert f"{rate:.1f}" in text
    assert f"{100 * rate / (989.4 * 0.667):.0f}%" in text
    assert "of roofline" in printed(record("ours", [200.0], device="some CPU"))


def test_a_table_shows_peaks_where_there_are_any():
    text = printed(record("ours", [1.0], peak_bytes=3 * 2**30), record("bare", [1.0]))
    assert "peak memory" in text
    assert "ours GiB" in text
    assert "3.00" in text
    assert "bare GiB" not in text


def test_a_table_of_errors_has_their_geometric_mean():
    text = printed(
        record("ours", mode="", errors={"a": 1e-3, "b": 4e-3, "own": 1e-3}),
        record("compile", mode="", errors={"a": 2e-3, "b": 2e-3}),
    )
    assert "kernels, bf16, NVIDIA H200" in text
    assert "geometric mean 1.000, at most 2.000" in text
    assert "0.500" in text


def test_a_table_of_the_host_has_a_row_for_each_thing_done():
    text = printed(record("ours", mode="", host_us={"a call": 12.34, "more": 5.0}))
    assert "12.3" in text
    assert "more" in text


# --- pictures -------------------------------------------------------------------------------------


def pixels(content):
    """A picture's pixels; whatever is no PNG raises."""
    assert content.startswith(PNG)
    return matplotlib.image.imread(io.BytesIO(content), format="png")


RECORDS = [
    record(variant, [time * f for f in (0.99, 1.0, 1.01)], pattern=pattern)
    for pattern in ("swiglu", "rope")
    for variant, time in (("ours", 200.0), ("compile", 260.0), ("bare", 198.0))
]


def test_bars_and_roofline_are_pictures(tmp_path):
    made = pictures.draw_pictures(some(*RECORDS, record("liger", failed="no")), tmp_path)
    assert [path.name for path in made] == [
        "kernels-nvidia-h200-bf16-sustained-bars.png",
        "kernels-nvidia-h200-bf16-sustained-roofline.png",
    ]
    for path in made:
        image = pixels(path.read_bytes())
        assert image.shape[0] > 400
        assert image.min() < image.max()


def test_there_is_no_roofline_of_a_device_whose_rates_are_not_known(tmp_path):
    records = [{**one, "device": "some CPU"} for one in RECORDS]
    (bars,) = pictures.draw_pictures(some(*records), tmp_path)
    assert bars.name.endswith("-bars.png")


def test_bars_change_with_what_was_measured():
    slower = [{**r, "samples": [3 * s for s in r["samples"]]} if r["variant"] == "ours" else r
              for r in RECORDS]  # fmt: skip
    assert pictures.bars("t", RECORDS) != pictures.bars("t", slower)


def test_nothing_is_drawn_of_nothing(tmp_path):
    assert pictures.draw_pictures(some(record("ours", failed="no")), tmp_path) == []


# --- the machine ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "known"),
    [("NVIDIA H200", "H200"), ("NVIDIA H100 80GB HBM3", "H100 SXM"), ("AMD EPYC", None),
     ("NVIDIA A100-SXM4-80GB", "A100 SXM 80 GB"), ("NVIDIA GeForce RTX 4090", "RTX 4090")],
)  # fmt: skip
def test_a_gpu_is_known_by_its_own_name(name, known):
    found = known_gpu(name)
    assert (found and found.name) == known


def test_clock_and_power_are_means_over_the_time_between(monkeypatch):
    clocks, watts = iter([1000, 2000]), iter([300_000, 500_000])
    seen = threading.Event()

    def power(_):
        found = next(watts)
        if found == 500_000:
            seen.set()
        return found

    monkeypatch.setattr(torch.cuda, "clock_rate", lambda _: next(clocks))
    monkeypatch.setattr(torch.cuda, "power_draw", power)
    with Meter(torch.device("cuda")) as meter:
        assert seen.wait(10)
    assert meter.means() == {"sm_mhz": 1500, "watts": 400}


def test_without_nvml_there_is_no_clock(monkeypatch):
    def missing(_):
        raise ModuleNotFoundError("pynvml")

    monkeypatch.setattr(torch.cuda, "clock_rate", missing)
    for device in ("cuda", "cpu"):
        with Meter(torch.device(device)) as meter:
            meter._done.wait(0.1)
        assert meter.means() == {}


def test_a_run_says_on_what_it_ran():
    name, facts = new_run(torch.device("cpu"), "1/2")
    assert name != new_run(torch.device("cpu"), "1/2")[0]
    assert {"date", "device", "shard", "cadenza", "commit", "torch", "triton"} <= set(facts)
    assert facts["torch"] == torch.__version__
    assert facts["device"]
    assert commit() == facts["commit"]
