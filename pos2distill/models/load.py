"""Load models, tokenizers and prompt builders, with an error that names what a folder lacks or is not supported."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from pos2distill.config import ModelSection, Study
from pos2distill.errors import UserError
from pos2distill.faults import error_text
from pos2distill.models.architecture import (
    attention_errors,
    context_length,
    load_config,
    raise_if_refused,
    resolve_attention,
    torch_dtype,
)
from pos2distill.models.attention import PACKED, disable_cudnn_attention, register_kernels
from pos2distill.models.downloaded import checked_folder
from pos2distill.models.files import local_folder
from pos2distill.models.rope.layer_scales import resolve_scales, scale_layers
from pos2distill.models.trainable import (
    reject_flash_attention,
    reject_soft_caps,
    reject_unpackable,
    require_trainable_family,
)
from pos2distill.tasks.prompts import PromptBuilder

_MISTRAL = ("mistral", "mistral3", "voxtral", "ministral", "pixtral")  # those that transformers 5.19 checks
_CHANNEL = "<|channel|>"  # of gpt-oss's format, harmony


def load_tokenizer(model: ModelSection) -> PreTrainedTokenizerBase:
    """The model's tokenizer, with a chat template.

    Raises:
        UserError: if the folder has no tokenizer, or its tokenizer no chat template; if the model writes its thoughts
            in a way that is not known.
    """
    folder = local_folder(model, weights=False)
    if not any((Path(folder) / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise UserError(f"{model.path}: holds no tokenizer (tokenizer.json, tokenizer.model or vocab.json)")
    try:
        # Mistral's folders may hold a `tekken.json` too. transformers 5.19 would load it with mistral-common, whose
        # tokenizers have no chat template.
        tokenizer = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=model.trust_remote_code, mistral_format=False, **_corrections(folder)
        )
    except Exception as error:  # tokenizers 0.23 raises plain `Exception` for a file that it cannot read
        raise_if_refused(model.path, error)
        raise UserError(f"{model.path}: no usable tokenizer: {error_text(error)}; copy its files again") from error
    # A tokenizer may know another length than the model, whose context is checked for every prompt. By this entry,
    # transformers 5.19 does not print its own warning.
    tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    if not tokenizer.chat_template:
        raise UserError(f"{model.path}: its tokenizer has no chat template; use the model's chat or instruct version")
    if _CHANNEL in tokenizer.all_special_tokens or _CHANNEL in tokenizer.get_added_vocab():
        raise UserError(
            f"{model.path}: writes thoughts and answers into channels ({_CHANNEL}), which are not known here; "
            f"evaluate it on a server that returns the answer alone (model.engine=openai model.api=chat)"
        )
    return tokenizer


def _corrections(folder: str) -> dict[str, bool]:
    """Arguments that correct a tokenizer. Of a Mistral model of before transformers 5, whose file splits words wrongly.

    transformers 5.19 only warns of it. It would also change the tokenizers of other models whose config names no
    version of transformers.
    """
    try:
        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        return {"fix_mistral_regex": True} if config.get("model_type") in _MISTRAL else {}
    except (OSError, ValueError, AttributeError):  # reported where the model is loaded
        return {}


def load_prompt_builder(study: Study, *, reserve: int) -> PromptBuilder:
    """The builder of a study's prompts, with the tokenizer and the context of its model.

    Args:
        reserve: tokens of the context that are kept free for the response.
    """
    return PromptBuilder(
        load_tokenizer(study.model),
        study.data.wording,
        max_length=context_length(study.model),
        reserve=reserve,
        chat_template_kwargs=study.model.chat_template_kwargs,
    )


def load_model(
    model: ModelSection,
    *,
    dtype: torch.dtype | None = None,
    compute_dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    packed: bool = False,
) -> PreTrainedModel:
    """The causal language model in evaluation mode, from safetensors only, with RoPE scales where it has some.

    Args:
        dtype: the dtype of the weights; default: `model.dtype`.
        compute_dtype: the dtype that autocast will compute in; default: that of the weights.
        device: where the model is moved to.
        packed: load the model for packed rows (`response_hidden_states`); it then accepts no others.

    Raises:
        UserError: if the folder holds no safetensors, or lacks weights of the model; of a hub model, if its weights do
            not pass `check_weights`; if the implementation leaves out a part of its attention, or cannot compute it
            exactly on packed rows.
    """
    folder = checked_folder(model)
    weights = dtype or torch_dtype(model.dtype)
    # Other formats are pickles, which can run code when they are loaded.
    if not list(Path(folder).glob("*.safetensors")):
        raise UserError(f"{model.path}: holds no weights in safetensors format")
    attention = resolve_attention(model.attention, compute_dtype or weights, torch.device(device))
    disable_cudnn_attention()
    implementation = attention
    config = load_config(model)
    reject_soft_caps(config, attention, model_name=model.path)
    if packed:
        require_trainable_family(config, model.path)
        register_kernels()
        implementation = PACKED[attention]
    with attention_errors(model, attention):
        # Untyped: transformers 5.19 does not tell mypy that it returns two things here.
        result: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=weights,
            attn_implementation=implementation,
            trust_remote_code=model.trust_remote_code,
            use_safetensors=True,
            output_loading_info=True,
        )
    loaded, loading = result
    _require_complete(loading["missing_keys"], model.path)
    if packed:
        reject_unpackable(loaded, context=context_length(model), model_name=model.path)
        if attention == "flash_attention_2":
            reject_flash_attention(loaded, model_name=model.path)
    scales = resolve_scales(model.rope_scales, loaded.config, model.path)
    if scales:
        scale_layers(loaded, scales, model.path)
    lm: PreTrainedModel = loaded.to(device).eval()
    # Sampling settings come from the study; the folder's defaults could add penalties that the study does not name.
    lm.generation_config = GenerationConfig()
    return lm


def _require_complete(missing: Collection[str], path: str) -> None:
    """Reject a model whose files lack weights: transformers would fill them with random numbers."""
    if missing:
        first = min(missing)
        raise UserError(
            f"{path}: its files lack {len(missing)} weights of the model, such as {first}; download it again"
        )
