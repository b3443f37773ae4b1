"""The measured problem: a random Llama, made-up examples, and one R1 step of the real training loop on them.

Shapes: T response tokens of a sample, H hidden size.
"""

import bisect
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pos2distill.config import DataSection, MethodSection, ModelSection, Study, TrainersSection, TrainingSection
from pos2distill.losses.objectives import ANCHOR
from pos2distill.models.hidden_states import hidden_to_bytes
from pos2distill.records import Example, Slots, Tokens
from pos2distill.sampling.teacher_encoder import TeacherEncoder
from pos2distill.training.batches import Batch
from pos2distill.training.distributed import DistContext
from pos2distill.training.loop import Action, TrainingLoop
from pos2distill.training.micro_batches import added_token_counter, count_micro_batches
from pos2distill.training.progress import TrainingProgress
from pos2distill.training.rows import Row, RowKey, Sample
from pos2distill.training.step_record import StepRecord
from pos2distill.training.strategies import build_strategy
from pos2distill.training.strategies.protocol import Strategy
from pos2distill.training.teachers import build_teacher

FRACTION = 1e-9
"""The fraction of the run that is completed, the same for every step: all steps have the full learning rate."""


@dataclass(frozen=True, slots=True)
class Size:
    """The size of the model and of a step.

    document_tokens: the mean; lengths vary by a third around it.
    examples: number of examples in a step.
    k: number of trivial rows of an example.
    micro_batch_rows: the number of micro-batches is the same as with this number of rows in each.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_value_heads: int
    vocabulary: int
    documents: int
    document_tokens: int
    response_tokens: int
    examples: int
    k: int
    micro_batch_rows: int
    precision: str
    gradient_checkpointing: bool = True

    @property
    def rows(self) -> int:
        """Rows of a step."""
        return self.examples * (self.k + 1)

    def as_dict(self) -> dict[str, Any]:
        """The fields, for a report."""
        return asdict(self)

    def llama(self) -> LlamaConfig:
        """A Llama with tied embeddings, and with weights so large that its predictions depend on the slot."""
        return LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_value_heads,
            max_position_embeddings=16384,
            initializer_range=1.5 / self.hidden**0.5,
            tie_word_embeddings=True,
        )


SIZES = {
    "cpu": Size(
        hidden=512,
        intermediate=1408,
        layers=14,
        heads=8,
        key_value_heads=4,
        vocabulary=32000,
        documents=20,
        document_tokens=50,
        response_tokens=20,
        examples=2,
        k=4,
        micro_batch_rows=4,
        precision="float32",
    ),
    "cuda": Size(
        hidden=2048,
        intermediate=5632,
        layers=28,
        heads=16,
        key_value_heads=8,
        vocabulary=32000,
        documents=20,
        document_tokens=145,
        response_tokens=20,
        examples=6,
        k=4,
        micro_batch_rows=4,
        precision="bfloat16",
    ),
}


def make_study(size: Size, folder: Path, *, teacher: str = "cached") -> Study:
    """R1 with the paper's settings on the model in `folder`, which is created if it does not exist."""
    if not (folder / "config.json").exists():
        torch.manual_seed(0)
        LlamaForCausalLM(size.llama()).save_pretrained(folder)
    return Study(
        model=ModelSection(path=str(folder), dtype=size.precision, engine="hf"),
        data=DataSection(format="jsonl", path="none", prompt="plain", documents=size.documents),
        method=MethodSection(name="r1", k=size.k, teacher=teacher),
        training=TrainingSection(
            global_batch_rows=size.rows, precision=size.precision, learning_rate=1e-5, warmup_ratio=0
        ),
    )


class Questions:
    """Made-up examples and their training rows, in place of a `BatchLoader` and a `RowBuilder`."""

    def __init__(self, size: Size, study: Study, device: torch.device) -> None:
        self.size = size
        random = np.random.default_rng(1)
        spread = size.document_tokens // 3

        def draw(tokens: int) -> Tokens:
            return random.integers(3, size.vocabulary, tokens).astype(np.int32)

        lengths = random.integers(size.document_tokens - spread, size.document_tokens + spread + 1, 64)
        self.documents = []
        for _ in range(size.examples):
            self.documents.append([draw(int(length)) for length in random.choice(lengths, size.documents)])
        self.questions = [draw(24) for _ in range(size.examples)]
        # The mean slots of a random draw, so that the shared prefixes have their mean length.
        self.slots: list[Slots] = [(0,)]
        for number in range(1, size.k + 1):
            self.slots.append((size.documents * number // (size.k + 1),))
        self.responses = [draw(size.response_tokens) for _ in range(size.examples)]
        self.samples = self._make_samples(study, device)

    def _make_samples(self, study: Study, device: torch.device) -> tuple[Sample, ...]:
        teacher = None
        if study.method.teacher == "cached":
            teacher = TeacherEncoder(
                study.model,
                alignment=study.method.alignment,
                threads=torch.get_num_threads(),
                device=str(device),
            )
        samples = []
        for index, response in enumerate(self.responses):
            prompt = self.prompt(index, (0,))
            hidden = None
            if teacher is not None:
                hidden_TH = teacher.encode([prompt], [response])[0]
                hidden = hidden_to_bytes(hidden_TH)
            example = Example(str(index), "", (), ())
            samples.append(
                Sample(example, (0,), prompt, response, hidden, study.model.dtype, top_ids=None, top_logprobs=None)
            )
        return tuple(samples)

    def prompt(self, index: int, slots: Slots) -> Tokens:
        """The documents with the gold one (the first) at its slot, then the question."""
        gold, *others = self.documents[index]
        others.insert(slots[0], gold)
        return np.concatenate([*others, self.questions[index]])

    def keys(self, sample: Sample) -> list[RowKey]:
        """See `RowBuilder.keys`."""
        return [(sample, slots) for slots in self.slots]

    def row(self, key: RowKey) -> Row:
        """See `RowBuilder.row`."""
        sample, slots = key
        index = int(sample.example.example_id)
        slot_id = slots[0] or ANCHOR
        prompt = self.prompt(index, slots)
        return Row(sample, slots, slot_id, prompt, sample.response_ids)

    def rows(self) -> list[Row]:
        """All rows of one step."""
        rows = []
        for sample in self.samples:
            for key in self.keys(sample):
                rows.append(self.row(key))
        return rows

    def batches(self, _: TrainingProgress) -> Iterator[Batch]:
        """See `BatchLoader.batches`. One batch of all samples."""
        yield Batch(0, np.arange(len(self.samples)), self.samples, FRACTION)


def tokens_for(rows: Sequence[Row], count: int) -> int:
    """The smallest `micro_batch_tokens` with which one rank's rows make at most this number of micro-batches.

    A plain loop makes the same number. Shared prefixes count once, so micro-batches need not have equally many rows.
    """
    tokens = added_token_counter(rows)
    limits = range(1, sum(row.length for row in rows) + 1)
    return limits[bisect.bisect_left(limits, -count, key=lambda limit: -count_micro_batches(tokens, len(rows), limit))]


class OurStep:
    """One step of the product's own training loop."""

    def __init__(
        self,
        size: Size,
        study: Study,
        questions: Questions,
        device: torch.device,
        *,
        dist: DistContext | None = None,
        strategy: str = "torch",
    ) -> None:
        self.study, self.questions = study, questions
        self.dist = dist if dist is not None else DistContext()
        self.trainers = TrainersSection(
            strategy=strategy,
            micro_batch_tokens=tokens_for(questions.rows(), math.ceil(size.rows / size.micro_batch_rows)),
            gradient_checkpointing=size.gradient_checkpointing,
            threads=torch.get_num_threads(),
        )
        self.strategy: Strategy = build_strategy(study, self.trainers, device, study.model)
        self.teacher = build_teacher(study, self.strategy.base_states, device)
        self.progress = TrainingProgress.at_start(size.examples)

    def __call__(self) -> float:
        """Make the step and return its loss."""
        records: list[StepRecord] = []
        build: Any = self.questions
        loader: Any = self.questions
        trainer = TrainingLoop(self.study, self.trainers, build, self.strategy, self.teacher, self.dist)
        trainer.train(loader, self.progress, records.append, lambda *_: Action.CONTINUE, lambda _: None)
        return records[0].loss


def model_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder for the random model while a benchmark runs."""
    return tempfile.TemporaryDirectory(prefix="train-step-")
