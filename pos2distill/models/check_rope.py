"""Whether an inference-time method, or a view that shifts positions, can be applied to a model."""

import math
from typing import Any

from pos2distill.config import ModelSection
from pos2distill.config.inference import InferenceSection
from pos2distill.errors import UserError
from pos2distill.models.architecture import context_length, empty_model, load_config
from pos2distill.models.rope.attention_buckets import use_bases
from pos2distill.models.rope.curves import CONFIG_KEY
from pos2distill.models.rope.layer_scales import resolve_scales, rope_types, scale_layers
from pos2distill.models.rope.ms_poe import apply_ms_poe
from pos2distill.models.trainable import longest_with_fixed_rope

# The classes of vLLM 0.32 that compute their rotations in the plain way.
_VLLM_TYPES = ("default", "llama3")
# Families (`model_type`) whose attention layers all rotate whole heads in halves, as Ms-PoE and Attention Buckets do.
_PLAIN_FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen3")


def check_inference(model: ModelSection, inference: InferenceSection) -> None:
    """Reject a model that the method, or the scales in its own config, cannot be applied to, before anything starts.

    No weights are loaded.

    Raises:
        UserError: with what the model lacks.
    """
    config = load_config(model)
    if model.engine == "hf":
        _require_frequencies_by_row(config, model)
    stored = resolve_scales((), config, model.path)
    changes = inference.spec.changes
    if changes in ("nothing", "order") and not stored:
        return
    lm = empty_model(model)
    if changes == "attention":
        _require_plain_family(lm.config, inference.method, model.path)
    if inference.method == "ms_poe":
        _require_no_short_window(lm.config, model)
        _require_changed_layer(lm.config, inference.ms_poe.first_layer, model.path)
        apply_ms_poe(lm, inference.ms_poe, model.path)
    if inference.method == "attention_buckets":
        use_bases(lm, inference.bases, model.path)
    if changes == "scales" and stored:
        raise UserError(
            f"{model.path}: its config.json has RoPE scales by layer ({CONFIG_KEY}), which inference.method "
            f"'{inference.method}' would replace; set inference.method to none, or remove them from config.json"
        )
    if inference.method == "lpes" and not inference.scales:
        _require_layers(lm.config, model.path)
    if changes == "scales" or stored:
        scales = stored or resolve_scales(inference.scales or (1.0,), lm.config, model.path)
        scale_layers(lm, scales, model.path)
        if model.engine == "vllm":
            _require_scalable_in_vllm(lm.config, model.path)


def require_position_room(model: ModelSection, config: Any, factor: float) -> None:
    """Reject a model with fewer positions than `factor` times its context, since shifted rows would need more.

    RoPE scales divide positions, so that with scales above 1 more of them fit, and with scales below 1 fewer.

    Args:
        config: the model's config.
    Raises:
        UserError: with the context that leaves room.
    """
    factor /= min(resolve_scales(model.rope_scales, config, model.path), default=1.0)
    text_config = config.get_text_config()
    limits = (getattr(text_config, "max_position_embeddings", None), longest_with_fixed_rope(text_config))
    positions = min((limit for limit in limits if limit), default=None)
    context = context_length(model)
    if positions and factor * context > positions:
        raise UserError(
            f"method.view: shifted rows need {math.ceil(factor * context)} positions, {model.path} has {positions}; "
            f"set model.max_length to {int(positions / factor)} or less"
        )


def _require_frequencies_by_row(config: Any, model: ModelSection) -> None:
    """Reject prompts so long that the frequencies of `dynamic` RoPE would grow with the batch's longest row.

    They would also stay grown for later batches that reach that length. Of `longrope`, the engine keeps the two kinds
    of prompts apart.
    """
    longest = longest_with_fixed_rope(config.get_text_config())
    if longest and "dynamic" in rope_types(config) and context_length(model) > longest:
        raise UserError(
            f"{model.path}: beyond {longest} tokens its position encoding (dynamic RoPE) depends on the other prompts "
            f"of a batch; set model.max_length to {longest} or less, or model.engine to vllm"
        )


def _require_scalable_in_vllm(config: Any, model_name: str) -> None:
    text_config = config.get_text_config()
    # SmolLM 3, for example, which vLLM 0.32 runs by transformers' code: its layers have no embedding of their own.
    if 0 in (getattr(text_config, "no_rope_layers", None) or ()):
        raise UserError(
            f"{model_name}: some of its layers have no RoPE (no_rope_layers), and the others cannot be scaled by layer "
            f"in vLLM; set model.engine to hf"
        )
    # DeepSeek V3, for example. vLLM 0.32 passes the embedding that all layers share to a module of its own.
    if getattr(text_config, "kv_lora_rank", None):
        raise UserError(
            f"{model_name}: has latent attention (kv_lora_rank), which cannot be scaled by layer in vLLM; set "
            f"model.engine to hf"
        )
    for rope_type in rope_types(config):
        if rope_type not in _VLLM_TYPES:
            raise UserError(
                f"{model_name}: RoPE of type '{rope_type}' cannot be scaled by layer in vLLM; set model.engine to hf"
            )


def _require_changed_layer(config: Any, first_layer: int, model_name: str) -> None:
    """Reject a first layer beyond the last one: the unchanged model would be reported as Ms-PoE."""
    layers = config.get_text_config().num_hidden_layers
    if first_layer >= layers:
        raise UserError(
            f"inference.ms_poe.first_layer: {first_layer}, but {model_name} has {layers} layers, so none would change; "
            f"set it to {layers - 1} or less"
        )


def _require_no_short_window(config: Any, model: ModelSection) -> None:
    """Reject layers that do not see the whole prompt: heads are ranked by their attention to all of it."""
    window = getattr(config.get_text_config(), "sliding_window", None)
    if window and window < context_length(model):
        raise UserError(
            f"{model.path}: its layers attend to the last {window} tokens only (sliding_window), and ms_poe ranks "
            f"heads by the whole prompt; set model.max_length to {window} or less"
        )


def _require_layers(config: Any, model_name: str) -> None:
    """Reject a search of scales by layer for a model with one layer."""
    if config.get_text_config().num_hidden_layers == 1:
        raise UserError(
            f"{model_name}: has one layer, so there are no scales by layer to search; set inference.method to "
            f"uniform_scale and inference.scales to one number"
        )


def _require_plain_family(config: Any, method: str, model_name: str) -> None:
    family = config.get_text_config().model_type
    if family not in _PLAIN_FAMILIES:
        raise UserError(
            f"{model_name}: inference.method '{method}' supports {', '.join(_PLAIN_FAMILIES)}, not {family}, whose "
            f"layers may rotate in another way"
        )
    if resolve_scales((), config, model_name):
        raise UserError(
            f"{model_name}: its config.json has RoPE scales by layer ({CONFIG_KEY}), which inference.method '{method}' "
            f"does not combine with"
        )
