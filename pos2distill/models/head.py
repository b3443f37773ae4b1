"""The output head: hidden states to logits, with the scale or soft cap that the architecture applies.

Shapes: T tokens, H hidden size, V vocabulary.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional as F

from pos2distill.config import ModelSection
from pos2distill.errors import UserError
from pos2distill.models.files import local_folder
from pos2distill.models.load import load_config

# In this order: where lm_head is tied to the embedding, a checkpoint holds only the embedding.
_HEAD_NAMES = ("lm_head.weight", "model.embed_tokens.weight", "transformer.wte.weight")


class LogitTransform:
    """What a model applies to lm_head's product: `cap * tanh(x * scale / cap)` (Cohere, Granite, Gemma), or nothing.

    Config fields, read in transformers 5.19: `logit_scale` multiplies (Cohere); `logits_scaling` divides (Granite,
    MiniCPM 3), except in HyperCLOVA X, which multiplies by it; `final_logit_softcapping` is the cap (Gemma).

    Args:
        config: a model's configuration.
    """

    def __init__(self, config: Any) -> None:
        text_config = config.get_text_config()
        self.scale = float(getattr(text_config, "logit_scale", None) or 1.0)
        # MiniCPM 3 divides the states before lm_head, which gives the same product.
        scaling = getattr(text_config, "logits_scaling", None)
        if scaling:
            multiplies = str(getattr(text_config, "model_type", "")).startswith("hyperclovax")
            self.scale *= float(scaling) if multiplies else 1 / float(scaling)
        self.soft_cap = getattr(text_config, "final_logit_softcapping", None)

    def __call__(self, product_TV: Tensor) -> Tensor:
        """The model's logits, float32."""
        # Scaled and capped in float32, since bfloat16 logits are too coarse for a KL.
        logits_TV = product_TV.float()
        if self.scale != 1.0:
            logits_TV = logits_TV * self.scale
        if self.soft_cap:
            logits_TV = torch.tanh(logits_TV / self.soft_cap) * self.soft_cap
        return logits_TV


class FrozenHead(nn.Module):
    """The initial model's lm_head, which stays fixed while the student's own (tied or not) is trained.

    Read from the checkpoint's safetensors and held as a buffer: no optimizer sees it and ZeRO does not partition it.
    """

    weight_VH: Tensor
    bias_V: Tensor | None

    def __init__(self, weight_VH: Tensor, bias_V: Tensor | None, transform: LogitTransform) -> None:
        super().__init__()
        # Not persistent: it belongs to the initial model, so no checkpoint of the student may contain it.
        self.register_buffer("weight_VH", weight_VH, persistent=False)
        self.register_buffer("bias_V", bias_V, persistent=False)
        self.transform = transform

    @classmethod
    def from_checkpoint(cls, model: ModelSection, dtype: torch.dtype) -> "FrozenHead":
        """Read the head, or the embedding if the two are tied, without loading the model.

        Raises:
            UserError: if the checkpoint has neither.
        """
        folder = Path(local_folder(model))
        weight_VH = _read_head(folder)
        if weight_VH is None:
            raise UserError(f"{model.path}: its safetensors hold none of {', '.join(_HEAD_NAMES)}")
        # Most architectures have no bias here.
        bias_V = _read_tensor(folder, "lm_head.bias")
        if bias_V is not None:
            bias_V = bias_V.to(dtype)
        return cls(weight_VH.to(dtype), bias_V, LogitTransform(load_config(model)))

    @torch.no_grad()
    def forward(self, hidden_TH: Tensor) -> Tensor:
        """Exact logits (T, V), float32, of stored hidden states."""
        return self.transform(F.linear(hidden_TH.to(self.weight_VH), self.weight_VH, self.bias_V))


def _read_head(folder: Path) -> Tensor | None:
    for name in _HEAD_NAMES:
        weight_VH = _read_tensor(folder, name)
        if weight_VH is not None:
            return weight_VH
    return None


def _read_tensor(folder: Path, name: str) -> Tensor | None:
    """A tensor of the checkpoint in `folder`, of one file or of several; None if it has none of that name."""
    file = "model.safetensors"
    index = folder / "model.safetensors.index.json"
    if index.exists():
        file = json.loads(index.read_text())["weight_map"].get(name, "")
    if not file or not (folder / file).exists():
        return None
    with safe_open(folder / file, framework="pt") as tensors:
        if name not in tensors.keys():  # noqa: SIM118 (safe_open is not a dict)
            return None
        tensor: Tensor = tensors.get_tensor(name)
    return tensor
