"""Stage `evaluate`: greedy answers at every placement, scored, in one table of predictions."""

import time

import pyarrow as pa
import pyarrow.compute as pc
from tqdm import tqdm

from pos2distill.config import Study
from pos2distill.config.fields import replace_section, restrict
from pos2distill.sampling.blocks import examples_per_block, index_blocks
from pos2distill.sampling.engines.protocol import SamplingParams
from pos2distill.sampling.operators import (
    PromptSpec,
    generation_operators,
    to_predictions,
)
from pos2distill.store.artifacts import Artifact, Manifest
from pos2distill.tasks.permutations import evaluated_placements
from pos2distill.training.job import MODEL_FOLDER

from .prepare import EVALUATION, evaluation_examples
from .stage import Digests, Input, RunContext, Stage

PREDICTIONS = "predictions.parquet"

# What prompts and answers are made with; the data itself is an input.
PROMPT_FIELDS = ("model", "data.prompt", "data.metric", "data.hops", "data.documents", "seed")
_EVALUATION = ("evaluation.slots", "evaluation.other_documents", "evaluation.max_new_tokens")


def plan(
    study: Study,
    storage: str,
    digests: Digests,
    prepare: Stage,
    distill: Stage | None = None,
    *,
    task: str | None = None,
) -> Stage:
    """The evaluation of the base model, or of the model that the stage `distill` makes."""
    fields = [*PROMPT_FIELDS, *_EVALUATION]
    # Only where it is used; otherwise it would change fingerprints without changing a result.
    if study.evaluation.other_documents:
        fields.append("evaluation.other_slots")
    settings = restrict(study, fields)
    inputs = {"examples": evaluation_examples(prepare, digests)}
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
    start = time.monotonic()
    study: Study = stage.study
    if "checkpoint" in stage.inputs:
        study = with_model(study, f"{stage.inputs['checkpoint'].artifact.url}/{MODEL_FOLDER}")
    examples = stage.inputs["examples"]
    count = len(examples.artifact.read_table(EVALUATION, ["example_id"]))
    predictions = predict(study, context, examples, EVALUATION, count, eval_specs(study), label=stage.name)
    with stage.artifact.writing():
        stage.artifact.write_table(PREDICTIONS, predictions)
        seconds = {"evaluate": time.monotonic() - start}
        return stage.artifact.publish(counts=count_answers(count, predictions), seconds=seconds)


def eval_specs(study: Study) -> list[PromptSpec]:
    """The prompt lengths and placements that are evaluated, the length of training first."""
    evaluation, hops = study.evaluation, study.data.hops
    specs = [
        PromptSpec(study.data.documents, evaluated_placements(study.data.documents, hops, evaluation.slots)),
    ]
    for documents in evaluation.other_documents:
        specs.append(PromptSpec(documents, evaluated_placements(documents, hops, evaluation.other_slots)))
    return specs


def predict(
    study: Study, context: RunContext, examples: Input, file: str, count: int, specs: list[PromptSpec], *, label: str
) -> pa.Table:
    """Greedy answers to the first `count` examples of a file at every placement.

    Returns: a sorted table of `PREDICTION_SCHEMA`.
    """
    # Temperature 0 is greedy, so a difference between slots is not sampling noise.
    params = SamplingParams(0.0, 1.0, study.evaluation.max_new_tokens, stop_ids=())
    operators = generation_operators(study, context.runtime, examples.artifact, file, specs, params)
    prompts_per_example = sum(spec.prompts_per_example for spec in specs)
    size = examples_per_block(count, prompts_per_example, context.runtime.samplers)
    parts = []
    results = context.executor.map(index_blocks(count, size), operators, label="evaluation")
    with tqdm(desc=label, total=count * prompts_per_example, unit="prompt") as bar:
        for answers in results:
            parts.append(to_predictions(answers))
            bar.update(len(answers))
    # Blocks arrive in any order. Sorted, the table is the same on every executor.
    order = [(name, "ascending") for name in ("documents", "example_id", "placement")]
    return pa.concat_tables(parts).sort_by(order)


def count_answers(examples: int, predictions: pa.Table) -> dict[str, int]:
    """What became of every prompt."""
    right = pc.sum(predictions["correct"]).as_py()
    return {
        "examples": examples,
        "prompts": len(predictions),
        "right": right,
        "wrong": len(predictions) - right,
        "hit_max_tokens": pc.sum(pc.equal(predictions["finish_reason"], "length")).as_py(),
    }


def with_model(study: Study, path: str) -> Study:
    """The study with another model folder of the same kind."""
    raw = study.model.model_dump(mode="json")
    raw["path"] = path
    # A revision belongs to a hub name, and the new path is a folder.
    raw["revision"] = None
    model = type(study.model).model_validate(raw)
    return replace_section(study, model=model)
