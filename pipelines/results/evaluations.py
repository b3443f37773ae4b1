"""The results of the command `evaluate`, for people and programs: the folder `evaluation/` of a storage."""

from collections.abc import Mapping
from typing import Any

from pos2distill.config import Recipe
from pos2distill.evaluation.evaluation_page import EvaluationInputs, render_evaluation
from pos2distill.evaluation.report import render_report
from pos2distill.evaluation.result import Evaluation, to_evaluation
from pos2distill.store.checkpoint_layout import model_url

from ..plan import Plan
from ..scaled_config import SCALED_CONFIG_FOLDER, scaled_config_files
from ..stages.made_from import is_current
from ..stages.predictions import read_predictions, read_refused
from ..stages.resolve import resolve_auto_settings
from ..stages.stage import Stage
from .folders import EVALUATION_FOLDER, SUMMARY, write_folder
from .report import TaskResults, describe_run, provenance_or_now, read_search, report_inputs


def write_evaluations(recipe: Recipe, plan: Plan) -> dict[str, Evaluation]:
    """Write `evaluation/`: index.html, summary.json, curves.csv and pictures.

    If RoPE scales are given in the settings, also the model's config with these.

    Returns: see `read_evaluations`.
    """
    evaluations = read_evaluations(recipe, plan)
    if len(evaluations) == 1:
        files = render_evaluation(_page_inputs(recipe, plan, evaluations["base"]))
    else:
        # Two models are compared as in the report.
        files = render_report(report_inputs(recipe, plan))
    scales = plan.study.inference.scales
    if scales:
        for name, content in scaled_config_files(plan.study.model, scales, searched=False).items():
            files[f"{SCALED_CONFIG_FOLDER}/{name}"] = content
    write_folder(recipe.storage, EVALUATION_FOLDER, files, SUMMARY, _summarize(recipe, plan, evaluations))
    return evaluations


def _page_inputs(recipe: Recipe, plan: Plan, evaluation: Evaluation) -> EvaluationInputs:
    results = TaskResults(plan.study, plan.prepare, plan.evaluate_base)
    run = describe_run(
        recipe,
        plan,
        plan.stages_for_evaluate(),
        provenance=provenance_or_now(plan.evaluate_base.artifact, recipe, plan),
        settings=_settings(plan),
        fingerprint=evaluation.fingerprint,
        prompt_lengths=results.prompt_lengths,
    )
    return EvaluationInputs(run, evaluation, results.questions())


def _summarize(recipe: Recipe, plan: Plan, evaluations: Mapping[str, Evaluation]) -> dict[str, Any]:
    provenance = provenance_or_now(plan.evaluate_base.artifact, recipe, plan)
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
    return resolve_auto_settings(plan.study, scales).model_dump(mode="json")


def read_evaluations(recipe: Recipe, plan: Plan) -> dict[str, Evaluation]:
    """The finished evaluation of the base model and, if there is one, of the distilled one: `base` and `distilled`."""
    stages = {"base": plan.evaluate_base, "distilled": plan.evaluate_distilled}
    return {name: _read(recipe, plan, stage) for name, stage in stages.items() if is_current(stage)}


def _read(recipe: Recipe, plan: Plan, stage: Stage) -> Evaluation:
    """The evaluation that a finished stage has made."""
    model = recipe.written_paths.get("model.path", plan.study.model.path)
    if stage is plan.evaluate_distilled:
        model = model_url(plan.distill.artifact)
    return to_evaluation(
        plan.study,
        model,
        read_predictions(stage.artifact),
        read_refused(stage.artifact),
        stage.output().manifest().counts,
        recipe.runtime.endpoint,
        stage.fingerprint,
    )
