"""The report of a sweep: one table and one plot, every setting with its interval over seeds."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np

from pos2distill.evaluation.plots import plot_sweep
from pos2distill.evaluation.report import TEMPLATES, Comparison, summarise, to_data_uri
from pos2distill.evaluation.scores import Interval

SEED = "seed"
SIDES = ("before", "after")
# 97.5 % quantiles of Student's t for 1, 2, … degrees of freedom; the last stands for more, which errs on the wide side.
_STUDENT_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


@dataclass(frozen=True, slots=True)
class CellResult:
    """One study of a sweep: its settings, and the comparison on every task, the one trained on first."""

    settings: Mapping[str, Any]
    tasks: Mapping[str, Comparison]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over seeds with its 95 % interval: Student's t over seeds; of one seed, the bootstrap over examples."""

    value: float
    low: float
    high: float


def estimate(values: Sequence[float], alone: Interval) -> Estimate:
    """The mean of one value a seed.

    Args:
        alone: the interval to state where there is one seed only.
    """
    mean = float(np.mean(values))
    if len(values) == 1:
        return Estimate(mean, *alone)
    quantile = _STUDENT_T[min(len(values) - 1, len(_STUDENT_T)) - 1]
    half = quantile * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return Estimate(mean, mean - half, mean + half)


def render_sweep(
    name: str, description: str, cells: Sequence[CellResult], versions: Mapping[str, str]
) -> dict[str, bytes]:
    """The files of a sweep's report: `index.html` and `sweep.png`, which shows the task trained on."""
    rows = [_row(settings, group) for settings, group in _by_settings(cells)]
    tasks = dict.fromkeys(task for row in rows for task in row["tasks"])
    main = next(iter(tasks))
    picture = plot_sweep([(row["label"], *map(_plotted, (row["tasks"][main][side] for side in SIDES))) for row in rows])
    html = TEMPLATES.get_template("sweep.html.j2").render(
        name=name,
        description=description,
        rows=rows,
        tasks={task: _asked(task, cells) for task in tasks},
        versions=versions,
        picture=to_data_uri(picture),
    )
    return {"index.html": html.encode(), "sweep.png": picture}


def summarise_sweep(name: str, cells: Sequence[CellResult]) -> dict[str, Any]:
    """What programs read: every cell's settings, curves and paired differences."""
    summaries = [
        {"settings": cell.settings, "tasks": {task: summarise(each) for task, each in cell.tasks.items()}}
        for cell in cells
    ]
    return {"name": name, "cells": summaries}


def _asked(task: str, cells: Sequence[CellResult]) -> str:
    """What was asked: data set, metric and size, each as often as cells differ in it."""
    asked = [cell.tasks[task] for cell in cells if task in cell.tasks]
    sizes = (f"{len(each.before.slots)} placements × {each.before.examples} examples" for each in asked)
    return "; ".join(
        dict.fromkeys(f"{each.dataset}, {each.metric}, {size}" for each, size in zip(asked, sizes, strict=True))
    )


def _by_settings(cells: Sequence[CellResult]) -> list[tuple[dict[str, Any], list[CellResult]]]:
    """Cells that differ by their seed alone stand together."""
    groups: dict[str, tuple[dict[str, Any], list[CellResult]]] = {}
    for cell in cells:
        settings = {key: value for key, value in cell.settings.items() if key != SEED}
        groups.setdefault(json.dumps(settings), (settings, []))[1].append(cell)
    return list(groups.values())


def _row(settings: Mapping[str, Any], cells: Sequence[CellResult]) -> dict[str, Any]:
    label = ", ".join(_label(key, value) for key, value in settings.items()) or "all"
    tasks = {task: _estimates([cell.tasks[task] for cell in cells]) for task in cells[0].tasks}
    return {"label": label, "seeds": len(cells), "tasks": tasks}


def _label(dotted: str, value: Any) -> str:
    field = dotted.rsplit(".", 1)[-1]
    return str(value) if field == "name" else f"{field.replace('_', ' ')} {value}"


def _estimates(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    first = comparisons[0]
    return {
        side: {
            "mean": estimate([getattr(each, side).mean for each in comparisons], getattr(first, side).ci95),
            "gap": estimate([getattr(each, side).gap for each in comparisons], getattr(first, side).gap_ci95),
            "groups": {
                name: estimate([getattr(each, side).by_group[name] for each in comparisons], (math.nan, math.nan))
                for name in getattr(first, side).by_group
            },
        }
        for side in SIDES
    } | {"difference": estimate([each.paired["mean_difference"] for each in comparisons], first.paired["ci95"])}


def _plotted(side: Mapping[str, Any]) -> dict[str, tuple[float, float, float]]:
    return {key: astuple(side[key]) for key in ("mean", "gap")}
