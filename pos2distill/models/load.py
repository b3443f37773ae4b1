"""Load models and tokenizers in Hugging Face format, and say plainly what one lacks."""

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
from pos2distill.models.attention import PACKED
from pos2distill.models.files import local_folder

_PROBE = "pos2distill-probe"


def load_config(model: ModelSection) -> Any:
    """The model's configuration.

    Raises:
        UserError: if the folder holds no readable config.json.
    """
    folder = local_folder(model)
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
    """The causal language model in evaluation mode, from safetensors only.

    Args:
        dtype: of the weights; default: `model.dtype`.
        computing: what autocast will compute in, if it will; default: as the weights.
        packed: for rows laid end to end alone (`response_hidden_states`), each at the cost of its own tokens.

    Raises:
        UserError: if the folder holds no safetensors; if packed rows would leak into each other, or their attention
            would be another than the model's.
    """
    folder = local_folder(model)
    weights = dtype or torch_dtype(model.dtype)
    if not list(Path(folder).glob("*.safetensors")):
        raise UserError(f"{model.path}: holds no weights in safetensors format")
    attention = resolve_attention(model.attention, computing or weights, torch.device(device))
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=weights,
            attn_implementation=PACKED[attention] if packed else attention,
            trust_remote_code=model.trust_remote_code,
            use_safetensors=True,
        )
    except ValueError as error:
        if "attention implementation" not in str(error):
            raise
        raise UserError(
            f"{model.path}: its attention cannot be computed by {attention}; set model.attention to eager"
        ) from None
    if packed:
        _refuse_unpackable(model, loaded, attention)
    lm: PreTrainedModel = loaded.to(device).eval()
    # Sampling settings come from the study; defaults from the model's folder would add penalties that nobody asked for.
    lm.generation_config = GenerationConfig()
    return lm


def _refuse_unpackable(model: ModelSection, lm: Any, attention: str) -> None:
    config = lm.config.get_text_config()
    if other := sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}):
        raise UserError(f"{model.path}: its layers of type '{other[0]}' would mix rows laid end to end")
    if not lm._supports_attention_backend:
        raise UserError(
            f"{model.path}: {type(lm).__name__} has attention of its own, which knows no rows laid end to end"
        )
    if lm._is_stateful:
        raise UserError(f"{model.path}: its layers carry a state from token to token; only attention can be trained")
    if getattr(config, "attention_chunk_size", None):
        raise UserError(f"{model.path}: its attention is cut into chunks, which rows laid end to end would shift")
    if attention == "sdpa" and getattr(config, "attn_logit_softcapping", None):
        raise UserError(
            f"{model.path}: its attention scores are capped, which torch's kernels leave out; "
            f"set model.attention to flash_attention_2 or eager"
        )
    if attention == "flash_attention_2":
        if "flash_attention_2" not in (getattr(lm, "_compatible_flash_implementations", None) or [attention]):
            raise UserError(
                f"{model.path}: flash-attn 2 leaves out part of its attention; set model.attention to eager"
            )
        try:
            lm._flash_attn_can_dispatch(2)
        except (ImportError, ValueError) as error:
            raise UserError(f"{model.path}: model.attention={attention}: {str(error).splitlines()[0]}") from None
    known = _length_of_fixed_rope(config)
    if known and context_length(model) > known:
        raise UserError(
            f"{model.path}: beyond {known} tokens its position encoding depends on the longest row of a batch; "
            f"set model.max_length to {known} or less"
        )


def _length_of_fixed_rope(config: Any) -> int | None:
    """Where RoPE's frequencies depend on the longest position of a forward pass: up to where they do not."""
    settings = getattr(config, "rope_parameters", None) or {}
    by_layers = [each for each in settings.values() if isinstance(each, dict)] or [settings]
    for each in by_layers:
        if each.get("rope_type") in ("dynamic", "longrope"):
            length: int = each.get("original_max_position_embeddings") or config.max_position_embeddings
            return length
    return None


def non_persistent_buffers(model: ModelSection, dtype: torch.dtype) -> dict[str, Tensor]:
    """What the model makes for itself and no checkpoint holds, by name: RoPE's frequencies above all.

    They stay float32 whatever the weights are: rounded to bfloat16, a frequency of 0.56 turns position 8,000 by two
    full circles too much. No weights are made.
    """
    lm = empty_model(model, dtype)
    saved = lm.state_dict().keys()
    return {name: buffer for name, buffer in lm.named_buffers() if name not in saved}


def empty_model(model: ModelSection, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """The model as its config describes it, on the meta device; of its tensors only the buffers hold values."""
    with init_empty_weights(include_buffers=False):
        lm: PreTrainedModel = AutoModelForCausalLM.from_config(
            load_config(model), dtype=dtype, trust_remote_code=model.trust_remote_code
        )
    return lm


def torch_dtype(name: str) -> torch.dtype:
    """`"bfloat16"` or `"float32"` as torch's dtype."""
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[name]


def resolve_attention(wanted: str, dtype: torch.dtype, device: torch.device) -> str:
    """`auto` resolved: flash_attention_2 for bfloat16 weights on a GPU where its package is installed, else sdpa."""
    if wanted != "auto":
        return wanted
    possible = device.type == "cuda" and dtype == torch.bfloat16
    return "flash_attention_2" if possible and importlib.util.find_spec("flash_attn") else "sdpa"


def context_length(model: ModelSection) -> int:
    """The longest prompt and response the model takes, in tokens."""
    if model.max_length:
        return model.max_length
    config = load_config(model)
    length = getattr(config.get_text_config(), "max_position_embeddings", None)
    if not length:
        raise UserError(f"{model.path}: its config states no max_position_embeddings; set model.max_length")
    return int(length)


def end_of_turn_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token that closes an assistant's turn, read off the chat template (it often is not `eos_token`)."""
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _PROBE}]
    rendered = str(tokenizer.apply_chat_template(turns, tokenize=False))
    tail = tokenizer(rendered.rpartition(_PROBE)[2], add_special_tokens=False)["input_ids"]
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    closing = next((int(token) for token in tail if token in special), tokenizer.eos_token_id)
    if closing is None:
        raise UserError("the chat template closes no assistant turn and the tokenizer has no eos_token")
    return closing


def stop_token_ids(model: ModelSection, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Every token that ends generation: end of turn, end of sequence, and what the generation config adds."""
    stops = {end_of_turn_id(tokenizer), tokenizer.eos_token_id}
    path = Path(local_folder(model)) / "generation_config.json"
    if path.exists():
        listed = json.loads(path.read_text()).get("eos_token_id")
        stops.update(listed if isinstance(listed, list) else [listed])
    return sorted(stop for stop in stops if stop is not None)
