"""Low-rank adapters (LoRA, arXiv:2106.09685) in a model's linear layers. The only module that imports peft.

Shapes: R rank, I and O a layer's inputs and outputs.
"""

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, TaskType, get_peft_model_state_dict, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import SAFETENSORS_WEIGHTS_NAME, ModulesToSaveWrapper
from peft.utils.transformers_weight_conversion import _MODEL_TO_CONVERSION_PATTERN, _MOE_TARGET_MODULE_MAPPING
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from pos2distill.config import LoraSection, ModelSection
from pos2distill.errors import UserError, did_you_mean
from pos2distill.models.architecture import empty_model
from pos2distill.models.files import is_hub_name

_ADAPTER = "default"  # the name of the adapter inside a model


def add_adapters(lm: PreTrainedModel, lora: LoraSection, *, seed: int) -> None:
    """Add adapters to `lm`, in place. Afterwards only they are trainable.

        y = W x + (alpha / rank) B A x

    B starts at zero, so that the model is unchanged; A is drawn from the seed, the same on every rank.

    Raises:
        UserError: naming the first target that is not a linear layer of the model.
    """
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=_targets(lm, lora),
        # Layers of an image encoder have the same names, but no token passes through them.
        exclude_modules=sorted(_other_linear_layers(lm)) or None,
        task_type=TaskType.CAUSAL_LM,
    )
    # The global generator is restored afterwards, so that adapters do not change later random numbers.
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        inject_adapter_in_model(config, lm, _ADAPTER)


def check_targets(model: ModelSection, lora: LoraSection) -> None:
    """Raise the UserError that `add_adapters` would raise, reading the model's config only.

    Raises:
        UserError: also if the rank is larger than that of every layer that gets an adapter.
    """
    lm = empty_model(model)
    targets = _targets(lm, lora)
    ranks = [min(layer.in_features, layer.out_features) for name, layer in _linear_layers(lm) if name in targets]
    if lora.rank > max(ranks):
        raise UserError(
            f"training.lora.rank: {lora.rank}, but the adapted layers of {model.path} have at most rank {max(ranks)}; "
            f"lower it"
        )


@contextmanager
def adapters_off(lm: PreTrainedModel) -> Iterator[None]:
    """Within this context, the model computes as the one it was made of, without adapters."""
    layers = [module for module in lm.modules() if isinstance(module, BaseTunerLayer)]
    in_training = [module for module in lm.modules() if module.training]
    lm.eval()
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
        for module in in_training:
            module.training = True


def merge(
    weights: dict[str, Tensor], lora: LoraSection, dtypes: Mapping[str, torch.dtype]
) -> tuple[dict[str, Tensor], float]:
    """The weights of a plain model, under its own names: W + (alpha / rank) B A, computed in fp32.

    Sums are on the CPU, and what they replace is released: memory that holds the model in training holds it here too.

    Args:
        weights: the weights of a model with adapters, as `state_dict` names them. Only those of the adapters are left.
        dtypes: the dtypes to which the sums are rounded, by the plain model's names.
    Returns: the weights, and by how much rounding changed the update D = (alpha / rank) B A: |merged - W - D| / |D|
        over all adapted weights.
    """
    # peft 0.21 names a wrapped layer's weights `LAYER.base_layer.weight`, `LAYER.lora_A.NAME.weight` and `lora_B`.
    merged: dict[str, Tensor] = {}
    for name in list(weights):
        if ".lora_" not in name:
            merged[name.replace(".base_layer.", ".")] = weights.pop(name)
    squared_error, squared_change = 0.0, 0.0
    for name, down_RI in weights.items():
        layer, is_adapter, _ = name.partition(".lora_A.")
        if not is_adapter:
            continue
        up_OR = weights[name.replace(".lora_A.", ".lora_B.")]
        weight_OI = merged[f"{layer}.weight"].float()
        change_OI = lora.alpha / lora.rank * (up_OR.float() @ down_RI.float())
        merged_OI = (weight_OI + change_OI).to(dtypes[f"{layer}.weight"])
        merged[f"{layer}.weight"] = merged_OI.cpu()
        squared_error += float((merged_OI.float() - weight_OI - change_OI).square().sum())
        squared_change += float(change_OI.square().sum())
    # Adapters that were never updated change nothing.
    return merged, math.sqrt(squared_error / squared_change) if squared_change else 0.0


def save_adapter(lm: PreTrainedModel, weights: Mapping[str, Tensor], model: ModelSection, folder: Path) -> None:
    """Write only the adapters, in peft's format, which peft and vLLM load for the model without them.

    Args:
        lm: the model with adapters; its own tensors are not read.
        weights: the weights of the adapters, by their names in `lm`.
        model: the model without the adapters. A path of this machine is not written, since the folder may be published.
        folder: made if it does not exist.
    """
    named: dict[str, Tensor] = get_peft_model_state_dict(
        lm, state_dict=dict(weights), adapter_name=_ADAPTER, save_embedding_layers=False
    )
    # peft 0.21 reads the names that its own wrapper of a model has.
    tensors = {f"base_model.model.{name}": weight.detach().cpu().contiguous() for name, weight in named.items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / SAFETENSORS_WEIGHTS_NAME, metadata={"format": "pt"})
    adapters: Any = lm.peft_config
    config: LoraConfig = copy.copy(adapters[_ADAPTER])
    config.inference_mode = True
    config.target_modules = sorted(config.target_modules or ())  # a set, whose order differs between processes
    if is_hub_name(model.path):
        config.base_model_name_or_path, config.revision = model.path, model.revision
    config.save_pretrained(str(folder))


def _targets(lm: PreTrainedModel, lora: LoraSection) -> list[str]:
    """The target names in the settings; for `all`, those of all linear layers except the output head."""
    means_experts = _names_of_experts(lm)
    linear = {name for name, _ in _linear_layers(lm)} - means_experts
    if not linear:
        raise UserError(f"training.lora: {lm.config.name_or_path} has no linear layers for adapters")
    if lora.targets == "all":
        # transformers 5.19 stores all experts of a layer in one 3-dimensional tensor, which is not a linear layer.
        if any(parameter.ndim == 3 and ".experts." in name for name, parameter in lm.named_parameters()):
            raise UserError(
                f"training.lora.targets: all: {lm.config.name_or_path} has experts, which cannot have adapters; "
                f"name the layers that can, of {', '.join(sorted(linear))}"
            )
        return sorted(linear)
    for target in lora.targets:
        if target in means_experts:
            raise UserError(
                f"training.lora.targets: {target}: of {lm.config.name_or_path} peft takes it for the experts, which "
                f"cannot have adapters; name others, of {', '.join(sorted(linear))}"
            )
        if target not in linear:
            raise UserError(
                f"training.lora.targets: {target}: not a linear layer of {lm.config.name_or_path}"
                f"{did_you_mean(target, linear)}"
            )
    return list(lora.targets)


def _names_of_experts(lm: PreTrainedModel) -> frozenset[str]:
    """Names that peft 0.21 takes for the experts of such a model, even where another linear layer has one of them.

    In transformers 4 every expert had linear layers of these names.
    """
    kind = _MODEL_TO_CONVERSION_PATTERN.get(str(lm.config.model_type), "")
    return frozenset(_MOE_TARGET_MODULE_MAPPING.get(kind, {}))


def _linear_layers(lm: PreTrainedModel) -> Iterator[tuple[str, nn.Linear]]:
    """The linear layers of the text model without the head, and the last part of their names, as peft matches them.

    Without routers that are linear layers to Python, and return more than one tensor (PhiMoE).
    """
    decoder: nn.Module = lm.get_decoder()  # type: ignore[no-untyped-call]
    for name, module in decoder.named_modules():
        if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
            yield name.rpartition(".")[2], module


def _other_linear_layers(lm: PreTrainedModel) -> set[str]:
    """The whole names of linear layers outside of the text model, without the output head."""
    decoder: nn.Module = lm.get_decoder()  # type: ignore[no-untyped-call]
    own = {*decoder.modules(), lm.get_output_embeddings()}
    return {name for name, module in lm.named_modules() if isinstance(module, nn.Linear) and module not in own}


def trained_layer(layer: Any) -> Any:
    """The layer itself, or the one of which peft trains a copy beside adapters (`modules_to_save`)."""
    return layer.original_module if isinstance(layer, ModulesToSaveWrapper) else layer
