import json
import tempfile
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
from transformers import BloomConfig

from pos2distill.config import ModelSection
from pos2distill.errors import UserError
from pos2distill.models import trainable
from pos2distill.models.check import check_engine_attention, check_sharded, check_trainable, check_weights
from pos2distill.models.load import load_model
from pos2distill.models.trainable import (
    REJECTED,
    TRAINABLE,
    longest_with_fixed_rope,
    reject_unpackable,
    require_trainable_family,
)
from scripts.model_families import PAGE, TOLERANCE, check, check_family, render, save_tiny
from tests.support.hub_server import hub_server, use_hub

# Of every kind of head, norm, attention and tying one; the others are checked in the slow tier.
CORE = ("cohere2", "deepseek_v3", "gemma2", "gemma3", "gpt2", "gpt_neox", "granite", "llama", "mixtral", "opt", "phi")


@pytest.mark.parametrize("family", CORE)
def test_trainable_families_compute_packed_rows_as_single_ones(family: str) -> None:
    assert f"| `{family}` | {check_family(family)} |" in PAGE.read_text().splitlines()


@pytest.mark.parametrize("family", ["gpt_neox", "llama", "phi"])
@pytest.mark.parametrize("tied", [False, True])
def test_trainable_families_may_tie_their_head(family: str, tied: bool, tmp_path: Path) -> None:
    """Phi's head has a bias, which is stored also if its weights are those of the embedding."""
    model = save_tiny(family, tmp_path, tie_word_embeddings=tied)
    parity = check(model)
    assert max(parity.loss, parity.gradient, parity.logits) < TOLERANCE


def test_trainable_and_rejected_families_are_those_of_the_page() -> None:
    cells = [line.split("`")[1] for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert cells == ["model_type", *TRAINABLE, "model_type", *sorted(REJECTED)]
    assert list(TRAINABLE) == sorted(set(TRAINABLE))
    assert not set(TRAINABLE) & set(REJECTED)


@pytest.mark.slow
def test_render_finds_what_the_page_says() -> None:
    """Else run `make docs`."""
    assert render(PAGE.read_text()) == PAGE.read_text()


SETTINGS: dict[str, dict[str, Any]] = {
    "gpt_neo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
    # By default, so few layers have no convolution.
    "lfm2": {"layer_types": ["conv", "full_attention"]},
}


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(REJECTED))
def test_rejected_families_cannot_be_trained(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not before and, with the rejection taken away, not afterwards: it is due to the family, not to the table."""
    model = save_tiny(family, tmp_path, **SETTINGS.get(family, {}))
    for attempt in (lambda: load_model(model, packed=True), lambda: check_trainable(model, on_gpu=True)):
        with pytest.raises(
            UserError, match=rf"the family '{family}' cannot be trained: {REJECTED[family]}; supported:"
        ):
            attempt()
    monkeypatch.setattr(trainable, "TRAINABLE", (*TRAINABLE, family))
    with pytest.raises((UserError, KeyError, ValueError)):
        check(model)


def test_require_trainable_family_names_the_family_and_those_that_are_supported() -> None:
    require_trainable_family(SimpleNamespace(model_type="llama"), "models/mine")
    with pytest.raises(UserError) as caught:
        require_trainable_family(SimpleNamespace(model_type="new"), "models/mine")
    assert str(caught.value) == (
        "models/mine: a model of the family 'new' cannot be trained: it was not tested with packed rows; supported: "
        + ", ".join(TRAINABLE)
    )


def test_reject_unpackable_names_layers_that_would_mix_packed_rows() -> None:
    config = SimpleNamespace(layer_types=["full_attention", "conv"])
    lm: Any = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: config))
    with pytest.raises(UserError, match=r"^mine: its layers of type 'conv' would mix packed rows$"):
        reject_unpackable(lm, context=100, model_name="mine")


@pytest.mark.parametrize(
    ("family", "attention", "message"),
    [
        ("gpt_oss", "auto", r"its attention cannot be computed by sdpa; set model\.attention to eager"),
        ("gemma2", "sdpa", r"scores are soft-capped, .*; set model\.attention to flash_attention_2 or eager"),
    ],
)
def test_check_trainable_rejects_attention_by_the_config_alone(
    family: str, attention: str, message: str, tmp_path: Path
) -> None:
    model = save_tiny(family, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    chosen = ModelSection(**{**model.model_dump(), "attention": attention})
    with pytest.raises(UserError, match=message):
        check_trainable(chosen, on_gpu=False)
    check_trainable(chosen.model_copy(update={"attention": "eager"}), on_gpu=False)
    check_trainable(chosen, on_gpu=True)  # where flash-attn may be installed


def test_check_trainable_names_a_family_without_gradient_checkpointing(tmp_path: Path) -> None:
    model = save_tiny("jetmoe", tmp_path)
    with pytest.raises(UserError) as caught:
        check_trainable(model, on_gpu=False, gradient_checkpointing=True)
    assert str(caught.value) == (
        f"{tmp_path}: models of the family jetmoe are trained without gradient checkpointing; set "
        f"runtime.trainers.gradient_checkpointing=false"
    )
    check_trainable(model, on_gpu=False)
    check_trainable(save_tiny("llama", tmp_path / "other"), on_gpu=False, gradient_checkpointing=True)


def test_longest_with_fixed_rope_needs_no_limit_of_positions_without_rope() -> None:
    """Bloom's config names none."""
    assert longest_with_fixed_rope(BloomConfig()) is None


def test_check_engine_attention_rejects_kernels_that_leave_out_soft_caps(tmp_path: Path) -> None:
    model = save_tiny("gemma2", tmp_path).model_copy(update={"attention": "auto"})
    message = (
        f"{tmp_path}: its attention scores are soft-capped, which torch's kernels do not support; set model.attention "
        f"to flash_attention_2 or eager"
    )
    with pytest.raises(UserError) as caught:
        check_engine_attention(model, on_gpu=False)
    assert str(caught.value) == message
    check_engine_attention(model, on_gpu=True)  # where flash-attn may be installed
    with pytest.raises(UserError):
        check_engine_attention(model.model_copy(update={"attention": "sdpa"}), on_gpu=True)
    check_engine_attention(model.model_copy(update={"attention": "eager"}), on_gpu=False)


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {"quant_method": "awq", "bits": 4, "group_size": 128},
        {"quant_method": "gptq", "bits": 4},
    ],
    ids=lambda settings: settings["quant_method"],
)
@pytest.mark.parametrize("on_gpu", [False, True])
def test_check_trainable_rejects_quantized_weights(quantization: dict[str, Any], on_gpu: bool, tmp_path: Path) -> None:
    model = save_tiny("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    check_weights(model)  # it may be evaluated
    with pytest.raises(UserError) as caught:
        check_trainable(model, on_gpu=on_gpu)
    assert str(caught.value) == (
        f"{tmp_path}: its weights are quantized ({quantization['quant_method']}); training, also of adapters, cached "
        f"teachers and analyses need plain ones; set model.path to the model in bfloat16 or float32"
    )


@pytest.mark.parametrize(
    ("family", "kept"),
    [
        ("deepseek_v3", None),  # a buffer, which ZeRO-3 does not shard
        ("ernie4_5_moe", "model.layers.1.mlp.gate.weight"),
        ("llama", None),
    ],
)
def test_check_sharded_rejects_parameters_that_stay_in_float32(family: str, kept: str | None, tmp_path: Path) -> None:
    model = save_tiny(family, tmp_path)
    check_sharded(model)
    in_bfloat16 = model.model_copy(update={"dtype": "bfloat16"})
    if kept is None:
        check_sharded(in_bfloat16)
        return
    with pytest.raises(UserError) as caught:
        check_sharded(in_bfloat16)
    assert str(caught.value) == (
        f"training.precision: bfloat16, but {tmp_path} has {kept} in float32, which runtime.trainers.strategy zero3 "
        f"would round; set training.precision to float32, or strategy to torch"
    )


def test_check_trainable_reads_a_url_without_copying_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"memory://{uuid.uuid4().hex}/model"
    (tmp_path / "model").mkdir()
    (tmp_path / "temporary").mkdir()
    save_tiny("bloom", tmp_path / "model")
    fsspec.filesystem("memory").put(str(tmp_path / "model"), url.removeprefix("memory:/"), recursive=True)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    with pytest.raises(UserError, match=r"^memory://.+/model: a model of the family 'bloom' cannot be trained"):
        check_trainable(ModelSection(path=url), on_gpu=False)
    assert not list((tmp_path / "temporary").iterdir())


@pytest.mark.parametrize(("family", "is_trained"), [("bloom", False), ("llama", True)])
def test_check_trainable_of_a_hub_name_downloads_no_weights(
    family: str, is_trained: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, and again from the cache where the hub cannot be reached."""
    save_tiny(family, tmp_path)
    model = ModelSection(path="me/a-model", revision="v1")

    def run_check() -> None:
        if is_trained:
            check_trainable(model, on_gpu=False)
            return
        with pytest.raises(UserError, match=rf"^me/a-model: a model of the family '{family}' cannot be trained"):
            check_trainable(model, on_gpu=False)

    with hub_server() as hub:
        use_hub(monkeypatch, hub.address, tmp_path / "cache")
        hub.files["me/a-model"] = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
        assert "model.safetensors" in hub.files["me/a-model"]
        run_check()
        assert "config.json" in hub.downloaded
        assert not [name for name in hub.downloaded if name.endswith(".safetensors")]
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    run_check()
