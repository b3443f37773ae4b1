"""Models that a method cannot be applied to are rejected before anything starts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    SmolLM3Config,
)

from pos2distill.config import ModelSection
from pos2distill.config.inference import InferenceSection
from pos2distill.errors import UserError
from pos2distill.models.check_rope import check_inference
from pos2distill.models.rope.curves import CONFIG_KEY
from pos2distill.models.rope.layer_scales import resolve_scales
from tests.support.models import HEADS, SMALL

YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 512}
LPES = InferenceSection(method="lpes")


def ms_poe(first_layer: int) -> InferenceSection:
    return InferenceSection.model_validate({"method": "ms_poe", "ms_poe": {"first_layer": first_layer}})


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., ModelSection]:
    """A model folder that holds a config alone."""

    def save(config: Any, engine: str = "hf") -> ModelSection:
        config.save_pretrained(tmp_path)
        return ModelSection.model_validate({"path": str(tmp_path), "engine": engine})

    return save


def test_check_inference_accepts_a_plain_model(save: Callable[..., ModelSection]) -> None:
    for engine in ("hf", "vllm"):
        check_inference(save(LlamaConfig(**SMALL, **HEADS), engine), LPES)
    check_inference(save(LlamaConfig(**SMALL, **HEADS)), ms_poe(first_layer=1))
    check_inference(save(GPT2Config()), InferenceSection(method="reorder"))


def test_check_inference_rejects_frequencies_that_depend_on_the_batch(save: Callable[..., ModelSection]) -> None:
    # The last one is for other types.
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 100}
    config = LlamaConfig(**SMALL, **HEADS, rope_parameters=dynamic)
    longest = config.max_position_embeddings
    model = save(config).model_copy(update={"max_length": longest + 1})
    with pytest.raises(UserError) as caught:
        check_inference(model, InferenceSection())
    assert str(caught.value) == (
        f"{model.path}: beyond {longest} tokens its position encoding (dynamic RoPE) depends on the other prompts of a "
        f"batch; set model.max_length to {longest} or less, or model.engine to vllm"
    )
    check_inference(model.model_copy(update={"max_length": longest}), InferenceSection())
    check_inference(model.model_copy(update={"engine": "vllm"}), InferenceSection())


@pytest.mark.parametrize(
    ("inference", "message"),
    [
        (
            {"method": "lpes", "scales": [1, 1.5, 2]},
            "inference.scales: 3 scales, but {} has 2 layers; give one for each",
        ),
        (
            {"method": "ms_poe", "ms_poe": {"first_layer": 1}},
            "{}: Ms-PoE needs plain RoPE (default, linear, llama3), the same in all layers, which LlamaForCausalLM "
            "does not have (here yarn)",
        ),
        (
            {"method": "attention_buckets"},
            "{}: Attention Buckets needs plain RoPE, which LlamaForCausalLM does not have",
        ),
        ({"method": "lpes"}, "{}: RoPE of type 'yarn' cannot be scaled by layer in vLLM; set model.engine to hf"),
    ],
)
def test_check_inference_rejects(save: Callable[..., ModelSection], inference: dict[str, Any], message: str) -> None:
    model = save(LlamaConfig(**SMALL, **HEADS, rope_parameters=YARN), "vllm")
    with pytest.raises(UserError) as caught:
        check_inference(model, InferenceSection.model_validate(inference))
    assert str(caught.value) == message.format(model.path)


@pytest.mark.parametrize("method", ["ms_poe", "attention_buckets"])
def test_check_inference_rejects_families_and_scales_that_these_methods_do_not_know(
    save: Callable[..., ModelSection], method: str
) -> None:
    inference = InferenceSection.model_validate({"method": method})
    with pytest.raises(
        UserError, match=rf"'{method}' supports llama, .*, qwen3, not smollm3, whose layers may rotate in"
    ):
        check_inference(save(SmolLM3Config(**SMALL, **HEADS, pad_token_id=0)), inference)
    scaled = LlamaConfig(**SMALL, **HEADS)
    setattr(scaled, CONFIG_KEY, [1.5, 1.5])
    with pytest.raises(
        UserError, match=rf"its config.json has RoPE scales by layer .* '{method}' does not combine with"
    ):
        check_inference(save(scaled), inference)


def test_check_inference_rejects_ms_poe_that_changes_no_layer(save: Callable[..., ModelSection]) -> None:
    model = save(LlamaConfig(**SMALL, **HEADS))
    with pytest.raises(UserError) as caught:
        check_inference(model, ms_poe(first_layer=2))
    assert str(caught.value) == (
        f"inference.ms_poe.first_layer: 2, but {model.path} has 2 layers, so none would change; set it to 1 or less"
    )


def test_check_inference_rejects_ms_poe_with_a_short_window(save: Callable[..., ModelSection]) -> None:
    model = save(MistralConfig(**SMALL, **HEADS, sliding_window=32))
    with pytest.raises(UserError) as caught:
        check_inference(model.model_copy(update={"max_length": 33}), ms_poe(first_layer=1))
    assert str(caught.value) == (
        f"{model.path}: its layers attend to the last 32 tokens only (sliding_window), and ms_poe ranks heads by the "
        f"whole prompt; set model.max_length to 32 or less"
    )
    check_inference(model.model_copy(update={"max_length": 32}), ms_poe(first_layer=1))


def test_check_inference_refuses_to_search_scales_of_one_layer(save: Callable[..., ModelSection]) -> None:
    model = save(LlamaConfig(**{**SMALL, "num_hidden_layers": 1}, **HEADS))
    with pytest.raises(UserError) as caught:
        check_inference(model, LPES)
    assert str(caught.value) == (
        f"{model.path}: has one layer, so there are no scales by layer to search; set inference.method to "
        f"uniform_scale and inference.scales to one number"
    )
    check_inference(model, InferenceSection(method="uniform_scale", scales=(1.5,)))


def test_check_inference_rejects_layers_without_rope_in_vllm(save: Callable[..., ModelSection]) -> None:
    """With four layers, the fourth of SmolLM 3 has none. In transformers the others are scaled."""
    sizes = {**SMALL, "num_hidden_layers": 4}
    check_inference(save(SmolLM3Config(**sizes, **HEADS, pad_token_id=0)), LPES)
    with pytest.raises(UserError, match=r"have no RoPE \(no_rope_layers\), .* in vLLM; set model.engine to hf$"):
        check_inference(save(SmolLM3Config(**sizes, **HEADS, pad_token_id=0), "vllm"), LPES)
    check_inference(save(SmolLM3Config(**SMALL, **HEADS, pad_token_id=0)), LPES)


def test_check_inference_rejects_latent_attention_in_vllm(save: Callable[..., ModelSection]) -> None:
    """In transformers its layers are scaled as others are."""
    config = DeepseekV3Config(**SMALL, num_attention_heads=4)
    check_inference(save(config), LPES)
    with pytest.raises(UserError, match=r"has latent attention \(kv_lora_rank\), .* in vLLM; set model.engine to hf$"):
        check_inference(save(config, "vllm"), LPES)


def test_check_inference_rejects_rotations_by_complex_numbers(save: Callable[..., ModelSection]) -> None:
    with pytest.raises(UserError, match="rotations of deepseek_v2 are complex numbers, which cannot be scaled"):
        check_inference(save(DeepseekV2Config(**SMALL, num_attention_heads=4)), LPES)


def test_check_inference_rejects_ms_poe_where_rotations_depend_on_the_prompt(
    save: Callable[..., ModelSection],
) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    with pytest.raises(UserError, match=r"Ms-PoE needs plain RoPE .* \(here dynamic\)"):
        check_inference(save(LlamaConfig(**SMALL, **HEADS, rope_parameters=rope)), ms_poe(first_layer=1))


def with_scales(scales: Any, **settings: Any) -> LlamaConfig:
    config = LlamaConfig(**SMALL, **HEADS, **settings)
    setattr(config, CONFIG_KEY, scales)
    return config


@pytest.mark.parametrize("scales", [[1.5], [1.5, float("inf")], [1.5, -1.0], [1.5, "2"], 1.5])
@pytest.mark.parametrize("method", ["none", "reorder", "lpes"])
def test_check_inference_rejects_wrong_scales_in_the_folder(
    save: Callable[..., ModelSection], method: str, scales: Any
) -> None:
    inference = InferenceSection.model_validate({"method": method})
    with pytest.raises(UserError, match=f"config.json: {CONFIG_KEY}: expected a list of 2 positive numbers"):
        check_inference(save(with_scales(scales)), inference)


def test_check_inference_rejects_scales_in_the_folder_that_the_engine_cannot_apply(
    save: Callable[..., ModelSection],
) -> None:
    config = with_scales([1.5, 2.0], rope_parameters=YARN)
    check_inference(save(config), InferenceSection())
    with pytest.raises(UserError, match="RoPE of type 'yarn' cannot be scaled by layer in vLLM"):
        check_inference(save(config, "vllm"), InferenceSection())


@pytest.mark.parametrize("inference", [{"method": "lpes"}, {"method": "uniform_scale", "scales": [1.5]}])
def test_check_inference_refuses_to_replace_scales_in_the_folder(
    save: Callable[..., ModelSection], inference: dict[str, Any]
) -> None:
    """The model was trained with them."""
    with pytest.raises(UserError, match=rf"'{inference['method']}' would replace; set inference.method to none, or"):
        check_inference(save(with_scales([1.5, 2.0])), InferenceSection.model_validate(inference))


def test_resolve_scales_of_a_config_without_layers() -> None:
    """vLLM's plugin sees the configs of speculators and other parts too."""
    assert resolve_scales((), PretrainedConfig(), "m") == ()


def test_check_inference_rejects_a_model_without_rope(save: Callable[..., ModelSection]) -> None:
    with pytest.raises(UserError, match="GPT2LMHeadModel has no rotary embedding that all its layers share"):
        check_inference(save(GPT2Config(n_layer=2)), LPES)
