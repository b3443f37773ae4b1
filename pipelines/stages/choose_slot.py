"""Stage `choose slot` (method.advantageous_slot: auto): where the base model does best.

It is measured on training examples, so that the choice has not seen the examples that are evaluated later.
"""

from dataclasses import asdict

import numpy as np

from pos2distill.evaluation.scores import to_curve, to_grid
from pos2distill.sampling.prompting import PromptSpec
from pos2distill.store.artifacts import Manifest
from pos2distill.tasks.permutations import candidate_placements

from ..artifact_names import SLOT_SCORES
from .plan_context import PlanContext
from .predictions import PROMPT_FIELDS, predict, publish
from .prepare import TRAIN_FILE, count_training, training_examples_input
from .resolve import resolve_auto_settings
from .stage import RunContext, Stage, recorded_seconds

_BOOTSTRAP_SAMPLES = 2000

_FIELDS = (
    *PROMPT_FIELDS,
    "seed",
    "method.auto_slots",
    "method.auto_examples",
    "evaluation.max_new_tokens",
)


def plan(context: PlanContext) -> Stage:
    """The stage of a study whose advantageous slot is `auto`, or whose documents are reordered."""
    inputs = {"examples": training_examples_input(context.prepare, context.digests), **context.scale_inputs}
    return context.declare(
        name="choose slot",
        folder=SLOT_SCORES,
        fields=_FIELDS,
        run=run,
        inputs=inputs,
    )


def run(stage: Stage, context: RunContext) -> Manifest:
    """Evaluate the base model and record the best slots (the first of equal ones), their accuracy and interval.

    Counts: see `count_predictions`.
    """
    study = resolve_auto_settings(stage.study, stage.inputs)
    # Both uses require a single number of hops, which `Study` has checked.
    (hops,) = study.data.hops
    documents = study.data.documents
    placements = candidate_placements(documents, hops, study.method.auto_slots)
    examples = stage.inputs["examples"]
    count = count_training(examples.artifact, at_most=study.method.auto_examples, setting="method.auto_examples")
    specs = [PromptSpec(documents, {hops: placements})]
    with recorded_seconds(stage, context, "choose") as seconds:
        predictions = predict(stage, study, context, TRAIN_FILE, count, specs)
    # The interval is only shown: with a number of bootstrap samples of its own, no setting of the report changes the
    # choice, and with it the samples and the checkpoint.
    curve = to_curve(to_grid(predictions.answered, documents), bootstrap_samples=_BOOTSTRAP_SAMPLES, seed=study.seed)
    best = int(np.argmax(curve.accuracy_by_slot))
    details = {
        "slots": list(placements[best].slots),
        "accuracy": curve.accuracy_by_slot[best],
        "ci95": curve.accuracy_ci95[best],
        "curve": asdict(curve),
    }
    return publish(stage, predictions, count, seconds, details)
