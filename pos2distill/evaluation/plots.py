"""The report's pictures, as PNG bytes. Positions count from 1 here, since people read them."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pos2distill.evaluation.scores import Curve

BEFORE, AFTER, QUIET = "#c2410c", "#0f766e", "#64748b"


def plot_curves(before: Curve, after: Curve, *, advantageous: int | None = None, width: float = 8) -> bytes:
    """Accuracy by the gold document's position, before and after, with 95 % bands. `width`: in inches."""
    figure = Figure(figsize=(width, 2 + width / 4), layout="constrained")
    axes = figure.add_subplot()
    _draw_curve(axes, before, BEFORE, "before")
    _draw_curve(axes, after, AFTER, "after")
    if advantageous is not None:
        axes.axvline(advantageous + 1, color=QUIET, linewidth=0.8, linestyle=":")
        axes.annotate(
            "advantageous",
            (advantageous + 1, 0.02),
            xytext=(-4 if advantageous > before.documents / 2 else 4, 0),
            textcoords="offset points",
            ha="right" if advantageous > before.documents / 2 else "left",
            color=QUIET,
            fontsize=8,
        )
    axes.set(xlabel=f"position of the gold document among {before.documents} (from 1)", ylabel="accuracy")
    axes.set_ylim(0, 1.02)
    _count_from_one(axes, before.documents)
    axes.legend(loc="lower center", frameon=False, ncols=2)
    return _to_png(figure)


def plot_loss(steps: Sequence[Mapping[str, Any]]) -> bytes:
    """Loss, trivial and anchor KL by step, on a logarithmic axis."""
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    axes = figure.add_subplot()
    shown = (
        ("loss", "loss", AFTER),
        ("kl_trivial", "KL, trivial rows", BEFORE),
        ("kl_anchor", "KL, anchor rows", QUIET),
    )
    for name, label, color in shown:
        points = [(step["step"] + 1, step[name]) for step in steps if step[name]]
        if points:
            axes.plot(*zip(*points, strict=True), color=color, label=label, linewidth=1.3)
    axes.set(xlabel="optimizer step", ylabel="nats", yscale="log")
    if axes.lines:  # KLs of 0 have no place on a logarithmic axis
        axes.legend(frameon=False)
    return _to_png(figure)


def plot_weights(steps: Sequence[Mapping[str, Any]], slots: int) -> bytes:
    """Where the position weights went: each position's weight in a step, early and late in training."""
    third = max(1, len(steps) // 3)
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    axes = figure.add_subplot()
    parts = ((steps[:third], "first third", BEFORE, -0.2), (steps[-third:], "last third", AFTER, 0.2))
    for part, label, color, offset in parts:
        totals = np.zeros(slots)
        for step in part:
            for slot, weight in step["weight_by_slot"].items():
                totals[int(slot)] += weight
        axes.bar(np.arange(1, slots + 1) + offset, totals / len(part), width=0.4, color=color, label=label)
    axes.set(xlabel="position of the gold document (from 1)", ylabel="weight in a step's loss")
    _count_from_one(axes, slots)
    axes.legend(frameon=False)
    return _to_png(figure)


def _draw_curve(axes: Axes, curve: Curve, color: str, label: str) -> None:
    position = np.asarray(curve.slots) + 1
    low, high = np.asarray(curve.accuracy_ci95).T
    axes.fill_between(position, low, high, color=color, alpha=0.15, linewidth=0)
    axes.plot(
        position, curve.accuracy_by_slot, color=color, marker="o", markersize=3, label=f"{label}: {curve.mean:.3f}"
    )


def _count_from_one(axes: Axes, documents: int) -> None:
    """Ticks at 1 and at about six round positions."""
    step = max(1, round(documents / 6 / 5) * 5) if documents > 10 else 1
    axes.set_xticks([1, *(position for position in range(step, documents + 1, step) if position > 1)])


def _to_png(figure: Figure) -> bytes:
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e2e8f0", linewidth=0.6)
        axes.set_axisbelow(True)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=144)
    return buffer.getvalue()
