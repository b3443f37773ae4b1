"""Which models can be trained: those whose packed rows give the same results as the same rows one by one.

`scripts/model_families.py` checks every family that is named here, and writes the table of docs/models.md.
"""

from typing import Any

from pos2distill.errors import UserError
from pos2distill.faults import error_text
from pos2distill.models.rope.layer_scales import rope_settings

TRAINABLE = (
    "apertus",
    "arcee",
    "bitnet",
    "cohere",
    "cohere2",
    "deepseek_v2",
    "deepseek_v3",
    "diffllama",
    "dots1",
    "ernie4_5",
    "ernie4_5_moe",
    "exaone4",
    "exaone_moe",
    "gemma",
    "gemma2",
    "gemma3",
    "gemma3_text",
    "glm",
    "glm4",
    "glm4_moe",
    "gpt2",
    "gpt_bigcode",
    "gpt_neox",
    "gpt_oss",
    "granite",
    "granitemoe",
    "helium",
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "jetmoe",
    "llama",
    "minicpm3",
    "ministral",
    "ministral3",
    "mistral",
    "mixtral",
    "olmo",
    "olmo2",
    "olmo3",
    "olmoe",
    "opt",
    "persimmon",
    "phi",
    "phi3",
    "phimoe",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "seed_oss",
    "smollm3",
    "starcoder2",
    "vaultgemma",
)
"""Families (`model_type` in config.json) whose packed rows equal single rows, in losses and gradients."""

_OWN_ATTENTION = "its attention is not computed through transformers' attention interface"
_STATE = "some of its layers carry a state from token to token, which packing would carry into the next row"
_CONVOLUTION = "some of its layers are convolutions, which packing would run across rows"
_CHUNKS = "its attention is chunked by position, which packing would shift"

REJECTED = {
    **dict.fromkeys(("biogpt", "bloom", "codegen", "falcon", "gpt_neo", "gptj", "mpt"), _OWN_ATTENTION),
    **dict.fromkeys(("stablelm", "xglm"), _OWN_ATTENTION),
    "doge": "its attention uses a mask of its own, computed from the values",
    "nemotron": "its layers do not pass on to attention which tokens belong to which row",
    **dict.fromkeys(("jamba", "mamba", "minimax", "qwen3_next", "recurrent_gemma", "rwkv"), _STATE),
    "lfm2": _CONVOLUTION,
    "llama4_text": _CHUNKS,
}
"""Other families that were tried, and why they cannot be trained (transformers 5.19)."""


def require_trainable_family(config: Any, model_name: str) -> None:
    """Reject a family of models that cannot be trained.

    Raises:
        UserError: if the config is of a family that is not in `TRAINABLE`, with the reason and those that are.
    """
    family = config.model_type
    if family in TRAINABLE:
        return
    reason = REJECTED.get(family, "it was not tested with packed rows")
    raise UserError(
        f"{model_name}: a model of the family '{family}' cannot be trained: {reason}; supported: {', '.join(TRAINABLE)}"
    )


def is_quantized(config: Any) -> bool:
    """Whether a model's weights are stored quantized, as its config.json says."""
    return getattr(config, "quantization_config", None) is not None


def reject_quantized(config: Any, model_name: str) -> None:
    """Reject a model whose weights are quantized.

    Raises:
        UserError: if a model's weights are stored quantized (fp8, bitsandbytes, AWQ, GPTQ and others).
    """
    if not is_quantized(config):
        return
    settings: Any = config.quantization_config
    settings = settings if isinstance(settings, dict) else vars(settings)
    kind = settings.get("quant_method", "an unknown method")
    raise UserError(
        f"{model_name}: its weights are quantized ({getattr(kind, 'value', kind)}); training, also of adapters, cached "
        f"teachers and analyses need plain ones; set model.path to the model in bfloat16 or float32"
    )


def reject_unpackable(lm: Any, *, context: int, model_name: str) -> None:
    """Reject what the settings in a model's config can change within a family.

    Args:
        context: the largest number of tokens of a row.
        model_name: the model's name in messages.
    Raises:
        UserError: if packed rows would give other results than the same rows one by one.
    """
    config = lm.config.get_text_config()
    _reject_unpackable_layers(lm, config, model_name)
    longest = longest_with_fixed_rope(config)
    if longest and context > longest:
        raise UserError(
            f"{model_name}: beyond {longest} tokens its position encoding depends on the longest row of a batch; "
            f"set model.max_length to {longest} or less"
        )


def reject_soft_caps(config: Any, attention: str, *, model_name: str) -> None:
    """Reject torch's kernels for a model that caps its attention scores: they would leave out the cap.

    transformers 5.19 does so without a word.

    Args:
        config: the model's config.
        attention: implementation, without its packed version.
        model_name: the model's name in messages.
    Raises:
        UserError: naming the implementations that compute the cap.
    """
    if attention == "sdpa" and getattr(config.get_text_config(), "attn_logit_softcapping", None):
        raise UserError(
            f"{model_name}: its attention scores are soft-capped, which torch's kernels do not support; "
            f"set model.attention to flash_attention_2 or eager"
        )


def _reject_unpackable_layers(lm: Any, config: Any, model_name: str) -> None:
    layer_types = set(getattr(config, "layer_types", None) or ())
    unsupported = sorted(layer_types - {"full_attention", "sliding_attention"})
    if unsupported:
        raise UserError(f"{model_name}: its layers of type '{unsupported[0]}' would mix packed rows")
    # transformers 5.19 sets this where attention layers look up their kernel, as the packed kernels require.
    if not lm._supports_attention_backend:
        raise UserError(
            f"{model_name}: {type(lm).__name__} does not use transformers' attention interface, "
            f"so it cannot keep packed rows apart"
        )
    if lm._is_stateful:
        raise UserError(f"{model_name}: its layers carry a state from token to token; only attention can be trained")
    if getattr(config, "attention_chunk_size", None):
        raise UserError(f"{model_name}: its attention is chunked by position, which packing rows would shift")


def reject_flash_attention(lm: Any, *, model_name: str) -> None:
    """Reject flash-attn 2 where it does not support all of the model's attention, or cannot be used here.

    Args:
        model_name: the model's name in messages.
    Raises:
        UserError: with the reason.
    """
    # transformers 5.19 lists compatible versions only on models that flash-attn 2 computes wrongly.
    compatible = getattr(lm, "_compatible_flash_implementations", None)
    if compatible and "flash_attention_2" not in compatible:
        raise UserError(
            f"{model_name}: flash-attn 2 does not support all of its attention; set model.attention to eager"
        )
    try:
        lm._flash_attn_can_dispatch(2)
    except (ImportError, ValueError) as error:
        raise UserError(f"{model_name}: model.attention=flash_attention_2: {error_text(error)}") from None


def longest_with_fixed_rope(config: Any) -> int | None:
    """Up to how many tokens RoPE's frequencies are constant; None if they always are.

    `dynamic` and `longrope` choose the frequencies by the longest position of a forward pass, so that beyond this
    length a row's result would depend on the other rows.
    """
    for each in rope_settings(config):
        rope_type = each.get("rope_type")
        if rope_type in ("dynamic", "longrope"):
            # transformers 5.19 uses the original length for longrope alone.
            original = each.get("original_max_position_embeddings") if rope_type == "longrope" else None
            length: int = original or config.max_position_embeddings
            return length
    return None
