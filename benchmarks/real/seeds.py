"""Compare the base model with models that were distilled with different seeds, at every prompt length, on all tasks.

Reads evaluations of one base model and of the distilled models, on the same questions, from their artifacts. Writes
NAME.json to this folder. For each task and prompt length it holds the curve of the base, the curve of each seed, and
the change: the mean over seeds, paired by question. The interval of the change is over questions, so it does not
contain the variation between training runs. The file also holds the counts of the earlier stages.

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

from benchmarks.real.stopped import RESAMPLES, curves, cut, lengths, open_artifact
from pipelines.stages.answers import PREDICTIONS
from pos2distill.errors import UserError
from pos2distill.evaluation.cross_fitting import mean_gap_change
from pos2distill.evaluation.scores import Grid, to_grid
from pos2distill.evaluation.statistics import difference_interval


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


def compare(before: pa.Table, after: list[pa.Table]) -> dict[str, Any]:
    """One task: curves and changes by prompt length."""
    return {
        "base": {"curves": curves(before), "cut": cut(before)},
        "distilled": [{"curves": curves(table), "cut": cut(table)} for table in after],
        "changes": [
            change(to_grid(before, documents), [to_grid(table, documents) for table in after])
            for documents in lengths(before)
        ],
    }


def main() -> int:
    """Write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--task",
        nargs="+",
        action="append",
        required=True,
        metavar=("NAME", "FOLDER"),
        help="its name, the evaluation of the base, and one of a distilled model for each seed",
    )
    parser.add_argument("--stages", nargs="*", default=[], metavar="FOLDER", help="whose counts are recorded")
    parser.add_argument("--name", required=True, help="of the file")
    arguments = parser.parse_args()
    tasks = {}
    try:
        for name, *folders in arguments.task:
            before, *after = (open_artifact(folder).read_table(PREDICTIONS) for folder in folders)
            tasks[name] = compare(before, after)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    made = json.loads((Path(arguments.task[0][1]) / "provenance.json").read_text())
    report = {
        **{field: made[field] for field in ("date", "hardware", "versions", "revision")},
        "counts": {
            Path(folder).name: json.loads((Path(folder) / "manifest.json").read_text())["counts"]
            for folder in arguments.stages
        },
        "tasks": tasks,
    }
    output = Path(__file__).with_name(f"{arguments.name}.json")
    output.write_text(json.dumps(report, indent=1) + "\n")
    for name, task in tasks.items():
        for row in task["changes"]:
            print(name, row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
