"""Compare the base model with a distilled one whose evaluation was stopped, on the questions that it finished.

This is for a machine that can be used for a limited time. An evaluation stores its questions in batches, in their
order, so the choice of finished questions does not depend on their answers. A question with an unanswered prompt is
left out. Writes NAME.json to this folder. For each prompt length it holds both curves and their paired difference. It
also holds the curves of the base on its other tasks, the counts of the earlier stages, and how all results were made.

Example (from the project's top folder; the folders are those of the study's storage):
  python -m benchmarks.real.stopped --name nq_gpu --base runs/nq/base-scores-FINGERPRINT \\
    --parts runs/nq/distilled-scores-FINGERPRINT --other kv=runs/nq/base-scores-FINGERPRINT \\
    --stages sample=runs/nq/samples-FINGERPRINT distill=runs/nq/checkpoint-FINGERPRINT
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pipelines.stages.predictions import PREDICTIONS, finished_examples, prediction_parts
from pos2distill.evaluation.scores import paired_difference, to_curve, to_grid
from pos2distill.store.artifacts import Artifact

RESAMPLES = 2000


def open_artifact(folder: str) -> Artifact:
    """The artifact in a folder, which is named NAME-FINGERPRINT."""
    storage, _, name = folder.rstrip("/").rpartition("/")
    return Artifact(storage, *name.rsplit("-", 1))


def finished_by_both(before: pa.Table, after: pa.Table) -> tuple[pa.Table, pa.Table]:
    """The answers to questions whose prompts both models answered completely. before: the finished evaluation."""
    questions = len(pc.unique(before["example_id"]))
    finished = finished_examples(after, before.num_rows // questions)
    first, second = (table.filter(pc.is_in(table["example_id"], finished)) for table in (before, after))
    return first, second


def lengths(predictions: pa.Table) -> list[int]:
    """Prompt lengths, in documents; without those of prompts that have the gold document alone, or none."""
    values: list[int] = pc.unique(predictions["documents"]).to_pylist()
    return sorted(documents for documents in values if documents > 1)


def curves(predictions: pa.Table) -> list[dict[str, Any]]:
    """By prompt length."""
    grids = [to_grid(predictions, documents) for documents in lengths(predictions)]
    return [asdict(to_curve(grid, bootstrap_samples=RESAMPLES, seed=0)) for grid in grids]


def answers(predictions: pa.Table) -> list[list[str]]:
    """By prompt length and question: one character for each slot, 1 if the answer is right and 0 if not."""
    grids = [to_grid(predictions, documents) for documents in lengths(predictions)]
    return [["".join(str(int(right)) for right in question) for question in grid.correct_ES] for grid in grids]


def cut(predictions: pa.Table) -> int:
    """Answers that ended at the limit of tokens."""
    number: int = pc.sum(pc.equal(predictions["finish_reason"], "length")).as_py()
    return number


def compare(before: pa.Table, after: pa.Table) -> list[dict[str, Any]]:
    """Paired differences, by prompt length."""
    return [
        {
            "documents": documents,
            **paired_difference(
                to_grid(before, documents), to_grid(after, documents), bootstrap_samples=RESAMPLES, seed=0
            ),
        }
        for documents in lengths(before)
    ]


def main() -> int:
    """Write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", required=True, help="finished evaluation of the base model")
    parser.add_argument("--parts", required=True, help="stopped evaluation of the distilled model")
    parser.add_argument("--other", nargs="*", default=[], metavar="TASK=FOLDER", help="the base on other tasks")
    parser.add_argument("--stages", nargs="*", default=[], metavar="STAGE=FOLDER", help="whose counts are recorded")
    parser.add_argument("--name", required=True, help="of the file")
    arguments = parser.parse_args()
    base = open_artifact(arguments.base)
    all_before = base.read_table(PREDICTIONS)
    before, after = finished_by_both(all_before, prediction_parts(open_artifact(arguments.parts)).read())
    made = json.loads((Path(arguments.base) / "provenance.json").read_text())
    others, stages = (dict(each.split("=", 1) for each in named) for named in (arguments.other, arguments.stages))
    report = {
        **{name: made[name] for name in ("date", "hardware", "versions", "revision", "settings")},
        "questions": {
            "all": len(pc.unique(all_before["example_id"])),
            "finished": len(pc.unique(after["example_id"])),
        },
        "counts": {
            stage: json.loads((Path(folder) / "manifest.json").read_text())["counts"]
            for stage, folder in stages.items()
        },
        "base": {"curves": curves(before), "cut": cut(before)},
        "distilled": {"curves": curves(after), "cut": cut(after)},
        "differences": compare(before, after),
        "base_on_other_tasks": {
            task: curves(open_artifact(folder).read_table(PREDICTIONS)) for task, folder in others.items()
        },
    }
    # Paths of the machine that ran the study say nothing to a reader.
    report["settings"]["model"]["path"] = Path(report["settings"]["model"]["path"]).name
    report["settings"]["data"]["path"] = Path(report["settings"]["data"]["path"]).name
    report["settings"]["runtime"].pop("storage")
    output = Path(__file__).with_name(f"{arguments.name}.json")
    output.write_text(json.dumps(report, indent=1) + "\n")
    for row in report["differences"]:
        print(row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
