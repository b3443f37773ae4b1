"""Prompts as tables: one row for each prompt to generate from.

Nothing that loads torch is imported before a prompt is built, since processes that merely schedule operators load this
module too.
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
    ANSWER_SCHEMA,
    EXAMPLE_SCHEMA,
    PROMPT_SCHEMA,
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
    """Which prompts one example gives: a number of documents, and placements of the gold documents.

    documents: `gold`: each example's gold documents alone.
    placements: by the number of hops of the example; equally many for each number. None: for samples, whose slots
    follow from the method.
    slot_of_rank: where documents are reordered, the slot that the document of each rank is shown at. A placement then
    holds the gold documents' ranks.
    orders: of the distractors, that every placement is shown with: the data set's, then random ones.
    """

    documents: int | Literal["gold"]
    placements: Mapping[int, tuple[Placement, ...]] | None
    slot_of_rank: Slots = ()
    orders: int = 1

    def documents_of(self, example: Example) -> int:
        """The number of documents in the example's prompts."""
        return len(example.golds) if self.documents == "gold" else self.documents

    @property
    def prompts_per_example(self) -> int:
        """The number of prompts that one example gives, whatever its number of hops."""
        if self.placements is None:
            return 1
        any_number_of_hops = next(iter(self.placements))
        return len(self.placements[any_number_of_hops]) * self.orders


def build_prompts(
    batch: pa.Table,
    study: Study,
    specs: Sequence[PromptSpec],
    max_new_tokens: int,
    *,
    record_too_long: bool = False,
    with_examples: bool = False,
    answered: frozenset[PromptKey] = frozenset(),
    model_version: str | None = None,
) -> pa.Table:
    """Build one prompt for each example, number of documents and placement; for samples, one for each sample.

    Prompts of one length are neighbours, so that batches need little padding.

    Args:
        batch: as `read_examples` returns it.
        record_too_long: a prompt that does not fit the context becomes a row with its error instead of a prompt.
            Otherwise it is an error, as where a model is evaluated.
        with_examples: each row has its whole example, for those that build further prompts of it; examples are long.
        answered: prompts to leave out. model_version: as of `prompt_builder`.
    Returns: a table of `PROMPT_SCHEMA`.
    Raises:
        UserError: for a prompt that does not fit the context, unless `record_too_long`.
    """
    builder = prompt_builder(study, max_new_tokens, model_version)
    records = batch.select(EXAMPLE_SCHEMA.names).to_pylist()
    numbers = [0] * len(batch)
    if "number" in batch.column_names:
        numbers = batch["number"].to_pylist()
    rows = []
    for spec in specs:
        for record, sample_number in zip(records, numbers, strict=True):
            example = example_from_row(record)
            documents = spec.documents_of(example)
            sample_id, placements = _placements(example, spec, study, sample_number)
            for (number, placement), order in itertools.product(enumerate(placements), range(spec.orders)):
                if (documents, example.example_id, number, order) in answered:
                    continue
                prompt = _build_prompt(builder, example, spec, placement, order)
                if prompt["error"] is not None and not record_too_long:
                    raise UserError(f"example {example.example_id}: {prompt['error']}")
                # From the example and its prompt, so that a sample does not depend on how examples are batched.
                seed = derive_seed(study.seed, "sample", example.example_id, documents, *placement.slots)
                rows.append(
                    {
                        "example_id": example.example_id,
                        "sample_id": sample_id,
                        "answers": example.answers,
                        "documents": documents,
                        "placement": number,
                        "order": order,
                        "group": placement.group,
                        "slots": placement.slots,
                        **prompt,
                        "seed": seed,
                        "example": record if with_examples else None,
                    }
                )
    return pa.Table.from_pylist(rows, schema=PROMPT_SCHEMA)


def _placements(
    example: Example, spec: PromptSpec, study: Study, sample_number: int
) -> tuple[str | None, Sequence[Placement]]:
    """The sample's id, None where a model is evaluated, and the placements that an example is shown at."""
    if spec.placements is not None:
        return None, spec.placements[len(example.golds)]
    sample_id = sample_ids([example.example_id], study.method.responses_per_example)[sample_number]
    return sample_id, (Placement(sampled_slots(study, example)[sample_number]),)


def _build_prompt(
    builder: PromptBuilder | MessageBuilder, example: Example, spec: PromptSpec, placement: Placement, order: int
) -> dict[str, Any]:
    """The columns of the prompt or, if it is too long, its error."""
    try:
        prompt = builder(
            example,
            spec.documents_of(example),
            placement.slots,
            distractor_order=order,
            slot_of_rank=spec.slot_of_rank,
        )
    except PromptTooLong as too_long:
        error = str(too_long).removeprefix(f"example {example.example_id}: ")
        return {"prompt_ids": (), "messages": None, "error": error}
    if isinstance(builder, MessageBuilder):
        return {"prompt_ids": (), "messages": prompt, "error": None}
    return {"prompt_ids": prompt, "messages": None, "error": None}


def show_teacher_prompts(answers: pa.Table, study: Study) -> pa.Table:
    """Replace the prompts that were answered by those that the teacher gets of their examples."""
    # Nothing is reserved, because the responses exist.
    builder = _token_builder(study, 0, files_version(study.model))
    prompts: list[Tokens | Sequence[int]] = []
    for record, outcome in zip(answers["example"].to_pylist(), answers["outcome"].to_pylist(), strict=True):
        if outcome == "failed":  # perhaps because its prompt is too long
            prompts.append(())
            continue
        example = example_from_row(record)
        prompts.append(builder(example, study.data.documents, teacher_slots(study, example)))
    column = answers.column_names.index("prompt_ids")
    field = ANSWER_SCHEMA.field("prompt_ids")
    return answers.set_column(column, field, pa.array(prompts, field.type))


def prompt_builder(
    study: Study, max_new_tokens: int, model_version: str | None = None
) -> PromptBuilder | MessageBuilder:
    """What builds the prompts of a study: token ids, or messages for a server that makes prompts of them.

    Args:
        model_version: of the model's files, which are listed if it is not known.
    """
    if study.model.uses_chat_api:
        return MessageBuilder(study.data.wording, max_length=study.model.max_length, reserve=max_new_tokens)
    # The files as they are now: in a notebook, they may have changed since the last call.
    return _token_builder(study, max_new_tokens, model_version or files_version(study.model))


@functools.lru_cache(maxsize=2)
def _token_builder(study: Study, max_new_tokens: int, _version: str) -> PromptBuilder:
    """Loaded once in a process, which may run many tasks, for each version of the model's files.

    In a thread: Ray 2.60 cancels a task by interrupting the main thread. In the middle of importing torch, that would
    leave a process which can never import it and which Ray gives further tasks.
    """

    def load() -> PromptBuilder:
        from pos2distill.models.prompts import load_prompt_builder

        return load_prompt_builder(study, reserve=max_new_tokens)

    with ThreadPoolExecutor(1, "prompts") as thread:
        return thread.submit(load).result()
