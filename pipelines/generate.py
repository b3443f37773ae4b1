"""Generation on Ray Data, for sampling and evaluation alike: examples to prompts to judged answers.

Ray's coordinators load this module too, so what loads torch is imported where the work is done.
"""

import functools
import math
import os
import sys
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import ray.data
from ray.actor import ActorHandle
from ray.data import Dataset, TaskPoolStrategy

from pipelines.executors.ray.session import device_of, pool_arguments
from pos2distill.config import ModelSection, PoolSection, Recipe, Study
from pos2distill.errors import UserError
from pos2distill.randomness import derive_seed
from pos2distill.records import ANSWER_SCHEMA, PROMPT_SCHEMA, Example, example_from_row
from pos2distill.sampling.engines import build_engine
from pos2distill.sampling.engines.protocol import EngineDied, Failure, GenerationResult, SamplingParams
from pos2distill.sampling.postprocess import ResponseProcessor
from pos2distill.tasks.permutations import Placement
from pos2distill.tasks.prompts import PromptBuilder, PromptTooLong

TASK_CPUS = 0.5
"""CPUs of a task between the models."""

# What an answer takes over from its prompt.
_CARRIED = ("example_id", "documents", "placement", "group", "slots", "prompt_ids", "seed", "example")


@dataclass(frozen=True, slots=True)
class PromptSpec:
    """A number of documents, and the placements of gold documents by the number of hops, equally many for each."""

    documents: int
    placements: Mapping[int, tuple[Placement, ...]]

    @property
    def prompts_per_example(self) -> int:
        """The prompts that one example gives, whatever its number of hops."""
        return len(next(iter(self.placements.values())))


def build_prompts(
    batch: pa.Table, study: Study, prompt_specs: Sequence[PromptSpec], max_new_tokens: int, for_training: bool
) -> pa.Table:
    """Examples to a table of `PROMPT_SCHEMA`: one prompt for each example, number of documents and placement.

    Prompts of one length stand together, so that batches need little padding. One that is too long is recorded with
    its error where samples are made, and fatal_error where a model is measured.
    """
    build = _prompt_builder(study, max_new_tokens)
    examples = [(example_from_row(row), row) for row in batch.to_pylist()]

    def prompt(example: Example, documents: int, placement: Placement) -> dict[str, Any]:
        try:
            return {"prompt_ids": build(example, documents, placement.slots), "error": None}
        except PromptTooLong as error:
            if not for_training:
                raise UserError(str(error)) from None
            return {"prompt_ids": (), "error": str(error).removeprefix(f"example {example.example_id}: ")}

    rows = [
        {
            "example_id": example.example_id,
            "answers": example.answers,
            "documents": each.documents,
            "placement": number,
            "group": placement.group,
            "slots": placement.slots,
            **prompt(example, each.documents, placement),
            "seed": derive_seed(study.seed, "sample", example.example_id, each.documents, *placement.slots),
            "example": row if for_training else None,
        }
        for each in prompt_specs
        for example, row in examples
        for number, placement in enumerate(each.placements[len(example.golds)])
    ]
    return pa.Table.from_pylist(rows, schema=PROMPT_SCHEMA)


@functools.lru_cache(maxsize=1)
def _prompt_builder(study: Study, max_new_tokens: int) -> PromptBuilder:
    """Made once in a process: Ray runs many tasks in one.

    In a thread, since Ray cancels a task by interrupting the main one: in the midst of importing torch, that would
    leave a process which can never import it, and which Ray gives further tasks.
    """
    return ThreadPoolExecutor(1, "prompts").submit(_load_prompt_builder, study, max_new_tokens).result()


def _load_prompt_builder(study: Study, max_new_tokens: int) -> PromptBuilder:
    from pos2distill.models.load import context_length, load_tokenizer

    max_length = context_length(study.model)
    return PromptBuilder(load_tokenizer(study.model), study.data.prompt, max_length=max_length, reserve=max_new_tokens)


class Generate:
    """Prompts to judged answers: an actor with one engine, whose batches overlap."""

    def __init__(
        self,
        recipe: Recipe,
        model: ModelSection,
        params: SamplingParams,
        for_training: bool,
        tracker_actor: ActorHandle | None,
    ) -> None:
        from pos2distill.models.chat import end_of_turn_id, stop_token_ids
        from pos2distill.models.load import load_tokenizer

        pool = recipe.runtime.samplers
        tokenizer = load_tokenizer(model)
        self.params = replace(params, stop_ids=tuple(stop_token_ids(model, tokenizer)))
        self.for_training = for_training
        self.tracker_actor = tracker_actor
        self.judge = ResponseProcessor(
            tokenizer,
            metric=recipe.study.data.metric,
            end_of_turn=end_of_turn_id(tokenizer),
            stop_ids=self.params.stop_ids,
            keep=recipe.study.sampling.keep,
        )
        self.engine = build_engine(model, recipe.runtime, threads=pool.threads, device=device_of(pool.gpus))
        # The actor may be dropped at any time; vLLM's own processes must not outlive it.
        weakref.finalize(self, self.engine.shutdown)

    async def __call__(self, batch: pa.Table) -> pa.Table:
        """A table of `ANSWER_SCHEMA`. A row that failed says why and holds no answer.

        Raises:
            UserError: of a failure where the model is measured: counted as wrong, it would spoil the curve.
        """
        if self.tracker_actor:
            self.tracker_actor.heartbeat.remote("samplers", ray.get_runtime_context().get_actor_id())
        results = await self._replies(batch)
        errors = [reply.error if isinstance(reply, Failure) else None for reply in results]
        if not self.for_training and (failed := [row for row, error in enumerate(errors) if error]):
            example_id = batch["example_id"][failed[0]]
            raise UserError(f"example {example_id}: the engine gave no answer ({errors[failed[0]]})")
        judged = list(map(self.judge, results, batch["answers"].to_pylist()))
        columns = {name: batch[name] for name in _CARRIED} | {
            "error": errors,
            "sampled_ids": [() if isinstance(reply, Failure) else reply.token_ids for reply in results],
            "finish_reason": [None if isinstance(reply, Failure) else reply.finish_reason for reply in results],
            "text": [answer.text for answer in judged],
            "response_ids": [answer.response_ids for answer in judged],
            "truncated_text": [answer.truncated_text for answer in judged],
            "correct": [answer.correct for answer in judged],
            "f1": [answer.f1 for answer in judged],
            "outcome": [answer.outcome for answer in judged],
            "top_ids": [answer.top and answer.top.ids_SK.ravel() for answer in judged],
            "top_logprobs": [answer.top and answer.top.logprobs_SK.ravel() for answer in judged],
        }
        return pa.table({name: columns[name] for name in ANSWER_SCHEMA.names}, schema=ANSWER_SCHEMA)

    async def _replies(self, batch: pa.Table) -> list[GenerationResult]:
        """A reply to every row; those without a prompt never heartbeat the engine."""
        errors, seeds = batch["error"].to_pylist(), batch["seed"].to_pylist()
        prompt_specs = [row for row, error in enumerate(errors) if error is None]
        if not prompt_specs:
            return [Failure(error) for error in errors]
        prompts = [batch["prompt_ids"][row].values.to_numpy() for row in prompt_specs]
        try:
            answers = iter(await self.engine.generate(prompts, self.params, [seeds[row] for row in prompt_specs]))
        except EngineDied as error:
            # An exception would leave this actor in the pool, to fail every batch it is given (ray#59522). As a crash
            # it is restarted with a new engine and the batch tried again, both as often as the pool's settings allow.
            sys.stderr.write(f"the engine died: {error}\n")
            sys.stderr.flush()
            os._exit(1)
        return [next(answers) if error is None else Failure(error) for error in errors]


def generate(
    recipe: Recipe,
    model: ModelSection,
    examples: Dataset,
    prompt_specs: Sequence[PromptSpec],
    *,
    temperature: float,
    top_p: float,
    max_new_tokens: int,
    for_training: bool = False,
    tracker_actor: ActorHandle | None = None,
) -> Dataset:
    """A lazy dataset of `ANSWER_SCHEMA`: permute, prompt, generate, judge.

    Args:
        model: the recipe's own, or the distilled one.
        examples: rows of `EXAMPLE_SCHEMA`.
        prompt_specs: prompt lengths and placements.
        for_training: whole examples go with their answers, so that what is trained on needs no other file, and what
            the method's teacher wants of the sampler; what failed is recorded. Otherwise a failure is an error.
        tracker_actor: is told which actors are at work.
    """
    pool = recipe.runtime.samplers
    study = recipe.study.model_copy(update={"model": model})
    stored_top_k = study.method.teacher_topk if for_training else 0
    params = SamplingParams(temperature, top_p, max_new_tokens, stop_ids=(), stored_top_k=stored_top_k)
    return examples.map_batches(
        build_prompts,
        fn_args=(study, prompt_specs, max_new_tokens, for_training),
        batch_format="pyarrow",
        compute=prompt_tasks(pool),
        num_cpus=TASK_CPUS,
    ).map_batches(
        Generate, fn_constructor_args=(recipe, model, params, for_training, tracker_actor), **pool_arguments(pool)
    )


def prompt_tasks(pool: PoolSection) -> TaskPoolStrategy:
    """As many tasks at a time as samplers: each has one load transformers, and tokenises far faster than one samples.

    Ray runs maps with the same limit as one.
    """
    return TaskPoolStrategy(size=pool.max)


def blocks_of_examples(examples: pa.Table, prompt_specs: Sequence[PromptSpec], pool: PoolSection) -> Dataset:
    """Examples in blocks that Ray Data hands to the pool."""
    size = block_size(len(examples), sum(each.prompts_per_example for each in prompt_specs), pool)
    return ray.data.from_arrow([examples.slice(start, size) for start in range(0, len(examples), size)])


def block_size(examples: int, prompts_per_example: int, pool: PoolSection) -> int:
    """Examples of a block: one to four batches of prompts, some blocks for every actor if there are so many."""
    share = examples * prompts_per_example // (4 * pool.max)
    return math.ceil(min(max(share, pool.batch_size), 4 * pool.batch_size) / prompts_per_example)
