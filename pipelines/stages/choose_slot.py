"""Stage `choose slot` (method.advantageous_slot: auto): where the base model does best, measured on training examples.

On training examples, so that the choice has not seen what is eval_specs later.
"""

import time
from dataclasses import asdict

import numpy as np

from pipelines.generate import PromptSpec
from pipelines.plan import Plan
from pipelines.stages.evaluate import PREDICTIONS, count_answers, run_eval
from pipelines.stages.prepare import TRAIN
from pos2distill.config import Recipe
from pos2distill.evaluation.scores import to_curve, to_grid
from pos2distill.store.artifacts import Artifact, Manifest
from pos2distill.tasks.permutations import candidate_placements


def make_choice(recipe: Recipe, plan: Plan) -> Manifest:
    """Ask the base model and record the best slots (of equals the first), their accuracy and interval.

    Counts: prompts = right + wrong; hit_max_tokens of them had no room to end.
    """
    start = time.monotonic()
    study = recipe.study
    (hops,) = study.data.hops
    examples = plan.examples.read_table(TRAIN).slice(0, study.method.auto_examples)
    placements = candidate_placements(study.data.documents, hops, study.method.auto_slots)
    artifact = _artifact(plan)
    predictions = run_eval(
        recipe, study.model, examples, [PromptSpec(study.data.documents, {hops: placements})], "choose slot"
    )
    curve = to_curve(
        to_grid(predictions, study.data.documents),
        bootstrap_samples=study.evaluation.bootstrap_samples,
        seed=study.seed,
    )
    best = int(np.argmax(curve.accuracy_by_slot))
    details = {
        "slots": list(placements[best].slots),
        "accuracy": curve.accuracy_by_slot[best],
        "ci95": curve.accuracy_ci95[best],
        "curve": asdict(curve),
    }
    with artifact.writing():
        artifact.write_table(PREDICTIONS, predictions)
        counts = count_answers(len(examples), predictions)
        return artifact.publish(counts=counts, seconds={"choose": time.monotonic() - start}, details=details)


def with_choice(recipe: Recipe, plan: Plan) -> Recipe:
    """The recipe with `auto` replaced by what was measured; as it is where nothing was to be chosen."""
    if plan.slot_scores is None:
        return recipe
    manifest = _artifact(plan).manifest()
    assert manifest is not None  # the stage ran, or the command prompt_specs for it
    method = recipe.study.method.model_copy(update={"advantageous_slot": tuple(manifest.details["slots"])})
    return recipe.model_copy(update={"study": recipe.study.model_copy(update={"method": method})})


def _artifact(plan: Plan) -> Artifact:
    assert plan.slot_scores is not None
    return plan.slot_scores
