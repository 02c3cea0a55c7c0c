"""The pictures of an audit as SVG: bars by class, the time line of a layer, a roofline.

A picture is drawn for a width in pixels, so that its text keeps its size on a phone. Colours are
classes of the page's style sheet; every mark says in a title what it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

from cadenza.tools.audit.counting import CLASSES
from cadenza.tools.audit.prediction import PartCost, Prediction, Share
from cadenza.tools.audit.rates import EIGHT, Timed
from cadenza.tools.audit.report import NAMES, TITLES

CHARACTER = 6.4  # pixels that a character of a label takes
LABEL, BAR, GAP = 16, 26, 14
PASSES = ("forward", "backward")
LEFT, RIGHT, BOTTOM, TOP = 46, 12, 40, 12


class Box(NamedTuple):
    """A rectangle."""

    x: float
    y: float
    width: float
    height: float


def svg(width: float, height: float, marks: Iterable[str], about: str) -> str:
    """A picture of some marks."""
    size = f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(about)}">'
        f"{''.join(marks)}</svg>"
    )


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    """Words that begin, end or have their middle at a point."""
    place = f'x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}"'
    return f"<text {place}>{escape(words)}</text>"


def rectangle(box: Box, kind: str, title: str) -> str:
    """A rectangle of a class, with what it is."""
    return (
        f'<rect x="{box.x:.2f}" y="{box.y:.1f}" width="{max(box.width, 0.6):.2f}" '
        f'height="{box.height:g}" class="k-{kind}"><title>{escape(title)}</title></rect>'
    )


def line(start: tuple[float, float], end: tuple[float, float], kind: str) -> str:
    """A straight line."""
    (x1, y1), (x2, y2) = start, end
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'


def inside(box: Box, *choices: str) -> str:
    """The first words that fit in a rectangle."""
    fitting = [words for words in choices if len(words) * CHARACTER + 8 <= box.width]
    if not fitting:
        return ""
    words = fitting[0]
    return text(box.x + box.width / 2, box.y + box.height / 2 + 4, words, "in", "middle")


# --- share of time by class -----------------------------------------------------------------------


def shares(prediction: Prediction, width: int) -> str:
    """A bar a precision and variant, as long as its step takes, by class."""
    rows = [
        (f"{precision}, {NAMES[variant]}", prediction.step(variant, precision))
        for precision in prediction.precisions
        for variant in prediction.variants
    ]
    longest = max(share.total for _, share in rows)
    marks, y = [], 0.0
    for label, share in rows:
        marks += _share_bar(label, share, y, width / longest if longest else 0.0, width)
        y += LABEL + BAR + GAP
    return svg(width, y, marks, "Time of a step by class of work, before and after")


def _share_bar(label: str, share: Share, y: float, scale: float, width: int) -> list[str]:
    total = f"{1e3 * share.total:,.1f} ms"
    marks = [text(0, y + 12, label), text(width, y + 12, total, "figure", "end")]
    x = 0.0
    for kind in CLASSES:
        seconds = share.seconds[kind]
        if not seconds:
            continue
        box = Box(x, y + LABEL + 2, seconds * scale, BAR)
        percent = f"{100 * seconds / share.total:.0f}%"
        title = f"{TITLES[kind]}: {1e3 * seconds:,.2f} ms, {percent} of {label}"
        marks += [rectangle(box, kind, title), inside(box, percent)]
        x += box.width
    return marks


# --- the time line of one layer -------------------------------------------------------------------


def time_line(prediction: Prediction, layers: dict[str, PartCost], width: int) -> str:
    """A row a pass and variant of one layer, kernel after kernel; each pass has its own scale."""
    precision = prediction.precisions[0]
    marks, y = [], 0.0
    for name in PASSES:
        rows = {v: list(prediction.timed(p, precision, (name,))) for v, p in layers.items()}
        longest = max(sum(one.seconds for one in row) for row in rows.values())
        if not longest:
            continue
        scale = width / longest
        for variant, row in rows.items():
            marks += _row(f"{name}, {NAMES[variant]}", row, y, scale, width)
            y += LABEL + BAR + GAP - 4
        marks += _ticks(1e3 * longest, y - 4, width)
        y += 30
    return svg(width, y - 8, marks, "Kernels of one layer, one after another")


def _row(label: str, row: Sequence[Timed], y: float, scale: float, width: int) -> list[str]:
    total = f"{1e3 * sum(one.seconds for one in row):,.2f} ms, {len(row)} kernels"
    marks = [text(0, y + 12, label), text(width, y + 12, total, "figure", "end")]
    x = 0.0
    for one in row:
        box = Box(x, y + LABEL + 2, one.seconds * scale, BAR)
        title = f"{one.name}: {1e6 * one.seconds:,.1f} µs, {one.bytes / 1e6:,.1f} MB"
        drawn = box._replace(width=box.width - (1.0 if box.width > 3 else 0.0))
        marks += [rectangle(drawn, one.kind, title), inside(drawn, one.name, short(one.name))]
        x += box.width
    return marks


def short(name: str) -> str:
    """A kernel's name without what it multiplies: mm, or F2."""
    return name.partition(":")[0].split()[-1 if ":" in name else 0]


def _ticks(longest: float, y: float, width: int) -> list[str]:
    """An axis from 0 to some milliseconds."""
    step = _round_step(longest / max(2, width // 110))
    marks, at = [line((0, y), (width, y), "axis")], 0.0
    while at <= longest:
        x = at / longest * width
        words = f"{at:g}" if at + step <= longest else f"{at:g} ms"
        anchor = "start" if at == 0 else "end" if x > width - 24 else "middle"
        marks += [line((x, y), (x, y + 4), "axis"), text(x, y + 17, words, "tick", anchor)]
        at = round(at + step, 9)
    return marks


def _round_step(least: float) -> float:
    """The next of 1, 2, 5, 10, …"""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * digit for digit in (1, 2, 5, 10) if power * digit >= least * 0.999)


# --- roofline -------------------------------------------------------------------------------------


class Plane(NamedTuple):
    """Logarithmic axes: FLOP a byte from left to right, TFLOP/s upwards."""

    width: float
    height: float
    low: tuple[float, float]
    high: tuple[float, float]

    def at(self, intensity: float, rate: float) -> tuple[float, float]:
        """The point of both in pixels."""
        across = _between(intensity, self.low[0], self.high[0])
        up = _between(rate, self.low[1], self.high[1])
        x = LEFT + across * (self.width - LEFT - RIGHT)
        return x, self.height - BOTTOM - up * (self.height - BOTTOM - TOP)


def _between(value: float, low: float, high: float) -> float:
    return math.log(value / low) / math.log(high / low)


def roofline(prediction: Prediction, layers: dict[str, PartCost], width: int) -> str:
    """Each kernel of one layer under what the GPU sustains; larger marks take longer."""
    precision, gpu = prediction.precisions[0], prediction.rates.gpu
    kernels = {
        variant: [one for one in prediction.timed(part, precision, PASSES) if one.flops]
        for variant, part in layers.items()
    }
    points = [one for row in kernels.values() for one in row]
    dtype = next((k.dtype for p in layers.values() for k in p.launches()), "bfloat16")
    roof, slope = gpu.flops(dtype) / 1e12, gpu.bytes / 1e12
    intensities = [one.flops / one.bytes for one in points]
    low = min([*intensities, 1.0]) / 2, min([*intensities, 1.0]) * slope / 3
    names = 80 / (width - LEFT - RIGHT - 80)  # room for the roofs' names at the right
    most = max([*intensities, 2 * roof / slope]) * 1.6
    high = most * (most / low[0]) ** names, roof * 4
    plane = Plane(width, min(420, 60 + 0.62 * width), low, high)
    roofs = {precision: roof}
    if EIGHT in prediction.precisions:
        roofs[EIGHT] = 2 * roof
    longest = max((one.seconds for one in points), default=1.0)
    marks = [*_grid(plane), *_roofs(plane, slope, roofs)]
    for variant, row in kernels.items():
        sizes = [math.sqrt(one.seconds / longest) * min(9, 3 + width / 160) for one in row]
        marks += [_point(plane, *one, variant) for one in zip(row, sizes, strict=True)]
    return svg(plane.width, plane.height, marks, "Kernels of one layer under the roofline")


def _grid(plane: Plane) -> list[str]:
    """Powers of ten on both axes, and what the axes are."""
    marks = []
    for power in range(-2, 6):
        value = 10.0**power
        if plane.low[0] <= value <= plane.high[0]:
            x, _ = plane.at(value, plane.low[1])
            marks.append(line((x, TOP), (x, plane.height - BOTTOM), "grid"))
            marks.append(text(x, plane.height - BOTTOM + 15, _power(power), "tick", "middle"))
        if plane.low[1] <= value <= plane.high[1]:
            _, y = plane.at(plane.low[0], value)
            marks.append(line((LEFT, y), (plane.width - RIGHT, y), "grid"))
            marks.append(text(LEFT - 5, y + 4, f"{value:g}", "tick", "end"))
    middle = (LEFT + plane.width - RIGHT) / 2
    marks.append(text(middle, plane.height - 6, "FLOP a byte", "tick", "middle"))
    return [*marks, text(2, TOP, "TFLOP/s", "tick")]


def _power(power: int) -> str:
    """A power of ten, in thousands where it is long."""
    return f"{10 ** (power - 3)}k" if power > 3 else f"{10.0**power:g}"


def _roofs(plane: Plane, slope: float, roofs: dict[str, float]) -> list[str]:
    """The line that memory draws, and one for each rate of products."""
    highest = max(roofs.values())
    marks = [line(plane.at(plane.low[0], slope * plane.low[0]),
                  plane.at(highest / slope, highest), "roof")]  # fmt: skip
    for name, rate in roofs.items():
        start, end = plane.at(rate / slope, rate), plane.at(plane.high[0], rate)
        marks.append(line(start, end, "roof"))
        marks.append(text(end[0], end[1] - 5, f"{name} {rate:,.0f}", "tick", "end"))
    return marks


def _point(plane: Plane, one: Timed, size: float, variant: str) -> str:
    x, y = plane.at(one.flops / one.bytes, one.flops / one.seconds / 1e12)
    rate = one.flops / one.seconds / 1e12
    title = (
        f"{NAMES[variant]}, {one.name}: {one.flops / one.bytes:,.1f} FLOP a byte, "
        f"{rate:,.1f} TFLOP/s, {1e6 * one.seconds:,.1f} µs"
    )
    return (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{2.5 + size:.1f}" class="p-{variant} s-{one.kind}">'
        f"<title>{escape(title)}</title></circle>"
    )
