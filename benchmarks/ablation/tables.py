"""Markdown tables of sweeps, and a plot of the mean against one setting. Intervals are Student's, 95 %, over seeds.

Where settings vary together, such as K and the batch, a study needs several sweeps; `--join` makes their summaries one.

Examples (from the project's top folder):
  python -m benchmarks.ablation.tables benchmarks/ablation/one_hop.json --compare-with r1
  python -m benchmarks.ablation.tables benchmarks/ablation/positions.json --plot-against method.k
  python -m benchmarks.ablation.tables benchmarks/ablation/positions.json --join runs/k1.json runs/k2.json
"""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from matplotlib.figure import Figure

from pos2distill.evaluation.sweep import SEED, Estimate, estimate

Cell = dict[str, Any]
"""The results of one study of a sweep: `settings`, `tasks` and, if `kept.py` has run, `kept`."""

Model = Literal["base", "distilled"]


def group_by_settings(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    """Groups of cells that differ only in their seed, ordered by seed. The key holds the values of other settings."""
    groups: dict[str, list[Cell]] = {}
    for cell in sorted(cells, key=lambda cell: int(cell["settings"][SEED])):
        values = [str(value) for name, value in cell["settings"].items() if name != SEED]
        groups.setdefault(", ".join(values), []).append(cell)
    return groups


def columns(cell: Cell, model: Model) -> dict[str, float]:
    """The values that the tables show of a cell's base or distilled model, by column name."""
    main, *others = cell["tasks"]
    curve = cell["tasks"][main][model]
    slots: list[float] = curve["accuracy_by_slot"]
    values = {"mean": curve["mean"], "worst": min(slots), "GAP": curve["gap"], "last slot": slots[-1]}
    for name in others:
        values[name] = cell["tasks"][name][model]["mean"]
    if model == "distilled":
        for name, kept in cell.get("kept", {}).items():
            values[f"KL to the base, {name}"] = kept["kl"]
    return values


def table(cells: Sequence[Cell], compare_with: str | None) -> str:
    """A Markdown table: one line for the base model and one for each group.

    Args:
        compare_with: key of the group whose means are subtracted from those of the others, paired by seed.
    """
    groups = group_by_settings(cells)
    names = list(columns(cells[0], "distilled"))
    header = ["", *names]
    if compare_with is not None:
        header.append(f"mean against {compare_with}")
    lines = [header, ["---"] * len(header)]
    # The base model's results depend on the seed only, so those of the first group are those of every group.
    first_group = next(iter(groups.values()))
    lines.append(_table_line("base", first_group, "base", names, groups, compare_with))
    for label, own in groups.items():
        lines.append(_table_line(label, own, "distilled", names, groups, compare_with))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _table_line(
    label: str,
    own: Sequence[Cell],
    model: Model,
    names: Sequence[str],
    groups: dict[str, list[Cell]],
    compare_with: str | None,
) -> list[str]:
    values = [columns(cell, model) for cell in own]
    line = [label]
    for name in names:
        shown = ""
        if name in values[0]:
            shown = _format([each[name] for each in values])
        line.append(shown)
    if compare_with is None:
        return line
    if label == compare_with:
        return [*line, ""]
    differences = []
    for each, other in zip(values, groups[compare_with], strict=True):
        differences.append(each["mean"] - columns(other, "distilled")["mean"])
    return [*line, _format_difference(differences)]


def plot(cells: Sequence[Cell], setting: str, path: Path) -> None:
    """Plot the mean against one setting, with one curve for each method and the base model's mean as a line."""
    groups = group_by_settings(cells)
    curves: dict[str, list[tuple[float, Estimate]]] = {}
    for own in groups.values():
        settings = own[0]["settings"]
        method = settings.get("method.name", "r1")
        means = [columns(cell, "distilled")["mean"] for cell in own]
        curves.setdefault(method, []).append((settings[setting], _estimate(means)))

    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    for method, points in curves.items():
        points.sort(key=lambda point: point[0])
        xs = [x for x, _ in points]
        ys = [mean.value for _, mean in points]
        errors = [mean.high - mean.value for _, mean in points]
        axes.errorbar(xs, ys, yerr=errors, marker="o", capsize=3, label=method)
    base_means = [columns(cell, "base")["mean"] for cell in next(iter(groups.values()))]
    axes.axhline(_estimate(base_means).value, color="grey", linestyle="--", label="base")
    axes.set(xlabel=setting.rsplit(".", 1)[-1].replace("_", " "), ylabel="accuracy, mean over positions")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def read(path: Path) -> list[Cell]:
    """The cells of a summary, with the results of `kept.py` if there are any."""
    cells: list[Cell] = json.loads(path.read_text())["cells"]
    kept_path = path.with_name(f"{path.stem}_kept.json")
    if kept_path.exists():
        kept_by_settings = {}
        for result in json.loads(kept_path.read_text())["cells"]:
            settings = result.pop("settings")
            kept_by_settings[json.dumps(settings)] = result
        for cell in cells:
            cell["kept"] = kept_by_settings[json.dumps(cell["settings"])]
    return cells


def join(path: Path, parts: Sequence[Path]) -> None:
    """Write the cells of several files into one file."""
    cells: list[Cell] = []
    for part in parts:
        cells += json.loads(part.read_text())["cells"]
    path.write_text(json.dumps({"name": path.stem.removesuffix("_kept"), "cells": cells}, indent=1) + "\n")


def _estimate(values: Sequence[float]) -> Estimate:
    """Student's interval over seeds alone."""
    without_questions = [(value, value) for value in values]
    return estimate(values, without_questions, shared=0, bounds=(-math.inf, math.inf))


def _format(values: Sequence[float]) -> str:
    mean = _estimate(values)
    if math.isnan(mean.low):
        return f"{mean.value:.3f}"
    return f"{mean.value:.3f} ± {mean.high - mean.value:.3f}"


def _format_difference(values: Sequence[float]) -> str:
    mean = _estimate(values)
    return f"{mean.value:+.3f} [{mean.low:+.3f}, {mean.high:+.3f}]"


def main() -> None:
    """Read the arguments, then join, or plot and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("summary", type=Path, help="NAME.json; NAME_kept.json of the same folder is read too")
    parser.add_argument("--join", type=Path, nargs="+", metavar="PART", help="write these summaries into one")
    parser.add_argument("--compare-with", metavar="GROUP", help="group whose means are subtracted from the others'")
    parser.add_argument("--plot-against", metavar="SETTING", help="plot the mean against this setting, into NAME.png")
    arguments = parser.parse_args()
    if arguments.join:
        join(arguments.summary, arguments.join)
        return
    cells = read(arguments.summary)
    if arguments.plot_against:
        plot(cells, arguments.plot_against, arguments.summary.with_suffix(".png"))
    print(table(cells, arguments.compare_with))


if __name__ == "__main__":
    main()
