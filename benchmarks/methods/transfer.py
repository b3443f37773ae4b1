"""LPES from one task to another: scales are searched on each task, and evaluated on both.

There are one model and two tasks with different questions. For each seed, the search of one task chooses scales by that
task's training questions; both tasks are then evaluated with them, on questions that no search has seen. The change is
relative to the same model without scales, paired by question. Writes transfer_TABLE.json to this folder after each of
the given seeds. Stored results are not computed again, so a stopped run continues.

Examples:
  python -m benchmarks.methods.transfer toy runs/transfer-toy
  python -m benchmarks.methods.transfer smollm2 runs/transfer-smollm2 --seeds 0
"""

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.methods.methods import run
from benchmarks.methods.rows import Run, accuracies, format_change
from benchmarks.methods.tables import GPU_SEARCH, NARROW_SEARCH, ON_GPU, SEEDS, TOY_SEARCH
from pos2distill.config import Recipe
from pos2distill.config.load import load_recipe

FOLDER = Path(__file__).parent
NONE = "none"
# Nothing is sampled, so no slots are compared for it.
NOTHING_SAMPLED = "method.advantageous_slot=last"

# The keys are the evaluated task, then the task whose scales are used.
Runs = dict[str, dict[str, list[Run]]]
Rows = dict[str, dict[str, dict[str, Any]]]
# For each task, what the search of each seed chose.
Searches = dict[str, list[dict[str, Any]]]


@dataclass(frozen=True)
class Task:
    """A recipe that is evaluated, with these settings."""

    recipe: str
    settings: tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """Tasks of one model. search: `inference.search` of all tasks."""

    tasks: Mapping[str, Task]
    search: str


TABLES = {
    # The toy for two hops also answers questions of one hop, with a chain of one step.
    "toy": Table(
        {
            "one hop": Task(
                "quickstart",
                (
                    "model.path=examples/toy/two_hop_base",
                    "evaluation.slots=[0, 7, 14, 22, 29]",
                    "evaluation.other_documents=[]",
                    "evaluation.max_new_tokens=32",
                    "runtime.executor=local",
                ),
            ),
            "two hops": Task("quickstart_r2", ("data.eval_examples=50", "runtime.executor=local")),
        },
        TOY_SEARCH,
    ),
    "smollm2": Table(
        {
            "key-value retrieval": Task("kv_smollm2", ("data.eval_examples=60", "evaluation.reference_prompts=false")),
            "natural questions": Task(
                "nq_smollm2", ("data.eval_examples=60", "evaluation.reference_prompts=false", NOTHING_SAMPLED)
            ),
        },
        NARROW_SEARCH,
    ),
    "smollm2_gpu": Table(
        {
            "key-value retrieval": Task("kv_smollm2", ("data.eval_examples=100", *ON_GPU)),
            "natural questions": Task(
                "nq_smollm2", ("data.eval_fraction=0.4", "data.eval_examples=100", NOTHING_SAMPLED, *ON_GPU)
            ),
        },
        GPU_SEARCH,
    ),
}


def load(task: Task, storage: str, seed: int, *settings: str) -> Recipe:
    """The recipe of one evaluation."""
    common = ("evaluation.seed=0", f"seed={seed}", f"runtime.storage={storage}/{task.recipe}")
    return load_recipe(task.recipe, [*common, *task.settings, *settings])


def measure_base(table: Table, storage: str) -> Runs:
    """The model without scales on every task."""
    return {name: {NONE: [run(load(task, storage, 0), trains=False)]} for name, task in table.tasks.items()}


def measure_seed(table: Table, storage: str, seed: int, runs: Runs, searches: Searches) -> None:
    """Search scales on each task and evaluate them on all; adds to the runs and to the searches."""
    for name, task in table.tasks.items():
        print(f"--- scales of {name}, seed {seed}", flush=True)
        lpes = load(task, storage, seed, "inference.method=lpes", f"inference.search={table.search}")
        own = run(lpes, trains=False)
        assert own.search is not None
        runs[name].setdefault(name, []).append(own)
        searches[name].append({"seed": seed, **own.search})
        fixed = ("inference.method=lpes", f"inference.scales={own.search['scales']}")
        for other in table.tasks.keys() - {name}:
            recipe = load(table.tasks[other], storage, seed, *fixed)
            runs[other].setdefault(name, []).append(run(recipe, trains=False))


def write_report(name: str, table: Table, runs: Runs, searches: Searches, output: Path) -> Rows:
    """Write the report, and return its rows: for each task, one for each task whose scales are used.

    The rows have no times, because times of a model that was just loaded, or that runs beside other work, cannot be
    compared.
    """
    rows = {
        evaluated: {scales: accuracies(each, by_scales[NONE][0]) for scales, each in by_scales.items()}
        for evaluated, by_scales in runs.items()
    }
    made = {
        evaluated: {scales: [how_made(each) for each in all_runs] for scales, all_runs in by_scales.items()}
        for evaluated, by_scales in runs.items()
    }
    tasks = {name: [task.recipe, *task.settings] for name, task in table.tasks.items()}
    report = {"search": table.search, "tasks": tasks, "searches": searches, "evaluated": rows, "runs": made}
    (output / f"transfer_{name}.json").write_text(json.dumps(report, indent=1) + "\n")
    return rows


def how_made(run: Run) -> dict[str, Any]:
    """A run without its times, and without its search, which the report has once."""
    apart = ("seconds_per_answer", "cost", "search")
    return {name: value for name, value in asdict(run).items() if name not in apart}


def print_tables(rows: Rows, runs: Runs) -> None:
    """The report as Markdown."""
    print("| evaluated on | scales of | mean by seed | change | worst position | GAP by seed |")
    print("|---|---|---|---|---|---|")
    for evaluated, by_scales in rows.items():
        for scales, row in by_scales.items():
            means = ", ".join(f"{run.mean:.3f}" for run in runs[evaluated][scales])
            gaps = ", ".join(f"{run.gap:.2f}" for run in runs[evaluated][scales])
            print(
                f"| {evaluated} | {scales} | {means} | {format_change(row['change'])} | {row['worst']:.2f} | {gaps} |"
            )


def main() -> None:
    """Run the searches and evaluations, and write the report after each seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("storage", help="a folder for the artifacts of both tasks")
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS, help="of the search: all that the report is of")
    parser.add_argument("--output", type=Path, default=FOLDER, help="where the report is written")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    table = TABLES[arguments.table]
    runs = measure_base(table, arguments.storage)
    searches: Searches = {name: [] for name in table.tasks}
    for seed in sorted({*arguments.seeds}):
        measure_seed(table, arguments.storage, seed, runs, searches)
        rows = write_report(arguments.table, table, runs, searches, arguments.output)
    print_tables(rows, runs)


if __name__ == "__main__":
    main()
