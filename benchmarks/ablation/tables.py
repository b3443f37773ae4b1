"""Markdown tables of sweeps, and a plot of the mean against one setting. Intervals are Student's, 95 %, over seeds.

Several summaries of one recipe (cells whose settings go together, such as K and the batch) are put into one file first.

Examples (from the project's top folder):
  python -m benchmarks.ablation.tables benchmarks/ablation/one_hop.json --than r1
  python -m benchmarks.ablation.tables benchmarks/ablation/positions.json --against method.k
  python -m benchmarks.ablation.tables benchmarks/ablation/positions.json --join runs/k1.json runs/k2.json
"""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from pos2distill.evaluation.sweep import SEED, Estimate, estimate

Cell = dict[str, Any]
ALONE = (math.nan, math.nan)


def group(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    """Cells that differ by their seed alone, under what they have in common, in order of the seeds."""
    groups: dict[str, list[Cell]] = {}
    for cell in sorted(cells, key=lambda cell: int(cell["settings"][SEED])):
        label = ", ".join(str(value) for name, value in cell["settings"].items() if name != SEED)
        groups.setdefault(label, []).append(cell)
    return groups


def columns(cell: Cell, side: str) -> dict[str, float]:
    """What the tables show of one cell's base or distilled model."""
    main, *others = cell["tasks"]
    curve = cell["tasks"][main][side]
    slots: list[float] = curve["accuracy_by_slot"]
    shown = {"mean": curve["mean"], "worst": min(slots), "GAP": curve["gap"], "last slot": slots[-1]}
    shown |= {name: cell["tasks"][name][side]["mean"] for name in others}
    if side == "distilled":
        shown |= {f"KL to the base, {name}": kept["kl"] for name, kept in cell.get("kept", {}).items()}
    return shown


def table(cells: Sequence[Cell], than: str | None) -> str:
    """One row for the base model and one for each group.

    Args:
        than: label of the group that others' means are compared with, paired by seed.
    """
    groups = group(cells)
    names = list(columns(cells[0], "distilled"))
    # The base is the same in every group of the same seeds.
    rows = [
        ("base", next(iter(groups.values())), "base"),
        *((label, own, "distilled") for label, own in groups.items()),
    ]
    lines = [["", *names, *([f"mean against {than}"] if than else [])]]
    lines.append(["---"] * len(lines[0]))
    for label, own, side in rows:
        values = [columns(cell, side) for cell in own]
        line = [label, *(_show([each[name] for each in values]) if name in values[0] else "" for name in names)]
        if than:
            other = [columns(cell, "distilled")["mean"] for cell in groups[than]]
            line.append("" if label == than else _signed([a["mean"] - b for a, b in zip(values, other, strict=True)]))
        lines.append(line)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def plot(cells: Sequence[Cell], against: str, path: Path) -> None:
    """The mean against one setting, a line for each group of the others, with the base model's mean."""
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    lines: dict[str, list[tuple[float, Estimate]]] = {}
    for own in group(cells).values():
        settings = own[0]["settings"]
        x, label = settings[against], settings.get("method.name", "r1")
        lines.setdefault(label, []).append((x, _estimate([columns(cell, "distilled")["mean"] for cell in own])))
    for label, points in lines.items():
        points.sort(key=lambda point: point[0])
        values = [each.value for _, each in points]
        errors = [each.high - each.value for _, each in points]
        axes.errorbar([x for x, _ in points], values, yerr=errors, marker="o", capsize=3, label=label)
    base = [columns(cell, "base")["mean"] for cell in next(iter(group(cells).values()))]
    axes.axhline(_estimate(base).value, color="grey", linestyle="--", label="base")
    axes.set(xlabel=against.rsplit(".", 1)[-1].replace("_", " "), ylabel="accuracy, mean over positions")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def read(path: Path) -> list[Cell]:
    """The cells of a summary, with what `kept` measured of them."""
    cells: list[Cell] = json.loads(path.read_text())["cells"]
    kept = path.with_name(f"{path.stem}_kept.json")
    if kept.exists():
        rows = {json.dumps(row.pop("settings")): row for row in json.loads(kept.read_text())["cells"]}
        cells = [cell | {"kept": rows[json.dumps(cell["settings"])]} for cell in cells]
    return cells


def join(path: Path, parts: Sequence[Path]) -> None:
    """Write the cells of several files as one."""
    cells = [cell for part in parts for cell in json.loads(part.read_text())["cells"]]
    path.write_text(json.dumps({"name": path.stem.removesuffix("_kept"), "cells": cells}, indent=1) + "\n")


def _estimate(values: Sequence[float]) -> Estimate:
    return estimate(values, ALONE)


def _show(values: Sequence[float]) -> str:
    each = _estimate(values)
    return f"{each.value:.3f}" if math.isnan(each.low) else f"{each.value:.3f} ± {each.high - each.value:.3f}"


def _signed(values: Sequence[float]) -> str:
    each = _estimate(values)
    return f"{each.value:+.3f} [{each.low:+.3f}, {each.high:+.3f}]"


def main() -> None:
    """Read the arguments; join, plot or print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("summary", type=Path, help="NAME.json; beside it NAME_kept.json, if there is one")
    parser.add_argument("--join", type=Path, nargs="+", help="summaries to make this one of")
    parser.add_argument("--than", help="group to compare the means with")
    parser.add_argument("--against", help="setting to plot the mean against, into NAME.png")
    arguments = parser.parse_args()
    if arguments.join:
        join(arguments.summary, arguments.join)
        return
    cells = read(arguments.summary)
    if arguments.against:
        plot(cells, arguments.against, arguments.summary.with_suffix(".png"))
    print(table(cells, arguments.than))


if __name__ == "__main__":
    main()
