"""Results as pictures, drawn without a display: bars against the bare products, a roofline."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from cadenza.core.cost import Gpu
from cadenza.tools.atomic import write_whole
from cadenza.tools.bench.case import Record
from cadenza.tools.bench.machine import known_gpu
from cadenza.tools.bench.results import Results, cases, ratio
from cadenza.tools.bench.stage import VARIANTS
from cadenza.tools.bench.tables import GROUP, present, torch_name

Case = Mapping[str, Record]
DOTS_PER_INCH = 120
BASES = ("bare", "compile", "eager")  # what bars are against: the first of these that there is
COLORS = {name: f"C{place}" for place, name in enumerate(VARIANTS)}
MARKS = {"ours": "o", "compile": "s", "autotune": "D", "bare": "x"}


def draw_pictures(results: Results, folder: Path) -> list[Path]:
    """Writes the pictures of a suite's times beside its results; their paths."""
    made: dict[Path, bytes] = {}
    groups: dict[tuple[str, ...], list[Record]] = {}
    for record in results.records:
        if "us" in record:
            groups.setdefault(tuple(record[name] for name in GROUP), []).append(record)
    for (device, dtype, mode), records in groups.items():
        words = "-".join(
            f"{results.suite} {device} {dtype} {mode}".lower().replace("/", " ").split()
        )
        title = f"{results.suite}, {dtype}, {mode}, {device}"
        made[folder / f"{words}-bars.png"] = bars(title, records)
        gpu = known_gpu(device)
        if gpu is not None and any(record["flops"] for record in records):
            made[folder / f"{words}-roofline.png"] = roofline(title, records, gpu)
    for path, content in made.items():
        write_whole(path, content)
    return list(made)


def bars(title: str, records: Sequence[Record]) -> bytes:
    """The time of each variant of each case over the bare products', as a PNG."""
    variants = present(records)
    base = next((name for name in BASES if name in variants), variants[0])
    others = [name for name in variants if name != base]
    rows = list(cases(records))
    figure = Figure(
        figsize=(max(8.0, 0.25 * len(rows) * (len(others) + 1)), 5), layout="constrained"
    )
    axes = figure.subplots()
    width = 0.8 / max(1, len(others))
    for place, name in enumerate(others):
        found = [(at, _over(case, name, base)) for at, case in enumerate(rows)]
        found = [(at + (place + 0.5) * width - 0.4, value) for at, value in found if value]
        xs, heights = [at for at, _ in found], [value for _, value in found]
        axes.bar(xs, heights, width, label=name, color=COLORS[name])
    axes.axhline(1.0, color="black", linewidth=1, label=base)
    axes.set_xticks(
        range(len(rows)),
        [_name(case) for case in rows],
        rotation=45,
        ha="right",
        rotation_mode="anchor",
    )
    axes.set(title=title, ylabel=f"time over {base}")
    figure.legend(loc="outside right upper")
    return _png(figure)


def _over(case: Case, name: str, base: str) -> float | None:
    if name not in case or base not in case:
        return None
    return ratio(case[name], case[base])


def _name(case: Case) -> str:
    record = next(iter(case.values()))
    return f"{record['pattern']} {record['size']}"


def roofline(title: str, records: Sequence[Record], gpu: Gpu) -> bytes:
    """What each case reaches against what the GPU sustains and what its data sheet says: a PNG."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    points = [record for record in records if record["flops"] and record["variant"] in MARKS]
    for name, mark in MARKS.items():
        own = [record for record in points if record["variant"] == name]
        rates = [record["flops"] / record["us"] / 1e6 for record in own]
        axes.plot([_intensity(r) for r in own], rates, mark, color=COLORS[name], label=name)
    intensities = [_intensity(record) for record in points]
    if intensities:
        dtype = torch_name(records[0]["dtype"])
        _draw_roofs(axes, (min(intensities) / 4, max(intensities) * 4), gpu, dtype)
    axes.set(title=title, xscale="log", yscale="log", xlabel="FLOP a byte", ylabel="TFLOP/s")
    for formatted in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        formatted("{x:g}")
    figure.legend(loc="outside right upper")
    return _png(figure)


def _intensity(record: Record) -> float:
    return float(record["flops"] / max(1, record["bytes"]))


def _draw_roofs(axes: Axes, span: tuple[float, float], gpu: Gpu, dtype: str) -> None:
    """Both roofs from the first intensity of the span to the last, with their corner between."""
    sustained = gpu.flops(dtype) / 1e12, gpu.bytes / 1e12
    nominal = gpu.nominal(dtype), gpu.memory
    for name, (compute, memory), style in (
        ("sustained", sustained, "-"),
        ("nominal", nominal, ":"),
    ):
        xs = sorted((*span, compute / memory))
        ys = [min(compute, memory * x) for x in xs]
        axes.plot(xs, ys, style, color="grey", label=f"{gpu.name}, {name}")


def _png(figure: Figure) -> bytes:
    FigureCanvasAgg(figure)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=DOTS_PER_INCH)
    return content.getvalue()
