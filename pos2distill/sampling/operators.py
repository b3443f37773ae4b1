"""The steps from examples to stored samples and predictions: callables from Arrow table to Arrow table.

    read_examples -> build_prompts -> Generate -> (EncodeTeacher) -> store_samples

An executor decides where they run. Nothing here imports Ray, and what loads torch is imported only where the work is
done, since processes that merely schedule operators load this module too.
"""

import functools
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from pos2distill.config import ModelSection, PoolSection, Runtime, Study
from pos2distill.errors import UserError
from pos2distill.randomness import derive_seed
from pos2distill.records import ANSWER_SCHEMA, PREDICTION_SCHEMA, PROMPT_SCHEMA, SAMPLE_SCHEMA, Slots, example_from_row
from pos2distill.sampling.engines import build_engine
from pos2distill.sampling.engines.protocol import Failure, GenerationResult, SamplingParams
from pos2distill.sampling.postprocess import ProcessedResponse, ResponseProcessor
from pos2distill.store.artifacts import Artifact
from pos2distill.store.samples import SampleStore
from pos2distill.tasks.permutations import Placement, advantageous_slots
from pos2distill.tasks.prompts import PromptBuilder, PromptTooLong
from pos2distill.urls import open_url

TableFunction = Callable[[pa.Table], pa.Table]
AsyncTableFunction = Callable[[pa.Table], Awaitable[pa.Table]]

# Columns that an answer takes over from its prompt.
_PROMPT_COLUMNS = ("example_id", "documents", "placement", "group", "slots", "prompt_ids", "seed", "example")


@dataclass(frozen=True, slots=True)
class TaskOperator:
    """A stateless step.

    function: picklable. max_tasks: how many calls may run at the same time; None: no limit.
    """

    name: str
    function: TableFunction
    max_tasks: int | None = None


@dataclass(frozen=True, slots=True)
class ActorOperator:
    """A step with state that is expensive to create, such as a model.

    create: picklable; called once in each actor. pool: number of actors, their resources and batch size.
    is_async: `create` returns a coroutine function, whose calls may overlap.
    """

    name: str
    create: Callable[[], TableFunction] | Callable[[], AsyncTableFunction]
    pool: PoolSection
    is_async: bool = False


Operator = TaskOperator | ActorOperator


class SampleCounter(Protocol):
    """Counts stored samples, wherever it runs."""

    def count_stored(self, outcomes: Sequence[str], errors: Sequence[str | None], example_ids: Sequence[str]) -> None:
        """Count the samples of one part of the store, and wait until they are counted.

        Raises:
            UserError: once too many samples of the run have failed.
        """


@dataclass(frozen=True, slots=True)
class PromptSpec:
    """Which prompts one example gives: a number of documents, and placements of the gold documents.

    placements: by the number of hops of the example; equally many for each number. None: one, at the example's
    advantageous slots.
    slot_of_rank: where documents are reordered, the slot that the document of each rank is shown at. A placement then
    holds the gold documents' ranks.
    """

    documents: int
    placements: Mapping[int, tuple[Placement, ...]] | None
    slot_of_rank: Slots = ()

    @property
    def prompts_per_example(self) -> int:
        """The number of prompts that one example gives, whatever its number of hops."""
        if self.placements is None:
            return 1
        any_number_of_hops = next(iter(self.placements))
        return len(self.placements[any_number_of_hops])


def generation_operators(
    study: Study,
    runtime: Runtime,
    examples: Artifact,
    file: str,
    specs: Sequence[PromptSpec],
    params: SamplingParams,
    *,
    for_training: bool = False,
) -> list[Operator]:
    """Read examples, build their prompts and generate: index tables in, tables of `ANSWER_SCHEMA` out.

    Args:
        study: the model that generates, the wording of prompts and the seed.
        examples, file: the artifact and its file that holds the examples.
        specs: prompt lengths and placements.
        params: without stop ids, which the model's tokenizer decides.
        for_training: failures are recorded, and whole examples accompany their answers. Otherwise a failure is an
            error: counted as a wrong answer, it would distort the curve.
    """
    pool = runtime.samplers
    # Each task loads transformers and builds prompts far faster than one sampler consumes them, so one task for each
    # sampler is enough. Ray Data 2.60 fuses maps of the same limit into one.
    read = TaskOperator("read examples", functools.partial(read_examples, artifact=examples, file=file), pool.max)
    build = TaskOperator(
        "build prompts",
        functools.partial(
            build_prompts,
            study=study,
            specs=tuple(specs),
            max_new_tokens=params.max_new_tokens,
            for_training=for_training,
        ),
        pool.max,
    )
    generate = ActorOperator(
        "samplers", functools.partial(Generate, study, runtime, params, for_training), pool, is_async=True
    )
    return [read, build, generate]


def read_examples(batch: pa.Table, artifact: Artifact, file: str) -> pa.Table:
    """The examples at the indices that a batch holds.

    Args:
        batch: a column `index`.
        artifact, file: where the examples are stored.
    Returns: a table of `EXAMPLE_SCHEMA`, in the batch's order.
    """
    parquet = _open_parquet(artifact.url, file)
    index_N = batch["index"].to_numpy()
    # All row groups but the last have the same size, so a division finds the group of an example.
    group_size = parquet.metadata.row_group(0).num_rows
    # Only the row groups that hold one of these examples are read; `row_N` is an example's row among them.
    groups = np.unique(index_N // group_size)
    row_N = np.searchsorted(groups, index_N // group_size) * group_size + index_N % group_size
    return parquet.read_row_groups(groups.tolist()).take(row_N)


@functools.lru_cache(maxsize=4)
def _open_parquet(artifact_url: str, file: str) -> pq.ParquetFile:
    """Opened once in a process, which may run many tasks."""
    fs, path = open_url(f"{artifact_url}/{file}", "runtime.storage")
    return pq.ParquetFile(fs.open(path))


def build_prompts(
    batch: pa.Table, study: Study, specs: Sequence[PromptSpec], max_new_tokens: int, for_training: bool
) -> pa.Table:
    """Build one prompt for each example, number of documents and placement.

    Prompts of one length are neighbours, so that batches need little padding. A prompt that is too long is recorded
    with its error where samples are made, and is an error where a model is evaluated.

    Returns: a table of `PROMPT_SCHEMA`.
    Raises:
        UserError: for a prompt that does not fit the context, unless `for_training`.
    """
    builder = _prompt_builder(study, max_new_tokens)
    records = batch.to_pylist()
    rows = []
    for spec in specs:
        for record in records:
            example = example_from_row(record)
            if spec.placements is None:
                placements: Sequence[Placement] = (Placement(advantageous_slots(study, example)),)
            else:
                placements = spec.placements[len(example.golds)]
            for number, placement in enumerate(placements):
                prompt_ids: Sequence[int] | npt.NDArray[np.int32] = ()
                error = None
                try:
                    prompt_ids = builder(example, spec.documents, placement.slots, slot_of_rank=spec.slot_of_rank)
                except PromptTooLong as too_long:
                    if not for_training:
                        raise UserError(str(too_long)) from None
                    error = str(too_long).removeprefix(f"example {example.example_id}: ")
                # From the example and its prompt, so that a sample does not depend on how examples are batched.
                seed = derive_seed(study.seed, "sample", example.example_id, spec.documents, *placement.slots)
                rows.append(
                    {
                        "example_id": example.example_id,
                        "answers": example.answers,
                        "documents": spec.documents,
                        "placement": number,
                        "group": placement.group,
                        "slots": placement.slots,
                        "prompt_ids": prompt_ids,
                        "error": error,
                        "seed": seed,
                        # The trainer builds further prompts of the example; evaluation does not, and examples are long.
                        "example": record if for_training else None,
                    }
                )
    return pa.Table.from_pylist(rows, schema=PROMPT_SCHEMA)


@functools.lru_cache(maxsize=1)
def _prompt_builder(study: Study, max_new_tokens: int) -> PromptBuilder:
    """Created once in a process, which may run many tasks.

    In a thread: Ray 2.60 cancels a task by interrupting the main thread. In the middle of importing torch, that would
    leave a process which can never import it and which Ray gives further tasks.
    """
    with ThreadPoolExecutor(1, "prompts") as thread:
        return thread.submit(_load_prompt_builder, study, max_new_tokens).result()


def _load_prompt_builder(study: Study, max_new_tokens: int) -> PromptBuilder:
    from pos2distill.models.load import context_length, load_tokenizer

    tokenizer = load_tokenizer(study.model)
    max_length = context_length(study.model)
    return PromptBuilder(tokenizer, study.data.prompt, max_length=max_length, reserve=max_new_tokens)


class Generate:
    """Prompts to processed answers. Holds one engine; calls may overlap."""

    def __init__(self, study: Study, runtime: Runtime, params: SamplingParams, for_training: bool) -> None:
        from pos2distill.models.chat import end_of_turn_id, stop_token_ids
        from pos2distill.models.load import load_tokenizer

        model: ModelSection = study.model
        tokenizer = load_tokenizer(model)
        self.params = replace(params, stop_ids=tuple(stop_token_ids(model, tokenizer)))
        self.for_training = for_training
        self.process = ResponseProcessor(
            tokenizer,
            metric=study.data.metric,
            end_of_turn=end_of_turn_id(tokenizer),
            stop_ids=self.params.stop_ids,
            keep=study.sampling.keep,
        )
        pool = runtime.samplers
        self.engine = build_engine(model, study.inference, runtime, threads=pool.threads, device=_device(pool))
        # An actor may be dropped at any time; vLLM's own processes must not outlive it.
        self.close = weakref.finalize(self, self.engine.shutdown)

    async def __call__(self, batch: pa.Table, rope_scales: tuple[float, ...] = ()) -> pa.Table:
        """Generate and process.

        Args:
            batch: of `PROMPT_SCHEMA`.
            rope_scales: see `SamplingParams`.
        Returns: a table of `ANSWER_SCHEMA`; a row that failed holds its error and no answer.
        Raises:
            UserError: for a failure where a model is evaluated.
            EngineDied: if the engine can answer no further call.
        """
        results = await self._generate(batch, replace(self.params, rope_scales=rope_scales))
        answers = batch["answers"].to_pylist()
        columns: dict[str, list[Any]] = {name: [] for name in ANSWER_SCHEMA.names if name not in _PROMPT_COLUMNS}
        for row, (result, right_answers) in enumerate(zip(results, answers, strict=True)):
            if isinstance(result, Failure) and not self.for_training:
                example_id = batch["example_id"][row]
                raise UserError(f"example {example_id}: the engine gave no answer ({result.error})")
            values = _answer_columns(result, self.process(result, right_answers))
            for name, column in columns.items():
                column.append(values[name])
        return pa.table(
            {name: batch[name] if name in _PROMPT_COLUMNS else columns[name] for name in ANSWER_SCHEMA.names},
            schema=ANSWER_SCHEMA,
        )

    async def _generate(self, batch: pa.Table, params: SamplingParams) -> list[GenerationResult]:
        """One result for every row. Rows without a prompt do not reach the engine."""
        errors = batch["error"].to_pylist()
        seeds = batch["seed"].to_pylist()
        rows = [row for row, error in enumerate(errors) if error is None]
        # Rows with a prompt get their result below.
        results: list[GenerationResult] = [Failure(error or "") for error in errors]
        if rows:
            prompts = [batch["prompt_ids"][row].values.to_numpy() for row in rows]
            generated = await self.engine.generate(prompts, params, [seeds[row] for row in rows])
            for row, result in zip(rows, generated, strict=True):
                results[row] = result
        return results


def _answer_columns(result: GenerationResult, response: ProcessedResponse) -> dict[str, Any]:
    """The values of one row of `ANSWER_SCHEMA` that do not come from its prompt."""
    values: dict[str, Any] = {
        "error": None,
        "sampled_ids": (),
        "finish_reason": None,
        "text": response.text,
        "response_ids": response.response_ids,
        "truncated_text": response.truncated_text,
        "correct": response.correct,
        "f1": response.f1,
        "outcome": response.outcome,
        "top_ids": None,
        "top_logprobs": None,
    }
    if isinstance(result, Failure):
        values["error"] = result.error
    else:
        values["sampled_ids"] = result.token_ids
        values["finish_reason"] = result.finish_reason
    if response.top is not None:
        values["top_ids"] = response.top.ids_SK.ravel()
        values["top_logprobs"] = response.top.logprobs_SK.ravel()
    return values


class EncodeTeacher:
    """The cached teacher: adds the frozen model's hidden states at the kept responses, once for each example."""

    def __init__(self, model: ModelSection, alignment: Literal["shifted", "official"], pool: PoolSection) -> None:
        from pos2distill.sampling.teacher_encoder import TeacherEncoder

        self.dtype = model.dtype
        self.encode = TeacherEncoder(model, alignment=alignment, threads=pool.threads, device=_device(pool))

    def __call__(self, batch: pa.Table) -> pa.Table:
        """Add the columns `hidden` and `hidden_dtype`."""
        from pos2distill.models.hidden_states import hidden_to_bytes

        # Only kept responses are trained on, and hidden states are the largest part of a sample.
        kept_rows = np.flatnonzero(np.asarray(batch["outcome"]) == "kept")
        hidden: list[bytes | None] = [None] * len(batch)
        if len(kept_rows):
            prompts = [batch["prompt_ids"][int(row)].values.to_numpy() for row in kept_rows]
            responses = [batch["response_ids"][int(row)].values.to_numpy() for row in kept_rows]
            for row, hidden_TH in zip(kept_rows, self.encode(prompts, responses), strict=True):
                hidden[row] = hidden_to_bytes(hidden_TH)
        columns = {
            "hidden": hidden,
            "hidden_dtype": [self.dtype] * len(batch),
        }
        for name, values in columns.items():
            field = SAMPLE_SCHEMA.field(name)
            batch = batch.append_column(field, pa.array(values, field.type))
        return batch


def store_samples(batch: pa.Table, artifact: Artifact, counter: SampleCounter, return_samples: bool) -> pa.Table:
    """Append a batch to the sample store as one part, and count it.

    Args:
        batch: of `ANSWER_SCHEMA`, with or without the teacher's columns.
        return_samples: return the samples, for a trainer; else their ids alone.
    Raises:
        UserError: once too many samples of the run have failed.
    """
    samples = to_samples(batch)
    # Before counting, which can end the run: a resumed run must find these samples.
    SampleStore(artifact).append(samples)
    counter.count_stored(
        samples["outcome"].to_pylist(), samples["error"].to_pylist(), samples["example_id"].to_pylist()
    )
    return samples if return_samples else samples.select(["example_id"])


def to_samples(answers: pa.Table) -> pa.Table:
    """Answers as a table of `SAMPLE_SCHEMA`; columns that no teacher has added are null."""
    for field in SAMPLE_SCHEMA:
        if field.name not in answers.column_names:
            answers = answers.append_column(field, pa.nulls(len(answers), field.type))
    return answers.select(SAMPLE_SCHEMA.names).cast(SAMPLE_SCHEMA)


def to_predictions(answers: pa.Table) -> pa.Table:
    """The columns of answers that evaluation keeps, as a table of `PREDICTION_SCHEMA`."""
    return answers.select(PREDICTION_SCHEMA.names).cast(PREDICTION_SCHEMA)


def _device(pool: PoolSection) -> str:
    """The torch device of one actor of a pool."""
    return "cuda" if pool.gpus else "cpu"
