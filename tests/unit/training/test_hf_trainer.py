"""`transformers.Trainer` with our losses, compared with the pipeline's own loop on the same examples."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from pos2distill.config import MethodSection, Recipe, Study
from pos2distill.losses.objectives import ANCHOR, row_coefficients
from pos2distill.models.load import load_model
from pos2distill.training.hf_trainer import PositionDistillTrainer, collate_examples, to_feature
from pos2distill.training.micro_batches import pack
from pos2distill.training.strategies.torch import TorchStrategy
from pos2distill.training.teachers import build_teacher
from tests.support.samples import Source

CPU = torch.device("cpu")


@pytest.fixture
def arguments(tmp_path: Path) -> Callable[..., TrainingArguments]:
    def make(**settings: Any) -> TrainingArguments:
        defaults = {"per_device_train_batch_size": 4, "max_grad_norm": 0.0, "use_cpu": True, "report_to": []}
        return TrainingArguments(output_dir=str(tmp_path / "out"), **{**defaults, **settings})

    return make


def move(lm: Any) -> None:
    """Away from the teacher, so that no divergence is 0."""
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.mul_(1.05)


def pipeline_loss(recipe: Recipe, source: Source, examples: int) -> tuple[float, torch.Tensor]:
    """The pipeline's objective on the first examples, and its gradient with respect to the embeddings."""
    study = recipe.study
    strategy = TorchStrategy(study, recipe.runtime.trainers, CPU, study.model)
    move(strategy.student.lm)
    teacher = build_teacher(study, strategy.base_states, CPU)
    rows = [source.build.row(key) for index in range(examples) for key in source.build.keys(source.sample(index))]
    loss_N = strategy.forward(pack(rows, study, 0), teacher(rows) if teacher else None)
    slot_id_N = torch.tensor([row.slot_id for row in rows])
    coefficient_N = row_coefficients(study.method, loss_N.detach(), torch.zeros_like(loss_N), slot_id_N)
    loss = (coefficient_N * loss_N).sum()
    loss.backward()
    embeddings: Any = strategy.student.lm.get_input_embeddings()
    return float(loss.detach()), embeddings.weight.grad


@pytest.mark.parametrize(
    "method",
    [
        {"name": "r1"},
        {"name": "r1", "weights": "official"},
        {"name": "r1", "divergence": "reverse"},
        {"name": "kl"},
        {"name": "seqkd"},
    ],
)
def test_trainer_has_the_loss_and_gradient_of_the_pipeline(
    make_recipe: Callable[..., Recipe],
    make_source: Callable[[Study], Source],
    arguments: Callable[..., TrainingArguments],
    method: dict[str, Any],
) -> None:
    recipe = make_recipe(method={**method, "k": 2})
    source, study = make_source(recipe.study), recipe.study
    lm = load_model(study.model)
    move(lm)
    trainer = PositionDistillTrainer(lm, arguments(), method=study.method, teacher=load_model(study.model))
    batch = collate_examples([to_feature(source.build, source.sample(index)) for index in range(4)])
    loss = trainer.compute_loss(lm, batch)
    loss.backward()
    expected, gradient = pipeline_loss(recipe, source, 4)
    assert expected > 0.01
    assert float(loss.detach()) == pytest.approx(expected, abs=1e-6)
    embeddings: Any = lm.get_input_embeddings()
    assert (embeddings.weight.grad - gradient).norm() < 1e-5 * gradient.norm()


def test_trainer_in_bfloat16_finds_no_divergence_of_equal_models(
    make_recipe: Callable[..., Recipe],
    make_source: Callable[[Study], Source],
    arguments: Callable[..., TrainingArguments],
) -> None:
    """From logits in bfloat16, beside a teacher in float32, it would be 6e-4 here, as large as what is distilled."""
    study = make_recipe(method={"k": 2}).study
    source = make_source(study)
    trainer = PositionDistillTrainer(
        load_model(study.model), arguments(bf16=True), method=study.method, teacher=load_model(study.model)
    )
    lm = trainer.accelerator.prepare_model(trainer.model)
    batch = collate_examples([to_feature(source.build, source.sample(index)) for index in range(4)])
    _, outputs = trainer.compute_loss(lm, batch, return_outputs=True)
    is_anchor_N = batch["slots"] == ANCHOR
    assert outputs["row_losses"][is_anchor_N].abs().max() < 1e-6
    assert outputs["row_losses"][~is_anchor_N].min() > 1e-3


def test_trainer_trains(
    make_recipe: Callable[..., Recipe],
    make_source: Callable[[Study], Source],
    arguments: Callable[..., TrainingArguments],
) -> None:
    recipe = make_recipe(method={"k": 2})
    source, study = make_source(recipe.study), recipe.study
    features = [to_feature(source.build, source.sample(index)) for index in range(len(source.examples))]
    lm, teacher = load_model(study.model), load_model(study.model)
    settings = arguments(num_train_epochs=6, learning_rate=1e-3, logging_steps=1, save_strategy="no")
    trainer = PositionDistillTrainer(lm, settings, method=study.method, teacher=teacher, train_dataset=features)
    trainer.train()
    losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
    assert len(losses) == 12
    assert losses[-1] < 0.8 * losses[0]
    # The teacher stays as it is.
    for one, other in zip(teacher.parameters(), load_model(study.model).parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("parameter", ["model", "model_init"])
def test_trainer_turns_dropout_off(arguments: Callable[..., TrainingArguments], parameter: str) -> None:
    """Else the weights would follow its noise: two equal models would differ at the answered prompt too."""
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, attention_dropout=0.1, initializer_range=0.3)  # type: ignore[arg-type]
    torch.manual_seed(0)
    teacher = LlamaForCausalLM(config)

    def copy() -> LlamaForCausalLM:
        lm = LlamaForCausalLM(config)
        lm.load_state_dict(teacher.state_dict())
        return lm

    given: dict[str, Any] = {parameter: copy() if parameter == "model" else copy}
    trainer = PositionDistillTrainer(args=arguments(), teacher=teacher, **given)
    batch = collate_examples(
        [{"prompts": [[*range(3, 23)], [*range(22, 2, -1)]], "slots": [-1, 4], "response": [5, 6]}]
    )
    lms: list[Any] = [trainer.model]
    if parameter == "model_init":
        lms.append(trainer.call_model_init())  # as when training starts
    for lm in lms:
        lm.train()
        (loss, outputs), (again, _) = (trainer.compute_loss(lm, batch, return_outputs=True) for _ in range(2))
        assert torch.equal(loss, again)
        anchor, trivial = outputs["row_losses"].tolist()
        assert anchor == pytest.approx(0, abs=1e-5)
        assert trivial > 0.1
        assert lm.config.attention_dropout == 0.1


def test_to_feature_rejects_samples_that_hold_the_prompt_of_the_teacher(
    make_recipe: Callable[..., Recipe], make_source: Callable[[Study], Source]
) -> None:
    source = make_source(make_recipe(method={"teacher_slot": "random"}).study)
    with pytest.raises(ValueError, match="a random teacher_slot are for the pipeline only"):
        to_feature(source.build, source.sample(0))


def test_collate_examples_aligns_responses_to_the_right() -> None:
    first = {"prompts": [[5, 6], [7]], "slots": [-1, 3], "response": [8, 9]}
    second = {"prompts": [[5, 6, 7]], "slots": [-1], "response": [4]}
    batch = collate_examples([first, second])
    assert batch["input_ids"].tolist() == [[5, 6, 8, 9], [0, 7, 8, 9], [5, 6, 7, 4]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [0, 1, 1, 1], [1, 1, 1, 1]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3], [0, 0, 1, 2], [0, 1, 2, 3]]
    assert batch["response_mask"].tolist() == [[True, True], [True, True], [False, True]]
    assert (batch["slots"].tolist(), batch["anchor_rows"].tolist()) == ([-1, 3, -1], [0, 0, 2])
    wrongs: list[dict[str, Any]] = [{"slots": [3, -1]}, {"response": []}]
    for wrong in wrongs:
        with pytest.raises(ValueError, match=r"^feature 0: expected the answered prompt first \(slot -1\), and a resp"):
            collate_examples([{**first, **wrong}])


def test_trainer_rejects_a_divided_head(
    make_recipe: Callable[..., Recipe], arguments: Callable[..., TrainingArguments], monkeypatch: pytest.MonkeyPatch
) -> None:
    create = Trainer.create_accelerator_and_postprocess

    def create_with_fsdp(self: Any) -> None:
        create(self)
        self.is_fsdp_enabled = True

    monkeypatch.setattr(Trainer, "create_accelerator_and_postprocess", create_with_fsdp)
    lm = load_model(make_recipe().study.model)
    with pytest.raises(ValueError, match=r"^DeepSpeed and FSDP hold no whole output head, which the loss needs"):
        PositionDistillTrainer(lm, arguments(), teacher=lm)


def test_trainer_rejects_adapters_of_the_head(
    make_recipe: Callable[..., Recipe], arguments: Callable[..., TrainingArguments]
) -> None:
    """Their part of the logits would be missing: those of the student untrained, those of the teacher not taught."""
    model = make_recipe().study.model
    adapted = get_peft_model(load_model(model), LoraConfig(r=2, target_modules=["q_proj", "lm_head"]))
    expected = r"^the output head is peft\S+Linear, expected torch.nn.Linear: it takes no adapt"
    with pytest.raises(ValueError, match=expected):
        PositionDistillTrainer(adapted, arguments(), method=MethodSection(name="seqkd"))
    with pytest.raises(ValueError, match=expected):
        PositionDistillTrainer(load_model(model), arguments(), teacher=adapted)


def test_trainer_rejects_a_head_that_is_more_than_its_weights_also_where_peft_trains_a_copy(
    make_recipe: Callable[..., Recipe], arguments: Callable[..., TrainingArguments]
) -> None:
    class Scaled(torch.nn.Module):
        def __init__(self, weight: torch.nn.Parameter) -> None:
            super().__init__()
            self.weight = weight

        def forward(self, states: torch.Tensor) -> torch.Tensor:
            return 3 * (states @ self.weight.T)

    lm = load_model(make_recipe().study.model)
    lm.set_output_embeddings(Scaled(lm.get_output_embeddings().weight))
    adapted = get_peft_model(lm, LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"]))
    for model in (lm, adapted):
        with pytest.raises(ValueError, match=r"^the output head is \S+Scaled, expected torch.nn.Linear"):
            PositionDistillTrainer(model, arguments(), method=MethodSection(name="seqkd"))


@pytest.mark.parametrize("saved", [None, ["lm_head"]], ids=["adapters", "adapters and a head"])
def test_trainer_trains_adapters_of_other_layers(
    make_recipe: Callable[..., Recipe], arguments: Callable[..., TrainingArguments], saved: list[str] | None
) -> None:
    """And a head of which peft trains a copy (`modules_to_save`)."""
    adapted = get_peft_model(
        load_model(make_recipe().study.model), LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=saved)
    )
    trainer = PositionDistillTrainer(adapted, arguments(), method=MethodSection(name="seqkd"))
    batch = collate_examples([{"prompts": [[5, 6, 7], [7, 6, 5]], "slots": [-1, 1], "response": [8, 9]}])
    trainer.compute_loss(adapted, batch).backward()
    trained = {name: weight for name, weight in adapted.named_parameters() if weight.requires_grad}
    # The second matrix of an adapter is 0 at first, so that the first one has no gradient yet.
    moved = {name for name, weight in trained.items() if weight.grad is not None and weight.grad.abs().sum() > 0}
    assert moved == {name for name in trained if "lora_A" not in name}
    assert any("lm_head" in name for name in moved) == bool(saved)


def test_trainer_rejects_what_would_change_the_loss(
    tiny_model_path: str, make_recipe: Callable[..., Recipe], arguments: Callable[..., TrainingArguments]
) -> None:
    lm = load_model(make_recipe().study.model)
    with pytest.raises(ValueError, match="method 'r1' needs the base model as teacher"):
        PositionDistillTrainer(lm, arguments())
    with pytest.raises(ValueError, match="position weights need the whole batch"):
        PositionDistillTrainer(lm, arguments(gradient_accumulation_steps=2), teacher=lm)
    with pytest.raises(ValueError, match="for the pipeline only"):
        PositionDistillTrainer(lm, arguments(), method=MethodSection(alignment="official"), teacher=lm)
    with pytest.raises(ValueError, match="'r1-on-policy' learns from an answer to each prompt, in the pipeline only"):
        PositionDistillTrainer(lm, arguments(), method=MethodSection(name="r1-on-policy"), teacher=lm)
