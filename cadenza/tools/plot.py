"""Pictures of losses, drawn without a display and handed over as the bytes of a PNG."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

Curve = Sequence[float]
DOTS_PER_INCH = 120


def loss_plot(training: Curve, validation: Mapping[int, float], unit: str = "byte") -> bytes:
    """Training loss by step, held-out loss by step; `unit` is what a token is."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    _draw_losses(axes, training, validation, color="C0", linewidth=1)
    _label_losses(axes, unit)
    axes.legend()
    return _png(figure)


def comparison_plot(
    curves: Mapping[str, tuple[Curve, Mapping[int, float]]],
    differences: Mapping[str, Curve],
    limit: float | None,
    unit: str = "byte",
) -> bytes:
    """Above all models' losses, below by step the relative difference of each from stock."""
    figure = Figure(figsize=(8, 9), layout="constrained")
    upper, lower = figure.subplots(2, sharex=True)
    colors = {name: f"C{index}" for index, name in enumerate(curves)}
    for index, (name, losses) in enumerate(curves.items()):
        # Curves that agree lie on each other: the first is the widest, and shows at the edges.
        width = 1 + 2 * (len(curves) - 1 - index)
        _draw_losses(upper, *losses, color=colors[name], linewidth=width, name=f"{name}: ")
    _label_losses(upper, unit)
    for name, difference in differences.items():
        label = f"{name} from stock"
        lower.plot(_steps(difference), difference, color=colors[name], label=label, linewidth=1)
    if limit is not None:
        lower.axhline(limit, color="grey", linestyle="--", label="limit")
    lower.set(xlabel="step", ylabel="relative difference of loss", yscale="log")
    upper.legend()
    lower.legend()
    return _png(figure)


def _draw_losses(
    axes: Axes,
    training: Curve,
    validation: Mapping[int, float],
    *,
    color: str,
    linewidth: float,
    name: str = "",
) -> None:
    axes.plot(_steps(training), training, label=f"{name}training", color=color, linewidth=linewidth)
    steps, losses = list(validation), list(validation.values())
    size = 4 + linewidth
    axes.plot(steps, losses, "o--", label=f"{name}held out", color=color, markersize=size)


def _label_losses(axes: Axes, unit: str) -> None:
    axes.set(xlabel="step", ylabel=f"cross-entropy (nats a {unit})")


def _steps(curve: Curve) -> range:
    return range(1, len(curve) + 1)


def _png(figure: Figure) -> bytes:
    FigureCanvasAgg(figure)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=DOTS_PER_INCH)
    return content.getvalue()
