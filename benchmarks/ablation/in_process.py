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
from pipelines.executors.ray.train_worker import make_prompt_builder
from pipelines.generate import Generate, PromptSpec, build_prompts
from pipelines.tee import to_samples

from pipelines.plan import MODEL_FOLDER, STEPS_FOLDER, Plan, make_plan
from pipelines.stages.distill import count_rows
from pipelines.stages.evaluate import PREDICTIONS, count_answers, eval_specs
from pipelines.stages.prepare import make_examples, training_ids
from pipelines.stages.sample import EncodeTeacher, missing_indices, publish_samples
from pos2distill.config import ModelSection, Recipe
from pos2distill.config.load import load_recipe, sweep_cells
from pos2distill.errors import UserError
from pos2distill.models.files import copy_generation_config
from pos2distill.models.load import load_tokenizer
from pos2distill.records import PREDICTION_SCHEMA
from pos2distill.sampling.engines.protocol import SamplingParams
from pos2distill.store.artifacts import Artifact, claim_storage, write_bytes
from pos2distill.store.samples import SampleStore
from pos2distill.tasks.permutations import Placement
from pos2distill.training.distributed import DistContext
from pos2distill.training.loader import BatchLoader, StreamReader, TrainingProgress
from pos2distill.training.loop import StepRecord, Trainer
from pos2distill.training.rows import RowBuilder
from pos2distill.training.strategies import build_strategy
from pos2distill.training.teachers import build_teacher


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
    recipe: Recipe,
    model: ModelSection,
    examples: pa.Table,
    prompt_specs: list[PromptSpec],
    params: SamplingParams,
    *,
    for_training: bool = False,
) -> pa.Table:
    """A table of `ANSWER_SCHEMA`: every example at every placement, prompts of like length together."""
    prompts = build_prompts(examples, recipe.study, prompt_specs, params.max_new_tokens, for_training)
    actor, size = Generate(recipe, model, params, for_training, None), recipe.runtime.samplers.batch_size
    batches = (prompts.slice(start, size) for start in range(0, len(prompts), size))
    return pa.concat_tables([asyncio.run(actor(batch)) for batch in batches])


def _evaluate(recipe: Recipe, examples: Artifact, artifact: Artifact, model: ModelSection) -> None:
    start = time.monotonic()
    table = examples.read_table("evaluation.parquet")
    params = SamplingParams(0.0, 1.0, recipe.study.evaluation.max_new_tokens, stop_ids=())
    answers = answer(recipe, model, table, eval_specs(recipe.study), params)
    order = [(name, "ascending") for name in ("documents", "example_id", "placement")]
    predictions = answers.select(PREDICTION_SCHEMA.names).cast(PREDICTION_SCHEMA).sort_by(order)
    with artifact.writing():
        artifact.write_table(PREDICTIONS, predictions)
        artifact.publish(counts=count_answers(len(table), predictions), seconds={"evaluate": time.monotonic() - start})


def _sample(recipe: Recipe, plan: Plan) -> None:
    start = time.monotonic()
    study, sampling = recipe.study, recipe.study.sampling
    SampleStore(plan.samples).open()
    if len(missing := missing_indices(plan)):
        prompt_specs = PromptSpec(
            study.data.documents, {hops: (Placement(study.advantageous(hops)),) for hops in study.data.hops}
        )
        drawn = (sampling.temperature, sampling.top_p, sampling.max_new_tokens)
        params = SamplingParams(*drawn, stop_ids=(), stored_top_k=study.method.teacher_topk)
        examples = plan.examples.read_table("train.parquet").take(missing)
        answers = answer(recipe, study.model, examples, [prompt_specs], params, for_training=True)
        if study.method.teacher == "cached":
            answers = EncodeTeacher(recipe)(answers)
        SampleStore(plan.samples).append(to_samples(answers))
    publish_samples(plan, time.monotonic() - start)


def _distill(recipe: Recipe, plan: Plan) -> None:
    start = time.monotonic()
    study, lines, ids = recipe.study, list[str](), training_ids(plan)

    def log(record: StepRecord) -> None:
        lines.append(json.dumps(record.as_dict()))

    loader = BatchLoader(study, ids, SampleStore(plan.samples), _no_stream, DistContext())
    build = RowBuilder(make_prompt_builder(study), study)
    device = torch.device("cpu")
    strategy = build_strategy(study, recipe.runtime.trainers, device)
    teacher = build_teacher(study, strategy.frozen_states, device)
    progress = TrainingProgress.at_start(len(ids))
    trainer = Trainer(study, recipe.runtime.trainers, build, strategy, teacher, DistContext())
    trainer.train(loader, progress, [log])
    with plan.checkpoint.writing():
        model = Path(plan.checkpoint.path) / MODEL_FOLDER
        strategy.save(model)
        load_tokenizer(study.model).save_pretrained(model)
        copy_generation_config(study.model, model)
        plan.checkpoint.fs.makedirs(f"{plan.checkpoint.path}/{STEPS_FOLDER}")
        steps = f"{plan.checkpoint.path}/{STEPS_FOLDER}/00000000.jsonl"
        write_bytes(plan.checkpoint.fs, steps, ("\n".join(lines) + "\n").encode())
        plan.checkpoint.publish(counts=count_rows(plan), seconds={"distill": time.monotonic() - start})


def _no_stream() -> StreamReader:
    raise RuntimeError("everything was sampled before")


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
