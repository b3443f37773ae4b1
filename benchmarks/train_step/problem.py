"""What is measured: a random Llama, made-up examples, and one R1 step of the real training loop on them.

Shapes: L tokens of a row, T response tokens of all rows, V vocabulary, H hidden size.
"""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
from pos2distill.training.distributed import DistContext
from pos2distill.training.loader import Action, Batch, TrainingProgress
from pos2distill.training.loop import StepRecord, Trainer
from pos2distill.training.rows import Row, RowKey, Sample
from pos2distill.training.strategies import build_strategy
from pos2distill.training.strategies.protocol import Strategy
from pos2distill.training.teachers import build_teacher

FRACTION = 1e-9
"""Of the run that is completed, for every step: the learning rate is always the full one."""


@dataclass(frozen=True, slots=True)
class Size:
    """How large the model and a step are. document_tokens: the mean; lengths vary by a third around it."""

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
        """Of a step."""
        return self.examples * (self.k + 1)

    def llama(self) -> LlamaConfig:
        """Tied embeddings, as small Llamas have them; weights large enough for predictions that differ by slot."""
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
    "cpu": Size(512, 1408, 14, 8, 4, 32000, 20, 50, 20, 2, 4, 4, "float32"),
    "cuda": Size(2048, 5632, 28, 16, 8, 32000, 20, 145, 20, 6, 4, 4, "bfloat16"),
}


def make_study(size: Size, folder: Path, *, teacher: str = "cached") -> Study:
    """R1 with the paper's settings on the model in `folder`, which is made if it is not there."""
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
    """Made-up examples, and the training rows that they fan out to; in place of a store and a `RowBuilder`."""

    def __init__(self, size: Size, study: Study, device: torch.device) -> None:
        self.size = size
        random = np.random.default_rng(1)
        spread = size.document_tokens // 3

        def draw(tokens: int) -> Tokens:
            return random.integers(3, size.vocabulary, tokens).astype(np.int32)

        lengths = random.integers(size.document_tokens - spread, size.document_tokens + spread + 1, 64)
        self.pieces = [
            [draw(int(length)) for length in random.choice(lengths, size.documents)] for _ in range(size.examples)
        ]
        self.question = [draw(24) for _ in range(size.examples)]
        # Where slots drawn at random stand on average, so that what rows share is not a matter of the draw.
        slots: list[Slots] = [(size.documents * (each + 1) // (size.k + 1),) for each in range(size.k)]
        self.slots = [(0,), *slots]
        self.responses = [draw(size.response_tokens) for _ in range(size.examples)]
        prompts = [self.prompt(index, (0,)) for index in range(size.examples)]
        states: Sequence[torch.Tensor | None] = [None] * size.examples
        if study.method.teacher == "cached":
            teacher = TeacherEncoder(study.model, device=str(device), threads=torch.get_num_threads())
            states = [teacher([prompts[index]], [self.responses[index]])[0] for index in range(size.examples)]
        self.samples = tuple(
            Sample(
                Example(str(index), "", (), ()),
                prompts[index],
                self.responses[index],
                None if hidden_TH is None else hidden_to_bytes(hidden_TH),
                study.model.dtype,
                top_ids=None,
                top_logprobs=None,
            )
            for index, hidden_TH in enumerate(states)
        )

    def prompt(self, index: int, slots: Slots) -> Tokens:
        """The documents with the gold one, which is the first, at its slot; then the question."""
        gold, *others = self.pieces[index]
        others.insert(slots[0], gold)
        return np.concatenate([*others, self.question[index]])

    def keys(self, sample: Sample) -> list[RowKey]:
        """As `RowBuilder.keys`."""
        return [(sample, slots) for slots in self.slots]

    def row(self, key: RowKey) -> Row:
        """As `RowBuilder.row`."""
        sample, slots = key
        index = int(sample.example.example_id)
        slot_id = slots[0] or ANCHOR
        prompt = self.prompt(index, slots)
        return Row(sample, slots, slot_id, prompt, sample.response_ids)

    def rows(self) -> list[Row]:
        """Those of one step."""
        return [self.row(key) for sample in self.samples for key in self.keys(sample)]

    def batches(self, _: TrainingProgress) -> Iterator[Batch]:
        """As `BatchLoader.batches`: one batch that holds everything."""
        yield Batch(0, np.arange(len(self.samples)), self.samples, FRACTION, Action.CONTINUE)


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
        self.study, self.questions, self.dist = study, questions, dist or DistContext()
        tokens = [len(row.prompt_ids) + len(row.response_ids) for row in questions.rows()]
        self.trainers = TrainersSection(
            strategy=strategy,
            micro_batch_tokens=size.micro_batch_rows * max(tokens),
            gradient_checkpointing=size.gradient_checkpointing,
            threads=torch.get_num_threads(),
        )
        self.strategy: Strategy = build_strategy(study, self.trainers, device)
        self.teacher = build_teacher(study, self.strategy.frozen_states, device)
        self.progress = TrainingProgress.at_start(size.examples)

    def __call__(self) -> float:
        """Returns the step's loss."""
        records: list[StepRecord] = []
        build: Any = self.questions
        loader: Any = self.questions
        trainer = Trainer(self.study, self.trainers, build, self.strategy, self.teacher, self.dist)
        trainer.train(loader, self.progress, [records.append])
        return records[0].loss


def model_folder() -> tempfile.TemporaryDirectory[str]:
    """Where the random model lies while a benchmark runs."""
    return tempfile.TemporaryDirectory(prefix="train-step-")
