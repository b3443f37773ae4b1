"""The report of a sweep: one table and one plot, with every setting's interval over seeds."""

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import numpy as np

from pos2distill.evaluation.charts import BEFORE, curve_chart, sweep_chart, to_png
from pos2distill.evaluation.page import TEMPLATES, chart_library, themes
from pos2distill.evaluation.report import Comparison, summarise
from pos2distill.evaluation.scores import Curve, format_slots
from pos2distill.evaluation.statistics import Interval, student_t

SEED = "seed"


@dataclass(frozen=True, slots=True)
class CellResult:
    """One study of a sweep: its settings, and its comparison on every task, the training task first."""

    settings: Mapping[str, Any]
    tasks: Mapping[str, Comparison]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over seeds with its 95 % interval: Student's t over seeds; for one seed, the bootstrap over examples."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class ModelEstimates:
    """One model's scores on one task, over seeds. groups: mean accuracy of each group of placements."""

    mean: Estimate
    gap: Estimate
    groups: Mapping[str, Estimate]


@dataclass(frozen=True, slots=True)
class TaskEstimates:
    """One task's scores before and after distillation, over seeds. difference: paired, after minus before."""

    before: ModelEstimates
    after: ModelEstimates
    difference: Estimate


@dataclass(frozen=True, slots=True)
class SweepRow:
    """One row of the report: a setting with all its seeds. tasks: by name, the training task first."""

    label: str
    seeds: int
    tasks: Mapping[str, TaskEstimates]


def estimate(values: Sequence[float], single_seed_interval: Interval) -> Estimate:
    """Mean and interval of one value for each seed.

    Args:
        values: at least one.
        single_seed_interval: the interval to report if there is one value only.
    """
    mean = float(np.mean(values))
    # One seed has no spread over seeds, so the interval is the one over examples.
    if len(values) == 1:
        low, high = single_seed_interval
        return Estimate(mean, low, high)
    # ddof=1, because the mean is estimated from the same values.
    half_width = student_t(len(values) - 1) * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return Estimate(mean, mean - half_width, mean + half_width)


def render_sweep(
    name: str, description: str, cells: Sequence[CellResult], versions: Mapping[str, str]
) -> dict[str, bytes]:
    """The files of a sweep's report: `index.html`, and of the training task `sweep.png` with means and GAPs.

    Where all its studies were evaluated at the same slots, also `curves.png` and `curves.csv`, accuracy by slot.
    """
    rows = _to_rows(cells)
    # Every task of any row, in order of appearance. Settings may differ in the tasks that they are evaluated on.
    task_names: list[str] = []
    for row in rows:
        task_names += [task for task in row.tasks if task not in task_names]
    training_task = task_names[0]
    points = []
    for row in rows:
        estimates = row.tasks[training_task]
        points.append((row.label, _to_points(estimates.before), _to_points(estimates.after)))
    charts = {"sweep": sweep_chart(points)}
    curves = _curves(cells, training_task)
    if curves:
        charts["curves"] = curve_chart(curves, selectable=True)
    html = TEMPLATES.get_template("sweep.html.j2").render(
        name=name,
        description=description,
        rows=rows,
        tasks={task: _describe_task(task, cells) for task in task_names},
        versions=versions,
        charts=charts,
        themes=themes(),
        chart_library=chart_library(),
    )
    pictures = {f"{chart}.png": to_png(spec) for chart, spec in charts.items()}
    return {"index.html": html.encode(), **pictures, **({"curves.csv": _curves_csv(curves)} if curves else {})}


def _curves(cells: Sequence[CellResult], task: str) -> dict[str, Curve]:
    """Accuracy by slot before distillation and after it, by setting, over seeds; empty if the slots differ.

    Settings may differ in what they distil; then each has a curve of its own before.
    """
    groups = [
        (label, [cell.tasks[task] for cell in group]) for label, group in _groups(cells) if task in group[0].tasks
    ]
    if len({(each.before.documents, each.before.slots) for _, comparisons in groups for each in comparisons}) != 1:
        return {}
    before = {label: _mean_curve([each.before for each in comparisons]) for label, comparisons in groups}
    after = {label: _mean_curve([each.after for each in comparisons]) for label, comparisons in groups}
    if len({curve.accuracy_by_slot for curve in before.values()}) == 1:
        return {BEFORE: next(iter(before.values())), **after}
    return {**{f"{label}, {BEFORE}": curve for label, curve in before.items()}, **after}


def _mean_curve(curves: Sequence[Curve]) -> Curve:
    """The curve over seeds; of its summary only the mean."""
    first = curves[0]
    estimates = []
    for slot, interval in enumerate(first.accuracy_ci95):
        estimates.append(estimate([curve.accuracy_by_slot[slot] for curve in curves], interval))
    return replace(
        first,
        accuracy_by_slot=tuple(each.value for each in estimates),
        accuracy_ci95=tuple((max(0.0, each.low), min(1.0, each.high)) for each in estimates),
        mean=float(np.mean([curve.mean for curve in curves])),
    )


def _curves_csv(curves: Mapping[str, Curve]) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["setting", "documents", "position", "accuracy", "low", "high", "questions"])
    for label, curve in curves.items():
        for slot, accuracy, (low, high) in zip(curve.slots, curve.accuracy_by_slot, curve.accuracy_ci95, strict=True):
            writer.writerow([label, curve.documents, format_slots(slot), accuracy, low, high, curve.examples])
    return text.getvalue().encode()


def summarise_sweep(name: str, cells: Sequence[CellResult]) -> dict[str, Any]:
    """Content of `summary.json`: every cell's settings, curves and paired differences."""
    summaries = []
    for cell in cells:
        tasks = {}
        for task, comparison in cell.tasks.items():
            tasks[task] = summarise(comparison)
        summaries.append({"settings": cell.settings, "tasks": tasks})
    return {"name": name, "cells": summaries}


def _groups(cells: Sequence[CellResult]) -> list[tuple[str, list[CellResult]]]:
    """The cells whose settings differ in the seed only, together, with a name for those settings."""
    # By their settings as JSON, since dicts cannot be keys. Cells keep their order.
    groups: dict[str, list[CellResult]] = {}
    for cell in cells:
        groups.setdefault(json.dumps(_without_seed(cell.settings)), []).append(cell)
    named = []
    for group in groups.values():
        labels = [_label(key, value) for key, value in _without_seed(group[0].settings).items()]
        named.append((", ".join(labels) or "all", group))
    return named


def _to_rows(cells: Sequence[CellResult]) -> list[SweepRow]:
    """One row for each group of cells."""
    rows = []
    for label, group in _groups(cells):
        tasks = {}
        for task in group[0].tasks:
            tasks[task] = _estimate_task([cell.tasks[task] for cell in group])
        rows.append(SweepRow(label, len(group), tasks))
    return rows


def _without_seed(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key != SEED}


def _label(dotted_name: str, value: Any) -> str:
    field = dotted_name.rsplit(".", 1)[-1]
    return str(value) if field == "name" else f"{field.replace('_', ' ')} {value}"


def _estimate_task(comparisons: Sequence[Comparison]) -> TaskEstimates:
    """Estimates over comparisons on one task, one for each seed."""
    differences = [comparison.paired["mean_difference"] for comparison in comparisons]
    return TaskEstimates(
        before=_estimate_model([comparison.before for comparison in comparisons]),
        after=_estimate_model([comparison.after for comparison in comparisons]),
        # The interval is used only if there is a single seed.
        difference=estimate(differences, comparisons[0].paired["ci95"]),
    )


def _estimate_model(curves: Sequence[Curve]) -> ModelEstimates:
    """Estimates over curves on the same prompts, one for each seed."""
    first = curves[0]
    groups = {}
    for name in first.by_group:
        groups[name] = estimate([curve.by_group[name] for curve in curves], first.by_group_ci95[name])
    return ModelEstimates(
        mean=estimate([curve.mean for curve in curves], first.ci95),
        gap=estimate([curve.gap for curve in curves], first.gap_ci95),
        groups=groups,
    )


def _to_points(model: ModelEstimates) -> dict[str, tuple[float, float, float]]:
    """(value, low, high) of mean and GAP, as `sweep_chart` takes them."""
    return {"mean": astuple(model.mean), "gap": astuple(model.gap)}


def _describe_task(task: str, cells: Sequence[CellResult]) -> str:
    """Data set, metric and size of a task; each variant once, if cells differ in them."""
    # A dict, because a set would lose the order of appearance.
    variants: dict[str, None] = {}
    for cell in cells:
        if task in cell.tasks:
            comparison = cell.tasks[task]
            size = f"{len(comparison.before.slots)} placements × {comparison.before.examples} examples"
            variants[f"{comparison.dataset}, {comparison.metric}, {size}"] = None
    return "; ".join(variants)
