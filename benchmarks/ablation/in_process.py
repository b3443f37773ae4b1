"""Run the studies of a sweep in this process, without Ray, whose actors take longer to start than the toy's stages run.

The artifacts are those of `python run.py study`, which then finds them done. It wants the hf engine and the torch
strategy; several processes may share a storage if each has seeds of its own.

Example (from the project's top folder):
  python -m benchmarks.ablation.in_process benchmarks/ablation/one_hop.yaml 'sweep.seed=[0]'
  python run.py report benchmarks/ablation/one_hop.yaml 'sweep.seed=[0]'
"""

import asyncio
import json
import sys
import time
from pathlib import Path

import pyarrow as pa
import torch

from pipelines.distill import MODEL_FOLDER, STEPS_FILE, make_source
from pipelines.evaluate import PREDICTIONS, count_answers, evaluated
from pipelines.examples import make_examples
from pipelines.generate import Answer, Asked, build_prompts
from pipelines.plan import Plan, make_plan
from pipelines.sample import AddTeacherStates, make_samples
from pipelines.tee import write_samples
from pos2distill.config import ModelSection, Recipe
from pos2distill.errors import UserError
from pos2distill.models.load import keep_generation_config, load_tokenizer, stop_token_ids
from pos2distill.recipes import load_recipe, sweep_cells
from pos2distill.records import PREDICTION_SCHEMA
from pos2distill.sampling.engine import SamplingParams
from pos2distill.store.artifacts import Artifact, claim_storage, write_bytes
from pos2distill.store.samples import SampleStore
from pos2distill.tasks.permutations import Placement
from pos2distill.training.stepper import build_stepper
from pos2distill.training.teachers import cached_states
from pos2distill.training.trainer import Ranks, StepRecord, train


def run_cell(recipe: Recipe) -> None:
    """Every stage of one study that is not done yet."""
    plan = make_plan(recipe)
    claim_storage(recipe.storage, recipe.name)
    if not plan.examples.manifest():
        make_examples(recipe, plan.examples)
    if not plan.base_scores.manifest():
        _evaluate(recipe, plan.examples, plan.base_scores, recipe.study.model)
    if not plan.samples.manifest():
        _sample(recipe, plan)
    if not plan.checkpoint.manifest():
        _distill(recipe, plan)
    distilled = recipe.study.model.model_copy(update={"path": f"{plan.checkpoint.url}/{MODEL_FOLDER}"})
    if not plan.distilled_scores.manifest():
        _evaluate(recipe, plan.examples, plan.distilled_scores, distilled)
    for transfer in plan.transfers.values():
        if not transfer.examples.manifest():
            make_examples(transfer.recipe, transfer.examples)
        for model, scores in ((recipe.study.model, transfer.base_scores), (distilled, transfer.distilled_scores)):
            if not scores.manifest():
                _evaluate(transfer.recipe, transfer.examples, scores, model)


def answer(
    recipe: Recipe, model: ModelSection, examples: pa.Table, asked: list[Asked], params: SamplingParams
) -> pa.Table:
    """A table of `ANSWER_SCHEMA`: every example at every placement, prompts of like length together."""
    prompts = build_prompts(examples, recipe.study, asked, params.max_new_tokens)
    actor, size = Answer(recipe, model, params), recipe.runtime.samplers.batch_size
    batches = (prompts.slice(start, size) for start in range(0, len(prompts), size))
    return pa.concat_tables([asyncio.run(actor(batch)) for batch in batches])


def sampling_params(recipe: Recipe, *, temperature: float, top_p: float, max_new_tokens: int) -> SamplingParams:
    """How the recipe's model is sampled; what ends a response is the model's own."""
    model = recipe.study.model
    return SamplingParams(temperature, top_p, max_new_tokens, tuple(stop_token_ids(model, load_tokenizer(model))))


def _evaluate(recipe: Recipe, examples: Artifact, artifact: Artifact, model: ModelSection) -> None:
    start = time.monotonic()
    table = examples.read_table("evaluation.parquet")
    params = sampling_params(recipe, temperature=0.0, top_p=1.0, max_new_tokens=recipe.study.evaluation.max_new_tokens)
    answers = answer(recipe, model, table, evaluated(recipe.study), params)
    order = [(name, "ascending") for name in ("documents", "example_id", "placement")]
    predictions = answers.select(PREDICTION_SCHEMA.names).cast(PREDICTION_SCHEMA).sort_by(order)
    with artifact.writing():
        artifact.write_table(PREDICTIONS, predictions)
        artifact.publish(counts=count_answers(len(table), predictions), seconds={"evaluate": time.monotonic() - start})


def _sample(recipe: Recipe, plan: Plan) -> None:
    """Fill the sample store; `make_samples` then finds nothing to sample, counts and publishes."""
    study, store = recipe.study, SampleStore(plan.samples)
    store.open()
    done = store.example_ids()
    table = plan.examples.read_table("train.parquet")
    missing = table.filter(pa.array([each not in done for each in table["example_id"].to_pylist()]))
    if len(missing):
        asked = Asked(study.data.documents, {hops: (Placement(study.advantageous(hops)),) for hops in study.data.hops})
        params = sampling_params(recipe, **study.sampling.model_dump(exclude={"keep"}))
        answers = answer(recipe, study.model, missing, [asked], params)
        if study.method.needs_teacher:
            answers = AddTeacherStates(recipe)(answers)
        write_samples(answers, plan.samples)
    make_samples(recipe, plan)


def _distill(recipe: Recipe, plan: Plan) -> None:
    start = time.monotonic()
    study, lines = recipe.study, list[str]()

    def log(record: StepRecord) -> None:
        lines.append(json.dumps(record.as_dict()))

    source = make_source(study, plan)
    stepper = build_stepper(study, recipe.runtime.trainers, torch.device("cpu"))
    teacher = cached_states if study.method.needs_teacher else None
    train(study, recipe.runtime.trainers, source, stepper, teacher, Ranks(), [log])
    counts = {"examples": len(source.example_ids), "rows": source.rows_per_epoch}
    counts |= {"epochs": study.training.epochs, "steps": source.total_steps}
    with plan.checkpoint.writing():
        model = Path(plan.checkpoint.path) / MODEL_FOLDER
        stepper.save(model)
        load_tokenizer(study.model).save_pretrained(model)
        keep_generation_config(study.model, model)
        write_bytes(plan.checkpoint.fs, f"{plan.checkpoint.path}/{STEPS_FILE}", ("\n".join(lines) + "\n").encode())
        plan.checkpoint.publish(counts=counts, seconds={"distill": time.monotonic() - start})


def main(arguments: list[str]) -> int:
    """Run all cells of the recipe in the first argument, changed by the overrides that follow."""
    try:
        recipe = load_recipe(arguments[0], arguments[1:])
        for settings, cell in sweep_cells(recipe):
            start = time.monotonic()
            run_cell(cell)
            print(f"{settings}: {time.monotonic() - start:.0f} s", flush=True)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
