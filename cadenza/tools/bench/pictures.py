"""Results as pictures, drawn without a display: bars against the bare products, a roofline.

Each is drawn as a PNG or an SVG, and holds the figures that it shows as its description, in JSON.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from cadenza.core.cost import Gpu
from cadenza.tools.atomic import write_whole
from cadenza.tools.bench.case import Record
from cadenza.tools.bench.machine import known_gpu
from cadenza.tools.bench.results import Results, cases, ratio, standing
from cadenza.tools.bench.stage import VARIANTS
from cadenza.tools.bench.tables import GROUP, present, torch_name

Case = Mapping[str, Record]
DOTS_PER_INCH = 120
BASES = ("bare", "compile", "eager")  # what bars are against: the first of these that there is
COLORS = {name: f"C{place}" for place, name in enumerate(VARIANTS)}
MARKS = {"ours": "o", "compile": "s", "autotune": "D", "bare": "x"}
LABELLED = 32  # bars that there is room to write a number over, in a wider picture
# Text stays text and names are those of the last drawing, so that a picture changes with its data.
SVG = {"svg.fonttype": "none", "svg.hashsalt": "cadenza"}


def draw_pictures(results: Results, folder: Path) -> list[Path]:
    """Writes the pictures of a suite's times beside its results, as PNG; their paths."""
    made = {folder / f"{name}.png": draw("png") for name, draw in drawings(results).items()}
    for path, content in made.items():
        write_whole(path, content)
    return list(made)


def drawings(results: Results) -> dict[str, Callable[[str], bytes]]:
    """The pictures of a suite's times by name: each draws itself, given "png" or "svg"."""
    found: dict[str, Callable[[str], bytes]] = {}
    groups: dict[tuple[str, ...], list[Record]] = {}
    for record in standing(results.records):
        if "us" in record:
            groups.setdefault(tuple(record[name] for name in GROUP), []).append(record)
    for (device, dtype, mode), records in groups.items():
        words = "-".join(
            f"{results.suite} {device} {dtype} {mode}".lower().replace("/", " ").split()
        )
        title = f"{results.suite}, {dtype}, {mode}, {device}"
        found[f"{words}-bars"] = partial(bars, title, records)
        gpu = known_gpu(device)
        if gpu is not None and any(record["flops"] for record in records):
            found[f"{words}-roofline"] = partial(roofline, title, records, gpu)
    return found


def bars(title: str, records: Sequence[Record], form: str = "png") -> bytes:
    """The time of each variant of each case over the bare products', as a "png" or "svg"."""
    variants = present(records)
    base = next((name for name in BASES if name in variants), variants[0])
    rows = list(cases(records))
    heights = {
        name: [_over(case, name, base) for case in rows] for name in variants if name != base
    }
    count = len(rows) * (len(heights) + 1)
    labelled = count <= LABELLED
    figure = Figure(figsize=(max(8.0, count / (3 if labelled else 4)), 5), layout="constrained")
    axes = figure.subplots()
    _draw_bars(axes, heights, labelled=labelled)
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
    shown = {"title": title, "over": base, "cases": [_name(case) for case in rows], **heights}
    return _image(figure, form, shown)


def _draw_bars(
    axes: Axes, heights: Mapping[str, Sequence[float | None]], *, labelled: bool
) -> None:
    """Bars of each variant side by side, none where nothing was measured."""
    width = 0.8 / max(1, len(heights))
    for place, (name, values) in enumerate(heights.items()):
        offset = (place + 0.5) * width - 0.4
        xs = [at + offset for at, value in enumerate(values) if value]
        drawn = axes.bar(xs, list(filter(None, values)), width, label=name, color=COLORS[name])
        if labelled:
            axes.bar_label(drawn, fmt="%.2f", label_type="center", color="white", fontsize="small")


def _over(case: Case, name: str, base: str) -> float | None:
    if name not in case or base not in case:
        return None
    return ratio(case[name], case[base])


def _name(case: Case) -> str:
    record = next(iter(case.values()))
    return f"{record['pattern']} {record['size']}"


def roofline(title: str, records: Sequence[Record], gpu: Gpu, form: str = "png") -> bytes:
    """What each case reaches, against what the GPU sustains and what its data sheet says."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    points = [record for record in records if record["flops"] and record["variant"] in MARKS]
    shown: dict[str, Any] = {"title": title}
    for name, mark in MARKS.items():
        own = [record for record in points if record["variant"] == name]
        rates = [record["flops"] / record["us"] / 1e6 for record in own]
        xs = [_intensity(record) for record in own]
        if own:
            axes.plot(xs, rates, mark, color=COLORS[name], label=name)
            shown[name] = list(zip(xs, rates, strict=True))
    intensities = [_intensity(record) for record in points]
    if intensities:
        dtype = torch_name(records[0]["dtype"])
        _draw_roofs(axes, (min(intensities) / 4, max(intensities) * 4), gpu, dtype)
    axes.set(title=title, xscale="log", yscale="log", xlabel="FLOP a byte", ylabel="TFLOP/s")
    for formatted in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        formatted("{x:g}")
    figure.legend(loc="outside right upper")
    return _image(figure, form, shown)


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


def _image(figure: Figure, form: str, shown: Mapping[str, Any]) -> bytes:
    FigureCanvasAgg(figure)
    content = io.BytesIO()
    about = {"Description": json.dumps(shown, ensure_ascii=False)}
    dated = {"Date": None} if form == "svg" else {}  # without one the same data draws the same
    with matplotlib.rc_context(SVG):
        figure.savefig(content, format=form, dpi=DOTS_PER_INCH, metadata={**about, **dated})
    return content.getvalue()
