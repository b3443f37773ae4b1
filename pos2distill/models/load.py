"""Load models and tokenizers in Hugging Face format, with an error that names what is missing or unsupported."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from pos2distill.config import ModelSection
from pos2distill.errors import UserError
from pos2distill.models.attention import PACKED, register_kernels
from pos2distill.models.files import local_folder
from pos2distill.models.rope.layer_scales import resolve_scales, rope_settings, scale_layers


def load_config(model: ModelSection, *, folder: str | None = None) -> Any:
    """The model's configuration.

    Args:
        folder: a folder on this machine that holds config.json; default: the model's own, which is downloaded with its
            weights if it is a URL or a hub name.
    Raises:
        UserError: if the folder holds no readable config.json.
    """
    folder = folder or local_folder(model)
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError, json.JSONDecodeError) as error:
        raise UserError(f"{model.path}: no usable config.json: {str(error).strip().splitlines()[0]}") from None


def load_tokenizer(model: ModelSection) -> PreTrainedTokenizerBase:
    """The model's tokenizer, with a chat template.

    Raises:
        UserError: if the folder has no tokenizer, or its tokenizer no chat template.
    """
    folder = local_folder(model)
    if not any((Path(folder) / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise UserError(f"{model.path}: holds no tokenizer (tokenizer.json, tokenizer.model or vocab.json)")
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=model.trust_remote_code)
    if not tokenizer.chat_template:
        raise UserError(f"{model.path}: its tokenizer has no chat template; use the model's chat or instruct version")
    return tokenizer


def load_model(
    model: ModelSection,
    *,
    dtype: torch.dtype | None = None,
    computing: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    packed: bool = False,
) -> PreTrainedModel:
    """The causal language model in evaluation mode, from safetensors only, with RoPE scales where it has some.

    Args:
        dtype: of the weights; default: `model.dtype`.
        computing: the dtype that autocast will compute in; default: that of the weights.
        device: where the model is moved to.
        packed: load the model for packed rows (`response_hidden_states`); it then accepts no others.

    Raises:
        UserError: if the folder holds no safetensors; if the model's attention cannot be computed exactly on packed
            rows.
    """
    folder = local_folder(model)
    weights = dtype or torch_dtype(model.dtype)
    # Other formats are pickles, which can run code when they are loaded.
    if not list(Path(folder).glob("*.safetensors")):
        raise UserError(f"{model.path}: holds no weights in safetensors format")
    attention = resolve_attention(model.attention, computing or weights, torch.device(device))
    implementation = attention
    if packed:
        register_kernels()
        implementation = PACKED[attention]
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=weights,
            attn_implementation=implementation,
            trust_remote_code=model.trust_remote_code,
            use_safetensors=True,
        )
    except ValueError as error:
        # transformers 5.19 has no exception class of its own for an implementation that a model does not support.
        if "attention implementation" not in str(error):
            raise
        raise UserError(
            f"{model.path}: its attention cannot be computed by {attention}; set model.attention to eager"
        ) from None
    if packed:
        _refuse_unpackable(model, loaded, attention)
    scales = resolve_scales(model.rope_scales, loaded.config, model.path)
    if scales:
        scale_layers(loaded, scales, model.path)
    lm: PreTrainedModel = loaded.to(device).eval()
    # Sampling settings come from the study; the folder's defaults could add penalties that the study does not name.
    lm.generation_config = GenerationConfig()
    return lm


def _refuse_unpackable(model: ModelSection, lm: Any, attention: str) -> None:
    """
    Raises:
        UserError: if packed rows would give other results than the same rows one by one.
    """
    config = lm.config.get_text_config()
    _refuse_unpackable_layers(model, lm, config)
    if attention == "sdpa" and getattr(config, "attn_logit_softcapping", None):
        raise UserError(
            f"{model.path}: its attention scores are soft-capped, which torch's kernels do not support; "
            f"set model.attention to flash_attention_2 or eager"
        )
    if attention == "flash_attention_2":
        _refuse_without_flash_attention(model, lm, attention)
    longest = _longest_with_fixed_rope(config)
    if longest and context_length(model) > longest:
        raise UserError(
            f"{model.path}: beyond {longest} tokens its position encoding depends on the longest row of a batch; "
            f"set model.max_length to {longest} or less"
        )


def _refuse_unpackable_layers(model: ModelSection, lm: Any, config: Any) -> None:
    layer_types = set(getattr(config, "layer_types", None) or ())
    unsupported = sorted(layer_types - {"full_attention", "sliding_attention"})
    if unsupported:
        raise UserError(f"{model.path}: its layers of type '{unsupported[0]}' would mix packed rows")
    # transformers 5.19 sets this where attention layers look up their kernel, as the packed kernels require.
    if not lm._supports_attention_backend:
        raise UserError(
            f"{model.path}: {type(lm).__name__} does not use transformers' attention interface, "
            f"so it cannot keep packed rows apart"
        )
    if lm._is_stateful:
        raise UserError(f"{model.path}: its layers carry a state from token to token; only attention can be trained")
    if getattr(config, "attention_chunk_size", None):
        raise UserError(f"{model.path}: its attention is chunked by position, which packing rows would shift")


def _refuse_without_flash_attention(model: ModelSection, lm: Any, attention: str) -> None:
    # transformers 5.19 lists compatible versions only on models that flash-attn 2 computes wrongly.
    compatible = getattr(lm, "_compatible_flash_implementations", None)
    if compatible and "flash_attention_2" not in compatible:
        raise UserError(
            f"{model.path}: flash-attn 2 does not support all of its attention; set model.attention to eager"
        )
    try:
        lm._flash_attn_can_dispatch(2)
    except (ImportError, ValueError) as error:
        raise UserError(f"{model.path}: model.attention={attention}: {str(error).splitlines()[0]}") from None


def _longest_with_fixed_rope(config: Any) -> int | None:
    """Up to how many tokens RoPE's frequencies are constant; None if they always are.

    `dynamic` and `longrope` choose the frequencies by the longest position of a forward pass, so that beyond this
    length a row's result would depend on the other rows.
    """
    for each in rope_settings(config):
        if each.get("rope_type") in ("dynamic", "longrope"):
            length: int = each.get("original_max_position_embeddings") or config.max_position_embeddings
            return length
    return None


def non_persistent_buffers(model: ModelSection, dtype: torch.dtype) -> dict[str, Tensor]:
    """The buffers that a model computes itself and no checkpoint holds, by name; mainly RoPE's frequencies.

    They stay float32 whatever dtype the weights have: rounded to bfloat16, a frequency of 0.56 rotates position 8,000
    two full turns too far. No weights are allocated.
    """
    lm = empty_model(model, dtype)
    # `state_dict` leaves out buffers that are not persistent.
    saved = lm.state_dict().keys()
    return {name: buffer for name, buffer in lm.named_buffers() if name not in saved}


def empty_model(model: ModelSection, dtype: torch.dtype | None = None, *, folder: str | None = None) -> PreTrainedModel:
    """The model that the config describes, with its parameters on the meta device; only its buffers hold values.

    Args:
        folder: with the config; as of `load_config`.
    """
    config = load_config(model, folder=folder)
    with init_empty_weights(include_buffers=False):
        lm: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=dtype, trust_remote_code=model.trust_remote_code
        )
    return lm


def torch_dtype(name: str) -> torch.dtype:
    """`"bfloat16"` or `"float32"` as torch's dtype."""
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[name]


def resolve_attention(attention: str, dtype: torch.dtype, device: torch.device) -> str:
    """Resolve `auto`: flash_attention_2 for bfloat16 on a GPU if its package is installed, otherwise sdpa."""
    if attention != "auto":
        return attention
    flash_possible = device.type == "cuda" and dtype == torch.bfloat16
    if flash_possible and importlib.util.find_spec("flash_attn"):
        return "flash_attention_2"
    return "sdpa"


def require_position_room(model: ModelSection, factor: float) -> None:
    """Refuse a model with fewer positions than `factor` times its context, which shifted rows would leave.

    Raises:
        UserError: with the context that leaves room.
    """
    config = load_config(model).get_text_config()
    limits = (getattr(config, "max_position_embeddings", None), _longest_with_fixed_rope(config))
    positions = min((limit for limit in limits if limit), default=None)
    context = context_length(model)
    if positions and factor * context > positions:
        raise UserError(
            f"method.view: shifted rows need {int(factor * context)} positions, {model.path} has {positions}; "
            f"set model.max_length to {int(positions / factor)} or less"
        )


def context_length(model: ModelSection) -> int:
    """The largest number of tokens, prompt and response together, that the model accepts."""
    if model.max_length:
        return model.max_length
    config = load_config(model)
    length = getattr(config.get_text_config(), "max_position_embeddings", None)
    if not length:
        raise UserError(f"{model.path}: its config has no max_position_embeddings; set model.max_length")
    return int(length)
