"""The results of the command `evaluate`, for people and programs: the folder `evaluation/` of a storage."""

from collections.abc import Mapping
from typing import Any

from pos2distill.config import Recipe
from pos2distill.config.defaults import changed_study_settings
from pos2distill.evaluation.evaluation_page import EvaluationInputs, render_evaluation
from pos2distill.evaluation.page import RunDescription
from pos2distill.evaluation.report import render_report
from pos2distill.evaluation.result import Evaluation, to_evaluation
from pos2distill.training.job import model_url

from .folders import write_folder
from .plan import Plan
from .provenance import Provenance, read_provenance
from .report import TaskResults, counts_and_seconds, read_search, report_inputs
from .stages.answers import PREDICTIONS, read_refused
from .stages.measured import with_measured
from .stages.stage import Stage


def write_evaluations(recipe: Recipe, plan: Plan) -> dict[str, Evaluation]:
    """Write `evaluation/`: index.html, summary.json, curves.csv and pictures.

    Returns: as `read_evaluations`.
    """
    evaluations = read_evaluations(recipe, plan)
    if len(evaluations) == 1:
        files = render_evaluation(_page_inputs(recipe, plan, evaluations["base"]))
    else:
        # Two models are compared as in the report.
        files = render_report(report_inputs(recipe, plan))
    write_folder(recipe.storage, "evaluation", files, "summary.json", _summarise(recipe, plan, evaluations))
    return evaluations


def _page_inputs(recipe: Recipe, plan: Plan, evaluation: Evaluation) -> EvaluationInputs:
    results = TaskResults(plan.study, plan.prepare, plan.evaluate_base)
    counts, seconds = counts_and_seconds(plan.evaluation_stages)
    provenance = _provenance(recipe, plan)
    run = RunDescription(
        name=recipe.name,
        description=recipe.description,
        counts=counts,
        seconds=seconds,
        settings=_settings(plan),
        changed_settings=changed_study_settings(recipe),
        command=provenance.command,
        made_with=provenance.summary,
        versions=provenance.versions,
        fingerprint=evaluation.fingerprint,
        prompt_lengths=results.prompt_lengths,
        search=read_search(plan),
    )
    return EvaluationInputs(run, evaluation, results.questions())


def _summarise(recipe: Recipe, plan: Plan, evaluations: Mapping[str, Evaluation]) -> dict[str, Any]:
    provenance = _provenance(recipe, plan)
    summary: dict[str, Any] = {
        "name": recipe.name,
        "description": recipe.description,
        "settings": _settings(plan),
        "command": provenance.command,
        "made_with": provenance.summary,
        "versions": provenance.versions,
        "search": read_search(plan),
    }
    for name, evaluation in evaluations.items():
        summary[name] = evaluation.summary()
    return summary


def _settings(plan: Plan) -> dict[str, Any]:
    """The settings of the study, with the RoPE scales that were searched."""
    scales = {name: each for name, each in plan.evaluate_base.inputs.items() if name == "scales"}
    return with_measured(plan.study, scales).model_dump(mode="json")


def _provenance(recipe: Recipe, plan: Plan) -> Provenance:
    # An artifact of an earlier version may say nothing of how it was made.
    return read_provenance(plan.evaluate_base.artifact) or Provenance.now(recipe, plan.study.model)


def read_evaluations(recipe: Recipe, plan: Plan) -> dict[str, Evaluation]:
    """The finished evaluation of the base model and, if there is one, of the distilled one: `base` and `distilled`."""
    stages = {"base": plan.evaluate_base, "distilled": plan.evaluate_distilled}
    finished = {name: stage for name, stage in stages.items() if stage.artifact.is_finished}
    return {name: _read(recipe, plan, stage) for name, stage in finished.items()}


def _read(recipe: Recipe, plan: Plan, stage: Stage) -> Evaluation:
    """The evaluation that a finished stage has made."""
    model = recipe.written_paths.get("model.path", plan.study.model.path)
    if stage is plan.evaluate_distilled:
        model = model_url(plan.distill.artifact)
    return to_evaluation(
        plan.study,
        model,
        stage.artifact.read_table(PREDICTIONS),
        read_refused(stage.artifact),
        stage.output().manifest().counts,
        recipe.runtime.endpoint,
        stage.fingerprint,
    )
