"""How far a distilled model is from the base model's answers at the advantageous position, compared by question.

Reads the analyses of the base model and of a distilled one (`analyze`), of the same answers, and writes NAME.json to
this folder: both analyses, and for each position the paired change of a question's mean KL to the base model at the
advantageous position, in nats per token, with Student's interval over questions.

Example (from the project's top folder; the folders are those of the study's storage):
  python -m benchmarks.real.kl_change runs/nq/base-analysis-FINGERPRINT runs/nq/distilled-analysis-FINGERPRINT \\
    --name nq_analysis_seed_2
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.real.seeds import provenance
from benchmarks.real.stopped import open_artifact
from pipelines.stages.analyze import ANALYSIS, PASSES
from pos2distill.errors import UserError
from pos2distill.evaluation.statistics import difference_interval

HERE = Path(__file__).parent


def nats_by_question(passes: pa.Table) -> dict[str, tuple[list[Any], list[float]]]:
    """For each question the slots of its placements, and the mean KL of the answer's tokens at each, in nats."""
    rows = passes.select(["example_id", "placement_slots", "kl"]).to_pylist()
    return {row["example_id"]: (row["placement_slots"], [float(np.mean(kl)) for kl in row["kl"]]) for row in rows}


def changes(before: pa.Table, after: pa.Table) -> list[dict[str, Any]]:
    """For each position both means, and the paired change.

    Raises:
        UserError: the analyses have different questions or positions.
    """
    base, distilled = nats_by_question(before), nats_by_question(after)
    slots = {json.dumps(slots) for nats in (base, distilled) for slots, _ in nats.values()}
    if base.keys() != distilled.keys() or len(slots) != 1:
        raise UserError("the analyses have different questions or positions")
    ids = sorted(base)
    base_ES = np.array([base[example][1] for example in ids])
    distilled_ES = np.array([distilled[example][1] for example in ids])
    rows = []
    for index, slot in enumerate(json.loads(slots.pop())):
        difference_E = distilled_ES[:, index] - base_ES[:, index]
        rows.append(
            {
                "slots": slot,
                "questions": len(ids),
                "base": float(base_ES[:, index].mean()),
                "distilled": float(distilled_ES[:, index].mean()),
                "change": float(difference_E.mean()),
                "ci95": difference_interval(difference_E),
            }
        )
    return rows


def main() -> int:
    """Write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", metavar="FOLDER", help="the analysis of the base model")
    parser.add_argument("distilled", metavar="FOLDER", help="that of the distilled one")
    parser.add_argument("--name", required=True, help="of the file")
    arguments = parser.parse_args()
    artifacts = {name: open_artifact(getattr(arguments, name)) for name in ("base", "distilled")}
    try:
        rows = changes(*(artifact.read_table(PASSES) for artifact in artifacts.values()))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    made = provenance(arguments.distilled)
    report = {
        **{field: made[field] for field in ("date", "hardware", "versions", "revision", "command")},
        "changes": rows,
        **{name: artifact.read_json(ANALYSIS) for name, artifact in artifacts.items()},
    }
    (HERE / f"{arguments.name}.json").write_text(json.dumps(report, indent=1) + "\n")
    for row in rows:
        print(row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
