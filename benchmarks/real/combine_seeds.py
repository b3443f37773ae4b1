"""Combine the changes of seeds that were evaluated on several machines, each beside the base model on its machine.

Reads reports of `benchmarks.real.seeds` and writes NAME.json to this folder: for each prompt length of a task the mean
change over all seeds, of the mean accuracy and of the corrected GAP, with a 95 % interval for both kinds of variation:

    margin² = (Student's margin over seeds)² + (margin over questions)²

All seeds have the same questions, of which Student's interval says nothing (docs/statistics.md). A report has the
margin over questions of the mean of its seeds; that of the mean of all is at most the mean of these margins, each
weighted with its number of seeds, and is taken to be as large.

Example (from the project's top folder):
  python -m benchmarks.real.combine_seeds nq_seeds_gpu nq_seed_2 --task "natural questions" --name nq_three_seeds
"""

import argparse
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pos2distill.errors import UserError
from pos2distill.evaluation.statistics import student_t

HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Compared:
    """One report's seeds at one prompt length: the base model's curve, the distilled ones', and their change."""

    base: dict[str, Any]
    distilled: list[dict[str, Any]]
    change: dict[str, Any]


def combine(reports: list[dict[str, Any]], task: str) -> list[dict[str, Any]]:
    """The changes over the seeds of all reports, at each prompt length that all of them have.

    Args:
        reports: those of `benchmarks.real.seeds`.
        task: the beginning of the names of its tasks: a report may have the prompt lengths of one as several tasks.
    Raises:
        UserError: if no prompt length is in all of them, one is twice in a report, or there is one seed in all.
    """
    by_length = [_by_length(report, task) for report in reports]
    rows = []
    for documents in sorted(set.intersection(*map(set, by_length))):
        compared = [each[documents] for each in by_length]
        counts = [len(each.distilled) for each in compared]
        row: dict[str, Any] = {"documents": documents, "base": [each.base["mean"] for each in compared]}
        for name in ("mean", "gap_corrected"):
            by_seed = [curve[name] - each.base[name] for each in compared for curve in each.distilled]
            intervals = [each.change[f"{name}_ci95"] for each in compared]
            row[name] = _over_seeds_and_questions(by_seed, intervals, counts)
        rows.append(row)
    if not rows:
        raise UserError(f"--task: {task}: the reports have no prompt length of it in common")
    return rows


def _by_length(report: dict[str, Any], task: str) -> dict[int, Compared]:
    """By the number of documents."""
    found: dict[int, Compared] = {}
    for name, compared in report["tasks"].items():
        if name.startswith(task):
            for i, change in enumerate(compared["changes"]):
                distilled = [model["curves"][i] for model in compared["distilled"]]
                if change["documents"] in found:
                    raise UserError(f"--task: {task}: a report has {change['documents']} documents twice")
                found[change["documents"]] = Compared(compared["base"]["curves"][i], distilled, change)
    return found


def _over_seeds_and_questions(
    by_seed: list[float], intervals: list[tuple[float, float]], counts: list[int]
) -> dict[str, Any]:
    """The mean of the seeds with both margins.

    Args:
        by_seed: the change of each seed.
        intervals: over questions, of the mean of the seeds of each report.
        counts: the number of seeds of each report.
    """
    mean, seeds = float(np.mean(by_seed)), len(by_seed)
    if seeds < 2:
        raise UserError("the reports have one seed in all; give another report")
    over_seeds = student_t(seeds - 1) * float(np.std(by_seed, ddof=1)) / math.sqrt(seeds)
    margins = [(high - low) / 2 for low, high in intervals]
    over_questions = float(np.average(margins, weights=counts))
    margin = math.hypot(over_seeds, over_questions)
    return {
        "change": mean,
        "ci95": [mean - margin, mean + margin],
        "by_seed": by_seed,
        "margin_over_seeds": over_seeds,
        "margin_over_questions": over_questions,
    }


def main() -> int:
    """Write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", nargs="+", help="names of reports of benchmarks.real.seeds in this folder")
    parser.add_argument("--task", required=True, help="the beginning of its names in the reports")
    parser.add_argument("--name", required=True, help="of the file")
    arguments = parser.parse_args()
    try:
        rows = combine([_read(name) for name in arguments.reports], arguments.task)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    combined = {"reports": arguments.reports, "task": arguments.task, "changes": rows}
    (HERE / f"{arguments.name}.json").write_text(json.dumps(combined, indent=1) + "\n")
    for row in rows:
        for measure in ("mean", "gap_corrected"):
            low, high = row[measure]["ci95"]
            print(f"{row['documents']} documents, {measure}: {row[measure]['change']:+.3f} [{low:+.3f}, {high:+.3f}]")
    return 0


def _read(name: str) -> dict[str, Any]:
    """A report.

    Raises:
        UserError: there is none, or it is of another script.
    """
    path = HERE / f"{name}.json"
    report: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if "tasks" not in report:
        raise UserError(f"{path}: expected a report of benchmarks.real.seeds")
    return report


if __name__ == "__main__":
    sys.exit(main())
