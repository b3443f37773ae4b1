"""Stage `evaluate`: greedy answers at every placement, judged, one table of predictions."""

import time

import pyarrow as pa
import pyarrow.compute as pc
from tqdm import tqdm

from pipelines.executors.ray.session import ray_session, require_resources
from pipelines.generate import PromptSpec, blocks_of_examples, generate
from pipelines.stages.prepare import EVALUATION
from pos2distill.config import ModelSection, Recipe, Study
from pos2distill.records import PREDICTION_SCHEMA
from pos2distill.store.artifacts import Artifact, Manifest
from pos2distill.tasks.permutations import evaluated_placements

PREDICTIONS = "predictions.parquet"


def eval_specs(study: Study) -> list[PromptSpec]:
    """The prompt lengths and placements that are prompt_specs for, the length trained on first."""
    wanted = [(study.data.documents, study.evaluation.slots)]
    wanted += [(documents, study.evaluation.other_slots) for documents in study.evaluation.other_documents]
    return [
        PromptSpec(documents, evaluated_placements(documents, study.data.hops, slots)) for documents, slots in wanted
    ]


def make_scores(recipe: Recipe, examples: Artifact, artifact: Artifact, model: ModelSection, label: str) -> Manifest:
    """Ask one model the evaluation examples at every placement and write the predictions.

    Counts: prompts = right + wrong; hit_max_tokens of them had no room to end.

    Args:
        examples: the split. artifact: where the predictions go. model: the recipe's own, or the distilled one.
        label: for the progress bar.
    """
    start = time.monotonic()
    table = examples.read_table(EVALUATION)
    predictions = run_eval(recipe, model, table, eval_specs(recipe.study), label)
    with artifact.writing():
        artifact.write_table(PREDICTIONS, predictions)
        seconds = {"evaluate": time.monotonic() - start}
        return artifact.publish(counts=count_answers(len(table), predictions), seconds=seconds)


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


def run_eval(
    recipe: Recipe, model: ModelSection, examples: pa.Table, prompt_specs: list[PromptSpec], label: str
) -> pa.Table:
    """Greedy answers to every example at every placement: a sorted table of `PREDICTION_SCHEMA`."""
    total = len(examples) * sum(each.prompts_per_example for each in prompt_specs)
    parts = []
    with ray_session(), tqdm(desc=label, total=total, unit="prompt") as bar:
        pool = recipe.runtime.samplers
        require_resources("evaluation", cpus=pool.min * pool.cpus, gpus=pool.min * pool.gpus)
        answers = generate(
            recipe,
            model,
            blocks_of_examples(examples, prompt_specs, pool),
            prompt_specs,
            temperature=0.0,
            top_p=1.0,
            max_new_tokens=recipe.study.evaluation.max_new_tokens,
        ).select_columns(PREDICTION_SCHEMA.names)
        for part in answers.iter_batches(batch_size=None, batch_format="pyarrow"):
            parts.append(part.cast(PREDICTION_SCHEMA))
            bar.update(len(part))
    return pa.concat_tables(parts).sort_by([(name, "ascending") for name in ("documents", "example_id", "placement")])
