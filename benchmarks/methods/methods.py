"""Every method of the papers on the same questions: accuracy, GAP, change, time for an answer, cost.

The tables are those of `benchmarks.methods.tables`: `toy`, the built-in toy on transformers in one process; `two_hop`,
the same for the toy with two hops; `smollm2`, a small real model on vLLM with generated questions; `few_slots`, that
model with few slots, whose position weights then count; `rates_cpu`, learning rates of that model; and for one GPU
`facts_gpu`, `nq_gpu` and `kv_gpu`, that model on three tasks, and `rates_gpu`, learning rates. All variants of a table
are evaluated on the same questions at the same slots. Where there is randomness (training, search), each seed is its
own run, and the interval of the mean covers seeds and questions (`estimate`); otherwise it is over questions. Change
and time are relative to the base model with the same engine and prompt; the time only in tables that are `timed`. The
change is paired by question, after the mean over seeds, and its interval is over questions.
Stages run one after the other, so that the cost of a method is the sum of their costs. Writes methods_TABLE.json and
methods_TABLE.png to this folder; other runs that the report already has are kept. A stopped run continues. Every run
records the commit and the versions with which its answers were made.

Examples (the first takes 36 minutes on two cores):
  python -m benchmarks.methods.methods toy runs/methods-toy
  python -m benchmarks.methods.methods toy runs/methods-toy --only base ms_poe
  python -m benchmarks.methods.methods two_hop runs/methods-two-hop
  python -m benchmarks.methods.methods smollm2 runs/methods-smollm2 --only base r1 seqkd --seeds 0
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from benchmarks.methods.rows import Run, draw, print_table, summarize
from benchmarks.methods.tables import SEEDS, TABLES, Table, Variant
from pipelines.commands import plan_command, run_evaluate, run_study
from pipelines.provenance import read_provenance
from pipelines.stages.stage import Stage
from pos2distill.config import Recipe
from pos2distill.config.load import load_recipe
from pos2distill.errors import UserError
from pos2distill.evaluation.cross_fitting import corrected_gap
from pos2distill.evaluation.scores import Grid, to_curve, to_grid

FOLDER = Path(__file__).parent
# While samples are streamed into training, the seconds of training contain those of sampling.
STAGED = "runtime.mode=staged"


def settings_of(table: Table, variant: Variant, seed: int, storage: str) -> list[str]:
    """The settings of one run, beyond those of the table's recipe."""
    return [*table.common, STAGED, f"seed={seed}", f"runtime.storage={storage}", *variant.settings]


def run(recipe: Recipe, *, trains: bool) -> Run:
    """Run one seed of a variant; what is stored is not computed again."""
    studies = plan_command(recipe, "study" if trains else "evaluate")
    if trains:
        run_study(recipe, studies)
    else:
        run_evaluate(recipe, studies)
    plan = studies[0].plan
    evaluated = plan.evaluate_distilled if trains else plan.evaluate_base
    predictions = evaluated.artifact.read_table("predictions.parquet")
    grid = to_grid(predictions, recipe.study.data.documents)
    curve = to_curve(grid, bootstrap_samples=2000, seed=0)
    rounds = plan.rounds if trains else ()
    samples = [each.sample for each in rounds]
    before_answers: list[Stage] = [*plan.measurements, *samples, *(each.distill for each in rounds)]
    # The circumstances of the evaluation, which may have been made by an earlier call.
    made = read_provenance(evaluated.artifact)
    return Run(
        seed=recipe.study.seed,
        date=made.date[:10] if made else time.strftime("%Y-%m-%d"),
        accuracy=list(curve.accuracy_by_slot),
        mean=curve.mean,
        mean_ci95=curve.ci95,
        worst=min(curve.accuracy_by_slot),
        gap=curve.gap,
        gap_corrected=corrected_gap(grid.correct_ES, seed=0),
        seconds_per_answer=seconds(evaluated) / prompts(grid),
        cost=sum(seconds(stage) for stage in before_answers),
        right=grid.correct_ES.sum(1).astype(int).tolist(),
        answers=["".join(str(int(right)) for right in question) for question in grid.correct_ES],
        cut=pc.sum(pc.equal(predictions["finish_reason"], "length")).as_py(),
        sampled=sum(counts(stage)["sampled"] for stage in samples) if trains else None,
        kept=sum(counts(stage)["kept"] for stage in samples) if trains else None,
        search=None if plan.search_scales is None else found(plan.search_scales),
        commit=made.revision if made else None,
        machine=made.hardware if made else None,
        versions=made.versions if made else None,
    )


def seconds(stage: Stage) -> float:
    """All seconds that the stage measured, except a teacher's: teachers work while samples are made."""
    measured = stage.output().manifest().seconds
    return sum(value for name, value in measured.items() if name != "teacher")


def counts(stage: Stage) -> Mapping[str, int]:
    """The counts of a finished stage."""
    return stage.output().manifest().counts


def found(search: Stage) -> dict[str, Any]:
    """The scales that a finished search chose, and their fitness on its questions."""
    details = search.output().details("scales", "fitness", "unscaled")
    return {
        "scales": details["scales"],
        "fitness": details["fitness"],
        "fitness without scales": details["unscaled"]["fitness"],
    }


def prompts(grid: Grid) -> int:
    """The number of answers of an evaluation."""
    return int(grid.correct_ES.size)


def stored_runs(report: Path, table: Table) -> dict[str, list[Run]]:
    """The runs of a report, by variant; none if there is no report yet.

    Early reports say only once how all runs were made.

    Raises:
        UserError: the runs were measured with another recipe or other settings than the table's.
    """
    if not report.exists():
        return {}
    stored = json.loads(report.read_text())
    measured = [stored["recipe"], *stored["common"]]
    if measured != [table.recipe, *table.common]:
        raise UserError(f"{report}: measured with {measured}, not with {[table.recipe, *table.common]}")
    settings = {variant.name: list(variant.settings) for variant in table.variants}
    for name, row in stored["variants"].items():
        # Early reports have no settings.
        if name not in settings or row.get("settings", settings[name]) != settings[name]:
            expected = settings.get(name, "no such variant")
            raise UserError(f"{report}: {name} was measured with {row.get('settings')}; the table has {expected}")
    of_all = {name: stored.get(name) for name in ("machine", "versions", "commit")}
    runs: dict[str, list[Run]] = {}
    for name, row in stored["variants"].items():
        known = [{field: value for field, value in run.items() if value is not None} for run in row["runs"]]
        runs[name] = [Run(**{**of_all, **run}) for run in known]
    return runs


def write_report(name: str, table: Table, runs: dict[str, list[Run]], output: Path) -> dict[str, dict[str, Any]]:
    """Write the report and its plot, and return the rows."""
    rows = {}
    for variant in table.variants:
        # A base that is asked for may come after runs that the report had.
        if variant.name in runs and variant.base in runs:
            made = {"settings": list(variant.settings), "base": variant.base}
            rows[variant.name] = {**made, **summarize(runs[variant.name], runs[variant.base][0], timed=table.timed)}
    report = {"recipe": table.recipe, "common": table.common, "variants": rows}
    (output / f"methods_{name}.json").write_text(json.dumps(report, indent=1) + "\n")
    draw(rows, output / f"methods_{name}.png")
    return rows


def main() -> int:
    """Run the variants and write the report after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("storage", help="a folder for the artifacts of all variants")
    names = {variant.name: None for table in TABLES.values() for variant in table.variants}
    parser.add_argument("--only", nargs="+", choices=names, metavar="VARIANT", help="some of them")
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS, help="some of them")
    parser.add_argument("--output", type=Path, default=FOLDER, help="where the report is written")
    arguments = parser.parse_args()
    started = time.monotonic()
    table = TABLES[arguments.table]
    arguments.output.mkdir(parents=True, exist_ok=True)
    try:
        runs = stored_runs(arguments.output / f"methods_{arguments.table}.json", table)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    chosen = arguments.only or [variant.name for variant in table.variants]
    unknown = sorted({*chosen} - {variant.name for variant in table.variants})
    if unknown:
        parser.error(f"--only: the table {arguments.table} has no {', '.join(unknown)}")
    for variant in table.variants:
        measured = variant.base in chosen and 0 in arguments.seeds
        # Those of the report too: it is written anew after each run.
        if variant.name in {*chosen, *runs} and variant.base not in runs and not measured:
            parser.error(f"--only: {variant.base} with seed 0 comes first, since {variant.name} is compared with it")
    for variant in table.variants:
        if variant.name in chosen:
            for seed in sorted({*arguments.seeds} & {*variant.seeds}):
                print(f"--- {variant.name}, seed {seed}, after {time.monotonic() - started:.0f} s", flush=True)
                recipe = load_recipe(table.recipe, settings_of(table, variant, seed, arguments.storage))
                done = run(recipe, trains=variant.trains)
                others = [each for each in runs.get(variant.name, []) if each.seed != seed]
                runs[variant.name] = sorted([*others, done], key=lambda each: each.seed)
                write_report(arguments.table, table, runs, arguments.output)
    print_table(write_report(arguments.table, table, runs, arguments.output))
    return 0


if __name__ == "__main__":
    sys.exit(main())
