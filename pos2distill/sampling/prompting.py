"""Prompts as tables: one row for each prompt to generate from.

Modules that load torch are imported only when a prompt is built, since processes that merely schedule operators load
this module too.
"""

import functools
import itertools
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa

from pos2distill.config import Study
from pos2distill.errors import UserError
from pos2distill.models.files import files_version
from pos2distill.randomness import derive_seed
from pos2distill.records import (
    EXAMPLE_SCHEMA,
    PROMPT_SCHEMA,
    RESPONSE_SCHEMA,
    Example,
    Slots,
    Tokens,
    example_from_row,
    sample_ids,
)
from pos2distill.tasks.permutations import Placement, sampled_slots, teacher_slots
from pos2distill.tasks.prompts import MessageBuilder, PromptBuilder, PromptTooLong

# Identifies a prompt of an evaluation: number of documents, example id, placement and order, as in `PROMPT_SCHEMA`.
PromptKey = tuple[int, str, int, int]


@dataclass(frozen=True, slots=True)
class PromptSpec:
    """Which prompts an evaluated example gives: a number of documents, and placements of the gold documents.

    Attributes:
        documents: number of documents; `gold`: only the example's gold documents.
        placements: the placements by the example's number of hops; each number of hops has equally many.
        slot_of_rank: where documents are reordered, the slot at which the document of each rank is shown. A placement
            then holds the gold documents' ranks.
        orders: number of orders of the distractors. Every placement is shown in each of them: first the data set's
            order, then random ones.
    """

    documents: int | Literal["gold"]
    placements: Mapping[int, tuple[Placement, ...]]
    slot_of_rank: Slots = ()
    orders: int = 1

    def documents_of(self, example: Example) -> int:
        """The number of documents in the example's prompts."""
        return len(example.golds) if self.documents == "gold" else self.documents

    @property
    def prompts_per_example(self) -> int:
        """The number of prompts that one example gives, whatever its number of hops."""
        any_number_of_hops = next(iter(self.placements))
        return len(self.placements[any_number_of_hops]) * self.orders


def build_evaluation_prompts(
    batch: pa.Table,
    study: Study,
    specs: Sequence[PromptSpec],
    max_new_tokens: int,
    *,
    answered: frozenset[PromptKey] = frozenset(),
    model_version: str | None = None,
) -> pa.Table:
    """One prompt for each example, number of documents, placement and order of the distractors.

    Prompts of the same length are next to each other, so that batches need little padding.

    Args:
        batch: as `fetch_examples` returns it.
        max_new_tokens: kept free for the response.
        answered: prompts to leave out.
        model_version: see `cached_prompt_builder`.
    Returns: a table of `PROMPT_SCHEMA`.
    Raises:
        UserError: a prompt does not fit the context. Without it, positions could not be compared.
    """
    build = cached_prompt_builder(study, max_new_tokens, model_version)
    examples = [example_from_row(record) for record in batch.select(EXAMPLE_SCHEMA.names).to_pylist()]
    rows = []
    for spec, example in itertools.product(specs, examples):
        documents = spec.documents_of(example)
        placements = enumerate(spec.placements[len(example.golds)])
        for (number, placement), order in itertools.product(placements, range(spec.orders)):
            if (documents, example.example_id, number, order) in answered:
                continue
            try:
                prompt = build(example, documents, placement.slots, order=order, slot_of_rank=spec.slot_of_rank)
            except PromptTooLong as too_long:
                # Ray Data keeps nothing of an error but its text, of which `executors.ray.errors` knows the classes.
                raise UserError(str(too_long)) from None
            row = _prompt_row(study, example, documents, placement.slots)
            row |= {"placement": number, "order": order, "group": placement.group}
            rows.append(row | _prompt_columns(build, prompt))
    return pa.Table.from_pylist(rows, schema=PROMPT_SCHEMA)


def build_sample_prompts(
    batch: pa.Table, study: Study, max_new_tokens: int, *, model_version: str | None = None
) -> pa.Table:
    """One prompt for each sample, at the slots that the method decides, with its whole example.

    A prompt that does not fit the context becomes a row with its error.

    Args:
        batch: as `fetch_examples` returns it.
        max_new_tokens: kept free for the response.
        model_version: see `cached_prompt_builder`.
    Returns: a table of `PROMPT_SCHEMA`.
    """
    build = cached_prompt_builder(study, max_new_tokens, model_version)
    records = batch.select(EXAMPLE_SCHEMA.names).to_pylist()
    numbers = batch["number"].to_pylist() if "number" in batch.column_names else [0] * len(batch)
    rows = []
    for record, number in zip(records, numbers, strict=True):
        example = example_from_row(record)
        slots = sampled_slots(study, example)[number]
        row = _prompt_row(study, example, study.data.documents, slots)
        sample_id = sample_ids([example.example_id], study.method.responses_per_example)[number]
        row |= {"sample_id": sample_id, "placement": 0, "order": 0, "group": "", "example": record}
        try:
            row |= _prompt_columns(build, build(example, study.data.documents, slots))
        except PromptTooLong as too_long:
            row |= {"prompt_ids": (), "error": too_long.problem}
        rows.append(row)
    return pa.Table.from_pylist(rows, schema=PROMPT_SCHEMA)


def _prompt_row(study: Study, example: Example, documents: int, slots: Slots) -> dict[str, Any]:
    """The columns that do not need the prompt."""
    return {
        "example_id": example.example_id,
        "answers": example.answers,
        "documents": documents,
        "slots": slots,
        # From the example and its prompt, so that a sample does not depend on how examples are batched.
        "seed": derive_seed(study.seed, "sample", example.example_id, documents, *slots),
    }


def _prompt_columns(builder: PromptBuilder | MessageBuilder, prompt: Any) -> dict[str, Any]:
    """The prompt that this builder has made, in its column."""
    if isinstance(builder, MessageBuilder):
        return {"prompt_ids": (), "messages": prompt}
    return {"prompt_ids": prompt}


def replace_with_teacher_prompts(responses: pa.Table, study: Study, model_version: str) -> pa.Table:
    """Replace each prompt by the teacher's prompt for the same example.

    Args:
        model_version: see `cached_prompt_builder`.
    """
    # Nothing is reserved, because the responses exist.
    builder = _token_builder(study, 0, model_version)
    prompts: list[Tokens | Sequence[int]] = []
    for record, outcome in zip(responses["example"].to_pylist(), responses["outcome"].to_pylist(), strict=True):
        if outcome == "failed":  # perhaps because its prompt is too long
            prompts.append(())
            continue
        example = example_from_row(record)
        prompts.append(builder(example, study.data.documents, teacher_slots(study, example)))
    column = responses.column_names.index("prompt_ids")
    field = RESPONSE_SCHEMA.field("prompt_ids")
    return responses.set_column(column, field, pa.array(prompts, field.type))


def cached_prompt_builder(
    study: Study, reserve: int, model_version: str | None = None
) -> PromptBuilder | MessageBuilder:
    """The builder of a study's prompts, kept in this process: token ids, or messages where a server has the template.

    Args:
        reserve: tokens that are kept free for the response.
        model_version: the version of the model's files. If it is None, the files are listed to find it.
    """
    if study.model.uses_chat_api:
        return MessageBuilder(study.data.wording, max_length=study.model.max_length, reserve=reserve)
    # The files as they are now: in a notebook, they may have changed since the last call.
    return _token_builder(study, reserve, model_version or files_version(study.model))


@functools.lru_cache(maxsize=2)
def _token_builder(study: Study, reserve: int, _version: str) -> PromptBuilder:
    """Load a builder once in a process, which may run many tasks, for each version of the model's files.

    It is loaded in a thread, because Ray 2.60 cancels a task by interrupting the main thread. An interrupt during the
    import of torch would leave a process that can never import it, and Ray would give that process further tasks.
    """

    def load() -> PromptBuilder:
        from pos2distill.models.load import load_prompt_builder

        return load_prompt_builder(study, reserve=reserve)

    with ThreadPoolExecutor(1, "prompts") as thread:
        return thread.submit(load).result()
