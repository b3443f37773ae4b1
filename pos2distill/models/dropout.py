"""Training without dropout."""

from torch import nn
from torch.nn.modules.dropout import _DropoutNd


def turn_dropout_off(lm: nn.Module) -> None:
    """Set every dropout probability to 0, and routers' jitter, which is random too. The model's config stays as it is.

    transformers 5.19: attention layers and routers hold their probabilities as float attributes, such as
    `attention_dropout` or `jitter_noise`, instead of in torch's dropout modules. The routers of PhiMoE draw experts at
    random in training mode, where their weights get no gradient, so they stay in evaluation mode; their
    `router_jitter_noise` is no noise, but a threshold that evaluation has too.
    """
    for module in lm.modules():
        if hasattr(module, "router_jitter_noise"):
            module.eval()
            continue
        for name, value in vars(module).items():
            is_probability = isinstance(module, _DropoutNd) or "drop" in name or "jitter" in name
            if isinstance(value, float) and is_probability:
                setattr(module, name, 0.0)
