"""Stage `evaluate`: greedy answers at every placement, scored, in one table (`predictions`)."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pyarrow as pa

from pos2distill.config import Study, fingerprint
from pos2distill.config.model import checkpoint_of
from pos2distill.errors import UserError, warn
from pos2distill.records import QUESTIONS
from pos2distill.sampling.prompting import PromptSpec, cached_prompt_builder
from pos2distill.store.artifacts import Artifact, Manifest, other_fingerprints
from pos2distill.tasks.permutations import Placement, evaluated_placements, rank_slots_by_accuracy
from pos2distill.tasks.prompts import MessageBuilder

from ..artifact_names import BASE_SCORES, CHECKPOINT, DISTILLED_SCORES, EXAMPLES
from .distill import read_steps
from .plan_context import PlanContext
from .predictions import PROMPT_FIELDS, predict, publish
from .prepare import EVALUATION_FILE, TRAIN_FILE, evaluation_examples_input, read_prepared
from .resolve import resolve_auto_settings, with_distilled
from .stage import Input, RunContext, Stage, recorded_seconds

_EVALUATION = ("evaluation.slots", "evaluation.other_documents", "evaluation.max_new_tokens")


def declared_settings(study: Study) -> list[str]:
    """The settings that decide the prompts and answers of an evaluation."""
    fields = [*PROMPT_FIELDS, *_EVALUATION]
    # Other methods act by the scales in the model's section.
    if study.inference.spec.only_evaluated:
        fields += ["inference.method", *(f"inference.{name}" for name in study.inference.spec.settings)]
    # Only where they are used; otherwise they would change fingerprints without changing a result.
    if study.evaluation.other_documents:
        fields.append("evaluation.other_slots")
    if study.evaluation.distractor_orders > 1:
        fields.append("evaluation.distractor_orders")
    if study.evaluation.reference_prompts:
        fields.append("evaluation.reference_prompts")
    return fields


def plan(context: PlanContext, *, distill_stage: Stage | None = None) -> Stage:
    """The evaluation of the base model, or of the model that the stage `distill` makes."""
    study = context.study
    inputs = {"examples": evaluation_examples_input(context.prepare, context.digests), **context.evaluation_inputs}
    name, folder = "evaluate base", BASE_SCORES
    if distill_stage is not None:
        inputs["checkpoint"] = distill_stage.output()
        name, folder = "evaluate distilled", DISTILLED_SCORES
    if context.task is not None:
        name = f"{context.task}: {name}"
    # Earlier versions showed the distractors in other orders at each slot.
    derived = {"orders": "the same at every slot"} if study.evaluation.distractor_orders > 1 else {}
    return context.declare(
        name=name,
        folder=folder,
        fields=declared_settings(study),
        run=run,
        inputs=inputs,
        derived=derived,
    )


def run(stage: Stage, context: RunContext) -> Manifest:
    """Evaluate one model at every placement and write the predictions.

    Counts: see `count_predictions`.
    """
    study = with_distilled(resolve_auto_settings(stage.study, stage.inputs), stage.inputs)
    examples = stage.inputs["examples"]
    asked = _questions(examples.artifact, EVALUATION_FILE)
    count = len(asked)
    if "checkpoint" not in stage.inputs:
        _warn_of_trained_questions(study.model.path, asked)
    specs = eval_specs(study, stage.inputs.get("curve")) + reference_specs(study)
    with recorded_seconds(stage, context, "evaluate") as seconds:
        predictions = predict(stage, study, context, EVALUATION_FILE, count, specs)
    predictions = replace(predictions, answered=_with_digest(predictions.answered, examples.artifact))
    details = {**_prompt_lengths(study, predictions.answered), **_chat_frame(study)}
    return publish(stage, predictions, count, seconds, details)


def _questions(examples: Artifact, file: str) -> list[tuple[str, str]]:
    """Id and text of the prepared questions: those of other data may have the same ids."""
    table = read_prepared(examples, file, ["example_id", "question"])
    return list(zip(table["example_id"].to_pylist(), table["question"].to_pylist(), strict=True))


def _warn_of_trained_questions(model: str, asked: Collection[tuple[str, str]]) -> None:
    """Say if a checkpoint of `study` was trained on some of the questions. A study holds its own ones out."""
    made = checkpoint_of(model)
    if made is None:
        return
    storage, checkpoint = made
    prepared: set[tuple[str, str]] = set()
    try:
        steps = read_steps(Artifact(storage, CHECKPOINT, checkpoint))
        for examples in other_fingerprints(storage, EXAMPLES, []):
            prepared.update(_questions(Artifact(storage, EXAMPLES, examples), TRAIN_FILE))
    except UserError:  # a copy of the model alone, or corrupt records, which an evaluation does not need
        return
    trained = {example for step in steps for example in step["examples"]}
    count = sum(example in trained for example, _ in prepared.intersection(asked))
    if count:
        warn(
            f"{model} was trained on {count} of these {len(asked)} questions, so it may look too good; those of its "
            f"own file are left out with the data.eval_fraction of its training"
        )


def _with_digest(predictions: pa.Table, examples: Artifact) -> pa.Table:
    """The predictions with the digest of what was asked, by which other data with the same ids are recognized."""
    questions = read_prepared(examples, EVALUATION_FILE, ["example_id", "question", "answers"]).sort_by("example_id")
    digest = fingerprint(questions.to_pylist())
    return predictions.replace_schema_metadata({**(predictions.schema.metadata or {}), QUESTIONS: digest})


def _chat_frame(study: Study) -> dict[str, Any]:
    """What the model's chat template writes before and after a message; nothing where a server applies its own."""
    builder = cached_prompt_builder(study, study.evaluation.max_new_tokens)
    return {} if isinstance(builder, MessageBuilder) else {"chat": builder.chat_frame()}


def _prompt_lengths(study: Study, predictions: pa.Table) -> dict[str, Any]:
    """The tokens of prompts by number of documents, and of the model's context; null if not reported by a server."""
    context = study.model.max_length
    if not study.model.uses_chat_api:
        from pos2distill.models.architecture import context_length

        context = context_length(study.model)
    by_documents = predictions.group_by("documents").aggregate([("prompt_tokens", "mean"), ("prompt_tokens", "max")])
    lengths = {}
    for row in by_documents.to_pylist():
        lengths[str(row["documents"])] = {"mean": row["prompt_tokens_mean"], "max": row["prompt_tokens_max"]}
    return {"prompt_tokens": lengths, "context_tokens": context}


def eval_specs(study: Study, curve: Input | None = None) -> list[PromptSpec]:
    """The prompt lengths and placements that are evaluated, the length of training first.

    Args:
        curve: the accuracy by slot, if documents are reordered by it.
    """
    evaluation, hops = study.evaluation, study.data.hops
    specs = []
    for documents in study.prompt_lengths:
        slots = evaluation.slots if documents == study.data.documents else evaluation.other_slots
        spec = PromptSpec(documents, evaluated_placements(documents, hops, slots), orders=evaluation.distractor_orders)
        if curve is not None:
            spec = replace(spec, slot_of_rank=slot_of_rank(curve, documents))
        specs.append(spec)
    return specs


def reference_specs(study: Study) -> list[PromptSpec]:
    """The prompts without documents and with the gold documents alone, if they are asked for."""
    if not study.evaluation.reference_prompts:
        return []
    gold = {hops: (Placement(tuple(range(hops))),) for hops in study.data.hops}
    return [PromptSpec(0, dict.fromkeys(study.data.hops, (Placement(()),))), PromptSpec("gold", gold)]


def slot_of_rank(curve: Input, documents: int) -> tuple[int, ...]:
    """The slot of each rank in prompts of so many documents, by a measured curve."""
    measured = curve.details("curve")["curve"]
    # With several hops, the first slot: the gold documents of this curve are next to each other.
    slots = [slot if isinstance(slot, int) else slot[0] for slot in measured["slots"]]
    return rank_slots_by_accuracy(slots, measured["accuracy_by_slot"], measured["documents"], documents)
