"""Every method of the papers on the same questions of the built-in toy: accuracy, GAP, time for an answer, cost.

All variants are evaluated on the same questions at the same slots, in float32 with transformers, in one process. Where
there is randomness (training, search), each seed is a run of its own, and intervals are Student's t over seeds; else
they are the bootstrap over questions. Writes methods_toy.json and methods_toy.png to this folder; with --only, the
other rows of the report stay. A run that was stopped continues.

Example (about an hour on two cores):
  python -m benchmarks.methods.methods runs/methods-toy
  python -m benchmarks.methods.methods runs/methods-toy --only base ms_poe
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from benchmarks.circumstances import circumstances
from pipelines.commands import run_evaluate, run_study
from pipelines.plan import make_plan
from pipelines.stages.stage import Stage
from pos2distill.config import Recipe
from pos2distill.config.load import load_recipe
from pos2distill.evaluation.scores import Grid, to_curve, to_grid
from pos2distill.evaluation.statistics import corrected_gap
from pos2distill.evaluation.sweep import Estimate, estimate

SEEDS = (0, 1, 2)
SPLITS = 200
FOLDER = Path(__file__).parent

# The same questions for all: whatever the seed, it is that of training and search alone.
COMMON = (
    "evaluation.slots=[0, 7, 14, 22, 29]",
    "evaluation.other_documents=[]",
    "evaluation.seed=0",
    "runtime.executor=local",
)
SHORT = ("model.max_length=512",)
SEARCH = "{generations: 5, population: 12, parents: 6, mutations: 3, crossovers: 3, examples: 40, mutation_step: 0.05}"


@dataclass(frozen=True)
class Variant:
    """One line of the table.

    settings: beyond `COMMON`. trains: whether a model is distilled. seeds: of one without randomness, the first alone.
    """

    name: str
    settings: tuple[str, ...]
    trains: bool = False
    seeds: tuple[int, ...] = (0,)


VARIANTS = (
    Variant("base", ()),
    Variant("reorder", ("inference.method=reorder",)),
    Variant(
        "uniform scale, searched",
        ("inference.method=lpes", f"inference.search={SEARCH}", "inference.search.strategy=uniform"),
        seeds=SEEDS,
    ),
    Variant("lpes", ("inference.method=lpes", f"inference.search={SEARCH}"), seeds=SEEDS),
    Variant(
        "lpes, random search",
        ("inference.method=lpes", f"inference.search={SEARCH}", "inference.search.strategy=random"),
        seeds=SEEDS,
    ),
    # The toy has three layers, so the published first layer leaves one.
    Variant("ms_poe, last layer", ("inference.method=ms_poe", "inference.ms_poe.first_layer=2")),
    Variant("ms_poe, all layers", ("inference.method=ms_poe", "inference.ms_poe.first_layer=0")),
    Variant("attention_buckets", ("inference.method=attention_buckets",)),
    Variant("r1", ("method.name=r1",), trains=True, seeds=SEEDS),
    Variant("r1, random slot", ("method.name=r1", "method.advantageous_slot=random"), trains=True, seeds=SEEDS),
    # Two rounds of one epoch: as many rows and steps as the two epochs of the others.
    Variant("on-policy r1", ("method.name=r1-on-policy", "training.epochs=1"), trains=True, seeds=SEEDS),
    Variant("seqkd", ("method.name=seqkd",), trains=True, seeds=SEEDS),
    # As its paper: no answers of the data set, and documents as they come.
    Variant(
        "sealong",
        ("method.name=seqkd", "method.advantageous_slot=random", "sampling.candidates=8", "sampling.keep=all"),
        trains=True,
        seeds=SEEDS,
    ),
    # Skips need twice the positions of a row, and the toy has 1,024.
    Variant("seqkd + rpsd skip", ("method.name=seqkd", "method.view=skip", *SHORT), trains=True, seeds=SEEDS),
    Variant("seqkd + rpsd cyclic", ("method.name=seqkd", "method.view=cyclic", *SHORT), trains=True, seeds=SEEDS),
    Variant("seqkd + pose", ("method.name=seqkd", "method.view=pose", *SHORT), trains=True, seeds=SEEDS),
    Variant(
        "r1 + lpes",
        ("method.name=r1", "inference.method=lpes", f"inference.search={SEARCH}"),
        trains=True,
        seeds=SEEDS,
    ),
)


@dataclass(frozen=True)
class Run:
    """What one seed of a variant measured. cost: seconds of search and training."""

    accuracy: list[float]
    mean: float
    mean_ci95: tuple[float, float]
    worst: float
    gap: float
    gap_corrected: float
    seconds_per_answer: float
    cost: float


def run(recipe: Recipe, *, trains: bool) -> Run:
    """Run one seed of a variant; what is stored is not computed again."""
    command = run_study if trains else run_evaluate
    command(recipe)
    plan = make_plan(recipe)
    evaluated = plan.evaluate_distilled if trains else plan.evaluate_base
    grid = to_grid(evaluated.artifact.read_table("predictions.parquet"), recipe.study.data.documents)
    curve = to_curve(grid, bootstrap_samples=2000, seed=0)
    paid: list[Stage] = [*plan.measurements]
    if trains:
        for each in plan.rounds:
            paid += [each.sample, each.distill]
    return Run(
        accuracy=list(curve.accuracy_by_slot),
        mean=curve.mean,
        mean_ci95=curve.ci95,
        worst=min(curve.accuracy_by_slot),
        gap=curve.gap,
        gap_corrected=corrected_gap(grid.correct_ES, splits=SPLITS, seed=0),
        seconds_per_answer=seconds(evaluated) / prompts(grid),
        cost=sum(seconds(stage) for stage in paid),
    )


def seconds(stage: Stage) -> float:
    """Of all that the stage measured, but for a teacher's, which work while samples are made."""
    measured = stage.output().manifest().seconds
    return sum(value for name, value in measured.items() if name != "teacher")


def prompts(grid: Grid) -> int:
    """Answers of an evaluation."""
    return int(grid.correct_ES.size)


def summarise(runs: Sequence[Run]) -> dict[str, Any]:
    """One line of the table."""
    interval = runs[0].mean_ci95
    return {
        "seeds": len(runs),
        "mean": asdict(estimate([run.mean for run in runs], interval)),
        "worst": float(np.mean([run.worst for run in runs])),
        "gap": float(np.mean([run.gap for run in runs])),
        "gap_corrected": float(np.mean([run.gap_corrected for run in runs])),
        "accuracy": np.mean([run.accuracy for run in runs], axis=0).tolist(),
        "seconds_per_answer": float(np.mean([run.seconds_per_answer for run in runs])),
        "cost_seconds": float(np.mean([run.cost for run in runs])),
        "runs": [asdict(run) for run in runs],
    }


def draw(rows: dict[str, dict[str, Any]], path: Path) -> None:
    """Mean, worst slot and corrected GAP of every variant."""
    figure = Figure(figsize=(9, 1.4 + 0.34 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    y = np.arange(len(rows))[::-1]
    means = [Estimate(**row["mean"]) for row in rows.values()]
    values = np.array([mean.value for mean in means])
    errors = [values - [mean.low for mean in means], [mean.high for mean in means] - values]
    axes.errorbar(values, y, xerr=np.maximum(errors, 0), fmt="o", label="mean over positions, 95 %", markersize=4)
    axes.plot([row["worst"] for row in rows.values()], y, "v", label="worst position", markersize=4)
    axes.plot([row["gap_corrected"] for row in rows.values()], y, "x", label="GAP, corrected", markersize=5)
    axes.set_yticks(y, list(rows))
    axes.set_xlim(-0.02, 1.02)
    axes.grid(axis="x", alpha=0.3)
    figure.legend(loc="outside lower center", frameon=False, ncols=3)
    figure.savefig(path, dpi=120)


def print_table(rows: dict[str, dict[str, Any]]) -> None:
    """The report as Markdown."""
    base = rows["base"]["seconds_per_answer"] if "base" in rows else float("nan")
    print("| | mean | worst | GAP | corrected | time per answer | cost, s |\n|---|---|---|---|---|---|---|")
    for name, row in rows.items():
        mean = Estimate(**row["mean"])
        print(
            f"| {name} | {mean.value:.3f} [{mean.low:.3f}, {mean.high:.3f}] | {row['worst']:.2f} | {row['gap']:.2f} | "
            f"{row['gap_corrected']:.2f} | {row['seconds_per_answer'] / base:.2f} | {row['cost_seconds']:.0f} |"
        )


def main() -> None:
    """Run the variants and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("storage", help="a folder for the artifacts of all variants")
    parser.add_argument("--only", nargs="+", choices=[variant.name for variant in VARIANTS], help="some of them")
    parser.add_argument("--output", type=Path, default=FOLDER, help="where the report is written")
    arguments = parser.parse_args()
    started = time.monotonic()
    report_path = arguments.output / "methods_toy.json"
    rows: dict[str, dict[str, Any]] = {}
    if arguments.only and report_path.exists():
        rows = json.loads(report_path.read_text())["variants"]
    for variant in VARIANTS:
        if arguments.only and variant.name not in arguments.only:
            continue
        runs = []
        for seed in variant.seeds:
            print(f"--- {variant.name}, seed {seed}, after {time.monotonic() - started:.0f} s", flush=True)
            settings = [*COMMON, f"seed={seed}", f"runtime.storage={arguments.storage}", *variant.settings]
            runs.append(run(load_recipe("quickstart", settings), trains=variant.trains))
        rows[variant.name] = summarise(runs)
    rows = {variant.name: rows[variant.name] for variant in VARIANTS if variant.name in rows}
    report = circumstances("torch", "transformers") | {"common": COMMON, "variants": rows}
    report_path.write_text(json.dumps(report, indent=1) + "\n")
    draw(rows, arguments.output / "methods_toy.png")
    print_table(rows)


if __name__ == "__main__":
    main()
