"""Load models, tokenizers and prompt builders, with an error that names what a folder lacks or is not supported."""

import importlib.util
import logging
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
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

from pos2distill.config import ModelSection, Study
from pos2distill.errors import UserError
from pos2distill.faults import error_file, error_text, find_refusal, fix_hint
from pos2distill.models.attention import PACKED, disable_cudnn_attention, register_kernels
from pos2distill.models.files import local_folder
from pos2distill.models.rope.layer_scales import resolve_scales, scale_layers
from pos2distill.models.trainable import (
    reject_attention,
    reject_unpackable,
    require_trainable_family,
)
from pos2distill.tasks.prompts import PromptBuilder


def load_config(model: ModelSection, *, folder: str | None = None) -> Any:
    """The model's configuration.

    Args:
        folder: a folder on this machine that holds config.json; default: the model's own, which is downloaded
            without its weights if it is a URL or a hub name.
    Raises:
        UserError: if the folder holds no readable config.json.
    """
    folder = folder or local_folder(model, weights=False)
    try:
        with _without_warnings_of_token_ids():
            return AutoConfig.from_pretrained(folder, trust_remote_code=model.trust_remote_code)
    except Exception as error:  # the classes of transformers compute with what the file holds
        if Path(folder, "adapter_config.json").exists():
            raise UserError(
                f"{model.path}: is an adapter (adapter_config.json); merge it into its base model (peft's "
                f"merge_and_unload), and use that model's folder"
            ) from error
        if not Path(folder, "config.json").exists():
            raise UserError(f"{model.path}: holds no config.json{_model_inside(folder)}") from error
        _raise_if_refused(model.path, error)
        raise UserError(f"{model.path}: no usable config.json: {error_text(error)}") from error


def _raise_if_refused(path: str, error: Exception) -> None:
    """Name the file of a model that may not be read: the classes of transformers read others than their own too."""
    refusal = find_refusal(error)
    if refusal is not None:
        reason = f"{error_text(refusal)}{error_file(refusal, path)}"
        raise UserError(f"{path}: cannot be used ({reason}) (model.path){fix_hint(refusal, path)}") from error


@contextmanager
def _without_warnings_of_token_ids() -> Iterator[None]:
    """Without the warnings of transformers 5.19 of token ids outside of the vocabulary.

    Those that are used are rejected.
    """
    logger = logging.getLogger("transformers.configuration_utils")

    def keep(record: logging.LogRecord) -> bool:
        return "within the vocabulary" not in record.getMessage()

    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


def _model_inside(folder: str) -> str:
    """A hint for a message: the newest model of a run's storage or of a checkpoint."""
    found = [*Path(folder).glob("model/config.json"), *Path(folder).glob("checkpoint-*/model/config.json")]
    newest = max(found, key=lambda config: config.stat().st_mtime, default=None)
    return f"; did you mean '{newest.parent}'?" if newest else ""


def load_tokenizer(model: ModelSection) -> PreTrainedTokenizerBase:
    """The model's tokenizer, with a chat template.

    Raises:
        UserError: if the folder has no tokenizer, or its tokenizer no chat template.
    """
    folder = local_folder(model, weights=False)
    if not any((Path(folder) / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise UserError(f"{model.path}: holds no tokenizer (tokenizer.json, tokenizer.model or vocab.json)")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=model.trust_remote_code)
    except Exception as error:  # tokenizers 0.23 raises plain `Exception` for a file that it cannot read
        _raise_if_refused(model.path, error)
        raise UserError(f"{model.path}: no usable tokenizer: {error_text(error)}; copy its files again") from error
    # A tokenizer may know another length than the model, whose context is checked for every prompt. By this entry,
    # transformers 5.19 does not print its own warning.
    tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    if not tokenizer.chat_template:
        raise UserError(f"{model.path}: its tokenizer has no chat template; use the model's chat or instruct version")
    return tokenizer


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
            not pass `check_weights`; if the model's attention cannot be computed exactly on packed rows.
    """
    # Imported here: its checks build the model with this module.
    from pos2distill.models.downloaded import checked_folder

    folder = checked_folder(model)
    weights = dtype or torch_dtype(model.dtype)
    # Other formats are pickles, which can run code when they are loaded.
    if not list(Path(folder).glob("*.safetensors")):
        raise UserError(f"{model.path}: holds no weights in safetensors format")
    attention = resolve_attention(model.attention, compute_dtype or weights, torch.device(device))
    disable_cudnn_attention()
    implementation = attention
    if packed:
        require_trainable_family(load_config(model), model.path)
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
        reject_attention(loaded, attention, model_name=model.path)
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


@contextmanager
def attention_errors(model: ModelSection, attention: str) -> Iterator[None]:
    """Within this context a model is built with an implementation of attention.

    Raises:
        UserError: if the model does not support it.
    """
    try:
        yield
    except ValueError as error:
        # transformers 5.19 has no exception class of its own for an implementation that a model does not support.
        if "attention implementation" not in str(error):
            raise
        raise UserError(
            f"{model.path}: its attention cannot be computed by {attention}; set model.attention to eager"
        ) from None


def non_persistent_buffers(model: ModelSection, dtype: torch.dtype) -> dict[str, Tensor]:
    """The buffers that a model computes itself and no checkpoint holds, by name; mainly RoPE's frequencies.

    They stay float32 whatever dtype the weights have: rounded to bfloat16, a frequency of 0.56 rotates position 8,000
    two full turns too far. No weights are allocated.
    """
    lm = empty_model(model, dtype)
    # `state_dict` leaves out buffers that are not persistent.
    saved = lm.state_dict().keys()
    return {name: buffer for name, buffer in lm.named_buffers() if name not in saved}


def empty_model(
    model: ModelSection,
    dtype: torch.dtype | None = None,
    *,
    folder: str | None = None,
    attention: str | None = None,
) -> PreTrainedModel:
    """The model that the config describes, with its parameters on the meta device; only its buffers hold values.

    Args:
        folder: the folder with the config; see `load_config`.
        attention: transformers' name of the implementation; default: its own choice.
    """
    config = load_config(model, folder=folder)
    try:
        with init_empty_weights(include_buffers=False):
            lm: PreTrainedModel = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=attention, trust_remote_code=model.trust_remote_code
            )
    except Exception as error:  # transformers computes with the numbers and names of the config
        if attention is not None and "attention implementation" in str(error):
            raise  # the caller names the setting
        if "Padding_idx" in str(error):  # torch 2.13
            text = config.get_text_config()
            raise UserError(
                f"{model.path}: config.json: pad_token_id {text.pad_token_id} is none of the {text.vocab_size} tokens; "
                f"correct it or copy the model again"
            ) from error
        raise UserError(
            f"{model.path}: config.json describes no language model that can be built "
            f"({type(error).__name__}: {error_text(error)}); copy the model again"
        ) from error
    return lm


def weight_dtypes(model: ModelSection, *, folder: str | None = None) -> dict[str, torch.dtype]:
    """The dtype of each of a model's weights once it is loaded in `model.dtype`, by name. No weights are allocated.

    Some weights are float32 also in a bfloat16 model, such as the corrections by which routers choose experts.

    Args:
        folder: the folder with the config; see `load_config`.
    """
    dtype = torch_dtype(model.dtype)
    lm = empty_model(model, dtype, folder=folder)
    dtypes = {name: weight.dtype for name, weight in lm.state_dict().items()}
    # transformers 5.19 gives the dtypes of these parts of names while it loads (`core_model_loading`), not before.
    for part, kept in lm._get_dtype_plan(dtype).items():
        for name in dtypes:
            if re.search(part.replace("*", ".*"), name):
                dtypes[name] = kept
    return dtypes


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


def context_length(model: ModelSection, *, folder: str | None = None) -> int:
    """The largest number of tokens, prompt and response together, that the model accepts.

    Args:
        folder: the folder with the config; see `load_config`.
    """
    if model.max_length:
        return model.max_length
    config = load_config(model, folder=folder)
    length = getattr(config.get_text_config(), "max_position_embeddings", None)
    if not length:
        raise UserError(f"{model.path}: its config has no max_position_embeddings; set model.max_length")
    return int(length)
