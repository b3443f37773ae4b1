"""RoPE with a scale of its own in every layer: layer l rotates queries and keys by position / scale_l.

With one scale for all layers this is linear position interpolation (arXiv:2306.15595); with different ones it is what
LPES searches (arXiv:2606.27705). A scale of 1 leaves a layer exactly as it is.

N: distinct scales, B: rows, L: tokens, D: size of a head.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pos2distill.errors import UserError
from pos2distill.models.rope.curves import CONFIG_KEY

# transformers 5.19: their frequencies depend on the longest position of a forward pass, which scales would change.
_UNSCALABLE_TYPES = ("dynamic", "longrope")
# transformers 5.19: their rotary embeddings return one complex number for each pair of coordinates.
_COMPLEX_FAMILIES = ("deepseek_v2", "llama4_text")
_HOOKS = "pos2distill_rope_hooks"  # attribute of a decoder


def resolve_scales(scales: Sequence[float], config: Any, model_name: str) -> tuple[float, ...]:
    """The scale of every layer; empty if positions are not scaled.

    Args:
        scales: the study's scales, which replace those of the config: one for each layer, or a single one for all.
        config: the model's config.
        model_name: the model's name in messages.
    Raises:
        UserError: if the number of scales is not that of the layers.
    """
    stored = getattr(config, CONFIG_KEY, None)
    # First, because vLLM's plugin sees configs of all kinds, and some have no such number of layers.
    if not scales and stored is None:
        return ()
    layers: int = config.get_text_config().num_hidden_layers
    if scales:
        return _for_each_layer(scales, layers, model_name)
    if not isinstance(stored, list) or len(stored) != layers or not all(_is_scale(each) for each in stored):
        raise UserError(f"{model_name}/config.json: {CONFIG_KEY}: expected a list of {layers} positive numbers")
    return tuple(map(float, stored))


def _for_each_layer(scales: Sequence[float], layers: int, model_name: str) -> tuple[float, ...]:
    if len(scales) == 1:
        return tuple(scales) * layers
    if len(scales) != layers:
        raise UserError(
            f"inference.scales: {len(scales)} scales, but {model_name} has {layers} layers; give one for each"
        )
    return tuple(scales)


def _is_scale(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) and value > 0


def scale_layers(lm: PreTrainedModel, scales: Sequence[float], model_name: str) -> None:
    """Divide the positions of every layer by its scale, in place, and record the scales in the model's config.

    For each forward pass, the model computes the rotations of all N distinct scales once and holds them; each attention
    layer takes its own. That is exact with packed rows, gradient checkpointing and generation. A second call replaces
    the scales.

    Args:
        scales: one for each layer.
        model_name: the model's name in messages.
    Raises:
        UserError: if the model's position embeddings cannot be scaled by layer.
    """
    decoder: Any = lm.get_decoder()
    rotary = getattr(decoder, "rotary_emb", None)
    attentions: list[Any] = [getattr(layer, "self_attn", None) for layer in getattr(decoder, "layers", ())]
    if rotary is None or not attentions or any(attention is None for attention in attentions):
        raise UserError(f"{model_name}: {type(lm).__name__} has no rotary embedding that all its layers share")
    family = lm.config.get_text_config().model_type
    if family in _COMPLEX_FAMILIES:
        raise UserError(f"{model_name}: rotations of {family} are complex numbers, which cannot be scaled by layer")
    for rope_type in rope_types(lm.config):
        if rope_type in _UNSCALABLE_TYPES:
            raise UserError(
                f"{model_name}: RoPE of type '{rope_type}' depends on the longest prompt and cannot be scaled"
            )
    for hook in vars(decoder).get(_HOOKS, ()):
        hook.remove()
    distinct = sorted(set(scales))
    hooks = [rotary.register_forward_hook(_RotateByAll(distinct), with_kwargs=True)]
    for attention, scale in zip(attentions, scales, strict=True):
        select = _SelectOwnRotation(distinct.index(scale), model_name)
        hooks.append(attention.register_forward_pre_hook(select, with_kwargs=True))
    setattr(decoder, _HOOKS, hooks)
    setattr(lm.config, CONFIG_KEY, list(scales))


def rope_types(config: Any) -> list[str]:
    """The types of RoPE that a model's layers have, as transformers names them: default, linear, llama3, yarn, ..."""
    return [settings.get("rope_type", "default") for settings in rope_settings(config)]


def rope_settings(config: Any) -> list[dict[str, Any]]:
    """The settings of RoPE in a model's config: one dictionary for the whole model, or one for each type of layer."""
    settings = getattr(config.get_text_config(), "rope_parameters", None) or {}
    by_layer_type = [each for each in settings.values() if isinstance(each, dict)]
    return by_layer_type or [settings]


class _RotateByAll:
    """A hook of the rotary embedding: (cos, sin) of shape (B, L, D) become those of all scales, (N, B, L, D).

    Plain tensors, because wrappers such as DeepSpeed's rebuild what a module returns.
    """

    def __init__(self, scales: Sequence[float]) -> None:
        self.scales = scales

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        arguments = dict(zip(("x", "position_ids", "layer_type"), args, strict=False)) | kwargs
        position_ids = arguments["position_ids"]
        cosines, sines = [], []
        for scale in self.scales:
            # Without a division, so that a scale of 1 is the model's own rotation, bit for bit.
            cos, sin = output
            if scale != 1:
                cos, sin = module.forward(**{**arguments, "position_ids": position_ids / scale})
            cosines.append(cos)
            sines.append(sin)
        return torch.stack(cosines), torch.stack(sines)


class _SelectOwnRotation:
    """A hook of an attention layer: takes the rotation of its own scale."""

    def __init__(self, index: int, model_name: str) -> None:
        self.index = index
        self.model_name = model_name

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        rotations = kwargs.get("position_embeddings")
        if rotations is None:
            raise UserError(f"{self.model_name}: {type(module).__name__} receives no rotations and cannot be scaled")
        cos_NBLD, sin_NBLD = rotations
        return args, {**kwargs, "position_embeddings": (cos_NBLD[self.index], sin_NBLD[self.index])}
