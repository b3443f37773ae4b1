"""The report of a sweep: one table and one plot, with every setting's interval over seeds."""

import functools
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from typing import Any

import numpy as np

from pos2distill.evaluation.charts import BEFORE, curve_chart, sweep_chart, to_png
from pos2distill.evaluation.formatting import to_csv
from pos2distill.evaluation.page import TEMPLATES, chart_library, themes
from pos2distill.evaluation.report import Comparison, summarize
from pos2distill.evaluation.scores import Curve, format_slots
from pos2distill.evaluation.statistics import Interval, student_t

SEED = "seed"

_ACCURACY: Interval = (0.0, 1.0)
_CHANGE: Interval = (-1.0, 1.0)  # what a difference of two accuracies can be


@dataclass(frozen=True, slots=True)
class CellResult:
    """One study of a sweep: its settings, and its comparison on every task, the training task first."""

    settings: Mapping[str, Any]
    tasks: Mapping[str, Comparison]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over seeds with its 95 % interval (`estimate`)."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class ModelEstimates:
    """One model's scores on one task, over seeds.

    Attributes:
        gap: max - min.
        gap_corrected: without its upward bias; its interval is None for one seed, since it has none over questions.
        groups: mean accuracy of each group of placements.
    """

    mean: Estimate
    gap: Estimate
    gap_corrected: float
    gap_corrected_ci95: Interval | None
    groups: Mapping[str, Estimate]


@dataclass(frozen=True, slots=True)
class TaskEstimates:
    """One task's scores before and after distillation, over seeds.

    Attributes:
        difference: paired difference of the means, after minus before.
        gap_change: that of the corrected GAPs.
    """

    before: ModelEstimates
    after: ModelEstimates
    difference: Estimate
    gap_change: Estimate


@dataclass(frozen=True, slots=True)
class SweepRow:
    """One row of the report: a setting with all its seeds.

    Attributes:
        tasks: each task by its name, the training task first.
    """

    label: str
    seeds: int
    tasks: Mapping[str, TaskEstimates]


def estimate(
    values: Sequence[float], intervals: Sequence[Interval], *, shared: float, bounds: Interval = _ACCURACY
) -> Estimate:
    """The mean of one value for each seed, with a 95 % interval.

    Seeds with questions of their own differ by training and by questions, so Student's t over seeds covers both. Of
    questions that seeds share it covers training alone, and their part of the margin over questions is added:

        margin^2 = max((t * s / sqrt(n))^2 + shared * q^2,  q^2 * (1 + (n - 1) * shared) / n)

    s: standard deviation of the n values; q: the mean margin of the seeds' own intervals on that side. The variance of
    the mean is that of one seed by training, over n, plus that of the questions times (1 + (n - 1) * shared) / n;
    s^2 / n estimates all of it but `shared` times the questions' variance. The second term is what the questions alone
    contribute: values of few seeds may be equal by chance, most often near 0 and 1. benchmarks/statistics has how often
    the interval covers the truth in simulations.

    Args:
        values: at least one value.
        intervals: the interval of each value over its questions; that of a single seed is the result.
        shared: the fraction of its questions that a seed shares with another (`shared_fraction`).
        bounds: what the value can be; the interval ends there.
    """
    mean = float(np.mean(values))
    if len(values) == 1:
        return Estimate(mean, *intervals[0])
    # ddof=1, because the mean is estimated from the same values.
    over_seeds = student_t(len(values) - 1) * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    lows, highs = zip(*intervals, strict=True)
    # Not below 0: the intervals may be those of the plain GAP, of which a corrected one may lie outside.
    below = max(0.0, mean - float(np.mean(lows)))
    above = max(0.0, float(np.mean(highs)) - mean)
    by_questions = math.sqrt((1 + (len(values) - 1) * shared) / len(values))
    low, high = (
        sign * max(math.hypot(over_seeds, math.sqrt(shared) * margin), by_questions * margin)
        for sign, margin in ((-1, below), (1, above))
    )
    return Estimate(mean, max(mean + low, bounds[0]), min(mean + high, bounds[1]))


def estimate_gap(
    gaps: Sequence[float], intervals: Sequence[Interval], corrected: Sequence[float], *, shared: float
) -> tuple[Estimate, Estimate]:
    """The mean GAP and the mean corrected GAP of the seeds, each with a 95 % interval.

    Noise raises the GAP of every seed, and more seeds do not change that. So its interval begins where that of the
    corrected GAP does, unless its own begins lower.

    Args:
        gaps: the GAP of each seed.
        intervals: the interval of each seed's GAP over its questions. It serves for the corrected GAP too, which
            estimates the same quantity.
        corrected: the corrected GAP of each seed.
        shared: as in `estimate`.
    """
    gap = estimate(gaps, intervals, shared=shared)
    gap_corrected = estimate(corrected, intervals, shared=shared, bounds=_CHANGE)
    if len(gaps) > 1:
        gap = replace(gap, low=min(gap.low, max(gap_corrected.low, 0.0)))
    return gap, gap_corrected


def shared_fraction(questions: Sequence[frozenset[str]]) -> float:
    """The fraction of its questions that a seed shares with another one: the mean over pairs of seeds.

    Args:
        questions: the ids of each seed's questions. 1 for a single seed.
    """
    pairs = list(itertools.combinations(questions, 2))
    if not pairs:
        return 1.0
    # Seeds have equally many questions, but for those that a server refused.
    return float(np.mean([len(one & other) / math.sqrt(len(one) * len(other)) for one, other in pairs]))


def render_sweep(
    name: str, description: str, cells: Sequence[CellResult], versions: Mapping[str, str]
) -> dict[str, bytes]:
    """The files of a sweep's report: `index.html`, its tables as `sweep.csv`, and `sweep.png`.

    `sweep.png` shows means and GAPs of the training task. Where all its studies were evaluated at the same slots, there
    are also `curves.png` and `curves.csv`, accuracy by slot.
    """
    rows = to_rows(cells)
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
    files = {"index.html": html.encode(), "sweep.csv": _sweep_csv(rows), **pictures}
    if curves:
        files["curves.csv"] = _curves_csv(curves)
    return files


def _curves(cells: Sequence[CellResult], task: str) -> dict[str, Curve]:
    """Accuracy by slot before distillation and after it, by setting, over seeds; empty if the slots differ.

    Settings may differ in what they distill; then each has its own curve before distillation.
    """
    evaluated = [cell.tasks[task].before for cell in cells if task in cell.tasks]
    if len({(curve.documents, curve.slots) for curve in evaluated}) != 1:
        return {}
    before, after = {}, {}
    for label, group in _groups(cells):
        if task not in group[0].tasks:
            continue
        comparisons = [cell.tasks[task] for cell in group]
        shared = shared_fraction([each.question_ids for each in comparisons])
        before[label] = _mean_curve([each.before for each in comparisons], shared)
        after[label] = _mean_curve([each.after for each in comparisons], shared)
    if len({curve.accuracy_by_slot for curve in before.values()}) == 1:
        return {BEFORE: next(iter(before.values())), **after}
    return {**{f"{label}, {BEFORE}": curve for label, curve in before.items()}, **after}


def _mean_curve(curves: Sequence[Curve], shared: float) -> Curve:
    """The curve over seeds; of its summary only the mean."""
    estimates = []
    for slot in range(len(curves[0].slots)):
        accuracies = [curve.accuracy_by_slot[slot] for curve in curves]
        intervals = [curve.accuracy_ci95[slot] for curve in curves]
        estimates.append(estimate(accuracies, intervals, shared=shared))
    return replace(
        curves[0],
        accuracy_by_slot=tuple(each.value for each in estimates),
        accuracy_ci95=tuple((each.low, each.high) for each in estimates),
        mean=float(np.mean([curve.mean for curve in curves])),
    )


def _curves_csv(curves: Mapping[str, Curve]) -> bytes:
    rows = []
    for label, curve in curves.items():
        for slot, accuracy, (low, high) in zip(curve.slots, curve.accuracy_by_slot, curve.accuracy_ci95, strict=True):
            rows.append([label, curve.documents, format_slots(slot), accuracy, low, high, curve.examples])
    return to_csv(["setting", "documents", "position", "accuracy", "low", "high", "questions"], rows)


def _sweep_csv(rows: Sequence[SweepRow]) -> bytes:
    """One line for each measure of each model, setting and task. A missing interval is an empty field."""
    lines = []
    for row in rows:
        for task, estimates in row.tasks.items():
            for measure, (value, low, high) in _measures(estimates).items():
                lines.append([task, row.label, row.seeds, measure, value, low, high])
    return to_csv(["task", "setting", "seeds", "measure", "value", "low", "high"], lines)


def _measures(estimates: TaskEstimates) -> dict[str, tuple[float, float | None, float | None]]:
    """(value, low, high) of every measure of a task."""
    measures: dict[str, tuple[float, float | None, float | None]] = {}
    for when, model in (("before", estimates.before), ("after", estimates.after)):
        measures[f"mean {when}"] = astuple(model.mean)
        measures[f"GAP {when}"] = astuple(model.gap)
        low, high = model.gap_corrected_ci95 or (None, None)
        measures[f"corrected GAP {when}"] = model.gap_corrected, low, high
        for group, accuracy in model.groups.items():
            measures[f"{group} {when}"] = astuple(accuracy)
    measures["difference of the means"] = astuple(estimates.difference)
    measures["change of the corrected GAP"] = astuple(estimates.gap_change)
    return measures


def summarize_sweep(name: str, cells: Sequence[CellResult]) -> dict[str, Any]:
    """Content of `summary.json`: every cell's settings, curves and paired differences; estimates over seeds."""
    summaries = []
    for cell in cells:
        tasks = {}
        for task, comparison in cell.tasks.items():
            tasks[task] = summarize(comparison)
        summaries.append({"settings": cell.settings, "tasks": tasks})
    return {"name": name, "cells": summaries, "estimates": [asdict(row) for row in to_rows(cells)]}


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


def to_rows(cells: Sequence[CellResult]) -> list[SweepRow]:
    """One row for each group of studies whose settings differ in the seed only."""
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
    """The setting in words; of a whole section, its settings."""
    if isinstance(value, Mapping):
        return ", ".join(_label(name, each) for name, each in value.items()) or f"default {dotted_name}"
    field = dotted_name.rsplit(".", 1)[-1]
    return str(value) if field in ("name", "method") else f"{field.replace('_', ' ')} {value}"


def _estimate_task(comparisons: Sequence[Comparison]) -> TaskEstimates:
    """Estimates over comparisons on one task, one for each seed."""
    paired = [comparison.paired for comparison in comparisons]
    shared = shared_fraction([comparison.question_ids for comparison in comparisons])
    over_seeds = functools.partial(estimate, shared=shared, bounds=_CHANGE)
    return TaskEstimates(
        before=_estimate_model([comparison.before for comparison in comparisons], shared),
        after=_estimate_model([comparison.after for comparison in comparisons], shared),
        difference=over_seeds([each["mean_difference"] for each in paired], [each["ci95"] for each in paired]),
        gap_change=over_seeds([each["gap_change"] for each in paired], [each["gap_change_ci95"] for each in paired]),
    )


def _estimate_model(curves: Sequence[Curve], shared: float) -> ModelEstimates:
    """Estimates over curves of one model, one for each seed."""
    over_seeds = functools.partial(estimate, shared=shared)
    gap_intervals = [curve.gap_ci95 for curve in curves]
    groups = {}
    for name in curves[0].by_group:
        accuracies = [curve.by_group[name] for curve in curves]
        groups[name] = over_seeds(accuracies, [curve.by_group_ci95[name] for curve in curves])
    gap, corrected = estimate_gap(
        [curve.gap for curve in curves], gap_intervals, [curve.gap_corrected for curve in curves], shared=shared
    )
    return ModelEstimates(
        mean=over_seeds([curve.mean for curve in curves], [curve.ci95 for curve in curves]),
        gap=gap,
        gap_corrected=corrected.value,
        gap_corrected_ci95=(corrected.low, corrected.high) if len(curves) > 1 else None,
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
