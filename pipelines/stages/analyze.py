"""Stage `analyze`: why answers differ by position, from forward passes and from the predictions of an evaluation.

The analysis of the distilled model reads the responses and the states of the base model from that of the base model.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pos2distill.config import AnalysisSection, ModelSection, PoolSection, Study
from pos2distill.evaluation.analysis import FIGURES, summarize_analysis
from pos2distill.literal_paths import make_folder
from pos2distill.records import PASSES_SCHEMA, RESPONSE_SCHEMA, Example, Slots, example_from_row
from pos2distill.sampling.blocks import batches_of, examples_per_block, index_blocks
from pos2distill.sampling.engines.protocol import Completion
from pos2distill.sampling.operators import ActorOperator, TableFunction, greedy_params, sample_operators
from pos2distill.store.artifacts import Manifest
from pos2distill.store.parts import TableParts
from pos2distill.tasks.permutations import advantageous_slots

from ..artifact_names import BASE_ANALYSIS, DISTILLED_ANALYSIS
from .parts_loop import map_and_store
from .plan_context import PlanContext
from .predictions import PROMPT_FIELDS, read_predictions
from .prepare import EVALUATION_FILE, evaluation_examples_input, read_prepared
from .resolve import resolve_auto_settings, with_distilled
from .sample import TEACHERS
from .stage import RunContext, Stage, recorded_seconds

ANALYSIS = "analysis.json"
PASSES = "passes.parquet"

_FIELDS = (
    *PROMPT_FIELDS,
    "seed",
    "method.advantageous_slot",
    "evaluation.slots",
    "evaluation.distractor_orders",
    "evaluation.max_new_tokens",
    "evaluation.seed",
    "analysis",
)
# Columns of `PASSES_SCHEMA`: what the analysis of another model reads.
_RESPONSES = ["example_id", "example", "slots", "response_ids", "hidden", "hidden_dtype"]
_RESPONSES_PER_BLOCK = 4
_ANSWERS = pa.schema([RESPONSE_SCHEMA.field(name) for name in (*_RESPONSES[:4], "outcome")])


def plan(
    context: PlanContext, evaluation: Stage, *, distill_stage: Stage | None = None, base_analysis: Stage | None = None
) -> Stage:
    """The analysis of the base model, or of the model that the stage `distill` makes.

    Args:
        evaluation: the evaluation of the same model.
        base_analysis: the analysis of the base model, for that of the distilled one.
    """
    examples = evaluation_examples_input(context.prepare, context.digests)
    inputs = {"examples": examples, "predictions": evaluation.output(), **context.training_inputs}
    name, folder = "analyze base", BASE_ANALYSIS
    if distill_stage is not None and base_analysis is not None:
        inputs["checkpoint"] = distill_stage.output()
        inputs["base_analysis"] = base_analysis.output()
        name, folder = "analyze distilled", DISTILLED_ANALYSIS
    return context.declare(
        name=name,
        folder=folder,
        fields=_FIELDS,
        run=run,
        inputs=inputs,
    )


def run(stage: Stage, context: RunContext) -> Manifest:
    """Answer at the advantageous slot (base model), pass over the correct answers at every placement, and summarize.

    Counts: examples = correct + wrong + empty + failed, of the answers at the advantageous slot; passes = correct
    answers * placements.
    """
    base = resolve_auto_settings(stage.study, stage.inputs)
    study = with_distilled(base, stage.inputs)
    artifact = stage.artifact
    make_folder(artifact.fs, artifact.path)
    answer_parts = TableParts(artifact, _ANSWERS, ["example_id"], "answer-parts")
    pass_parts = TableParts(artifact, PASSES_SCHEMA, ["example_id"], "pass-parts")
    with recorded_seconds(stage, context, "analyze") as seconds:
        if "base_analysis" in stage.inputs:
            responses = stage.inputs["base_analysis"].artifact.read_table(PASSES, _RESPONSES)
            counts = _answer_counts(stage.inputs["base_analysis"].manifest().counts)
        else:
            responses, counts = _answer(stage, base, context, answer_parts)
        passes = _pass(stage, study, base.model, context, responses, pass_parts)
    predictions = read_predictions(stage.inputs["predictions"].artifact)
    summary = summarize_analysis(study, passes, predictions, _examples(stage))
    counts["passes"] = pc.sum(pc.list_value_length(passes["kl"])).as_py() or 0
    artifact.write_table(PASSES, passes)
    artifact.write_json(ANALYSIS, summary)
    manifest = artifact.publish(counts=counts, seconds=seconds)
    for parts in (answer_parts, pass_parts):
        parts.remove()
    return manifest


def read_analysis(stage: Stage) -> dict[str, Any]:
    """The figures of a finished analysis."""
    return stage.artifact.read_json(ANALYSIS, *FIGURES)


def _answer(stage: Stage, study: Study, context: RunContext, parts: TableParts) -> tuple[pa.Table, dict[str, int]]:
    """The correct greedy answers at the advantageous slot, and what became of all.

    Answers that the evaluation has are taken from it, so that no engine starts if it evaluated that slot. Others are
    stored in parts as they come.
    """
    records = read_prepared(stage.inputs["examples"].artifact, EVALUATION_FILE).to_pylist()[: _settings(study).examples]
    ids = [record["example_id"] for record in records]
    evaluated = _evaluated_answers(stage, study, records)
    answered = pa.concat_tables([evaluated, parts.read()])["example_id"]
    missing = np.flatnonzero(~np.isin(ids, answered))

    def store(generated: pa.Table) -> None:
        parts.append(generated.select(_ANSWERS.names).cast(_ANSWERS))

    samplers = context.runtime.samplers
    # The study is that of a method that samples at the advantageous slot alone. A prompt that is too long counts as
    # failed.
    map_and_store(
        stage,
        context,
        index_blocks(missing, examples_per_block(len(missing), 1, samplers)),
        sample_operators(
            study, context.runtime, stage.inputs["examples"].artifact, EVALUATION_FILE, greedy_params(study)
        ),
        store,
        label="analysis",
        total=len(records),
        done=len(records) - len(missing),
        unit="prompt",
    )
    answers = pa.concat_tables([evaluated, parts.read()])
    counts = {"examples": len(records)}
    for name, outcome in (("correct", "kept"), ("wrong", "wrong"), ("empty", "empty"), ("failed", "failed")):
        counts[name] = int(np.sum(np.asarray(answers["outcome"]) == outcome))
    correct = answers.filter(pc.equal(answers["outcome"], "kept")).sort_by("example_id")
    return correct.drop_columns(["outcome"]), counts


def _evaluated_answers(stage: Stage, study: Study, records: Sequence[dict[str, Any]]) -> pa.Table:
    """The answers that the evaluation has at advantageous slots, processed as for training."""
    from pos2distill.models.load import load_tokenizer
    from pos2distill.sampling.postprocess import response_processor

    predictions = read_predictions(
        stage.inputs["predictions"].artifact,
        ["example_id", "documents", "order", "slots", "sampled_ids", "finish_reason"],
    )
    # The data set's order of the distractors alone, which the passes use.
    shown = (pc.field("documents") == study.data.documents) & (pc.field("order") == 0)
    found: dict[tuple[str, Slots], dict[str, Any]] = {}
    for row in predictions.filter(shown).to_pylist():
        found[row["example_id"], tuple(row["slots"])] = row
    process = response_processor(study, load_tokenizer(study.model))
    answers = []
    for record in records:
        example = example_from_row(record)
        slots = advantageous_slots(study, example)
        row = found.get((example.example_id, slots))
        if row is None:
            continue
        completion = Completion(np.asarray(row["sampled_ids"], np.int32), row["finish_reason"])
        response = process(completion, example.answers)
        answers.append(
            {
                "example_id": example.example_id,
                "example": record,
                "slots": slots,
                "response_ids": response.response_ids,
                "outcome": response.outcome,
            }
        )
    return pa.Table.from_pylist(answers, schema=_ANSWERS)


def _answer_counts(counts: Mapping[str, int]) -> dict[str, int]:
    return {name: count for name, count in counts.items() if name != "passes"}


def _pass(
    stage: Stage, study: Study, base: ModelSection, context: RunContext, responses: pa.Table, parts: TableParts
) -> pa.Table:
    """The passes of a model over all responses, sorted by example, stored in parts as they come."""
    pool = context.runtime.teachers
    # Teachers too only compute states of a model that is not trained.
    create = functools.partial(_create_passes, study, base, pool)
    operators = [ActorOperator(TEACHERS, create, pool)]
    finished = parts.read()["example_id"].combine_chunks()
    missing = responses.filter(pc.invert(pc.is_in(responses["example_id"], value_set=finished)))
    map_and_store(
        stage,
        context,
        batches_of(missing, _RESPONSES_PER_BLOCK) if len(missing) else [],
        operators,
        parts.append,
        label="analysis",
        total=len(responses),
        done=len(finished),
        unit="response",
    )
    return parts.read()


def _create_passes(study: Study, base: ModelSection, pool: PoolSection) -> TableFunction:
    # Imported in the actor: it loads torch and transformers.
    from pos2distill.evaluation.passes import PositionPasses

    return PositionPasses(study, base, pool)


def _examples(stage: Stage) -> dict[str, Example]:
    examples = {}
    for record in read_prepared(stage.inputs["examples"].artifact, EVALUATION_FILE).to_pylist():
        examples[record["example_id"]] = example_from_row(record)
    return examples


def _settings(study: Study) -> AnalysisSection:
    assert study.analysis is not None  # the plan of a study without this section has no such stage
    return study.analysis
