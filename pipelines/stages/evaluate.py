"""Stage `evaluate`: greedy answers at every placement, scored, in one table of predictions."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pos2distill.config import Study
from pos2distill.config.fields import replace_section, restrict
from pos2distill.errors import TransientError, UserError
from pos2distill.sampling.blocks import examples_per_block, index_blocks
from pos2distill.sampling.engines.protocol import SamplingParams
from pos2distill.sampling.operators import generation_operators, to_predictions
from pos2distill.sampling.prompting import PromptSpec, prompt_builder
from pos2distill.store.artifacts import Artifact, Manifest
from pos2distill.store.parts import finished_examples, prediction_parts
from pos2distill.tasks.permutations import Placement, evaluated_placements, slot_of_rank
from pos2distill.tasks.prompts import MessageBuilder
from pos2distill.training.job import MODEL_FOLDER

from ..progress import show_stage
from .measured import with_measured
from .prepare import EVALUATION, evaluation_examples
from .stage import Digests, Input, RunContext, Stage

PREDICTIONS = "predictions.parquet"

# What prompts and answers are made with; the data itself is an input.
PROMPT_FIELDS = ("model", "data.prompt", "data.metric", "data.hops", "data.documents")
# By method. The others change the model alone, by the scales in its section.
_INFERENCE = {
    "reorder": ("inference.method",),
    "ms_poe": ("inference.method", "inference.ms_poe"),
    "attention_buckets": ("inference.method", "inference.bases"),
}
_EVALUATION = ("evaluation.slots", "evaluation.other_documents", "evaluation.max_new_tokens")


def plan(
    study: Study,
    storage: str,
    digests: Digests,
    prepare: Stage,
    measured: Mapping[str, Input],
    *,
    distill: Stage | None = None,
    task: str | None = None,
) -> Stage:
    """The evaluation of the base model, or of the model that the stage `distill` makes.

    Args:
        measured: what was measured of the model before.
    """
    fields = [*PROMPT_FIELDS, *_EVALUATION]
    fields += _INFERENCE.get(study.inference.method, ())
    # Only where they are used; otherwise they would change fingerprints without changing a result.
    if study.evaluation.other_documents:
        fields.append("evaluation.other_slots")
    if study.evaluation.distractor_orders > 1:
        fields.append("evaluation.distractor_orders")
    if study.evaluation.reference_prompts:
        fields.append("evaluation.reference_prompts")
    settings = restrict(study, fields)
    inputs = {"examples": evaluation_examples(prepare, digests), **measured}
    name, folder = "evaluate base", "base-scores"
    if distill is not None:
        inputs["checkpoint"] = distill.output()
        name, folder = "evaluate distilled", "distilled-scores"
    if task is not None:
        name = f"{task}: {name}"
    artifact = Artifact(storage, folder, digests.fingerprint(settings, inputs))
    return Stage(name, artifact, settings, run, inputs)


def run(stage: Stage, context: RunContext) -> Manifest:
    """Evaluate one model at every placement and write the predictions.

    Counts: prompts = right + wrong; hit_max_tokens of them were cut off at the length limit.
    """
    study = with_measured(stage.study, stage.inputs)
    if "checkpoint" in stage.inputs:
        study = with_model(study, model_url(stage.inputs["checkpoint"]))
    examples = stage.inputs["examples"]
    count = len(examples.artifact.read_table(EVALUATION, ["example_id"]))
    specs = eval_specs(study, stage.inputs.get("curve")) + reference_specs(study)
    with recorded_seconds(stage, "evaluate") as seconds:
        predictions = predict(stage, study, context, EVALUATION, count, specs)
    details = {**_prompt_lengths(study, predictions), **_chat_frame(study)}
    return publish(stage, predictions, count, seconds, details)


def _chat_frame(study: Study) -> dict[str, Any]:
    """What the model's chat template writes before and after a message; nothing where a server applies its own."""
    builder = prompt_builder(study, study.evaluation.max_new_tokens)
    return {} if isinstance(builder, MessageBuilder) else {"chat": builder.chat_frame()}


def _prompt_lengths(study: Study, predictions: pa.Table) -> dict[str, Any]:
    """The tokens of prompts, by number of documents, and of the model's context; null where a server tells neither."""
    context = study.model.max_length
    if not study.model.is_served_name:
        from pos2distill.models.load import context_length

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
            spec = replace(spec, slot_of_rank=_slot_of_rank(curve, documents))
        specs.append(spec)
    return specs


def reference_specs(study: Study) -> list[PromptSpec]:
    """The prompts without documents and with the gold documents alone, if they are asked for."""
    if not study.evaluation.reference_prompts:
        return []
    gold = {hops: (Placement(tuple(range(hops))),) for hops in study.data.hops}
    return [PromptSpec(0, dict.fromkeys(study.data.hops, (Placement(()),))), PromptSpec("gold", gold)]


def _slot_of_rank(curve: Input, documents: int) -> tuple[int, ...]:
    measured = curve.details("curve")["curve"]
    # Of several hops, the first slot: the gold documents of this curve are next to each other.
    slots = [slot if isinstance(slot, int) else slot[0] for slot in measured["slots"]]
    return slot_of_rank(slots, measured["accuracy_by_slot"], measured["documents"], documents)


@contextmanager
def recorded_seconds(stage: Stage, name: str) -> Iterator[dict[str, float]]:
    """Measure the body's seconds; if it is stopped, add them to those that the stage's manifest will count."""
    start = time.monotonic()
    seconds: dict[str, float] = {}
    try:
        yield seconds
        seconds[name] = time.monotonic() - start
    except (UserError, KeyboardInterrupt):
        # What ended the run is what the user must see, whatever happens to this record of its time.
        with suppress(Exception):
            stage.artifact.add_seconds({name: time.monotonic() - start})
        raise


def predict(
    stage: Stage, study: Study, context: RunContext, file: str, count: int, specs: list[PromptSpec]
) -> pa.Table:
    """Greedy answers to the first `count` examples of a file of the stage's input `examples`, at every placement.

    Answers are stored in the stage's artifact as they come, and examples that an earlier run has answered at every
    placement are not answered again.

    Args:
        study: the stage's, with the model that answers.
    Returns: a table of `PREDICTION_SCHEMA`, sorted by prompt length, example and placement.
    """
    examples = stage.inputs["examples"]
    # Temperature 0 is greedy, so a difference between slots is not sampling noise.
    params = SamplingParams(0.0, 1.0, study.evaluation.max_new_tokens, stop_ids=())
    operators = generation_operators(study, context.runtime, examples.artifact, file, specs, params)
    prompts_per_example = sum(spec.prompts_per_example for spec in specs)
    parts = prediction_parts(stage.artifact)
    missing = _missing(examples, file, count, finished_examples(parts.read(), prompts_per_example))
    blocks = index_blocks(missing, examples_per_block(len(missing), prompts_per_example, context.runtime.samplers))
    total = count * prompts_per_example
    answered = total - len(missing) * prompts_per_example
    # Before the bar: an executor connects at once, and a bar is shown only when there is something to show.
    results = context.executor.map(blocks, operators, label="evaluation") if blocks else ()
    with show_stage(stage.name, total, done=answered, unit="prompt") as shown:
        for answers in results:
            parts.append(to_predictions(answers))
            shown.update(len(answers))
    predictions = parts.read()
    if len(predictions) != total:
        raise TransientError(
            f"{stage.artifact.url}: {len(predictions)} of {total} answers are readable; run the same command again"
        )
    return predictions


def _missing(examples: Input, file: str, count: int, finished: pa.Array) -> npt.NDArray[np.int64]:
    """Indices of the first `count` examples of a file that are not finished."""
    ids = examples.artifact.read_table(file, ["example_id"])["example_id"][:count]
    return np.flatnonzero(~pc.is_in(ids, value_set=finished).to_numpy())


def publish(
    stage: Stage,
    predictions: pa.Table,
    count: int,
    seconds: Mapping[str, float],
    details: Mapping[str, Any] | None = None,
) -> Manifest:
    """Write the predictions of `count` examples as one file, and publish the artifact."""
    artifact = stage.artifact
    artifact.write_table(PREDICTIONS, predictions)
    manifest = artifact.publish(counts=count_answers(count, predictions), seconds=seconds, details=details)
    prediction_parts(artifact).remove()
    return manifest


def count_answers(examples: int, predictions: pa.Table) -> dict[str, int]:
    """What became of every prompt, and the tokens of prompts and answers unless a server did not count them."""
    right = pc.sum(predictions["correct"]).as_py()
    counts = {
        "examples": examples,
        "prompts": len(predictions),
        "right": right,
        "wrong": len(predictions) - right,
        "hit_max_tokens": pc.sum(pc.equal(predictions["finish_reason"], "length")).as_py(),
    }
    for name in ("prompt_tokens", "answer_tokens"):
        if predictions[name].null_count == 0:
            counts[name] = pc.sum(predictions[name]).as_py()
    if predictions["prompt_tokens"].null_count:
        counts["without_usage"] = predictions["prompt_tokens"].null_count
    return counts


def model_url(checkpoint: Input) -> str:
    """The folder of the model that a checkpoint holds."""
    return f"{checkpoint.artifact.url}/{MODEL_FOLDER}"


def with_model(study: Study, path: str) -> Study:
    """The study with another model folder of the same kind."""
    raw = study.model.model_dump(mode="json")
    raw["path"] = path
    # A revision belongs to a hub name, and the new path is a folder.
    raw["revision"] = None
    model = type(study.model).model_validate(raw)
    return replace_section(study, model=model)
