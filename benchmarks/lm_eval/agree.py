"""Compare the accuracies of lm-evaluation-harness on the toy's exported questions with those of `evaluate`.

Evaluates the toy, exports its questions as tasks, runs the harness on them, and reads its logs back with `compare`.
Writes `lm_eval_toy.json`.

Example, with the harness in its own environment (see README.md beside this file):
  python -m benchmarks.lm_eval.agree --lm-eval /tmp/lm-eval/bin/lm_eval
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.circumstances import circumstances

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples" / "toy" / "base"
SETTINGS = [
    "runtime.executor=local",
    "data.eval_examples=40",
    "evaluation.slots=5",
    "evaluation.other_documents=[20]",
    "evaluation.other_slots=3",
]


def run(*command: str) -> str:
    """What a command prints, in the root of the project."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr[-3000:]}")
    return done.stdout


def pos2distill(*words: str) -> Any:
    """What one of our commands prints with `--json`."""
    return json.loads(run(sys.executable, "run.py", *words, "--json"))


def measure(lm_eval: str, folder: Path) -> dict[str, Any]:
    """The accuracies at every prompt length and position, by this project and by the harness."""
    storage, tasks, answers = (str(folder / name) for name in ("run", "tasks", "answers"))
    start = time.monotonic()
    pos2distill("evaluate", "quickstart", f"runtime.storage={storage}", *SETTINGS)
    middle = time.monotonic()
    groups = pos2distill("export", storage, tasks)["groups"]
    arguments = f"pretrained={MODEL},dtype=float32"
    command = ["--include_path", tasks, "--tasks", ",".join(groups), "--model", "hf", "--model_args", arguments]
    run(lm_eval, *command, "--device", "cpu", "--batch_size", "16", "--log_samples", "--output_path", answers)
    seconds = {"evaluate": middle - start, "lm_eval": time.monotonic() - middle}
    (results,) = Path(answers).glob("*/results_*.json")
    return {
        "seconds": seconds,
        "harness": harness_results(json.loads(results.read_text())["results"], groups),
        "compare": pos2distill("compare", storage, answers),
        "evaluate": json.loads((Path(storage) / "evaluation" / "summary.json").read_text())["base"]["curves"],
    }


def harness_results(results: dict[str, Any], groups: dict[str, list[str]]) -> dict[str, Any]:
    """For each group the harness's mean, and its accuracies of the tasks in the order of positions."""
    found = {}
    for group, tasks in groups.items():
        accuracies = {int(task.rpartition("_")[2]): results[task]["accuracy,none"] for task in tasks}
        by_position = [accuracies[position] for position in sorted(accuracies)]
        found[group] = {"mean": results[group]["accuracy,none"], "accuracy": by_position}
    return found


def main() -> None:
    """Measure, compare, write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lm-eval", default="lm_eval", metavar="PATH", help="the harness's command")
    options = parser.parse_args()
    harness = Path(options.lm_eval).with_name("python")
    version = run(str(harness), "-c", "from importlib.metadata import version; print(version('lm_eval'))").strip()
    with tempfile.TemporaryDirectory() as folder:
        measured = measure(options.lm_eval, Path(folder))
    ours = {f"{curve['documents']} documents": curve for curve in measured.pop("evaluate")}
    lengths = []
    for (name, curve), theirs in zip(ours.items(), by_length(measured["harness"], list(ours)), strict=True):
        lengths.append({"prompts": name, "evaluate": curve["accuracy_by_slot"], "lm_eval": theirs["accuracy"]})
        print(f"{name}: evaluate {curve['accuracy_by_slot']}, lm_eval {theirs['accuracy']}")
    report = {
        **circumstances("torch", "transformers"),
        "lm_eval": version,
        "settings": SETTINGS,
        "seconds": measured["seconds"],
        "accuracies": lengths,
        "means": {group: each["mean"] for group, each in measured["harness"].items()},
        "difference_by_compare": measured["compare"]["differences"],
    }
    path = Path(__file__).parent / "lm_eval_toy.json"
    path.write_text(json.dumps(report, indent=2) + "\n")
    if any(each["evaluate"] != each["lm_eval"] for each in lengths):
        sys.exit("the accuracies differ")


def by_length(harness: dict[str, Any], names: list[str]) -> list[dict[str, Any]]:
    """The harness's groups in the order of our curves."""
    found = []
    for name in names:
        (group,) = (group for group in harness if group.endswith(f"_{name.replace(' ', '_')}"))
        found.append(harness[group])
    return found


if __name__ == "__main__":
    main()
