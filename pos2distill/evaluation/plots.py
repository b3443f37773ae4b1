"""The report's pictures, as PNG bytes. Positions count from 1 here, since people read them."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pos2distill.evaluation.scores import Curve, format_slots

BEFORE, AFTER, QUIET = "#c2410c", "#0f766e", "#64748b"


def plot_curves(before: Curve, after: Curve, *, advantageous: int | None = None, width: float = 8) -> bytes:
    """Accuracy by where the gold documents stand, before and after, with 95 % intervals. `width`: in inches.

    One gold document: a curve over its positions. Two at every ordered pair of some slots: two heat maps. Else a pair
    of bars for every placement, group by group.
    """
    if _is_pair_grid(before):
        return _plot_heat_maps(before, after)
    if any(not isinstance(slot, int) for slot in before.slots):
        return _plot_placements(before, after, width)
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


def _plot_placements(before: Curve, after: Curve, width: float) -> bytes:
    figure = Figure(figsize=(width, 2.4 + width / 4), layout="constrained")
    axes = figure.add_subplot()
    place_S = np.arange(len(before.slots)) + 0.7 * np.unique(before.groups, return_inverse=True)[1]
    for curve, color, label, offset in ((before, BEFORE, "before", -0.2), (after, AFTER, "after", 0.2)):
        accuracy_S, (low_S, high_S) = np.asarray(curve.accuracy_by_slot), np.asarray(curve.accuracy_ci95).T
        errors = np.abs(np.stack([accuracy_S - low_S, high_S - accuracy_S]))
        axes.bar(
            place_S + offset,
            accuracy_S,
            width=0.4,
            color=color,
            label=f"{label}: {curve.mean:.3f}",
            yerr=errors,
            ecolor=QUIET,
            capsize=2,
        )
    for group in dict.fromkeys(filter(None, before.groups)):
        own = [place for place, name in zip(place_S, before.groups, strict=True) if name == group]
        axes.annotate(group, (float(np.mean(own)), 1.04), ha="center", color=QUIET, fontsize=9)
    axes.set_xticks(place_S, [format_slots(slots) for slots in before.slots], fontsize=8, rotation=45)
    axes.set(
        xlabel=f"positions of the gold documents among {before.documents}, in hop order (from 1)", ylabel="accuracy"
    )
    axes.set_ylim(0, 1.12)
    figure.legend(loc="outside lower center", frameon=False, ncols=2)
    return _to_png(figure)


def _is_pair_grid(curve: Curve) -> bool:
    """Whether the placements are every ordered pair of some slots."""
    pairs = [slot for slot in curve.slots if not isinstance(slot, int) and len(slot) == 2]
    slots = {slot for pair in pairs for slot in pair}
    return len(pairs) == len(curve.slots) == len(slots) * (len(slots) - 1) > 2


def _plot_heat_maps(before: Curve, after: Curve) -> bytes:
    """Accuracy by (first-hop position, second-hop position), before and after."""
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    all_axes = figure.subplots(1, 2, sharey=True)
    for axes, curve, label in zip(all_axes, (before, after), ("before", "after"), strict=True):
        slots = sorted({slot for pair in curve.slots for slot in pair})  # type: ignore[union-attr]
        value = np.full((len(slots), len(slots)), np.nan)
        for pair, accuracy in zip(curve.slots, curve.accuracy_by_slot, strict=True):
            first, second = pair  # type: ignore[misc]
            value[slots.index(first), slots.index(second)] = accuracy
        image = axes.imshow(value, vmin=0, vmax=1, cmap="viridis")
        for (row, column), accuracy in np.ndenumerate(value):
            if not np.isnan(accuracy):
                ink = "white" if accuracy < 0.6 else "black"
                axes.text(column, row, f"{accuracy:.2f}", ha="center", va="center", color=ink, fontsize=8)
        ticks = [str(slot + 1) for slot in slots]
        axes.set_xticks(range(len(slots)), ticks)
        axes.set_yticks(range(len(slots)), ticks)
        axes.set(title=f"{label}: {curve.mean:.3f}", xlabel="position of the second hop's document (from 1)")
    all_axes[0].set_ylabel("position of the first hop's document")
    figure.colorbar(image, ax=all_axes, shrink=0.8)
    return _to_png(figure, grid=False)


def plot_sweep(rows: Sequence[tuple[str, Mapping[str, Any], Mapping[str, Any]]]) -> bytes:
    """Mean and GAP of every setting of a sweep, before and after, with intervals over seeds.

    Args:
        rows: label, and for before and after {"mean": (value, low, high), "gap": (value, low, high)}.
    """
    figure = Figure(figsize=(9, 1.6 + 0.42 * len(rows)), layout="constrained")
    for axes, name in zip(figure.subplots(1, 2, sharey=True), ("mean", "gap"), strict=True):
        for part, color, label, offset in ((1, BEFORE, "before", 0.13), (2, AFTER, "after", -0.13)):
            value_R, low_R, high_R = np.asarray([row[part][name] for row in rows]).T  # type: ignore[index]
            axes.errorbar(
                value_R,
                np.arange(len(rows))[::-1] + offset,
                xerr=np.abs(np.stack([value_R - low_R, high_R - value_R])),
                fmt="o",
                color=color,
                markersize=4,
                linewidth=1.2,
                label=label,
            )
        axes.set_yticks(range(len(rows)), [row[0] for row in rows][::-1])
        axes.set_ylim(-0.5, len(rows) - 0.5)
        axes.set_xlabel({"mean": "mean accuracy", "gap": "GAP"}[name])
        axes.set_xlim(-0.02, 1.02)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", frameon=False, ncols=2)
    return _to_png(figure)


def plot_loss(steps: Sequence[Mapping[str, Any]]) -> bytes:
    """The objective, and the mean loss of trivial and anchor rows, by step, on a logarithmic axis."""
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    axes = figure.add_subplot()
    shown = (
        ("loss", "objective", AFTER),
        ("loss_trivial", "trivial rows", BEFORE),
        ("loss_anchor", "anchor rows", QUIET),
    )
    for name, label, color in shown:
        points = [(step["step"] + 1, step[name]) for step in steps if step[name]]
        if points:
            axes.plot(*zip(*points, strict=True), color=color, label=label, linewidth=1.3)
    axes.set(xlabel="optimizer step", ylabel="nats", yscale="log")
    if axes.lines:  # losses of 0 have no place on a logarithmic axis
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


def _to_png(figure: Figure, *, grid: bool = True) -> bytes:
    for axes in figure.axes if grid else ():
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e2e8f0", linewidth=0.6)
        axes.set_axisbelow(True)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=144)
    return buffer.getvalue()
