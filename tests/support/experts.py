"""Mixtures of experts whose routers have weights in float32, the others in bfloat16, as published ones do."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pos2distill.config import ModelSection
from scripts.model_families import save_tiny

_ROUTER = "model.layers.1.mlp"

KEPT = {
    "deepseek_v3": {f"{_ROUTER}.gate.e_score_correction_bias"},
    "ernie4_5_moe": {f"{_ROUTER}.gate.weight", f"{_ROUTER}.moe_statics.e_score_correction_bias"},
}
"""By family, the weights that stay in float32, as they are stored."""


def mixture_in_bfloat16(family: str, folder: Path) -> ModelSection:
    """A random mixture of the family, with weights in float32 that bfloat16 cannot hold."""
    model = save_tiny(family, folder)
    generator = torch.Generator().manual_seed(0)
    weights = tensors_of(folder)
    for name, weight in weights.items():
        weights[name] = weight.bfloat16()
        if name in KEPT[family]:
            weights[name] = 6 + 0.01 * torch.randn(weight.shape, generator=generator)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return model.model_copy(update={"dtype": "bfloat16", "attention": "eager"})


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """The tensors of a model that is stored in one file."""
    return load_file(folder / "model.safetensors")
