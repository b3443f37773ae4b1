"""From a sample to its training rows, and from the rows of a global batch to one rank's share."""

import functools
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from pos2distill.config import Study
from pos2distill.errors import UserError
from pos2distill.losses.objectives import ANCHOR
from pos2distill.models.chat import end_of_turn_id
from pos2distill.records import Example, Floats, Slots, Tokens, example_from_row
from pos2distill.tasks.permutations import draw_trivial_slots, slots_to_index
from pos2distill.tasks.prompts import PromptBuilder


@dataclass(frozen=True, slots=True)
class Sample:
    """A kept answer. What a cached teacher or the sampler knows of the frozen model at it is as the store keeps it."""

    example: Example
    prompt_ids: Tokens
    response_ids: Tokens
    hidden: bytes | None
    hidden_dtype: str | None
    top_ids: Tokens | None
    top_logprobs: Floats | None


RowKey = tuple[Sample, Slots]
"""A training row: its sample, and where its gold documents stand."""


@dataclass(frozen=True, slots=True)
class Row:
    """One training row of a sample: the student's prompt with the gold documents at `slots`, and the response.

    slot_id: one number for the slots, of a single slot that slot; ANCHOR on an anchor row, whose prompt is the
    advantageous prompt itself; FILLER on rows that only make ranks equally long and count for nothing.
    response_ids: the advantaged response, or of SFT the data set's answer; where the sampler is the teacher, the
    response as far as it knows the frozen model there.
    """

    sample: Sample
    slots: Slots
    slot_id: int
    prompt_ids: Tokens
    response_ids: Tokens


class RowBuilder:
    """Fans a sample out to its rows, and builds a row when it is asked for.

    Args:
        build_prompt: as in sampling.
        study: method and seed.
    """

    def __init__(self, build_prompt: PromptBuilder, study: Study) -> None:
        self.build_prompt = build_prompt
        self.study = study

    def keys(self, sample: Sample) -> list[RowKey]:
        """The anchor row, where the method has one, and K trivial rows, drawn by the seed and the example alone."""
        advantageous = self.study.advantageous(len(sample.example.golds))
        trivial = draw_trivial_slots(
            sample.example.example_id,
            documents=self.study.data.documents,
            advantageous=advantageous,
            k=self.study.method.k,
            seed=self.study.seed,
        )
        anchor = [advantageous] if self.study.method.anchor_weight else []
        return [(sample, slots) for slots in (*anchor, *trivial)]

    def row(self, key: RowKey) -> Row:
        """Build one row: arrange the documents, render and tokenise the prompt."""
        sample, slots = key
        example, prompt_ids, slot_id = sample.example, sample.prompt_ids, ANCHOR
        advantageous = self.study.advantageous(len(example.golds))
        if slots != advantageous:
            slot_id = _slot_id(slots, self.study.data.documents)
            prompt_ids = self.build_prompt(
                example,
                self.study.data.documents,
                slots,
                order=self.study.method.distractor_order,
                seed=self.study.seed,
            )
        return Row(sample, slots, slot_id, prompt_ids, self._response(sample))

    def _response(self, sample: Sample) -> Tokens:
        if self.study.method.spec.target == "gold":
            return self._gold_response(sample.example)
        if k := self.study.method.teacher_topk:
            if sample.top_ids is None:
                raise UserError("the samples hold no likeliest tokens; sample again with method.teacher=topk")
            return sample.response_ids[: len(sample.top_ids) // k]
        return sample.response_ids

    def _gold_response(self, example: Example) -> Tokens:
        """The data set's answer as the model would say it: what SFT trains on."""
        answer = example.answers[0] if self.study.data.metric == "sub_em" else f"The answer is: {example.answers[0]}"
        tokenizer = self.build_prompt.tokenizer
        ids = tokenizer(answer, add_special_tokens=False)["input_ids"]
        return np.asarray([*ids, self._end_of_turn], np.int32)

    @functools.cached_property
    def _end_of_turn(self) -> int:
        return end_of_turn_id(self.build_prompt.tokenizer)


def kept_samples(table: pa.Table) -> list[Sample | None]:
    """Rows of `SAMPLE_SCHEMA`; None for answers that are not trained on."""
    names = ("example", "prompt_ids", "response_ids", "hidden", "hidden_dtype", "top_ids", "top_logprobs")
    rows = zip(*(table[name] for name in names), strict=True)
    return [
        Sample(
            example_from_row(example.as_py()),
            _values(prompt),
            _values(response),
            hidden.as_py(),
            dtype.as_py(),
            _values(top_ids),
            _values(top_logprobs),
        )
        if outcome == "kept"
        else None
        for outcome, (example, prompt, response, hidden, dtype, top_ids, top_logprobs) in zip(
            table["outcome"].to_pylist(), rows, strict=True
        )
    ]


def examples_per_batch(study: Study) -> int:
    """Examples of a global batch: as many as their K + 1 rows leave room for, the same for every method.

    The index of the anchor row stays empty where the method has none: equal steps, less work.
    """
    return study.training.global_batch_rows // (study.method.k + 1)


def rows_of_rank(keys: Sequence[RowKey], rank: int, world: int) -> list[tuple[RowKey, bool]]:
    """The part of a global batch that one rank works on, as (key, whether it is filler).

    Contiguous and equally long on all ranks, since ZeRO-3 needs every rank in every pass; the last dist are filled up
    with copies of the first row. Rows of one example are neighbours, and are parted only where a rank's share ends:
    whole examples would leave ranks idle whose number does not divide that of the examples.
    """
    size = math.ceil(len(keys) / world)
    own = list(keys[rank * size : (rank + 1) * size])
    return [(key, False) for key in own] + [(keys[0], True)] * (size - len(own))


def count_parts(lengths: Sequence[int], limit: int) -> int:
    """How many consecutive parts the rows make if none holds more than `limit` tokens, a longer row alone."""
    return len(_fill(lengths, limit, 1))


def split_rows(lengths: Sequence[int], parts: int) -> list[int]:
    """The rows of each of so many consecutive parts, so that the one with most tokens has as few as possible.

    Args:
        lengths: of the rows, in tokens. parts: at most as many as rows; none is empty.
    """
    limits = range(1, sum(lengths) + 1)
    limit = limits[bisect_left(limits, True, key=lambda limit: count_parts(lengths, limit) <= parts)]
    return _fill(lengths, limit, parts)


def _fill(lengths: Sequence[int], limit: int, parts: int) -> list[int]:
    """Rows of each part where parts are filled up one by one, and later where `parts` would not come about."""
    sizes, tokens = [0], 0
    for done, length in enumerate(lengths):
        if sizes[-1] and (tokens + length > limit or len(lengths) - done <= parts - len(sizes)):
            sizes.append(0)
            tokens = 0
        sizes[-1] += 1
        tokens += length
    return sizes


def _slot_id(slots: Slots, documents: int) -> int:
    """Tuples of different lengths have different ids: those of one slot come first, then pairs, and so on."""
    shorter = sum(math.perm(documents, hops) for hops in range(1, len(slots)))
    return shorter + slots_to_index(slots, documents)


def _values(lists: Any) -> Any:
    """The numbers of a list scalar, or None where it is null."""
    return lists.values.to_numpy() if lists.is_valid else None
