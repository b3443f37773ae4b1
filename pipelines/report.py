"""The report: everything the artifacts of a study hold, for people and programs.

It is no stage and has no artifact: `report/` is of the study that was reported last, whose fingerprint is in its
summary.json. The report of another study of the storage is kept as `report-FINGERPRINT/`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pos2distill.config import Recipe, Study, fingerprint
from pos2distill.config.fields import changed_settings
from pos2distill.evaluation.questions import EvaluatedPrompts, EvaluatedTask
from pos2distill.evaluation.report import (
    Comparison,
    ReportInputs,
    build_summary,
    compare,
    render_analysis,
    render_model_card,
    render_report,
)
from pos2distill.evaluation.sweep import CellResult, render_sweep, summarise_sweep
from pos2distill.models.files import is_hub_name, read_licence
from pos2distill.models.rope.layer_scales import CONFIG_KEY
from pos2distill.records import Slots
from pos2distill.store.artifacts import Artifact, write_bytes, write_json
from pos2distill.training.job import MODEL_FOLDER
from pos2distill.urls import open_url, storage_errors

from .plan import Plan
from .provenance import Provenance, package_versions, read_provenance
from .stages.analyse import ANALYSIS, read_analysis
from .stages.distill import read_steps
from .stages.evaluate import PREDICTIONS, eval_specs
from .stages.measured import with_measured
from .stages.prepare import EVALUATION, read_locations
from .stages.stage import Stage


@dataclass(frozen=True, slots=True)
class Cell:
    """One study of a sweep: the values of the swept settings, its recipe and its plan."""

    settings: dict[str, Any]
    recipe: Recipe
    plan: Plan


def make_report(recipe: Recipe, plan: Plan) -> Comparison:
    """Write `report/` (index.html, summary.json, curves.csv, pictures) and the checkpoint's model card.

    Returns: the comparison at the prompt length of training.
    """
    inputs = _report_inputs(recipe, plan)
    _write_model_card(inputs, plan)
    _write_report(recipe, render_report(inputs), build_summary(inputs))
    if inputs.analyses:
        write_analysis(recipe, inputs.analyses)
    return inputs.main


def compare_models(plan: Plan) -> Comparison:
    """The comparison of a finished study at the prompt length of training."""
    study = with_measured(plan.study, plan.measured)
    return _Results(study, plan.prepare, plan.evaluate_base, plan.evaluate_distilled).comparisons()[0]


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
    files = render_sweep(recipe.name, recipe.description, results, package_versions())
    summary = summarise_sweep(recipe.name, results)
    summary["fingerprint"] = fingerprint([cell.plan.fingerprint for cell in cells])
    _write_report(recipe, files, summary)


def read_analyses(plan: Plan) -> dict[str, dict[str, Any]]:
    """The finished analyses by model, that of the base model first."""
    analyses = {}
    for model, stage in (("base", plan.analyse_base), ("distilled", plan.analyse_distilled)):
        if stage is not None and stage.artifact.manifest() is not None:
            analyses[model] = read_analysis(stage)
    return analyses


def write_analysis(recipe: Recipe, analyses: Mapping[str, Mapping[str, Any]]) -> None:
    """Write `analysis/` (index.html, analysis.json, pictures)."""
    fs, root = open_url(recipe.storage, "runtime.storage")
    fs.makedirs(f"{root}/analysis", exist_ok=True)
    for name, data in render_analysis(recipe.name, analyses).items():
        write_bytes(fs, f"{root}/analysis/{name}", data)
    write_json(fs, f"{root}/analysis/{ANALYSIS}", analyses)


def reported_fingerprint(storage: str) -> str | None:
    """The fingerprint of the study that the report in this storage shows."""
    summary = read_report(storage)
    fingerprint: str | None = summary.get("fingerprint") if summary else None
    return fingerprint


def read_report(storage: str) -> dict[str, Any] | None:
    """The summary of the report in this storage, if there is one."""
    fs, path = open_url(f"{storage}/report/summary.json", "runtime.storage")
    if not fs.exists(path):  # it is the last file of a report
        return None
    with storage_errors(storage, "runtime.storage"):
        try:
            summary = json.loads(fs.cat_file(path))
        except ValueError:
            return None  # corrupt: it is written again
    return summary if isinstance(summary, dict) else None


def _write_model_card(inputs: ReportInputs, plan: Plan) -> None:
    """Describe the checkpoint by a study of it, but not by one that changes only how it is evaluated."""
    if plan.study.inference.method in ("reorder", "ms_poe", "attention_buckets"):
        return
    checkpoint = plan.distill.artifact
    card = f"{checkpoint.path}/{MODEL_FOLDER}/README.md"
    write_bytes(checkpoint.fs, card, render_model_card(inputs).encode())


def _write_report(recipe: Recipe, files: Mapping[str, bytes], summary: Mapping[str, Any]) -> None:
    fs, root = open_url(recipe.storage, "runtime.storage")
    _keep_other_report(recipe.storage, str(summary["fingerprint"]))
    fs.makedirs(f"{root}/report", exist_ok=True)
    for name, data in files.items():
        write_bytes(fs, f"{root}/report/{name}", data)
    # Last, since its fingerprint says that the report is complete.
    write_json(fs, f"{root}/report/summary.json", summary)


def _keep_other_report(storage: str, fingerprint: str) -> None:
    """Move the report of another study out of the way of the one with this fingerprint."""
    shown = reported_fingerprint(storage)
    if shown is None or shown == fingerprint:
        return
    fs, root = open_url(storage, "runtime.storage")
    fs.mv(f"{root}/report", f"{root}/report-{shown}", recursive=True)
    # Of this study there will be a new report.
    if fs.exists(f"{root}/report-{fingerprint}"):
        fs.rm(f"{root}/report-{fingerprint}", recursive=True)


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
    main = _Results(study, plan.prepare, plan.evaluate_base, plan.evaluate_distilled)
    first, *others = main.comparisons()
    other_results = {}
    for name, task in plan.other_tasks.items():
        other_results[name] = _Results(task.study, task.prepare, task.evaluate_base, task.evaluate_distilled)
    # An artifact of an earlier version may say nothing of how it was made.
    provenance = read_provenance(plan.distill.artifact) or Provenance.now(recipe)
    return ReportInputs(
        name=recipe.name,
        description=recipe.description,
        method=study.method.name,
        advantageous=_shown_slots(study),
        choice=choice,
        main=first,
        others=others,
        # Another task is evaluated only at its own training length (see `_plan_task`).
        other_tasks={name: results.comparisons()[0] for name, results in other_results.items()},
        tasks=[results.questions() for results in (main, *other_results.values())],
        steps=_steps(plan),
        counts={name: manifest.counts for name, manifest in manifests.items()},
        seconds=seconds,
        settings=_shown_settings(study, plan.distill.artifact) | {"runtime": _shown_runtime(recipe)},
        changed_settings=changed_settings(plan.study),
        command=provenance.command,
        made_with=provenance.summary,
        versions=provenance.versions,
        checkpoint=f"{plan.distill.artifact.url}/{MODEL_FOLDER}",
        base_model=study.model.path if is_hub_name(study.model.path) else None,
        licence=read_licence(study.model),
        artifacts={
            "base": f"base-scores-{plan.evaluate_base.fingerprint}",
            "distilled": f"distilled-scores-{plan.evaluate_distilled.fingerprint}",
        },
        fingerprint=plan.fingerprint,
        prompt_lengths=manifests[plan.evaluate_base.name].details,
        analyses=read_analyses(plan),
    )


def _steps(plan: Plan) -> list[dict[str, Any]]:
    """The step records of all rounds, numbered from the first to the last."""
    steps: list[dict[str, Any]] = []
    for each in plan.rounds:
        start = len(steps)
        for record in read_steps(each.distill.artifact):
            steps.append({**record, "step": start + record["step"]})
    return steps


class _Results:
    """The evaluations of both models on one task."""

    def __init__(self, study: Study, prepare: Stage, evaluate_base: Stage, evaluate_distilled: Stage) -> None:
        self.study = study
        self.examples = prepare.artifact
        self.before = evaluate_base.artifact.read_table(PREDICTIONS)
        self.after = evaluate_distilled.artifact.read_table(PREDICTIONS)
        self.specs = eval_specs(study, evaluate_base.inputs.get("curve"))

    def comparisons(self) -> list[Comparison]:
        """At every prompt length, the length of training first."""
        return [compare(self.before, self.after, spec.documents, self.study) for spec in self.specs]

    def questions(self) -> EvaluatedTask:
        """The questions, and the answers at every prompt length."""
        prompts = []
        for spec in self.specs:
            label = f"{spec.documents} documents"
            models = (self.before, self.after)
            prompts.append(EvaluatedPrompts(label, spec.documents, *models, spec.slot_of_rank, spec.orders))
        examples = self.examples.read_table(EVALUATION)
        return EvaluatedTask(self.study.data.metric, examples, read_locations(self.examples), prompts)


def _shown_settings(study: Study, checkpoint: Artifact) -> dict[str, Any]:
    """All settings of the study, with the RoPE scales that the checkpoint has: its initial model may bring its own."""
    settings = study.model_dump(mode="json")
    config = checkpoint.read_json(f"{MODEL_FOLDER}/config.json")
    settings["model"]["rope_scales"] = config.get(CONFIG_KEY, [])
    return settings


def _shown_runtime(recipe: Recipe) -> dict[str, object]:
    runtime = recipe.runtime
    return {
        "strategy": runtime.trainers.strategy,
        "workers": runtime.trainers.workers,
        "micro_batch_tokens": runtime.trainers.micro_batch_tokens,
        "samplers": f"{runtime.samplers.min} to {runtime.samplers.max}",
        "teachers": f"{runtime.teachers.min} to {runtime.teachers.max}",
    }
