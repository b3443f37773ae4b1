"""The output head: hidden states to logits, with the scale or soft cap that the architecture applies.

Shapes: T tokens, H hidden size, V vocabulary.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from fsspec.implementations.local import LocalFileSystem
from safetensors import safe_open
from torch import Tensor, nn

from pos2distill.config import ModelSection
from pos2distill.errors import UserError
from pos2distill.models.architecture import load_config
from pos2distill.models.files import INDEX, SINGLE_FILE, local_folder
from pos2distill.models.loss_head import float32_logits
from pos2distill.models.stored_tensors import read_weight_map

# Suffixes of tensor names, in order of preference: if the head is tied to the embedding, a checkpoint holds only the
# embedding. `embed_out` and `embed_in` are GPT-NeoX's. A prefix says where the language model is in a larger one.
_BIAS_NAMES = ("lm_head.bias", "embed_out.bias")
_HEAD_NAMES = ("lm_head.weight", "embed_out.weight", "embed_tokens.weight", "wte.weight", "embed_in.weight")


class LogitTransform:
    """What a model applies to the raw logits: `cap * tanh(x * scale / cap)` (Cohere, Granite, Gemma), or nothing.

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

    def __call__(self, raw_logits_TV: Tensor) -> Tensor:
        """The model's logits, float32."""
        # Scaled and capped in float32, since bfloat16 logits are too coarse for a KL.
        logits_TV = raw_logits_TV.float()
        if self.scale != 1.0:
            logits_TV = logits_TV * self.scale
        if self.soft_cap:
            logits_TV = torch.tanh(logits_TV / self.soft_cap) * self.soft_cap
        return logits_TV


class FrozenHead(nn.Module):
    """The base model's lm_head, which stays fixed while the student's own (tied or not) is trained.

    Read from the checkpoint's safetensors and held as a buffer: no optimizer sees it and ZeRO does not partition it.
    """

    weight_VH: Tensor
    bias_V: Tensor | None

    def __init__(self, weight_VH: Tensor, bias_V: Tensor | None, transform: LogitTransform) -> None:
        super().__init__()
        # Not persistent: it belongs to the base model, so no checkpoint of the student may contain it.
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
        files = _tensor_files(folder, model.path)
        name = _find(files, _HEAD_NAMES)
        if name is None:
            raise UserError(f"{model.path}: its safetensors hold none of {', '.join(_HEAD_NAMES)}")
        bias_V = None
        # Most architectures have no bias here.
        bias_name = _find(files, _BIAS_NAMES)
        if bias_name is not None:
            bias_V = _read_tensor(folder / files[bias_name], bias_name).to(dtype)
        weight_VH = _read_tensor(folder / files[name], name).to(dtype)
        return cls(weight_VH, bias_V, LogitTransform(load_config(model)))

    @torch.no_grad()
    def forward(self, hidden_TH: Tensor) -> Tensor:
        """Logits (T, V) of stored hidden states, in float32 also if states and weights are bfloat16."""
        return self.transform(float32_logits(hidden_TH.to(self.weight_VH), self.weight_VH, self.bias_V))


def _tensor_files(folder: Path, model_name: str) -> dict[str, str]:
    """The file of each tensor of the checkpoint in `folder`, which consists of one file or of several."""
    if (folder / INDEX).exists():
        return read_weight_map(LocalFileSystem(), str(folder), model_name)
    with safe_open(folder / SINGLE_FILE, framework="pt") as tensors:
        return dict.fromkeys(tensors.keys(), SINGLE_FILE)


def _find(names: Iterable[str], ends: Sequence[str]) -> str | None:
    """The first name with one of these suffixes, in order of preference."""
    for end in ends:
        for name in names:
            if f".{name}".endswith(f".{end}"):
                return name
    return None


def _read_tensor(file: Path, name: str) -> Tensor:
    with safe_open(file, framework="pt") as tensors:
        tensor: Tensor = tensors.get_tensor(name)
    return tensor
