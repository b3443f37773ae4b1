"""The output head: hidden states to logits, with whatever scale or soft cap the architecture applies.

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

_HEAD_NAMES = ("lm_head.weight", "model.embed_tokens.weight", "transformer.wte.weight")


class LogitTransform:
    """What a model does to lm_head's product: `cap * tanh(x * scale / cap)` (Cohere, Granite, Gemma), or nothing.

    What a config calls `logits_scaling` divides, but of HyperCLOVA X, which multiplies by it.
    """

    def __init__(self, config: Any) -> None:
        text = config.get_text_config()
        self.scale = float(getattr(text, "logit_scale", None) or 1.0)
        # MiniCPM 3 has it too, and divides the states before lm_head, which comes to the same.
        if scaling := getattr(text, "logits_scaling", None):
            multiplies = str(getattr(text, "model_type", "")).startswith("hyperclovax")
            self.scale *= float(scaling) if multiplies else 1 / float(scaling)
        self.soft_cap = getattr(text, "final_logit_softcapping", None)

    def __call__(self, product_TV: Tensor) -> Tensor:
        """The model's logits, float32."""
        logits_TV = product_TV.float()
        if self.scale != 1.0:
            logits_TV = logits_TV * self.scale
        if self.soft_cap:
            logits_TV = torch.tanh(logits_TV / self.soft_cap) * self.soft_cap
        return logits_TV


class FrozenHead(nn.Module):
    """The initial model's lm_head, which the student's own (tied or not) moves away from.

    Read from the checkpoint's safetensors as a buffer: no optimizer sees it and ZeRO does not partition it.
    """

    weight_VH: Tensor
    bias_V: Tensor | None

    def __init__(self, weight_VH: Tensor, bias_V: Tensor | None, transform: LogitTransform) -> None:
        super().__init__()
        self.register_buffer("weight_VH", weight_VH, persistent=False)
        self.register_buffer("bias_V", bias_V, persistent=False)
        self.transform = transform

    @classmethod
    def from_checkpoint(cls, model: ModelSection, dtype: torch.dtype) -> "FrozenHead":
        """Read the head, or the embedding where the two are tied, without loading the model."""
        folder = Path(local_folder(model))
        weight_VH = next((tensor for name in _HEAD_NAMES if (tensor := _read_tensor(folder, name)) is not None), None)
        if weight_VH is None:
            raise UserError(f"{model.path}: its safetensors hold none of {', '.join(_HEAD_NAMES)}")
        bias_V = _read_tensor(folder, "lm_head.bias")
        config = load_config(model)
        return cls(weight_VH.to(dtype), None if bias_V is None else bias_V.to(dtype), LogitTransform(config))

    @torch.no_grad()
    def forward(self, hidden_TH: Tensor) -> Tensor:
        """Exact logits (T, V), float32, of stored hidden states."""
        return self.transform(F.linear(hidden_TH.to(self.weight_VH), self.weight_VH, self.bias_V))


def _read_tensor(folder: Path, name: str) -> Tensor | None:
    index = folder / "model.safetensors.index.json"
    file = json.loads(index.read_text())["weight_map"].get(name) if index.exists() else "model.safetensors"
    if file is None or not (folder / file).exists():
        return None
    with safe_open(folder / file, framework="pt") as tensors:
        return tensors.get_tensor(name) if name in tensors.keys() else None  # noqa: SIM118 (not a dict)
