"""RoPE scales by layer in vLLM 0.32: a plugin for models whose config.json has them, and a call that changes them.

Where this package is installed, `register` is a plugin of vLLM (entry point `vllm.general_plugins`), so that `vllm
serve` also applies the scales of a folder that was exported with them. Our own engine names `RopeScales` as its worker
extension, which vLLM imports in every worker before it loads the model.

P: positions, D: rotated size of a head.
"""

import copy
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from pos2distill.models.rope.layer_scales import resolve_scales


def register() -> None:
    """Make vLLM's loaders scale the positions of models whose config says so. Calling it again changes nothing."""
    load_model = BaseModelLoader.load_model
    if hasattr(load_model, "scales_positions"):
        return

    @functools.wraps(load_model)
    def load_and_scale(loader: Any, vllm_config: Any, model_config: Any, *args: Any, **kwargs: Any) -> nn.Module:
        model: nn.Module = load_model(loader, vllm_config, model_config, *args, **kwargs)
        scales = resolve_scales((), model_config.hf_config, model_config.model)
        if scales:
            # Before vLLM compiles the model: compilation captures the modules that the model then has.
            _give_own_embeddings(model, len(scales))
            set_scales(model, scales)
        return model

    load_and_scale.scales_positions = True  # type: ignore[attr-defined]
    BaseModelLoader.load_model = load_and_scale  # type: ignore[method-assign]


class RopeScales:
    """A method added to vLLM's workers: `engine.collective_rpc("set_rope_scales", args=(scales,))`."""

    model_runner: Any

    def set_rope_scales(self, scales: Sequence[float]) -> None:
        """Change the scales of a model that was loaded with some. The caller must reset the cache of prefixes."""
        set_scales(self.model_runner.get_model(), scales)


def set_scales(model: nn.Module, scales: Sequence[float]) -> None:
    """Write the rotations of every layer's scale into its own embedding, in place: captured CUDA graphs use the tensor.

    Raises:
        ValueError: layers share an embedding, as in a model that was loaded without scales. All of them would get the
            last layer's scale.
    """
    embeddings = _embeddings(model)
    distinct = {id(embedding) for embedding in embeddings}
    if len(distinct) != len(embeddings):
        raise ValueError(
            f"{type(model).__name__}: its {len(embeddings)} layers share {len(distinct)} rotary embeddings, since it "
            f"was loaded without RoPE scales; load it with some"
        )
    for embedding, scale in zip(embeddings, scales, strict=True):
        embedding.cos_sin_cache.copy_(_rotations(embedding, scale))


def _embeddings(model: nn.Module) -> list[Any]:
    return [layer.self_attn.rotary_emb for layer in _layers(model)]


def _layers(model: nn.Module) -> list[Any]:
    layers = getattr(getattr(model, "model", None), "layers", ())
    return [layer for layer in layers if hasattr(layer, "self_attn")]


def _give_own_embeddings(model: nn.Module, count: int) -> None:
    """Give each layer its own copy of the embedding, which vLLM shares between layers of equal settings.

    Raises:
        ValueError: the model has other layers than its config says, or an embedding that cannot be scaled. vLLM shows
            the message, and the engine does not start.
    """
    layers = _layers(model)
    name = type(model).__name__
    # Pipeline parallelism would put some layers on other workers.
    if len(layers) != count:
        raise ValueError(f"{name}: {len(layers)} layers with RoPE are here, but there are {count} scales")
    for layer in layers:
        shared = getattr(layer.self_attn, "rotary_emb", None)
        # Other classes compute their rotations differently (YaRN, dynamic, several dimensions).
        if not isinstance(shared, RotaryEmbedding) or not _has_plain_cache(shared):
            raise ValueError(f"{name}: positions of {type(shared).__name__} cannot be scaled by layer in vLLM")
        # Latent attention has already passed on the shared embedding, so that a copy here would change nothing.
        if hasattr(layer.self_attn, "mla_attn"):
            raise ValueError(f"{name}: positions of latent attention cannot be scaled by layer in vLLM")
        layer.self_attn.rotary_emb = copy.deepcopy(shared)


def _has_plain_cache(embedding: RotaryEmbedding) -> bool:
    return type(embedding)._compute_cos_sin_cache is RotaryEmbeddingBase._compute_cos_sin_cache


def _rotations(embedding: RotaryEmbedding, scale: float) -> Tensor:
    """(P, D): cosines and sines of all positions divided by the scale, as `_compute_cos_sin_cache` has them."""
    frequencies_F = embedding._compute_inv_freq(embedding.base)
    position_P = torch.arange(embedding.max_position_embeddings, dtype=torch.float, device=frequencies_F.device)
    angle_PF = torch.outer(position_P / scale, frequencies_F)
    return torch.cat((angle_PF.cos(), angle_PF.sin()), dim=-1)
