"""Samples fanned out to rows, and rows laid out in global batches.

Which row stands at which place is a pure function of (seed, epoch, place): no worker, cut or clock moves it.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from pos2distill.config import Study
from pos2distill.errors import UserError
from pos2distill.models.responses import Tokens, hidden_from_bytes
from pos2distill.randomness import derive_generator
from pos2distill.records import Example
from pos2distill.tasks.permutations import draw_trivial_slots
from pos2distill.tasks.prompts import PromptBuilder


@dataclass(frozen=True, slots=True)
class Row:
    """One training row: the student's prompt with the gold document at `slot`, and the advantaged response.

    On an anchor row, prompt_ids are the advantageous prompt itself. teacher_TH: the cached teacher's hidden states.
    `filler` rows only make ranks equally long: they count for nothing.
    """

    example_id: str
    slot: int
    prompt_ids: Tokens
    response_ids: Tokens
    teacher_prompt_ids: Tokens
    teacher_TH: Tensor | None
    filler: bool = False


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
        """K trivial rows and one anchor row an example."""
        return len(self.example_ids) * (self.study.method.k + 1)

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.study.training.epochs * math.ceil(self.rows_per_epoch / self.study.training.batch_rows)

    def global_batches(self, epoch: int) -> Iterator[list[tuple[int, int]]]:
        """The epoch's global batches as (index of the sample, slot), windows over the shuffled examples.

        Rows of one example stay together, so that a micro-batch shares its teacher; the last batch may be short.
        """
        order = derive_generator(self.study.seed, "epoch", epoch).permutation(len(self.example_ids))
        keys = [(int(index), slot) for index in order for slot in self._slots(int(index))]
        size = self.study.training.batch_rows
        for start in range(0, len(keys), size):
            yield keys[start : start + size]

    def row(self, key: tuple[int, int]) -> Row:
        """Build one row: arrange the documents, render and tokenise the prompt."""
        index, slot = key
        sample = {name: self.samples[name][index] for name in self.samples.column_names}
        example = self.examples[self.example_ids[index]]
        response_ids = _tokens(sample["response_ids"])
        teacher_prompt_ids = _tokens(sample["prompt_ids"])
        prompt_ids = teacher_prompt_ids
        if slot != self.study.advantageous_slot:
            prompt_ids = self.build_prompt(
                example,
                self.study.data.documents,
                slot,
                order=self.study.method.distractors,
                seed=self.study.seed,
            )
        teacher_TH = None
        if (data := sample["hidden"].as_py()) is not None:
            teacher_TH = hidden_from_bytes(data, sample["hidden_dtype"].as_py(), len(response_ids))
        return Row(example.example_id, slot, prompt_ids, response_ids, teacher_prompt_ids, teacher_TH)

    def _slots(self, index: int) -> tuple[int, ...]:
        advantageous = self.study.advantageous_slot
        trivial = draw_trivial_slots(
            self.example_ids[index],
            documents=self.study.data.documents,
            advantageous=advantageous,
            k=self.study.method.k,
            seed=self.study.seed,
        )
        return (advantageous, *trivial)


def rank_share(keys: Sequence[tuple[int, int]], rank: int, world: int) -> list[tuple[tuple[int, int], bool]]:
    """The part of a global batch that one rank works on, as (key, whether it is filler).

    Contiguous and equally long on all ranks, since ZeRO-3 needs every rank in every pass; the last ranks are filled up
    with copies of the first row.
    """
    size = math.ceil(len(keys) / world)
    own = list(keys[rank * size : (rank + 1) * size])
    return [(key, False) for key in own] + [(keys[0], True)] * (size - len(own))


def _tokens(value: Any) -> Tokens:
    tokens: Tokens = value.values.to_numpy()
    return tokens


def slots_of(rows: Sequence[Row]) -> Tensor:
    """(N,) int64 slots of rows; -1 for filler."""
    return torch.tensor([-1 if row.filler else row.slot for row in rows])
