"""Samples fanned out to rows, and rows laid out in global batches.

Which row stands at which place is a pure function of (seed, epoch, place): no worker, cut or clock moves it.
"""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from torch import Tensor

from pos2distill.config import Study
from pos2distill.errors import UserError
from pos2distill.losses.objectives import ANCHOR
from pos2distill.models.load import end_of_turn_id
from pos2distill.models.responses import Tokens, hidden_from_bytes
from pos2distill.randomness import derive_generator
from pos2distill.records import Example, Slots
from pos2distill.tasks.permutations import draw_trivial_slots, slots_to_index
from pos2distill.tasks.prompts import PromptBuilder

RowKey = tuple[int, Slots]
"""A training row: the index of its sample, and where its gold documents stand."""


@dataclass(frozen=True, slots=True)
class Row:
    """One training row: the student's prompt with the gold documents at `slots`, and the response.

    slot_id: one number for the slots, of a single slot that slot; ANCHOR on an anchor row, whose prompt is the
    advantageous prompt itself; FILLER on rows that only make ranks equally long and count for nothing.
    response_ids: the advantaged response, or of SFT the data set's answer. teacher_TH: the cached teacher's states.
    """

    example_id: str
    slots: Slots
    slot_id: int
    prompt_ids: Tokens
    response_ids: Tokens
    teacher_prompt_ids: Tokens
    teacher_TH: Tensor | None


class RowSource:
    """The rows of a training run, built when they are asked for.

    Args:
        examples: by id; must hold every kept sample's example.
        samples: a table of `SAMPLE_SCHEMA`; rows that were not kept are passed over.
        build_prompt: as in sampling.
        study: method, seed and batch size.
    """

    def __init__(
        self, examples: Mapping[str, Example], samples: pa.Table, build_prompt: PromptBuilder, study: Study
    ) -> None:
        self.examples = examples
        self.build_prompt = build_prompt
        self.study = study
        self.samples = samples.filter(pa.compute.field("outcome") == "kept").sort_by("example_id")
        self.example_ids: list[str] = self.samples["example_id"].to_pylist()
        if not self.example_ids:
            raise UserError("no sample was kept, so there is nothing to train on")

    @property
    def rows_per_epoch(self) -> int:
        """K trivial rows an example, and one anchor row where lambda is not 0."""
        return len(self.example_ids) * (self.study.method.k + (self.study.method.anchor > 0))

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run; the same for every method."""
        places = len(self.example_ids) * (self.study.method.k + 1)
        return self.study.training.epochs * math.ceil(places / self.study.training.batch_rows)

    def global_batches(self, epoch: int) -> Iterator[list[RowKey]]:
        """The epoch's global batches: windows over the shuffled examples, each with its anchor row and K trivial rows.

        Rows of one example stay together, so that a micro-batch shares its teacher; the last batch may be short. Anchor
        rows of methods without an anchor keep their places in the windows but are not built: equal steps, less work.
        """
        order = derive_generator(self.study.seed, "epoch", epoch).permutation(len(self.example_ids))
        keys = [(int(index), slots) for index in order for slots in self._slots(int(index))]
        size = self.study.training.batch_rows
        for start in range(0, len(keys), size):
            window = keys[start : start + size]
            yield window if self.study.method.anchor else [key for key in window if not self._is_anchor(key)]

    def row(self, key: RowKey) -> Row:
        """Build one row: arrange the documents, render and tokenise the prompt."""
        index, slots = key
        sample = {name: self.samples[name][index] for name in self.samples.column_names}
        example = self.examples[self.example_ids[index]]
        response_ids = _tokens(sample["response_ids"])
        teacher_prompt_ids = _tokens(sample["prompt_ids"])
        prompt_ids, slot_id = teacher_prompt_ids, ANCHOR
        if not self._is_anchor(key):
            slot_id = _slot_id(slots, self.study.data.documents)
            prompt_ids = self.build_prompt(
                example,
                self.study.data.documents,
                slots,
                order=self.study.method.distractors,
                seed=self.study.seed,
            )
        teacher_TH = None
        if self.study.method.needs_teacher and (data := sample["hidden"].as_py()) is not None:
            teacher_TH = hidden_from_bytes(data, sample["hidden_dtype"].as_py(), len(response_ids))
        if self.study.method.name == "sft":
            response_ids = self._gold_response(example)
        return Row(example.example_id, slots, slot_id, prompt_ids, response_ids, teacher_prompt_ids, teacher_TH)

    def _gold_response(self, example: Example) -> Tokens:
        """The data set's answer as the model would say it: what SFT trains on."""
        answer = example.answers[0] if self.study.data.metric == "sub_em" else f"The answer is: {example.answers[0]}"
        tokenizer = self.build_prompt.tokenizer
        ids = tokenizer(answer, add_special_tokens=False)["input_ids"]
        return np.asarray([*ids, self._end_of_turn], np.int32)

    @functools.cached_property
    def _end_of_turn(self) -> int:
        return end_of_turn_id(self.build_prompt.tokenizer)

    def _slots(self, index: int) -> tuple[Slots, ...]:
        advantageous = self._advantageous(index)
        trivial = draw_trivial_slots(
            self.example_ids[index],
            documents=self.study.data.documents,
            advantageous=advantageous,
            k=self.study.method.k,
            seed=self.study.seed,
        )
        return (advantageous, *trivial)

    def _advantageous(self, index: int) -> Slots:
        return self.study.advantageous(len(self.examples[self.example_ids[index]].golds))

    def _is_anchor(self, key: RowKey) -> bool:
        return key[1] == self._advantageous(key[0])


def rank_share(keys: Sequence[RowKey], rank: int, world: int) -> list[tuple[RowKey, bool]]:
    """The part of a global batch that one rank works on, as (key, whether it is filler).

    Contiguous and equally long on all ranks, since ZeRO-3 needs every rank in every pass; the last ranks are filled up
    with copies of the first row.
    """
    size = math.ceil(len(keys) / world)
    own = list(keys[rank * size : (rank + 1) * size])
    return [(key, False) for key in own] + [(keys[0], True)] * (size - len(own))


def _slot_id(slots: Slots, documents: int) -> int:
    """Tuples of different lengths have different ids: those of one slot come first, then pairs, and so on."""
    shorter = sum(math.perm(documents, hops) for hops in range(1, len(slots)))
    return shorter + slots_to_index(slots, documents)


def _tokens(value: Any) -> Tokens:
    tokens: Tokens = value.values.to_numpy()
    return tokens
