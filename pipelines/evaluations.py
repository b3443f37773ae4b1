"""The results of the command `evaluate`, for people and programs.

As the report, it is no stage: all recipes of a storage write the same folder `evaluation/`, whose summary.json names
the fingerprints of the evaluations that it shows.
"""

from typing import Any

from pos2distill.config import Recipe
from pos2distill.evaluation.result import Evaluation, to_evaluation
from pos2distill.store.artifacts import write_bytes, write_json
from pos2distill.training.job import MODEL_FOLDER
from pos2distill.urls import open_url

from .plan import Plan
from .provenance import Provenance, read_provenance
from .stages.evaluate import PREDICTIONS
from .stages.stage import Stage


def write_evaluations(recipe: Recipe, plan: Plan) -> dict[str, Evaluation]:
    """Write `evaluation/`: summary.json, and for each model `MODEL-accuracy.png`.

    Returns: the evaluation of the base model and, if there is a checkpoint, of the distilled one, by the names `base`
        and `distilled`.
    """
    evaluations = {"base": read_evaluation(recipe, plan, plan.evaluate_base)}
    if plan.evaluate_distilled.artifact.manifest() is not None:
        evaluations["distilled"] = read_evaluation(recipe, plan, plan.evaluate_distilled)
    fs, root = open_url(recipe.storage, "runtime.storage")
    fs.makedirs(f"{root}/evaluation", exist_ok=True)
    for name, evaluation in evaluations.items():
        write_bytes(fs, f"{root}/evaluation/{name}-accuracy.png", evaluation.plot().png)
    # An artifact of an earlier version may say nothing of how it was made.
    provenance = read_provenance(plan.evaluate_base.artifact) or Provenance.now(recipe)
    summary: dict[str, Any] = {
        "name": recipe.name,
        "description": recipe.description,
        "settings": plan.study.model_dump(mode="json"),
        "command": provenance.command,
        "made_with": provenance.summary,
        "versions": provenance.versions,
    }
    for name, evaluation in evaluations.items():
        summary[name] = evaluation.summary()
    # Last, since its fingerprints say that the pictures are those of these results.
    write_json(fs, f"{root}/evaluation/summary.json", summary)
    return evaluations


def read_evaluation(recipe: Recipe, plan: Plan, stage: Stage) -> Evaluation:
    """The evaluation that a finished stage has made."""
    model = recipe.written_paths.get("model.path", plan.study.model.path)
    if stage is plan.evaluate_distilled:
        model = f"{plan.distill.artifact.url}/{MODEL_FOLDER}"
    return to_evaluation(
        plan.study,
        model,
        stage.artifact.read_table(PREDICTIONS),
        stage.output().manifest().counts,
        recipe.runtime.endpoint,
        stage.fingerprint,
    )
