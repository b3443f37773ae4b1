"""The report's plots, as PNG bytes. Positions are 1-based in plots."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pos2distill.evaluation.scores import Curve, format_slots

BEFORE_COLOR = "#c2410c"
AFTER_COLOR = "#0f766e"
MUTED_COLOR = "#64748b"
GRID_COLOR = "#e2e8f0"


def plot_curves(before: Curve, after: Curve, *, advantageous: int | None = None, width: float = 8) -> bytes:
    """Accuracy by position of the gold documents, before and after, with 95 % intervals.

    One gold document: a curve over its positions. Two gold documents at every ordered pair of some slots: two heat
    maps. Otherwise: a pair of bars for every placement, group by group.

    Args:
        advantageous: 0-based slot to mark in a curve.
        width: inches.
    """
    if _is_pair_grid(before):
        return _plot_heat_maps(before, after)
    if any(not isinstance(slot, int) for slot in before.slots):
        return _plot_placements(before, after, width)
    # `Figure` without pyplot, which would keep every figure in memory until it is closed.
    figure = Figure(figsize=(width, 2 + width / 4), layout="constrained")
    axes = figure.add_subplot()
    _draw_curve(axes, before, BEFORE_COLOR, "before")
    _draw_curve(axes, after, AFTER_COLOR, "after")
    if advantageous is not None:
        _mark_advantageous(axes, advantageous, before.documents)
    axes.set(xlabel=f"position of the gold document among {before.documents} (from 1)", ylabel="accuracy")
    axes.set_ylim(0, 1.02)  # above 1, so that the markers at 1 are whole
    _set_position_ticks(axes, before.documents)
    axes.legend(loc="lower center", frameon=False, ncols=2)
    return _to_png(figure)


def _draw_curve(axes: Axes, curve: Curve, color: str, label: str) -> None:
    positions = np.asarray(curve.slots) + 1
    low, high = np.asarray(curve.accuracy_ci95).T
    axes.fill_between(positions, low, high, color=color, alpha=0.15, linewidth=0)
    legend = f"{label}: {curve.mean:.3f}"
    axes.plot(positions, curve.accuracy_by_slot, color=color, marker="o", markersize=3, label=legend)


def _mark_advantageous(axes: Axes, slot: int, documents: int) -> None:
    """A dotted line at the slot, with its text on the side that has more room."""
    axes.axvline(slot + 1, color=MUTED_COLOR, linewidth=0.8, linestyle=":")
    in_right_half = slot > documents / 2
    axes.annotate(
        "advantageous",
        (slot + 1, 0.02),
        xytext=(-4, 0) if in_right_half else (4, 0),
        textcoords="offset points",
        ha="right" if in_right_half else "left",
        color=MUTED_COLOR,
        fontsize=8,
    )


def _plot_placements(before: Curve, after: Curve, width: float) -> bytes:
    figure = Figure(figsize=(width, 2.4 + width / 4), layout="constrained")
    axes = figure.add_subplot()
    # A gap of 0.7 bars between the groups.
    group_number_S = np.unique(before.groups, return_inverse=True)[1]
    x_S = np.arange(len(before.slots)) + 0.7 * group_number_S
    for curve, color, label, offset in ((before, BEFORE_COLOR, "before", -0.2), (after, AFTER_COLOR, "after", 0.2)):
        low_S, high_S = np.asarray(curve.accuracy_ci95).T
        axes.bar(
            x_S + offset,
            curve.accuracy_by_slot,
            width=0.4,
            color=color,
            label=f"{label}: {curve.mean:.3f}",
            yerr=_error_bars(curve.accuracy_by_slot, low_S, high_S),
            ecolor=MUTED_COLOR,
            capsize=2,
        )
    # Placements without a group have an empty name, which is not shown.
    for group in set(before.groups) - {""}:
        center = float(x_S[np.asarray(before.groups) == group].mean())
        axes.annotate(group, (center, 1.04), ha="center", color=MUTED_COLOR, fontsize=9)
    axes.set_xticks(x_S, [format_slots(slots) for slots in before.slots], fontsize=8, rotation=45)
    axes.set_xlabel(f"positions of the gold documents among {before.documents}, in hop order (from 1)")
    axes.set_ylabel("accuracy")
    axes.set_ylim(0, 1.12)  # room for the groups' names
    figure.legend(loc="outside lower center", frameon=False, ncols=2)
    return _to_png(figure)


def _error_bars(value: Any, low: Any, high: Any) -> Any:
    """(2, N) distances below and above the values, as matplotlib takes them.

    A bootstrap interval may lie on one side of its value, and matplotlib refuses negative distances.
    """
    return np.abs(np.stack([np.asarray(value) - low, high - np.asarray(value)]))


def _is_pair_grid(curve: Curve) -> bool:
    """Whether the placements are every ordered pair of some slots."""
    pairs = [slot for slot in curve.slots if not isinstance(slot, int) and len(slot) == 2]
    slots: set[int] = set()
    for pair in pairs:
        slots.update(pair)
    all_pairs = len(slots) * (len(slots) - 1)
    # Two slots have only two pairs, which bars show better than a heat map.
    return len(curve.slots) == len(pairs) == all_pairs and all_pairs > 2


def _plot_heat_maps(before: Curve, after: Curve) -> bytes:
    """Accuracy by (first-hop position, second-hop position), before and after."""
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    all_axes = figure.subplots(1, 2, sharey=True)
    for axes, curve, label in zip(all_axes, (before, after), ("before", "after"), strict=True):
        slots = np.unique(np.asarray(curve.slots))
        accuracy = np.full((len(slots), len(slots)), np.nan)  # a pair of one slot with itself does not exist
        first_S, second_S = np.searchsorted(slots, np.asarray(curve.slots)).T
        accuracy[first_S, second_S] = curve.accuracy_by_slot
        # Both maps have the whole range of colours, so that they can be compared.
        image = axes.imshow(accuracy, vmin=0, vmax=1, cmap="viridis")
        for row, column, value in zip(first_S, second_S, curve.accuracy_by_slot, strict=True):
            color = "white" if value < 0.6 else "black"  # readable on viridis, which is dark at 0
            axes.text(column, row, f"{value:.2f}", ha="center", va="center", color=color, fontsize=8)
        axes.set_xticks(range(len(slots)), [str(slot + 1) for slot in slots])
        axes.set_yticks(range(len(slots)), [str(slot + 1) for slot in slots])
        axes.set(title=f"{label}: {curve.mean:.3f}", xlabel="position of the second hop's document (from 1)")
    all_axes[0].set_ylabel("position of the first hop's document (from 1)")
    figure.colorbar(image, ax=all_axes, shrink=0.8)
    # Grid lines would cross the cells.
    return _to_png(figure, grid=False)


def plot_sweep(rows: Sequence[tuple[str, Mapping[str, Any], Mapping[str, Any]]]) -> bytes:
    """Mean accuracy and GAP of every setting of a sweep, before and after, with intervals over seeds.

    Args:
        rows: (label, before, after) of each setting; the last two are
            {"mean": (value, low, high), "gap": (value, low, high)}.
    """
    figure = Figure(figsize=(9, 1.6 + 0.42 * len(rows)), layout="constrained")
    labels = [label for label, _, _ in rows]
    y_R = np.arange(len(rows))[::-1]  # the first setting at the top
    mean_axes, gap_axes = figure.subplots(1, 2, sharey=True)
    for axes, name, title in ((mean_axes, "mean", "mean accuracy"), (gap_axes, "gap", "GAP")):
        _draw_estimates(axes, [before[name] for _, before, _ in rows], y_R + 0.13, BEFORE_COLOR, "before")
        _draw_estimates(axes, [after[name] for _, _, after in rows], y_R - 0.13, AFTER_COLOR, "after")
        axes.set_yticks(y_R, labels)
        axes.set_ylim(-0.5, len(rows) - 0.5)
        axes.set_xlabel(title)
        axes.set_xlim(-0.02, 1.02)  # the same for all sweeps, so that reports can be compared
    figure.legend(*mean_axes.get_legend_handles_labels(), loc="outside lower center", frameon=False, ncols=2)
    return _to_png(figure)


def _draw_estimates(axes: Axes, estimates: Sequence[Any], y: Any, color: str, label: str) -> None:
    """Horizontal intervals. estimates: (value, low, high) for each y."""
    value, low, high = np.asarray(estimates).T
    errors = _error_bars(value, low, high)
    axes.errorbar(value, y, xerr=errors, fmt="o", color=color, markersize=4, linewidth=1.2, label=label)


def plot_loss(steps: Sequence[Mapping[str, Any]]) -> bytes:
    """The objective, and the mean loss of trivial and anchor rows, by optimizer step, on a logarithmic axis."""
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    axes = figure.add_subplot()
    lines = (
        ("loss", "objective", AFTER_COLOR),
        ("loss_trivial", "trivial rows", BEFORE_COLOR),
        ("loss_anchor", "anchor rows", MUTED_COLOR),
    )
    for name, label, color in lines:
        shown = [step for step in steps if step[name]]  # a logarithmic axis cannot show a loss of 0
        if shown:
            x = [step["step"] + 1 for step in shown]
            axes.plot(x, [step[name] for step in shown], color=color, label=label, linewidth=1.3)
    axes.set(xlabel="optimizer step", ylabel="nats", yscale="log")
    if axes.lines:
        axes.legend(frameon=False)
    return _to_png(figure)


def plot_weights(steps: Sequence[Mapping[str, Any]], slots: int) -> bytes:
    """Mean weight of each gold position in a step's loss, in the first and in the last third of training."""
    third = max(1, len(steps) // 3)
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    axes = figure.add_subplot()
    parts = ((steps[:third], "first third", BEFORE_COLOR, -0.2), (steps[-third:], "last third", AFTER_COLOR, 0.2))
    for part, label, color, offset in parts:
        total_by_slot = np.zeros(slots)
        for step in part:
            for slot, weight in step["weight_by_slot"].items():
                # The step log is JSON, where keys are text.
                total_by_slot[int(slot)] += weight
        axes.bar(np.arange(1, slots + 1) + offset, total_by_slot / len(part), width=0.4, color=color, label=label)
    axes.set(xlabel="position of the gold document (from 1)", ylabel="weight in a step's loss")
    _set_position_ticks(axes, slots)
    axes.legend(frameon=False)
    return _to_png(figure)


def _set_position_ticks(axes: Axes, documents: int) -> None:
    """Ticks at 1 and at about six multiples of 5; at every position if there are at most 10."""
    step = 1
    if documents > 10:
        step = max(1, round(documents / 6 / 5) * 5)
    ticks = [1]
    for position in range(step, documents + 1, step):
        if position > 1:
            ticks.append(position)
    axes.set_xticks(ticks)


def _to_png(figure: Figure, *, grid: bool = True) -> bytes:
    if grid:
        for axes in figure.axes:
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(axis="y", color=GRID_COLOR, linewidth=0.6)
            axes.set_axisbelow(True)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=144)
    return buffer.getvalue()
