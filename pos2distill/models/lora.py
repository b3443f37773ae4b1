"""Low-rank adapters (LoRA, arXiv:2106.09685) in a model's linear layers. The only importer of peft.

Shapes: R rank, I and O a layer's inputs and outputs.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from pos2distill.config import LoraSection, ModelSection
from pos2distill.errors import UserError, did_you_mean
from pos2distill.models.load import empty_model


def add_adapters(lm: PreTrainedModel, lora: LoraSection, *, seed: int) -> None:
    """Put adapters into `lm`, in place; they alone are trained from here on.

        y = W x + (alpha / rank) B A x

    B starts at zero, so that the model is unchanged; A is drawn by the seed, alike on every rank.

    Raises:
        UserError: naming the first target that is no linear layer of the model.
    """
    config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=_targets(lm, lora))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        inject_adapter_in_model(config, lm)


def check_targets(model: ModelSection, lora: LoraSection) -> None:
    """Raises UserError as `add_adapters`, from the model's config alone."""
    _targets(empty_model(model), lora)


@contextmanager
def adapters_off(lm: PreTrainedModel) -> Iterator[None]:
    """Inside, the model in training is the initial one again, without adapters."""
    layers = [module for module in lm.modules() if isinstance(module, BaseTunerLayer)]
    lm.eval()
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
        lm.train()


def merge(weights: Mapping[str, Tensor], lora: LoraSection) -> dict[str, Tensor]:
    """The weights of a plain model, by its own names: W + (alpha / rank) B A, summed in fp32, in W's dtype.

    Args:
        weights: of a model with adapters, as `state_dict` names them.
    """
    merged = {name.replace(".base_layer.", "."): weight for name, weight in weights.items() if ".lora_" not in name}
    for name, down_RI in weights.items():
        layer, found, _ = name.partition(".lora_A.")
        if found:
            up_OR, weight_OI = weights[name.replace(".lora_A.", ".lora_B.")], merged[f"{layer}.weight"]
            change_OI = lora.alpha / lora.rank * (up_OR.float() @ down_RI.float())
            merged[f"{layer}.weight"] = (weight_OI.float() + change_OI).to(weight_OI.dtype)
    return merged


def _targets(lm: PreTrainedModel, lora: LoraSection) -> list[str]:
    """The names that the settings give, or those of all linear layers but the output head."""
    head = lm.get_output_embeddings()
    linear = {
        name.rpartition(".")[2]
        for name, module in lm.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    }
    if not linear:
        raise UserError(f"training.lora: {lm.config.name_or_path} has no linear layers for adapters")
    if lora.targets == "all":
        # transformers holds all experts of a layer in one tensor, which is no linear layer.
        if any(parameter.ndim == 3 and ".experts." in name for name, parameter in lm.named_parameters()):
            raise UserError(
                f"training.lora.targets: all: {lm.config.name_or_path} has experts, which take no adapters; "
                f"name the layers that do, of {', '.join(sorted(linear))}"
            )
        return sorted(linear)
    if unknown := [target for target in lora.targets if target not in linear]:
        raise UserError(
            f"training.lora.targets: {unknown[0]}: not a linear layer of {lm.config.name_or_path}"
            f"{did_you_mean(unknown[0], linear)}"
        )
    return list(lora.targets)
