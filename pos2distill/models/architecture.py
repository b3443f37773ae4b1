"""What a model's config says of it: its architecture, without any weights."""

import importlib.util
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from pos2distill.config import ModelSection
from pos2distill.errors import UserError
from pos2distill.faults import error_file, error_text, find_refusal, fix_hint
from pos2distill.models.files import local_folder


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
        raise_if_refused(model.path, error)
        raise UserError(f"{model.path}: no usable config.json: {error_text(error)}") from error


def raise_if_refused(path: str, error: Exception) -> None:
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
