"""Fixtures of the unit tests: sample stores, and samples in them, made without a pipeline."""

import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pos2distill.config import Study
from pos2distill.models.chat import end_of_turn_id
from pos2distill.models.head import FrozenHead
from pos2distill.models.hidden_states import hidden_to_bytes
from pos2distill.models.load import load_tokenizer, torch_dtype
from pos2distill.records import SAMPLE_SCHEMA, Example, Slots
from pos2distill.sampling.teacher_encoder import TeacherEncoder
from pos2distill.store.artifacts import Artifact
from pos2distill.store.samples import SampleStore
from pos2distill.tasks.datasets import load_split
from pos2distill.tasks.prompts import PromptBuilder
from pos2distill.training.distributed import DistContext
from pos2distill.training.loader import BatchLoader
from pos2distill.training.rows import Row, RowBuilder, RowKey, Sample, kept_samples


def no_stream() -> Any:
    """For a loader whose store holds everything."""
    raise AssertionError("the store holds everything, so nobody opens the stream")


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
        return self.table["example_id"].combine_chunks()

    def sample(self, index: int) -> Sample:
        (sample,) = kept_samples(self.table.slice(index, 1))
        assert sample is not None
        return sample

    def row(self, index: int, slots: Slots) -> Row:
        return self.build.row((self.sample(index), slots))

    def row_keys(self) -> list[RowKey]:
        return [key for index in range(len(self.examples)) for key in self.build.keys(self.sample(index))]

    def loader(self, dist: DistContext | None = None, **settings: Any) -> BatchLoader:
        return BatchLoader(self.study, self.ids, self.store, no_stream, dist or DistContext(), **settings)


@pytest.fixture(params=["disk", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A fresh place for a run, on disk or on an object store."""
    return str(tmp_path / "run") if request.param == "disk" else f"memory://{uuid.uuid4().hex}/run"


def open_store(storage: str) -> SampleStore:
    """A sample store under `storage`, ready to append."""
    store = SampleStore(Artifact(storage, "samples", "f00d"))
    store.open()
    return store


def make_samples(*ids: str, **values: Any) -> pa.Table:
    """A kept sample of each id, every other column null or as given."""
    rows = [
        dict.fromkeys(SAMPLE_SCHEMA.names) | {"text": "42", "outcome": "kept", **values, "example_id": i} for i in ids
    ]
    return pa.Table.from_pylist(rows, schema=SAMPLE_SCHEMA)


@pytest.fixture
def make_source() -> Callable[[Study], Source]:
    """`make_source(study)`: every training example answered rightly, with what its teacher stores.

    Of every third answer the sampler knows all but the closing token, as of one cut at its greatest length.
    """

    def make(study: Study) -> Source:
        tokenizer = load_tokenizer(study.model)
        build = PromptBuilder(tokenizer, study.data.prompt, max_length=512, reserve=16)
        examples = load_split(study.data, documents=study.data.documents, seed=study.seed).train
        prompts = [build(example, study.data.documents, study.advantageous(len(example.golds))) for example in examples]
        # Responses of different lengths, so that a mean over tokens is no mean over rows.
        texts = [example.answers[0] + "!" * (index % 3) for index, example in enumerate(examples)]
        end = end_of_turn_id(tokenizer)
        responses = [np.asarray([*tokenizer(text)["input_ids"], end], np.int32) for text in texts]
        states = TeacherEncoder(study.model, alignment=study.method.alignment)(prompts, responses)
        rows = [
            dict.fromkeys(SAMPLE_SCHEMA.names)
            | {
                "example_id": example.example_id,
                "example": asdict(example),
                "prompt_ids": prompt,
                "response_ids": response,
                "outcome": "kept",
                "hidden": hidden_to_bytes(hidden_TH),
                "hidden_dtype": study.model.dtype,
            }
            for example, prompt, response, hidden_TH in zip(examples, prompts, responses, states, strict=True)
        ]
        if k := study.method.teacher_topk:
            head = FrozenHead.from_checkpoint(study.model, torch_dtype(study.model.dtype))
            for index, (row, hidden_TH) in enumerate(zip(rows, states, strict=True)):
                told_SH = hidden_TH[: len(hidden_TH) - (index % 3 == 0)]
                logprobs_SK, ids_SK = head(told_SH).log_softmax(-1).topk(k)
                row |= {"top_ids": ids_SK.flatten().numpy(), "top_logprobs": logprobs_SK.flatten().numpy()}
        return Source(study, examples, pa.Table.from_pylist(rows, schema=SAMPLE_SCHEMA), RowBuilder(build, study))

    return make
