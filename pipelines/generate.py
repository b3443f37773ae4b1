"""Generation on Ray Data, for sampling and evaluation alike: examples to prompts to judged answers."""

import functools
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import pyarrow as pa
import ray.data
from ray.actor import ActorHandle
from ray.data import Dataset, TaskPoolStrategy

from pipelines.ray_session import device_of, pool_arguments
from pos2distill.config import ModelSection, PoolSection, Recipe, Study
from pos2distill.models.load import context_length, end_of_turn_id, load_tokenizer, stop_token_ids
from pos2distill.randomness import derive_seed
from pos2distill.records import ANSWER_SCHEMA, PROMPT_SCHEMA, example_from_row
from pos2distill.sampling.engine import SamplingParams, build_engine
from pos2distill.sampling.judge import Judge
from pos2distill.tasks.permutations import Placement
from pos2distill.tasks.prompts import PromptBuilder

# What an answer takes over from its prompt.
_CARRIED = ("example_id", "documents", "placement", "group", "slots", "prompt_ids", "seed", "example", "error")


@dataclass(frozen=True, slots=True)
class Asked:
    """A number of documents, and the placements of gold documents by the number of hops, equally many for each."""

    documents: int
    placements: Mapping[int, tuple[Placement, ...]]

    @property
    def prompts_each(self) -> int:
        """The prompts that one example gives, whatever its number of hops."""
        return len(next(iter(self.placements.values())))


def build_prompts(
    batch: pa.Table, study: Study, asked: Sequence[Asked], max_new_tokens: int, carry_examples: bool
) -> pa.Table:
    """Examples to a table of `PROMPT_SCHEMA`: one prompt for each example, number of documents and placement.

    Prompts of one length stand together, so that batches need little padding.
    """
    build = _prompt_builder(study, max_new_tokens)
    examples = [example_from_row(row) for row in batch.to_pylist()]
    rows = [
        {
            "example_id": example.example_id,
            "answers": example.answers,
            "documents": each.documents,
            "placement": number,
            "group": placement.group,
            "slots": placement.slots,
            "prompt_ids": build(example, each.documents, placement.slots),
            "seed": derive_seed(study.seed, "sample", example.example_id, each.documents, *placement.slots),
            "example": asdict(example) if carry_examples else None,
        }
        for each in asked
        for example in examples
        for number, placement in enumerate(each.placements[len(example.golds)])
    ]
    return pa.Table.from_pylist(rows, schema=PROMPT_SCHEMA)


@functools.lru_cache(maxsize=1)
def _prompt_builder(study: Study, max_new_tokens: int) -> PromptBuilder:
    """Made once in a process: Ray runs many tasks in one."""
    max_length = context_length(study.model)
    return PromptBuilder(load_tokenizer(study.model), study.data.prompt, max_length=max_length, reserve=max_new_tokens)


class Answer:
    """Prompts to judged answers: an actor with one engine, whose batches overlap."""

    def __init__(self, recipe: Recipe, model: ModelSection, params: SamplingParams, board: ActorHandle | None) -> None:
        pool = recipe.runtime.samplers
        tokenizer = load_tokenizer(model)
        self.params = params
        self.board = board
        self.judge = Judge(
            tokenizer,
            metric=recipe.study.data.metric,
            end_of_turn=end_of_turn_id(tokenizer),
            stop_ids=params.stop_ids,
            keep=recipe.study.sampling.keep,
        )
        self.engine = build_engine(model, recipe.runtime, threads=pool.threads, device=device_of(pool.gpus))
        # The actor may be dropped at any time; vLLM's own processes must not outlive it.
        weakref.finalize(self, self.engine.shutdown)

    async def __call__(self, batch: pa.Table) -> pa.Table:
        """A table of `ANSWER_SCHEMA`."""
        prompts = [ids.values.to_numpy() for ids in batch["prompt_ids"]]
        completions = await self.engine.generate(prompts, self.params, batch["seed"].to_pylist())
        if self.board:
            self.board.see.remote("samplers", ray.get_runtime_context().get_actor_id())
        judged = list(map(self.judge, completions, batch["answers"].to_pylist()))
        columns = {name: batch[name] for name in _CARRIED} | {
            "sampled_ids": [completion.token_ids for completion in completions],
            "finish_reason": [completion.finish_reason for completion in completions],
            "text": [answer.text for answer in judged],
            "response_ids": [answer.response_ids for answer in judged],
            "cut_text": [answer.cut_text for answer in judged],
            "correct": [answer.correct for answer in judged],
            "f1": [answer.f1 for answer in judged],
            "outcome": [answer.outcome for answer in judged],
        }
        return pa.table({name: columns[name] for name in ANSWER_SCHEMA.names}, schema=ANSWER_SCHEMA)


def generate(
    recipe: Recipe,
    model: ModelSection,
    examples: Dataset,
    asked: Sequence[Asked],
    *,
    temperature: float,
    top_p: float,
    max_new_tokens: int,
    carry_examples: bool = False,
    board: ActorHandle | None = None,
) -> Dataset:
    """A lazy dataset of `ANSWER_SCHEMA`: permute, prompt, generate, judge.

    Args:
        model: the recipe's own, or the distilled one.
        examples: rows of `EXAMPLE_SCHEMA`.
        asked: prompt lengths and placements.
        carry_examples: whole examples go with their answers, so that what is trained on needs no other file.
        board: is told which actors are at work.
    """
    pool = recipe.runtime.samplers
    study = recipe.study.model_copy(update={"model": model})
    params = SamplingParams(temperature, top_p, max_new_tokens, tuple(stop_token_ids(model, load_tokenizer(model))))
    return examples.map_batches(
        build_prompts,
        fn_args=(study, asked, max_new_tokens, carry_examples),
        batch_format="pyarrow",
        # Tokenising is far cheaper than generating, and each process that does it loads transformers first.
        compute=TaskPoolStrategy(size=pool.max),
        num_cpus=0.5,
    ).map_batches(Answer, fn_constructor_args=(recipe, model, params, board), **pool_arguments(pool))


def blocks_of_examples(examples: pa.Table, asked: Sequence[Asked], pool: PoolSection) -> Dataset:
    """Examples in blocks of one to four batches of prompts: some for every actor, but none smaller than a batch."""
    prompts_each = sum(each.prompts_each for each in asked)
    share = len(examples) * prompts_each // (4 * pool.max)
    size = max(1, min(max(share, pool.batch_size), 4 * pool.batch_size) // prompts_each)
    return ray.data.from_arrow([examples.slice(start, size) for start in range(0, len(examples), size)])
