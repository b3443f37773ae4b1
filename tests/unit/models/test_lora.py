"""Adapters: what they leave alone, what is trained, what is exported."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftConfig, PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, MixtralConfig, MixtralForCausalLM

from pos2distill.config import LoraSection, ModelSection, Recipe, Study, TrainersSection
from pos2distill.errors import UserError
from pos2distill.models.architecture import weight_dtypes
from pos2distill.models.hidden_states import response_hidden_states
from pos2distill.models.load import load_model
from pos2distill.models.lora import add_adapters, merge, save_adapter
from pos2distill.models.packing import ResponseBatch, collate, pack_rows
from pos2distill.training.distributed import DistContext
from pos2distill.training.loop import TrainingLoop
from pos2distill.training.progress import TrainingProgress
from pos2distill.training.step_record import StepRecord
from pos2distill.training.strategies.torch import TorchStrategy
from pos2distill.training.student import trainable
from pos2distill.training.teachers import build_teacher
from scripts.model_families import save_tiny
from tests.support.samples import Source
from tests.support.training import train_to_end

CPU = torch.device("cpu")
TRAINERS = TrainersSection(strategy="torch", gradient_checkpointing=False, micro_batch_tokens=100000)
PRECISIONS = [("float32", "float32"), ("bfloat16", "bfloat16")]


@pytest.fixture
def make_study(make_recipe: Callable[..., Recipe]) -> Callable[..., Study]:
    """`make_study(dtype, precision, method={…}, …)`: with adapters."""

    def make(dtype: str = "float32", precision: str = "float32", **overrides: Any) -> Study:
        lora = {"rank": 4, "alpha": 8}
        training = {"lora": lora, "precision": precision, **overrides.pop("training", {})}
        return make_recipe(model={"dtype": dtype}, training=training, **overrides).study

    return make


def moved_strategy(study: Study) -> TorchStrategy:
    """After a few steps, so that the adapters do something."""
    strategy = TorchStrategy(study, TRAINERS, CPU, study.model)
    for number in range(4):
        strategy.backward(strategy.forward(make_batch(number), None).sum(), last=True)
        strategy.step(1e-2)
    return strategy


def make_batch(number: int) -> ResponseBatch:
    random = np.random.default_rng(number)
    prompts, responses = ([random.integers(5, 250, size).astype(np.int32) for size in s] for s in ((9, 4), (3, 5)))
    return collate(prompts, responses)


def all_logits(lm: Any, batch: ResponseBatch) -> Tensor:
    """(S, V): each row on its own."""
    rows = batch.input_ids_S.tensor_split(batch.packed.start_B1[1:-1].long())
    with torch.no_grad():
        return torch.cat(
            [lm.eval()(input_ids=row[None], packed_rows=pack_rows([row.numpy()], [len(row)])).logits[0] for row in rows]
        )


def run(source: Source) -> tuple[list[StepRecord], TorchStrategy]:
    strategy = TorchStrategy(source.study, TRAINERS, CPU, source.study.model)
    teacher = build_teacher(source.study, strategy.base_states, CPU)
    progress = TrainingProgress.at_start(len(source.ids))
    trainer = TrainingLoop(source.study, TRAINERS, source.build, strategy, teacher, DistContext())
    return train_to_end(trainer, source.loader(), progress), strategy


# --- the base model


@pytest.mark.parametrize(("dtype", "precision"), PRECISIONS)
def test_adapters_off_restores_the_initial_model_bit_for_bit(
    make_study: Callable[..., Study], dtype: str, precision: str
) -> None:
    study = make_study(dtype, precision, method={"name": "seqkd"})
    strategy, batch = moved_strategy(study), make_batch(9)
    initial = load_model(study.model, packed=True)
    with torch.no_grad():
        expected_TH = response_hidden_states(initial, batch)
        assert not torch.equal(response_hidden_states(strategy.student.lm, batch), expected_TH)
    before = trainable(strategy.student.lm)
    assert torch.equal(strategy.base_states(batch), expected_TH)
    assert trainable(strategy.student.lm).keys() == before.keys()  # on again, and in training
    assert strategy.student.lm.training


def test_add_adapters_leaves_the_model_unchanged(make_study: Callable[..., Study]) -> None:
    study = make_study()
    strategy, batch = TorchStrategy(study, TRAINERS, CPU, study.model), make_batch(0)
    torch.testing.assert_close(
        all_logits(strategy.student.lm, batch), all_logits(load_model(study.model, packed=True), batch), rtol=0, atol=0
    )


def test_base_states_with_adapters_need_no_second_model(
    make_study: Callable[..., Study], make_source: Callable[[Study], Source]
) -> None:
    settings = {"data": {"train_examples": 4}, "training": {"epochs": 4, "learning_rate": 1e-2}}
    cached, resident = (
        run(make_source(make_study(method={"teacher": teacher}, **settings))) for teacher in ("cached", "resident")
    )
    assert resident[1].base is None
    losses = [record.loss for record in cached[0]]
    assert [record.loss for record in resident[0]] == pytest.approx(losses, rel=1e-3)
    assert max(losses) > 1.5 * min(losses)  # the student did move


# --- training


def test_trainer_with_adapters_halves_the_loss(
    make_study: Callable[..., Study], make_source: Callable[[Study], Source]
) -> None:
    settings = {"data": {"train_examples": 4}, "training": {"epochs": 20, "learning_rate": 1e-2}}
    losses = [record.loss for record in run(make_source(make_study(**settings)))[0]]
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])


@pytest.mark.parametrize(("dtype", "precision"), PRECISIONS)
def test_add_adapters_makes_only_them_trainable_in_fp32(
    make_study: Callable[..., Study], dtype: str, precision: str
) -> None:
    study = make_study(dtype, precision, method={"name": "seqkd"})
    strategy = moved_strategy(study)
    initial = load_model(study.model).state_dict()
    trained = trainable(strategy.student.lm)
    assert len(trained) == 2 * 2 * 7  # A and B, two layers, seven linear ones in each
    assert {parameter.dtype for parameter in trained.values()} == {torch.float32}
    for name, value in strategy.student.lm.state_dict().items():
        if name not in trained:
            assert torch.equal(value, initial[name.replace(".base_layer", "")])


def test_adapters_gradient_does_not_change_with_activation_checkpoints(make_study: Callable[..., Study]) -> None:
    study, gradients = make_study(method={"name": "seqkd"}), []
    for checkpointing in (False, True):
        trainers = TRAINERS.model_copy(update={"gradient_checkpointing": checkpointing})
        strategy = TorchStrategy(study, trainers, CPU, study.model)
        strategy.backward(strategy.forward(make_batch(0), None).sum(), last=True)
        parameters = trainable(strategy.student.lm).values()
        gradients.append(torch.cat([each.grad.flatten() for each in parameters if each.grad is not None]))
    assert gradients[0].norm() > 0
    torch.testing.assert_close(gradients[0], gradients[1])


def test_add_adapters_draws_from_the_seed(make_study: Callable[..., Study]) -> None:
    one, same, other = (
        torch.cat(
            [
                value.flatten()
                for value in trainable(TorchStrategy(study, TRAINERS, CPU, study.model).student.lm).values()
            ]
        )
        for study in (make_study(), make_study(), make_study(seed=1))
    )
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_save_state_with_adapters_holds_only_them(make_study: Callable[..., Study], tmp_path: Path) -> None:
    strategy = moved_strategy(make_study(method={"name": "seqkd"}))
    strategy.save_state(tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    assert len(load_file(file)) == 3 * 2 * 2 * 7
    assert all(".lora_" in key for key in load_file(file))


def test_add_adapters_to_targets_by_name(make_study: Callable[..., Study]) -> None:
    study = make_study(training={"lora": {"targets": ["q_proj", "up_proj"]}})
    names = trainable(TorchStrategy(study, TRAINERS, CPU, study.model).student.lm)
    assert {name.split(".")[4] for name in names} == {"q_proj", "up_proj"}


@pytest.mark.parametrize(
    ("target", "hint"),
    [
        ("q_prj", "did you mean 'q_proj'"),
        ("self_attn", "expected one of: down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"),
        ("lm_head", "expected one of: down_proj"),
    ],
)
def test_add_adapters_rejects_a_target_that_is_not_a_linear_layer(
    make_study: Callable[..., Study], target: str, hint: str
) -> None:
    study = make_study(training={"lora": {"targets": ["v_proj", target]}})
    with pytest.raises(UserError, match=rf"^training.lora.targets: {target}: not a linear layer of .+; {hint}"):
        TorchStrategy(study, TRAINERS, CPU, study.model)


def test_add_adapters_rejects_a_model_without_linear_layers() -> None:
    lm = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=16, n_positions=8))
    with pytest.raises(UserError, match=r"^training.lora: .* has no linear layers for adapters$"):
        add_adapters(lm, LoraSection(), seed=0)


def test_add_adapters_to_all_layers_rejects_experts() -> None:
    """Most weights of such a model are theirs, so nobody shall believe that they are trained."""
    sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    lm = MixtralForCausalLM(MixtralConfig(vocab_size=16, num_key_value_heads=1, num_local_experts=2, **sizes))
    with pytest.raises(UserError, match=r"^training.lora.targets: all: .* has experts, .* of k_proj, o_proj, q_proj"):
        add_adapters(lm, LoraSection(), seed=0)
    add_adapters(lm, LoraSection(targets=("q_proj",)), seed=0)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "ernie4_5_moe"])
def test_add_adapters_rejects_a_name_that_peft_takes_for_the_experts(family: str, tmp_path: Path) -> None:
    """The layers before the experts have it too."""
    lm = load_model(save_tiny(family, tmp_path), packed=True)
    with pytest.raises(UserError) as caught:
        add_adapters(lm, LoraSection(targets=("gate_proj", "up_proj", "down_proj")), seed=0)
    message = str(caught.value)
    assert message.startswith("training.lora.targets: gate_proj: of ")
    assert "peft takes it for the experts, which cannot have adapters; name others, of " in message
    with pytest.raises(UserError) as caught:
        add_adapters(lm, LoraSection(), seed=0)
    for rest in (message, str(caught.value)):
        names = rest.rpartition(", of ")[2].split(", ")
        assert not {"gate_proj", "up_proj", "down_proj"} & {*names}
    add_adapters(lm, LoraSection(targets=tuple(names)), seed=0)
    adapted = {name.partition(".lora_A.")[0].rpartition(".")[2] for name in trainable(lm) if ".lora_A." in name}
    assert adapted == {*names}


def test_add_adapters_rejects_a_router_that_returns_more_than_a_tensor(tmp_path: Path) -> None:
    lm = load_model(save_tiny("phimoe", tmp_path), packed=True)
    with pytest.raises(UserError, match=r"^training.lora.targets: router: not a linear layer of "):
        add_adapters(lm, LoraSection(targets=("q_proj", "router")), seed=0)


@pytest.mark.parametrize("targets", ["all", ("q_proj",)])
def test_add_adapters_of_a_multimodal_model_are_those_of_its_text_model(
    tmp_path: Path, targets: str | tuple[str, ...]
) -> None:
    """The encoder of images has layers of the same names. peft must read the adapters with the same layers."""
    model = save_tiny("gemma3", tmp_path / "model")
    lm = load_model(model, packed=True)
    assert any(name.endswith("q_proj") for name, _ in lm.named_modules() if "vision" in name)
    add_adapters(lm, LoraSection(targets=targets), seed=0)
    trained = trainable(lm)
    assert trained
    assert all(".language_model.layers." in name for name in trained)
    save_adapter(lm, trained, model, tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(model.path)
    adapted = PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    assert len(trained) == sum(".lora_" in name for name, _ in adapted.named_parameters())


def test_add_adapters_rejects_a_layer_of_the_encoder_of_images(tmp_path: Path) -> None:
    lm = load_model(save_tiny("gemma3", tmp_path), packed=True)
    with pytest.raises(UserError, match=r"^training.lora.targets: fc1: not a linear layer of "):
        add_adapters(lm, LoraSection(targets=("fc1",)), seed=0)


# --- the export


def test_torch_strategy_of_one_worker_ignores_a_group_that_the_process_is_in(
    make_study: Callable[..., Study], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a script under `torchrun` that distills in its first process."""
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 1)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    study = make_study()
    alone = TorchStrategy(study, TRAINERS, CPU, study.model)
    both = TorchStrategy(study, TRAINERS.model_copy(update={"workers": 2}), CPU, study.model)
    assert [(each.rank, each.world_size) for each in (alone, both)] == [(0, 1), (1, 2)]


def test_merge_by_hand() -> None:
    weights = {
        "up.base_layer.weight": torch.eye(2),
        "up.base_layer.bias": torch.ones(2),
        "up.lora_A.default.weight": torch.tensor([[1.0, 2.0]]),
        "up.lora_B.default.weight": torch.tensor([[3.0], [4.0]]),
        "norm.weight": torch.full((2,), 5.0),
    }
    dtypes = dict.fromkeys(("up.weight", "up.bias", "norm.weight"), torch.float32)
    merged, error = merge(weights, LoraSection(rank=1, alpha=2), dtypes)  # W + 2 B A
    assert error == 0.0
    assert all(".lora_" in name for name in weights), "what was merged is released"
    assert {name: value.tolist() for name, value in merged.items()} == {
        "up.weight": [[7.0, 12.0], [8.0, 17.0]],
        "up.bias": [1.0, 1.0],
        "norm.weight": [5.0, 5.0],
    }


@pytest.mark.parametrize(
    ("update", "rounded"),
    [
        (2**-9, [0.0, 0.0]),  # below half of the step of 1.0 in bfloat16, which is 2^-7 above it
        (2**-7, [2**-7, 2**-7]),
        (3 * 2**-9, [2**-7, 2**-7]),  # to the nearest step
    ],
)
def test_merge_returns_the_error_of_the_rounded_update(update: float, rounded: list[float]) -> None:
    weights = {
        "up.base_layer.weight": torch.ones(1, 2),
        "up.lora_A.default.weight": torch.ones(1, 2),
        "up.lora_B.default.weight": torch.full((1, 1), update),
    }
    merged, error = merge(weights, LoraSection(rank=1, alpha=1), {"up.weight": torch.bfloat16})
    assert merged["up.weight"].dtype == torch.bfloat16
    assert (merged["up.weight"].float() - 1).tolist() == [rounded]
    assert error == pytest.approx(abs(rounded[0] - update) / update)


def test_merge_of_new_adapters_has_no_error() -> None:
    weights = {
        "up.base_layer.weight": torch.full((1, 2), 1.001),
        "up.lora_A.default.weight": torch.ones(1, 2),
        "up.lora_B.default.weight": torch.zeros(1, 1),
    }
    assert merge(weights, LoraSection(rank=1), {"up.weight": torch.bfloat16})[1] == 0.0


@pytest.mark.parametrize(("dtype", "is_rounded"), [("float32", False), ("bfloat16", True)])
def test_save_with_adapters_returns_the_error_of_a_small_update(
    make_study: Callable[..., Study], tmp_path: Path, dtype: str, is_rounded: bool
) -> None:
    study = make_study(dtype, dtype, method={"name": "seqkd"})
    strategy = TorchStrategy(study, TRAINERS, CPU, study.model)
    for number in range(4):
        strategy.backward(strategy.forward(make_batch(number), None).sum(), last=True)
        strategy.step(3e-6)
    error = strategy.save(tmp_path)
    assert error > 0.5 if is_rounded else error < 0.01


def test_save_with_adapters_writes_a_plain_model_that_computes_the_same(
    make_study: Callable[..., Study], tmp_path: Path
) -> None:
    study = make_study(method={"name": "seqkd"})
    strategy, batch = moved_strategy(study), make_batch(9)
    expected_BLV = all_logits(strategy.student.lm, batch)
    strategy.save(tmp_path)
    saved = load_model(study.model.model_copy(update={"path": str(tmp_path)}))
    initial = load_model(study.model, packed=True)
    assert saved.state_dict().keys() == initial.state_dict().keys()
    assert (all_logits(saved, batch) - expected_BLV).abs().max() < 1e-5 * expected_BLV.abs().max()
    assert (all_logits(initial, batch) - expected_BLV).abs().max() > 0.1


def test_save_with_adapters_keeps_the_models_dtype(make_study: Callable[..., Study], tmp_path: Path) -> None:
    strategy = moved_strategy(make_study("bfloat16", "bfloat16", method={"name": "seqkd"}))
    strategy.save(tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    assert {value.dtype for value in load_file(file).values()} == {torch.bfloat16}


def test_merge_equals_peft(make_study: Callable[..., Study]) -> None:
    """Against peft's own sum, layer by layer."""
    study = make_study()
    lm = load_model(study.model, dtype=torch.float32)
    lora = LoraSection(rank=3, alpha=7)
    add_adapters(lm, lora, seed=1)
    generator = torch.Generator().manual_seed(0)
    for parameter in trainable(lm).values():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    merged, _ = merge(lm.state_dict(), lora, weight_dtypes(study.model))
    for name, module in lm.named_modules():
        if hasattr(module, "get_delta_weight"):
            expected = module.get_base_layer().weight + module.get_delta_weight("default")
            torch.testing.assert_close(merged[f"{name}.weight"], expected, rtol=1e-5, atol=1e-5)


# --- the adapters by themselves


@pytest.mark.parametrize("targets", ["all", ("q_proj", "down_proj")])
def test_save_adapter_is_read_by_peft_and_computes_what_the_merged_model_does(
    make_study: Callable[..., Study], tmp_path: Path, targets: str | tuple[str, ...]
) -> None:
    study = make_study(method={"name": "seqkd"}, training={"lora": {"rank": 3, "alpha": 7, "targets": targets}})
    strategy = moved_strategy(study)
    strategy.save_adapter(tmp_path / "adapter")
    strategy.save(tmp_path / "model")
    assert {path.name for path in (tmp_path / "adapter").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    input_ids = torch.from_numpy(np.random.default_rng(0).integers(5, 250, (2, 12)))

    def logits(lm: Any) -> Tensor:
        with torch.no_grad():
            result: Tensor = lm.eval()(input_ids=input_ids).logits
        return result

    merged = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "model"))
    base = AutoModelForCausalLM.from_pretrained(study.model.path)
    plain = logits(base)
    adapted = logits(PeftModel.from_pretrained(base, str(tmp_path / "adapter")))
    assert (adapted - merged).abs().max() < 1e-5 * merged.abs().max()
    assert (plain - merged).abs().max() > 0.1


def test_save_adapter_of_a_bfloat16_model_holds_the_trained_values_in_fp32(
    make_study: Callable[..., Study], tmp_path: Path
) -> None:
    strategy = moved_strategy(make_study("bfloat16", "bfloat16", method={"name": "seqkd"}))
    strategy.save_adapter(tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    trained = trainable(strategy.student.lm)
    assert len(saved) == len(trained)
    for name, value in trained.items():
        assert torch.equal(saved[f"base_model.model.{name.replace('.default', '')}"], value)
        assert value.dtype == torch.float32


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (ModelSection(path="owner/name", revision="abc"), ("owner/name", "abc")),
        (ModelSection(path="/home/me/models/name"), (None, None)),
        (ModelSection(path="s3://mine/name"), (None, None)),
    ],
    ids=lambda value: getattr(value, "path", ""),
)
def test_save_adapter_names_a_model_of_the_hub_and_no_path(
    make_study: Callable[..., Study], tmp_path: Path, model: ModelSection, expected: tuple[str | None, str | None]
) -> None:
    lm = load_model(make_study().model)
    lora = LoraSection(rank=2, alpha=6)
    add_adapters(lm, lora, seed=0)
    save_adapter(lm, trainable(lm), model, tmp_path)
    config = PeftConfig.from_pretrained(str(tmp_path))
    assert (config.base_model_name_or_path, config.revision) == expected
    assert (config.r, config.lora_alpha, config.task_type, config.inference_mode) == (2, 6, "CAUSAL_LM", True)
    assert "/home/me" not in (tmp_path / "adapter_config.json").read_text()
