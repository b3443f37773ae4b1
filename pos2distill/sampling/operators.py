"""The steps from examples to stored samples and predictions: callables from Arrow table to Arrow table.

    fetch_examples -> build_sample_prompts -> GenerationOperator
        -> (replace_with_teacher_prompts) -> (TeacherEncoder) -> store_samples
    fetch_examples -> build_evaluation_prompts -> GenerationOperator

An executor decides where they run. Nothing here imports Ray, and what loads torch is imported only where the work is
done, since processes that merely schedule operators load this module too.
"""

import functools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pos2distill.config import PoolSection, Runtime, Study
from pos2distill.models.files import files_version
from pos2distill.parquet import ParquetFile, open_parquet
from pos2distill.records import PREDICTION_SCHEMA, REFUSAL_SCHEMA, SAMPLE_SCHEMA
from pos2distill.sampling.engines.protocol import SamplingParams
from pos2distill.sampling.generate import GenerationOperator
from pos2distill.sampling.prompting import PromptKey, PromptSpec, build_evaluation_prompts, build_sample_prompts
from pos2distill.store.artifacts import Artifact
from pos2distill.store.samples import IntegerArray, SampleStore
from pos2distill.urls import open_url, storage_errors

TableFunction = Callable[[pa.Table], pa.Table]
AsyncTableFunction = Callable[[pa.Table], Awaitable[pa.Table]]


@dataclass(frozen=True, slots=True)
class TaskOperator:
    """A stateless step.

    Attributes:
        function: picklable.
        max_tasks: how many calls may run at the same time; None: no limit.
    """

    name: str
    function: TableFunction
    max_tasks: int | None = None


@dataclass(frozen=True, slots=True)
class ActorOperator:
    """A step with state that is expensive to create, such as a model.

    Attributes:
        create: picklable; called once in each actor.
        pool: number of actors, their resources and batch size.
        is_async: `create` returns a coroutine function, whose calls may overlap.
        only_needed: for asynchronous operators in a stage that reports progress. Before each batch (a whole block), ask
            which samples are still needed and drop the others; wait if the samples in progress will probably suffice.
    """

    name: str
    create: Callable[[], TableFunction] | Callable[[], AsyncTableFunction]
    pool: PoolSection
    is_async: bool = False
    only_needed: bool = False


Operator = TaskOperator | ActorOperator


class SampleCounter(Protocol):
    """Counts stored samples, wherever it runs."""

    def count_stored(self, outcomes: Sequence[str], errors: Sequence[str | None], sample_ids: Sequence[str]) -> None:
        """Count the samples of one part of the store, and wait until they are counted.

        Raises:
            UserError: too many samples of the run have failed.
        """


def evaluation_operators(
    study: Study,
    runtime: Runtime,
    examples: Artifact,
    file: str,
    specs: Sequence[PromptSpec],
    params: SamplingParams,
    *,
    answered: frozenset[PromptKey] = frozenset(),
) -> list[Operator]:
    """Responses at every placement: index tables in, tables of `RESPONSE_SCHEMA` out.

    Args:
        study: the model that answers, the wording of prompts and the seed.
        examples, file: the artifact and its file that holds the examples.
        specs: prompt lengths and placements.
        params: without stop ids; the model's tokenizer decides them. To measure, `greedy_params`.
        answered: see `build_evaluation_prompts`.
    """
    build = functools.partial(
        build_evaluation_prompts,
        study=study,
        specs=tuple(specs),
        max_new_tokens=params.max_new_tokens,
        answered=answered,
        model_version=_model_version(study),
    )
    read = functools.partial(fetch_examples, artifact=examples, file=file)
    generate = functools.partial(GenerationOperator, study, runtime, params)
    return _chain(runtime, read, build, generate)


def sample_operators(
    study: Study,
    runtime: Runtime,
    examples: Artifact,
    file: str,
    params: SamplingParams,
    *,
    candidates: int = 1,
    only_needed: bool = False,
) -> list[Operator]:
    """Responses at the slots that the method decides: index tables in, tables of `RESPONSE_SCHEMA` out.

    Args:
        study: the model that answers, the method, the wording of prompts and the seed.
        examples, file: the artifact and its file that holds the examples.
        params: without stop ids; the model's tokenizer decides them.
        candidates: see `GenerationOperator`.
        only_needed: see `ActorOperator`.
    """
    build = functools.partial(
        build_sample_prompts,
        study=study,
        max_new_tokens=params.max_new_tokens,
        model_version=_model_version(study),
    )
    read = functools.partial(
        fetch_examples, artifact=examples, file=file, per_example=study.method.responses_per_example
    )
    generate = functools.partial(GenerationOperator, study, runtime, params, candidates=candidates)
    return _chain(runtime, read, build, generate, only_needed=only_needed)


def greedy_params(study: Study) -> SamplingParams:
    """How answers are measured: at temperature 0, so that a difference between slots is not sampling noise."""
    return SamplingParams(0.0, 1.0, study.evaluation.max_new_tokens, stop_ids=())


def _model_version(study: Study) -> str | None:
    """For all tasks: listing the files of a model at a URL takes a request."""
    return None if study.model.uses_chat_api else files_version(study.model)


def _chain(
    runtime: Runtime,
    read: TableFunction,
    build: TableFunction,
    generate: Callable[[], AsyncTableFunction],
    *,
    only_needed: bool = False,
) -> list[Operator]:
    pool = runtime.samplers
    # Each task loads transformers and builds prompts far faster than one sampler consumes them, so one task for each
    # sampler is enough. Ray Data 2.60 fuses maps of the same limit into one.
    return [
        TaskOperator("read examples", read, pool.max),
        TaskOperator("build prompts", build, pool.max),
        ActorOperator("samplers", generate, pool, is_async=True, only_needed=only_needed),
    ]


def fetch_examples(batch: pa.Table, artifact: Artifact, file: str, per_example: int = 1) -> pa.Table:
    """The examples at the indices that a batch holds.

    Args:
        batch: a table with the column `index`.
        artifact, file: where the examples are stored.
        per_example: number of samples of each example. The indices count samples (`sample_ids`).
    Returns: a table of `EXAMPLE_SCHEMA`, in the batch's order. With several samples of an example, the column `number`
        holds the sample's number among them.
    Raises:
        TransientError: the storage does not answer.
    """
    index_N, number_N = np.divmod(batch["index"].to_numpy(), per_example)
    with storage_errors(artifact.url, "runtime.storage"):
        examples = _read_rows(_open_parquet(artifact.url, file), index_N)
    return examples if per_example == 1 else examples.append_column("number", pa.array(number_N))


def _read_rows(parquet: ParquetFile, index_N: IntegerArray) -> pa.Table:
    """The rows at these indices, in their order."""
    # All row groups but the last have the same size, so a division finds the group of an example.
    group_size = parquet.metadata.row_group(0).num_rows
    # Only the row groups that hold one of these examples are read; `row_N` is an example's row among them.
    groups = np.unique(index_N // group_size)
    row_N = np.searchsorted(groups, index_N // group_size) * group_size + index_N % group_size
    return parquet.read_row_groups(groups.tolist(), use_threads=False).take(row_N)


@functools.lru_cache(maxsize=4)
def _open_parquet(artifact_url: str, file: str) -> ParquetFile:
    """Open a file once for all tasks of a process. The fingerprint in the URL decides what the file holds."""
    fs, path = open_url(f"{artifact_url}/{file}", "runtime.storage")
    return open_parquet(fs.open(path))


def store_samples(batch: pa.Table, artifact: Artifact, counter: SampleCounter, return_samples: bool) -> pa.Table:
    """Append a batch to the sample store as one part, and count it.

    Args:
        batch: a table of `RESPONSE_SCHEMA`, with or without the teacher's columns.
        return_samples: return the samples, for a trainer; otherwise only their ids.
    Raises:
        UserError: too many samples of the run have failed.
        TransientError: the storage does not answer.
    """
    samples = to_samples(batch)
    if not len(samples):
        return samples if return_samples else samples.select(["sample_id"])
    # Before counting, which can end the run: a resumed run must find these samples.
    with storage_errors(artifact.url, "runtime.storage"):
        SampleStore(artifact).append(samples)
    counter.count_stored(samples["outcome"].to_pylist(), samples["error"].to_pylist(), samples["sample_id"].to_pylist())
    return samples if return_samples else samples.select(["sample_id"])


def to_samples(responses: pa.Table) -> pa.Table:
    """Responses as a table of `SAMPLE_SCHEMA`; columns that no teacher has added are null."""
    for field in SAMPLE_SCHEMA:
        if field.name not in responses.column_names:
            responses = responses.append_column(field, pa.nulls(len(responses), field.type))
    return responses.select(SAMPLE_SCHEMA.names).cast(SAMPLE_SCHEMA)


def to_predictions(responses: pa.Table) -> pa.Table:
    """The columns that evaluation keeps, as a table of `PREDICTION_SCHEMA`. Prompts without a response are left out."""
    answered = responses.filter(pc.is_null(responses["error"]))
    return answered.select(PREDICTION_SCHEMA.names).cast(PREDICTION_SCHEMA)


def to_refusals(responses: pa.Table) -> pa.Table:
    """The prompts that a server refused, as a table of `REFUSAL_SCHEMA`."""
    refused = responses.filter(pc.field("outcome") == "refused")
    return refused.select(REFUSAL_SCHEMA.names).cast(REFUSAL_SCHEMA)
