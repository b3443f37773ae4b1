"""Compare the base model with models that were distilled with different seeds, at every prompt length, on all tasks.

Reads evaluations of one base model and of the distilled models, on the same questions, from their artifacts. Writes
NAME.json and NAME.png to this folder. For each task and prompt length the report holds the curve of the base, the curve
of each seed, and the change: the mean over seeds, paired by question. The interval of the change is over questions, so
it does not contain the variation between training runs. The report also holds the answers, the settings of each seed
and the counts of the earlier stages. Without --task, the plot of an existing report is drawn again.

Example (from the project's top folder; the folders are those of the studies' storage):
  python -m benchmarks.real.seeds --name nq_seeds \\
    --task nq runs/nq/base-scores-FINGERPRINT \\
      runs/nq/distilled-scores-FINGERPRINT runs/nq/distilled-scores-FINGERPRINT \\
    --task kv runs/nq/base-scores-FINGERPRINT runs/nq/distilled-scores-FINGERPRINT \\
    --stages runs/nq/samples-FINGERPRINT runs/nq/checkpoint-FINGERPRINT
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from matplotlib.figure import Figure

from benchmarks.real.stopped import RESAMPLES, answers, curves, cut, lengths, open_artifact
from pipelines.stages.predictions import PREDICTIONS
from pos2distill.errors import UserError
from pos2distill.evaluation.cross_fitting import mean_gap_change
from pos2distill.evaluation.scores import Grid, to_grid
from pos2distill.evaluation.statistics import difference_interval

HERE = Path(__file__).parent


def change(before: Grid, after: list[Grid]) -> dict[str, Any]:
    """The mean over seeds of each change, with its interval over questions.

    Raises:
        UserError: an evaluation has other questions or slots than the base's.
    """
    for grid in after:
        if grid.example_ids != before.example_ids or grid.slots != before.slots:
            raise UserError("the evaluations have different questions or slots")
    mean_E = np.mean([grid.correct_ES.mean(1) for grid in after], axis=0)
    difference_E = mean_E - before.correct_ES.mean(1)
    gap, gap_interval = mean_gap_change(
        before.correct_ES, [grid.correct_ES for grid in after], bootstrap_samples=RESAMPLES, seed=0
    )
    return {
        "documents": before.documents,
        "mean": float(difference_E.mean()),
        "mean_ci95": difference_interval(difference_E),
        "by_seed": [float((grid.correct_ES.mean(1) - before.correct_ES.mean(1)).mean()) for grid in after],
        "gap_corrected": gap,
        "gap_corrected_ci95": gap_interval,
    }


def measured(predictions: pa.Table) -> dict[str, Any]:
    """What one model was measured to do on one task."""
    return {"curves": curves(predictions), "cut": cut(predictions), "answers": answers(predictions)}


def compare(before: pa.Table, after: list[pa.Table]) -> dict[str, Any]:
    """One task: curves and changes by prompt length."""
    return {
        "base": measured(before),
        "distilled": [measured(table) for table in after],
        "changes": [
            change(to_grid(before, documents), [to_grid(table, documents) for table in after])
            for documents in lengths(before)
        ],
    }


def provenance(folder: str) -> dict[str, Any]:
    """How the artifact in a folder was made."""
    made: dict[str, Any] = json.loads((Path(folder) / "provenance.json").read_text())
    return made


def make_report(tasks: list[list[str]], stages: list[str]) -> dict[str, Any]:
    """The report.

    Args:
        tasks: for each its name, the folder with the evaluation of the base, and a folder for the distilled model of
            each seed.
        stages: the folders of stages whose counts are recorded.

    Raises:
        UserError: an evaluation is missing, or has other questions or slots than the base's.
    """
    compared = {}
    for name, *folders in tasks:
        before, *after = (open_artifact(folder).read_table(PREDICTIONS) for folder in folders)
        compared[name] = compare(before, after)
    base = provenance(tasks[0][1])
    return {
        **{field: base[field] for field in ("date", "hardware", "versions", "revision")},
        "settings": {name: [provenance(folder)["settings"] for folder in folders] for name, _, *folders in tasks},
        "counts": {
            Path(folder).name: json.loads((Path(folder) / "manifest.json").read_text())["counts"] for folder in stages
        },
        "tasks": compared,
    }


def draw(tasks: dict[str, Any], path: Path) -> None:
    """A panel for each task and prompt length: the base with its intervals, and the distilled model of each seed.

    Args:
        tasks: the tasks whose questions have one gold document.
    """
    panels = [
        (name, base, [model["curves"][i] for model in task["distilled"]])
        for name, task in tasks.items()
        for i, base in enumerate(task["base"]["curves"])
    ]
    figure = Figure(figsize=(3.2 * len(panels), 3.4), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for ax, (name, base, seeds) in zip(axes, panels, strict=True):
        positions = [slot + 1 for slot in base["slots"]]
        low, high = np.array(base["accuracy_ci95"]).T
        ax.fill_between(positions, low, high, color="0.85", linewidth=0)
        ax.plot(positions, base["accuracy_by_slot"], color="0.3", marker="o", label="base, 95 % interval")
        for i, curve in enumerate(seeds):
            label = "distilled, each seed" if i == 0 else None
            ax.plot(positions, curve["accuracy_by_slot"], color="tab:blue", marker="o", alpha=0.7, label=label)
        ax.set_title(f"{name}, {base['documents']} documents", fontsize=9)
        ax.set_xticks(positions)
        ax.set_xlabel("position of the gold document")
    axes[0].set_ylim(bottom=0)
    axes[0].set_ylabel("accuracy")
    axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=120)


def main() -> int:
    """Write the report and its plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--task",
        nargs="+",
        action="append",
        default=[],
        metavar=("NAME", "FOLDER"),
        help="its name, the evaluation of the base, and one of a distilled model for each seed",
    )
    parser.add_argument("--stages", nargs="*", default=[], metavar="FOLDER", help="whose counts are recorded")
    parser.add_argument("--name", required=True, help="of the files")
    arguments = parser.parse_args()
    output = HERE / f"{arguments.name}.json"
    if arguments.stages and not arguments.task:
        parser.error("--stages: needs --task")
    if not arguments.task and not output.exists():
        parser.error(f"--name: {output}: no such report to draw; give --task to write it")
    if arguments.task:
        try:
            report = make_report(arguments.task, arguments.stages)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        output.write_text(json.dumps(report, indent=1) + "\n")
    tasks = json.loads(output.read_text())["tasks"]
    draw(tasks, output.with_suffix(".png"))
    for name, task in tasks.items():
        for row in task["changes"]:
            print(name, row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
