"""Checks of a model's files against the settings of a study: its config, weights, tokenizer and chat template.

What a check says of a model is kept in this process for as long as the model's files do not change: the studies of a
sweep share it.
"""

import functools
import os
from typing import Any

from pos2distill.config import ModelSection, Study
from pos2distill.errors import UserError, warn
from pos2distill.models.files import files_version

# Types of RoPE by whose factor vLLM 0.32 does not multiply the positions of config.json (vllm/config/model.py).
_FACTOR_NOT_APPLIED = frozenset(
    {"default", "su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling"}
)


def check_against_model(study: Study) -> None:
    """Raise if the model's config contradicts the settings."""
    # Imported where needed: torch and transformers take longer to import than a cached study takes to show.
    from pos2distill.models.architecture import context_length, load_config
    from pos2distill.models.check_rope import check_inference, require_position_room

    config = load_config(study.model)
    text_config = config.get_text_config()
    if getattr(text_config, "num_hidden_layers", 1) < 1:
        raise UserError(f"{study.model.path}: its config.json describes no layers (num_hidden_layers)")
    if study.method.teacher == "topk" and study.method.teacher_topk > text_config.vocab_size:
        raise UserError(
            f"method.teacher_topk: {study.method.teacher_topk}, but {study.model.path} has {text_config.vocab_size} "
            f"tokens"
        )
    if study.training.lora:
        from pos2distill.models.lora import check_targets

        check_targets(study.model, study.training.lora)
    if study.method.view != "none":
        from pos2distill.training.views import POSITIONS

        positions = POSITIONS[study.method.view]
        if study.inference.searches_scales:
            # Scales below 1 may be found, and they need more positions.
            positions /= min(1.0, study.inference.search.smallest)
        require_position_room(study.model, config, positions)
    check_inference(study.model, study.inference)
    context = context_length(study.model)
    for name, tokens in (
        ("sampling.max_new_tokens", study.sampling.max_new_tokens),
        ("evaluation.max_new_tokens", study.evaluation.max_new_tokens),
    ):
        if tokens >= context:
            raise UserError(f"{name}: {tokens}, but prompt and response together may have {context} tokens")


@functools.cache
def check_weights_once(model: ModelSection, _version: str) -> None:
    """Raise if the weights do not fit the config, or the engine rejects the study's context (`check_context`).

    Args:
        _version: the version of the model's files (`files_version`).
    """
    from pos2distill.models.check import check_weights

    check_weights(model)
    check_context(model)


def check_context(model: ModelSection) -> None:
    """Warn of a context beyond the positions that the model was made for; raise if vLLM would reject it.

    The model's quality there is unknown, but not all models have a limit.
    """
    from pos2distill.models.architecture import load_config

    config = load_config(model)
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if not (model.max_length and positions and model.max_length > positions):
        return
    if model.engine == "vllm" and not _vllm_may_accept(config, model.max_length):
        raise UserError(
            f"model.max_length: {model.max_length}, but {model.path} was made for {positions} positions, and vLLM "
            f"accepts no more; lower it, or set model.engine to hf"
        )
    warn(f"model.max_length: {model.max_length}, but {model.path} was made for {positions} positions")


def _vllm_may_accept(config: Any, context: int) -> bool:
    """Whether vLLM 0.32 may accept a context beyond `max_position_embeddings`; how long a factor makes it, it says."""
    from pos2distill.models.rope.layer_scales import rope_types

    if os.environ.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "0").strip().lower() in ("1", "true"):
        return True
    limits = [getattr(each, "model_max_length", None) for each in (config, config.get_text_config())]
    if any(limit is not None and context <= limit for limit in limits):
        return True
    is_multiplied = "gemma3" not in config.model_type
    return is_multiplied and not _FACTOR_NOT_APPLIED.issuperset(rope_types(config))


def check_tokenizer(study: Study, version: str) -> None:
    """Raise if the tokenizer has no chat template that shows what the prompts of the study say.

    Args:
        version: the version of the model's files (`files_version`).
    """
    template = study.data.template
    has_system = template is not None and bool(template.system)
    _check_tokenizer(study.model, version, has_system=has_system)


@functools.cache
def _check_tokenizer(model: ModelSection, _version: str, *, has_system: bool) -> None:
    from pos2distill.models.chat import check_template, stop_token_ids
    from pos2distill.models.load import load_tokenizer

    tokenizer = load_tokenizer(model)
    check_template(tokenizer, model, has_system=has_system)
    stop_token_ids(model, tokenizer)


def check_gold_responses(study: Study) -> None:
    """Raise if the data set's answers are no whole responses, since the model must think first."""
    from pos2distill.models.chat import response_opening
    from pos2distill.models.load import load_tokenizer

    model = study.model
    if response_opening(load_tokenizer(model), model.chat_template_kwargs):
        raise UserError(
            f"method.name: '{study.method.name}' trains on the data set's answers, but the chat template of "
            f"{model.path} begins a thought (<think>) that they do not end; switch thinking off "
            f"(model.chat_template_kwargs), or choose another method"
        )


def count_parameters(model: ModelSection) -> int:
    """The number of the model's parameters."""
    return _count_parameters(model, files_version(model))


@functools.cache
def _count_parameters(model: ModelSection, _version: str) -> int:
    from pos2distill.models.architecture import empty_model

    return sum(parameter.numel() for parameter in empty_model(model).parameters())
