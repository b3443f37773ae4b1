"""Training rows: the rows of a sample, and which rows of a global batch belong to which rank."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from pos2distill.config import Study
from pos2distill.errors import UserError
from pos2distill.losses.objectives import ANCHOR
from pos2distill.models.chat import model_end_of_turn_id
from pos2distill.records import Example, Logprobs, Slots, Tokens, example_from_row
from pos2distill.tasks.permutations import advantageous_slots, slots_to_index, teacher_slots, trivial_slots
from pos2distill.tasks.prompts import PromptBuilder


@dataclass(frozen=True, slots=True)
class Sample:
    """An example and a kept answer to one of its prompts.

    Attributes:
        slots: slots of the gold documents in the prompt that was answered: the advantageous ones, except in on-policy
            methods.
        teacher_prompt_ids: the prompt that the teacher reads (the store's column `prompt_ids`). It is the answered one,
            except in on-policy methods (the advantageous one) and with `method.teacher_slot: random` (one with the gold
            documents at random slots).
        response_ids: the answer.
        hidden: the base model's hidden states at the response, as `hidden_to_bytes` encodes them.
        hidden_dtype: the dtype of `hidden`.
        top_ids: (S * K,), the K most likely tokens at each of the first S positions of the response.
        top_logprobs: (S * K,), their log-probabilities by the base model.
    """

    example: Example
    slots: Slots
    teacher_prompt_ids: Tokens
    response_ids: Tokens
    hidden: bytes | None
    hidden_dtype: str | None
    top_ids: Tokens | None
    top_logprobs: Logprobs | None


RowKey = tuple[Sample, Slots]
"""Identifies a training row: its sample, and the slots of its gold documents."""


@dataclass(frozen=True, slots=True)
class Row:
    """One training row: the student's prompt with the gold documents at `slots`, and the response.

    Attributes:
        sample: the sample this row was built from.
        slots: slots of the gold documents.
        slot_id: a number that identifies `slots`; for a single slot, the slot itself. ANCHOR on an anchor row, whose
            prompt is the advantageous prompt. PADDING on rows that only fill up a rank and have no weight.
        prompt_ids: the student's prompt.
        response_ids: the sampled response, or for SFT the data set's answer. With stored top-k log-probabilities, the
            response as far as they reach.
    """

    sample: Sample
    slots: Slots
    slot_id: int
    prompt_ids: Tokens
    response_ids: Tokens

    @property
    def length(self) -> int:
        """Tokens of prompt and response."""
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def group(self) -> str:
        """Neighboring rows of one group, which is an example's, are packed with common prefixes once."""
        return self.sample.example.example_id


class RowBuilder:
    """Lists the rows of a sample, and builds a row on demand.

    Args:
        build_prompt: the same as in sampling.
        study: method and seed.
    """

    def __init__(self, build_prompt: PromptBuilder, study: Study) -> None:
        self.build_prompt = build_prompt
        self.study = study

    def keys(self, sample: Sample) -> list[RowKey]:
        """The anchor row, if the method has one, then K trivial rows, drawn from the seed and the example's id.

        On-policy, a row of each of these prompts has a sample of its own.
        """
        if self.study.method.spec.on_policy:
            return [(sample, sample.slots)]
        keys = [(sample, slots) for slots in trivial_slots(self.study, sample.example)]
        if self.study.method.anchor_weight:
            keys.insert(0, (sample, advantageous_slots(self.study, sample.example)))
        return keys

    def row(self, key: RowKey) -> Row:
        """Build one row: arrange the documents, render and tokenize the prompt."""
        sample, slots = key
        response_ids = self._response(sample)
        is_anchor = slots == advantageous_slots(self.study, sample.example)
        # The stored prompt, not one that is built again: training may reshuffle distractors, sampling does not.
        if is_anchor and slots == teacher_slots(self.study, sample.example):
            return Row(sample, slots, ANCHOR, sample.teacher_prompt_ids, response_ids)
        order = self.study.method.distractor_order
        prompt_ids = self.build_prompt(
            sample.example,
            self.study.data.documents,
            slots,
            order=0 if order == "fixed" else order,
            seed=self.study.seed,
        )
        slot_id = ANCHOR if is_anchor else _slot_id(slots, self.study.data.documents)
        return Row(sample, slots, slot_id, prompt_ids, response_ids)

    def _response(self, sample: Sample) -> Tokens:
        method = self.study.method
        if method.spec.target == "gold":
            return self._gold_response(sample.example)
        if method.teacher_topk:
            if sample.top_ids is None:
                raise UserError(
                    f"the sample of example {sample.example.example_id} has no top-k log-probabilities; delete the "
                    f"samples and sample again with method.teacher=topk"
                )
            known_positions = len(sample.top_ids) // method.teacher_topk
            return sample.response_ids[:known_positions]
        return sample.response_ids

    def _gold_response(self, example: Example) -> Tokens:
        """The data set's answer in the form in which the model answers."""
        answer = example.answers[0]
        # Under exact match the model is prompted for a chain of thought that ends in this sentence.
        if self.study.data.metric == "em":
            answer = f"The answer is: {answer}"
        # Without special tokens, since the prompt already opens the assistant's turn.
        ids = self.build_prompt.tokenizer(answer, add_special_tokens=False)["input_ids"]
        # Sampled responses end with this token too.
        return np.asarray([*ids, self._end_of_turn], np.int32)

    @functools.cached_property
    def _end_of_turn(self) -> int:
        return model_end_of_turn_id(self.study.model, self.build_prompt.tokenizer)


def decode_samples(table: pa.Table) -> list[Sample | None]:
    """Decode a table of `SAMPLE_SCHEMA`; None for records that were not kept."""
    names = (
        "outcome",
        "example",
        "slots",
        "prompt_ids",
        "response_ids",
        "hidden",
        "hidden_dtype",
        "top_ids",
        "top_logprobs",
    )
    samples: list[Sample | None] = []
    # Not `to_pylist`, which would make a Python object of every token id.
    for scalars in zip(*(table[name] for name in names), strict=True):
        record = dict(zip(names, scalars, strict=True))
        if record["outcome"].as_py() != "kept":
            samples.append(None)
            continue
        samples.append(
            Sample(
                example=example_from_row(record["example"].as_py()),
                slots=tuple(record["slots"].as_py()),
                teacher_prompt_ids=_values(record["prompt_ids"]),
                response_ids=_values(record["response_ids"]),
                hidden=record["hidden"].as_py(),
                hidden_dtype=record["hidden_dtype"].as_py(),
                top_ids=_values(record["top_ids"]),
                top_logprobs=_values(record["top_logprobs"]),
            )
        )
    return samples


def row_keys_of_rank(keys: Sequence[RowKey], rank: int, world_size: int) -> list[tuple[RowKey, bool]]:
    """One rank's rows of a global batch, as (key, whether it is padding).

    Ranks take consecutive rows, equally many, since ZeRO-3 requires every rank in every pass; the last ranks are
    filled up with copies of the first row. Rows of one example are neighbors, and are separated only at the end of a
    rank's rows. (Whole examples for each rank would leave ranks idle when their number does not divide the examples.)
    """
    size = math.ceil(len(keys) / world_size)
    own = keys[rank * size : (rank + 1) * size]
    rows = [(key, False) for key in own]
    padding = [(keys[0], True)] * (size - len(own))
    return rows + padding


def _slot_id(slots: Slots, documents: int) -> int:
    """A number for a tuple of slots: those of one slot come first, then pairs, and so on."""
    shorter = sum(math.perm(documents, hops) for hops in range(1, len(slots)))
    return shorter + slots_to_index(slots, documents)


def _values(scalar: Any) -> Any:
    """The numbers of an Arrow list scalar as an array; None where it is null."""
    if not scalar.is_valid:
        return None
    return scalar.values.to_numpy()
