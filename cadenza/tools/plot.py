"""Pictures of losses, drawn without a display and handed over as the bytes of a PNG."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

Curve = Sequence[float]
DOTS_PER_INCH = 120


def loss_plot(training: Curve, validation: Mapping[int, float]) -> bytes:
    """Training loss by step, held-out loss by step."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    _draw_losses(axes, "", training, validation)
    axes.legend()
    return _png(figure)


def comparison_plot(
    curves: Mapping[str, tuple[Curve, Mapping[int, float]]],
    differences: Mapping[str, Curve],
    limit: float | None,
) -> bytes:
    """Above all models' losses, below by step the relative difference of each from stock."""
    figure = Figure(figsize=(8, 9), layout="constrained")
    upper, lower = figure.subplots(2, sharex=True)
    for name, (training, validation) in curves.items():
        _draw_losses(upper, f"{name}: ", training, validation)
    for name, difference in differences.items():
        lower.plot(_steps(difference), difference, label=f"{name} from stock", linewidth=1)
    if limit is not None:
        lower.axhline(limit, color="grey", linestyle="--", label="limit")
    lower.set(xlabel="step", ylabel="relative difference of loss", yscale="log")
    upper.legend()
    lower.legend()
    return _png(figure)


def _draw_losses(axes: Axes, name: str, training: Curve, validation: Mapping[int, float]) -> None:
    (line,) = axes.plot(_steps(training), training, label=f"{name}training", linewidth=1)
    axes.plot(
        list(validation), list(validation.values()), "o--", color=line.get_color(), markersize=4,
        label=f"{name}held out",
    )  # fmt: skip
    axes.set(xlabel="step", ylabel="cross-entropy (nats a byte)")


def _steps(curve: Curve) -> range:
    return range(1, len(curve) + 1)


def _png(figure: Figure) -> bytes:
    FigureCanvasAgg(figure)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=DOTS_PER_INCH)
    return content.getvalue()
