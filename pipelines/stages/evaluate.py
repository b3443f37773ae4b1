"""Stage `evaluate`: greedy answers at every placement, scored, in one table of predictions.

A question of which a server refuses a prompt for its content is left out at every placement, so that placements stay
comparable. Its prompts that were refused are in a second table, which is not there if there are none.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pos2distill.config import Study
from pos2distill.config.fields import replace_section, restrict
from pos2distill.errors import TransientError, UserError
from pos2distill.records import REFUSAL_SCHEMA
from pos2distill.sampling.blocks import examples_per_block, index_blocks
from pos2distill.sampling.engines.protocol import SamplingParams
from pos2distill.sampling.generate import require_answers
from pos2distill.sampling.operators import generation_operators, to_predictions, to_refusals
from pos2distill.sampling.prompting import PromptKey, PromptSpec, prompt_builder
from pos2distill.store.artifacts import Artifact, Manifest
from pos2distill.store.parts import TableParts, finished_examples, prediction_parts, refusal_parts
from pos2distill.tasks.permutations import Placement, evaluated_placements, slot_of_rank
from pos2distill.tasks.prompts import MessageBuilder
from pos2distill.tasks.thoughts import count_thoughts
from pos2distill.training.job import MODEL_FOLDER

from ..progress import show_stage
from .measured import with_measured
from .prepare import EVALUATION, evaluation_examples
from .stage import Digests, Input, RunContext, Stage

PREDICTIONS = "predictions.parquet"
REFUSALS = "refused.parquet"

# What prompts and answers are made with; the data itself is an input.
PROMPT_FIELDS = ("model", "data.template", "data.prompt", "data.metric", "data.hops", "data.documents")
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

    Counts: as of `count_answers`.
    """
    study = with_measured(stage.study, stage.inputs)
    if "checkpoint" in stage.inputs:
        study = with_model(study, model_url(stage.inputs["checkpoint"]))
    examples = stage.inputs["examples"]
    count = len(examples.artifact.read_table(EVALUATION, ["example_id"]))
    specs = eval_specs(study, stage.inputs.get("curve")) + reference_specs(study)
    with recorded_seconds(stage, "evaluate") as seconds:
        answers = predict(stage, study, context, EVALUATION, count, specs)
    details = {**_prompt_lengths(study, answers.predictions), **_chat_frame(study)}
    return publish(stage, answers, count, seconds, details)


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


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers of one model to some examples.

    predictions: a table of `PREDICTION_SCHEMA`, sorted by prompt length, example and placement, of the examples that
    are answered at every placement. refused: of `REFUSAL_SCHEMA`, of all others.
    """

    predictions: pa.Table
    refused: pa.Table


def predict(stage: Stage, study: Study, context: RunContext, file: str, count: int, specs: list[PromptSpec]) -> Answers:
    """Greedy answers to the first `count` examples of a file of the stage's input `examples`, at every placement.

    Answers and refusals are stored in the stage's artifact as they come, also those that came with a failure which
    ends the run, and an earlier run's are not asked for again.

    Args:
        study: the stage's, with the model that answers.
    Raises:
        UserError: if the engine fails on a prompt, or more examples are refused than `runtime.max_failed_fraction`.
    """
    examples, runtime = stage.inputs["examples"], context.runtime
    # Temperature 0 is greedy, so a difference between slots is not sampling noise.
    params = SamplingParams(0.0, 1.0, study.evaluation.max_new_tokens, stop_ids=())
    prompts_per_example = sum(spec.prompts_per_example for spec in specs)
    total = count * prompts_per_example
    parts, refused_parts = prediction_parts(stage.artifact), refusal_parts(stage.artifact)
    predictions, refused = parts.read(), refused_parts.read()
    _require_few_refused(refused, count, runtime.max_failed_fraction, refused_parts.url)
    finished = pa.concat_arrays([finished_examples(predictions, prompts_per_example), _ids(refused)])
    missing = _missing(examples, file, count, finished)
    # Of examples that an earlier run did not finish.
    answered = _prompt_keys(_without(predictions, finished))
    operators = generation_operators(study, runtime, examples.artifact, file, specs, params, answered=answered)
    blocks = index_blocks(missing, examples_per_block(len(missing), prompts_per_example, runtime.samplers))
    done = total - len(missing) * prompts_per_example + len(answered)
    if blocks:
        # Before the bar: an executor connects at once, and a bar is shown only when there is something to show.
        results = context.executor.map(blocks, operators, label="evaluation")
        with closing(results), show_stage(stage.name, total, done=done, unit="prompt") as shown:
            for answers in results:
                new, new_refused = to_predictions(answers), to_refusals(answers)
                if len(new):
                    parts.append(new)
                if len(new_refused):
                    refused_parts.append(new_refused)
                refused = pa.concat_tables([refused, new_refused])
                shown.update(len(answers))
                # After all is stored, so that no answer that was paid for is lost.
                require_answers(answers.filter(pc.field("outcome") != "refused"))
                _require_few_refused(refused, count, runtime.max_failed_fraction, refused_parts.url)
    return _read_answers(parts, refused_parts, count, prompts_per_example)


def _read_answers(parts: TableParts, refused_parts: TableParts, count: int, prompts_per_example: int) -> Answers:
    """All that is stored of `count` examples.

    Raises:
        TransientError: if that is not all.
    """
    refused = refused_parts.read()
    predictions = _without(parts.read(), _ids(refused))
    expected = (count - _count_examples(refused)) * prompts_per_example
    if len(predictions) != expected:
        raise TransientError(
            f"{parts.artifact.url}: {len(predictions)} of {expected} answers are readable; run the same command again"
        )
    return Answers(predictions, refused)


def _require_few_refused(refused: pa.Table, count: int, max_fraction: float, url: str) -> None:
    """Refuse to leave out too many of `count` examples. It depends on no order in which they are asked.

    Args:
        url: where the refusals are stored.
    Raises:
        UserError: with the reason of the first one.
    """
    left_out = _count_examples(refused)
    if left_out > max_fraction * count:
        limit = f"more than runtime.max_failed_fraction={max_fraction:g}; with a larger one they are left out"
    elif left_out and left_out == count:
        limit = "so nothing is measured"
    else:
        return
    first = refused.sort_by("example_id").slice(0, 1).to_pylist()[0]
    raise UserError(
        f"the server refuses a prompt of {left_out} of {count} questions for its content ({limit}); to ask these "
        f"again, delete {url}; the first is example {first['example_id']}: {first['error']:.300}"
    )


def _missing(examples: Input, file: str, count: int, finished: pa.Array) -> npt.NDArray[np.int64]:
    """Indices of the first `count` examples of a file that are not finished."""
    ids = examples.artifact.read_table(file, ["example_id"])["example_id"][:count]
    return np.flatnonzero(~pc.is_in(ids, value_set=finished).to_numpy())


def _ids(prompts: pa.Table) -> pa.Array:
    return prompts["example_id"].combine_chunks()


def _count_examples(prompts: pa.Table) -> int:
    return len(pc.unique(_ids(prompts)))


def _without(predictions: pa.Table, example_ids: pa.Array) -> pa.Table:
    return predictions.filter(pc.invert(pc.is_in(predictions["example_id"], value_set=example_ids)))


def _prompt_keys(predictions: pa.Table) -> frozenset[PromptKey]:
    columns = [predictions[name].to_pylist() for name in ("documents", "example_id", "placement")]
    return frozenset(zip(*columns, strict=True))


def publish(
    stage: Stage,
    answers: Answers,
    count: int,
    seconds: Mapping[str, float],
    details: Mapping[str, Any] | None = None,
) -> Manifest:
    """Write the answers to `count` examples, each table as one file, and publish the artifact."""
    artifact = stage.artifact
    artifact.write_table(PREDICTIONS, answers.predictions)
    if len(answers.refused):
        artifact.write_table(REFUSALS, answers.refused)
    manifest = artifact.publish(counts=count_answers(count, answers), seconds=seconds, details=details)
    prediction_parts(artifact).remove()
    refusal_parts(artifact).remove()
    return manifest


def read_refused(artifact: Artifact) -> pa.Table:
    """The prompts of a finished evaluation that the server refused, as a table of `REFUSAL_SCHEMA`."""
    manifest = artifact.manifest()
    if manifest is None or not manifest.counts.get("refused"):
        return REFUSAL_SCHEMA.empty_table()
    return artifact.read_table(REFUSALS)


def count_answers(examples: int, answers: Answers) -> dict[str, int]:
    """What became of every example and prompt, and the tokens of both unless a server did not count them.

    Counts: refused of the examples are left out, because a server refuses a prompt of theirs; absent if there are none.
    prompts = right + wrong, of the others; hit_max_tokens of them were cut off at the length limit;
    thoughts and unfinished_thoughts as of `count_thoughts`.
    """
    predictions = answers.predictions
    right = pc.sum(predictions["correct"]).as_py()
    counts = {"examples": examples}
    if len(answers.refused):
        counts["refused"] = _count_examples(answers.refused)
    counts |= {
        "prompts": len(predictions),
        "right": right,
        "wrong": len(predictions) - right,
        "hit_max_tokens": pc.sum(pc.equal(predictions["finish_reason"], "length")).as_py(),
        **count_thoughts(predictions["text"].to_pylist()),
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
