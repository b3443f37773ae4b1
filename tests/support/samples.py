"""A study with a sample of each of its training examples, made without a pipeline."""

import uuid
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from pos2distill.config import Study
from pos2distill.models.architecture import torch_dtype
from pos2distill.models.chat import end_of_turn_id
from pos2distill.models.head import FrozenHead
from pos2distill.models.hidden_states import hidden_to_bytes
from pos2distill.models.load import load_tokenizer
from pos2distill.records import SAMPLE_SCHEMA, Example, Slots
from pos2distill.sampling.teacher_encoder import TeacherEncoder
from pos2distill.tasks.datasets import load_split
from pos2distill.tasks.prompts import PromptBuilder
from pos2distill.training.distributed import DistContext
from pos2distill.training.loader import BatchLoader
from pos2distill.training.rows import Row, RowBuilder, RowKey, Sample, decode_samples
from tests.support.stores import open_store


def no_stream() -> Any:
    """For a loader whose store holds everything."""
    raise AssertionError("the store holds every sample, so the stream must not be opened")


@dataclass
class Source:
    """A study with its training examples, and a store that holds a sample of each."""

    study: Study
    examples: list[Example]
    table: pa.Table
    build: RowBuilder

    def __post_init__(self) -> None:
        self.store = open_store(f"memory://{uuid.uuid4().hex}")
        self.store.append(self.table)

    @property
    def ids(self) -> pa.Array:
        return self.table["sample_id"].combine_chunks()

    def sample(self, index: int) -> Sample:
        (sample,) = decode_samples(self.table.slice(index, 1))
        assert sample is not None
        return sample

    def row(self, index: int, slots: Slots) -> Row:
        return self.build.row((self.sample(index), slots))

    def row_keys(self) -> list[RowKey]:
        return [key for index in range(len(self.examples)) for key in self.build.keys(self.sample(index))]

    def loader(self, dist: DistContext | None = None, **settings: Any) -> BatchLoader:
        return BatchLoader(self.study, self.ids, self.store, no_stream, dist or DistContext(), **settings)


def answered_source(study: Study) -> Source:
    """A source in which every training example is answered correctly, with what the study's teacher stores.

    With stored top-k log-probabilities, every third sample lacks those of the closing token, as a sample does that was
    cut at its maximum length.
    """
    tokenizer = load_tokenizer(study.model)
    build = PromptBuilder(tokenizer, study.data.prompt, max_length=512, reserve=16)
    examples = list(load_split(study.data, documents=study.data.documents, seed=study.seed).train)
    # As if all of them were kept, so no further ones were needed.
    examples = examples[: study.data.train_examples]
    slots = [study.fixed_advantageous_slots(len(example.golds)) for example in examples]
    prompts = [build(example, study.data.documents, each) for example, each in zip(examples, slots, strict=True)]
    # Responses of different lengths, so that a mean over tokens differs from a mean over rows.
    texts = [example.answers[0] + "!" * (index % 3) for index, example in enumerate(examples)]
    end = end_of_turn_id(tokenizer)
    responses = [np.asarray([*tokenizer(text)["input_ids"], end], np.int32) for text in texts]
    encoder = TeacherEncoder(study.model, alignment=study.method.alignment, threads=1, device="cpu")
    states = encoder.encode(prompts, responses)
    rows = [
        dict.fromkeys(SAMPLE_SCHEMA.names)
        | {
            "example_id": example.example_id,
            "sample_id": example.example_id,
            "example": asdict(example),
            "slots": gold_slots,
            "prompt_ids": prompt,
            "response_ids": response,
            "outcome": "kept",
            "hidden": hidden_to_bytes(hidden_TH),
            "hidden_dtype": study.model.dtype,
        }
        for example, gold_slots, prompt, response, hidden_TH in zip(
            examples, slots, prompts, responses, states, strict=True
        )
    ]
    if k := study.method.teacher_topk:
        head = FrozenHead.from_checkpoint(study.model, torch_dtype(study.model.dtype))
        for index, (row, hidden_TH) in enumerate(zip(rows, states, strict=True)):
            known_SH = hidden_TH[: len(hidden_TH) - (index % 3 == 0)]
            logprobs_SK, ids_SK = head(known_SH).log_softmax(-1).topk(k)
            row |= {"top_ids": ids_SK.flatten().numpy(), "top_logprobs": logprobs_SK.flatten().numpy()}
    return Source(study, examples, pa.Table.from_pylist(rows, schema=SAMPLE_SCHEMA), RowBuilder(build, study))
