"""An audit as one page: no script, nothing from elsewhere, light and dark, wide and narrow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from html import escape

import cadenza
from cadenza.tools.audit import drawings
from cadenza.tools.audit.counting import CLASSES
from cadenza.tools.audit.prediction import CADENZA, EAGER, PartCost
from cadenza.tools.audit.rates import EIGHT
from cadenza.tools.audit.report import NAMES, TITLES, Report
from cadenza.tools.audit.savings import Saving
from cadenza.tools.audit.style import STYLE
from cadenza.tools.audit.trace import PASSES

WIDTHS = {"wide": 1040, "narrow": 350}  # pixels that a picture has on a desk and on a phone
Picture = Callable[[int], str]


def page(report: Report) -> str:
    """All of the page, as HTML."""
    title = f"{report.name} on {report.prediction.rates.gpu.name}"
    body = "\n".join(_body(report, title))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)}: before and after Cadenza</title>\n<style>{STYLE}</style>\n"
        f"</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _body(report: Report, title: str) -> Iterator[str]:
    yield f"<h1>{escape(title)}</h1>"
    yield f'<p class="about">A training step {escape(_basis(report))}: before and after Cadenza</p>'
    yield _tiles(report)
    prediction = report.prediction
    yield _figure(
        "Time of a step by class of work", lambda width: drawings.shares(prediction, width),
        _legend(_classes(report)),
    )  # fmt: skip
    layers = layers_of(report)
    if layers:
        yield _figure(
            "One layer, kernel after kernel",
            lambda width: drawings.time_line(prediction, layers, width),
            f"<p>{escape(prediction.precisions[0])}; a pass has its own scale. Narrow kernels say "
            "what they are when pointed at.</p>",
        )
        yield _figure(
            "Roofline of its kernels",
            lambda width: drawings.roofline(prediction, layers, width),
            _points(layers),
        )
        yield _kernels(report, layers)
    if report.measured:
        yield _measured(report)
    yield "<h2>What this rests on</h2>"
    yield f"<ul>{''.join(f'<li>{escape(one)}</li>' for one in report.assumptions)}</ul>"
    yield f"<footer>cadenza {cadenza.__version__}</footer>"


def _basis(report: Report) -> str:
    return "predicted and measured" if report.measured else "predicted from its operations"


def layers_of(report: Report) -> dict[str, PartCost]:
    """The first layer of the variants to compare; empty where the model has none."""
    variants = report.prediction.variants
    names = [report.prediction.before, CADENZA]
    found = {name: next((p for p in variants.get(name, ()) if p.is_layer), None) for name in names}
    return {name: part for name, part in found.items() if part is not None}


# --- figures --------------------------------------------------------------------------------------


def _figure(title: str, picture: Picture, caption: str) -> str:
    drawn = "".join(f'<div class="{name}">{picture(width)}</div>' for name, width in WIDTHS.items())
    return f"<h2>{escape(title)}</h2>\n<figure>{drawn}<figcaption>{caption}</figcaption></figure>"


def _classes(report: Report) -> list[str]:
    prediction = report.prediction
    steps = [prediction.step(v, p) for v in prediction.variants for p in prediction.precisions]
    return [kind for kind in CLASSES if any(step.seconds[kind] for step in steps)]


def _legend(kinds: Iterable[str]) -> str:
    marks = (f'<li><i class="k-{kind}"></i>{escape(TITLES[kind])}</li>' for kind in kinds)
    return f'<ul class="legend">{"".join(marks)}</ul>'


def _points(layers: dict[str, PartCost]) -> str:
    marks = (f'<li><i class="p-{name}"></i>{escape(NAMES[name])}</li>' for name in layers)
    return (
        f'<ul class="legend">{"".join(marks)}</ul><p>Colours are those above. Larger marks take '
        "longer. Arithmetic beside products counts one FLOP for each number computed.</p>"
    )


# --- figures in words -----------------------------------------------------------------------------


def _tiles(report: Report) -> str:
    return f'<div class="tiles">{"".join(_tile(*one) for one in _facts(report))}</div>'


def _tile(figure: str, words: str) -> str:
    return f"<div><b>{escape(figure)}</b><span>{escape(words)}</span></div>"


def _facts(report: Report) -> Iterator[tuple[str, str]]:
    prediction, options = report.prediction, report.options
    for precision in prediction.precisions:
        before = 1e3 * prediction.step(prediction.before, precision).total
        if CADENZA not in prediction.variants:
            yield f"{before:,.0f} ms", f"{precision}: a step, {NAMES[prediction.before]}"
            continue
        after, saving = 1e3 * prediction.step(CADENZA, precision).total, report.saving(precision)
        once = ", once epilogues store fp8" if precision == EIGHT else ""
        yield (
            f"{100 * saving.share:.1f} %",
            (
                f"of a step saved in {precision}{once}: {before:,.0f} ms to {after:,.0f} ms, "
                f"against {_against(prediction.before)}"
            ),
        )
        if options.hours is not None:
            yield _range(saving, options.hours, "GPU-hours", f"saved in {precision}")
        if options.hours is not None and options.price is not None:
            yield _range(saving, options.hours * options.price, "", f"in money, in {precision}")


def _against(variant: str) -> str:
    return "PyTorch eager" if variant == EAGER else "torch.compile"


def _range(saving: Saving, factor: float, unit: str, words: str) -> tuple[str, str]:
    middle, least, most = saving.times(factor)
    return f"{middle:,.0f} {unit}".strip(), f"{words}: {least:,.0f} to {most:,.0f}, {saving.basis}"


# --- tables ---------------------------------------------------------------------------------------


def _table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    lines = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def _kernels(report: Report, layers: dict[str, PartCost]) -> str:
    header = ("pass", "kernel", "class", "GFLOP", "MB", "µs")
    tables = []
    for variant, part in layers.items():
        rows = [
            (name, one.name, one.kind, f"{one.flops / 1e9:,.1f}", f"{one.bytes / 1e6:,.1f}",
             f"{1e6 * one.seconds:,.1f}")
            for name in PASSES
            for one in report.prediction.timed(part, report.prediction.precisions[0], (name,))
        ]  # fmt: skip
        tables.append(
            f"<details><summary>The kernels of one layer, {escape(NAMES[variant])}</summary>"
            f"{_table(header, rows)}</details>"
        )
    return "\n".join(tables)


def _measured(report: Report) -> str:
    header = ("", "predicted, ms", "measured, ms", "measured ÷ predicted")
    rows = []
    for one in report.measured:
        name = NAMES[one["variant"]]
        if "failed" in one:
            rows.append((name, "", one["failed"], ""))
            continue
        predicted, measured = one["predicted"]["ms"], one["measured"]["ms"]
        ratio = f"{measured / predicted:.2f}"
        rows.append((name, f"{predicted:,.2f}", f"{measured:,.2f}", ratio))
    device, layers = report.measured[0]["device"], report.measured[0]["layers"]
    place = f"{device}, {layers} layers" if layers else device
    return f"<h2>Measured on {escape(place)}</h2>{_table(header, rows)}"
