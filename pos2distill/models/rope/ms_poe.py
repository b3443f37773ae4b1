"""Ms-PoE (arXiv:2403.04797): in every prompt each attention head gets a RoPE scale by how it attends to that prompt.

Only for transformers 5.19: vLLM's fused attention does not support it. Heads that share keys (GQA) share a scale,
since a key can be rotated in one way only; the paper has no such models.

B: rows, H: query heads, G: groups of heads that share keys, L: tokens of queries, S: tokens of keys, D: size of a head.
"""

import importlib
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from pos2distill.config.inference import MsPoeSection
from pos2distill.errors import UserError
from pos2distill.models.attention import eager_kernel
from pos2distill.models.rope.layer_scales import rope_types

_NAME = "pos2distill_ms_poe"
_STATE = "pos2distill_ms_poe_state"  # attribute of an attention layer
_ROPE_TYPES = ("default", "linear", "llama3")  # whose frequencies are the same at every position
_OUTLIER = 3.0  # times the mean attention: a key that a head attends to more is counted (section 3 of the paper)


class MsPoe:
    """The scales of one batch of prompts. `begin` is called before each `generate`."""

    def __init__(self, rotary: nn.Module, kernel: Any, settings: MsPoeSection) -> None:
        self.rotary = rotary
        self.kernel = kernel
        self.settings = settings
        self.padding_B1 = torch.zeros(1, 1)
        self.scales: dict[int, Tensor] = {}

    def begin(self, attention_mask_BL: Tensor) -> None:
        """Forget the scales of the previous prompts. attention_mask_BL: 0 where a row is padded, on the left."""
        self.padding_B1 = (attention_mask_BL == 0).sum(1, keepdim=True)
        self.scales = {}

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **settings: Any
    ) -> tuple[Tensor, Any]:
        """Attention of one layer: query (B, H, L, D), key and value (B, G, S, D), rotated by their positions."""
        if module.layer_idx >= self.settings.first_layer:
            position_BS = torch.arange(key.shape[2], device=key.device) - self.padding_B1.to(key.device)
            if module.layer_idx not in self.scales:
                # The whole prompt comes in the first pass, and its scales stay for the response.
                self.scales[module.layer_idx] = self._choose(module, query, key, position_BS, settings["scaling"])
            # Rotations add up: from position t to t / scale it is t * (1 / scale - 1) more.
            change_BG1 = (1 / self.scales[module.layer_idx] - 1).unsqueeze(-1)
            change_BGS = position_BS.unsqueeze(1) * change_BG1
            query = self._rotate(module, query, change_BGS[..., -query.shape[2] :])
            key = self._rotate(module, key, change_BGS)
        return self.kernel(module, query, key, value, attention_mask, **settings)  # type: ignore[no-any-return]

    def _choose(self, module: Any, query: Tensor, key: Tensor, position_BS: Tensor, scaling: float) -> Tensor:
        """The scale of each group, (B, G)."""
        groups = key.shape[1]
        # In float32, whatever the model's dtype: a score is a count of keys above a threshold.
        query, key = query[:, :, -1:].float(), key.float()
        back_BGS = -position_BS.unsqueeze(1).expand(-1, groups, -1).float()
        last_BH1D = self._rotate(module, query, back_BGS[..., -1:])
        plain_BGSD = self._rotate(module, key, back_BGS)
        last_BGND = last_BH1D.unflatten(1, (groups, -1)).squeeze(3)
        scores_BGNS = last_BGND @ plain_BGSD.transpose(2, 3) * scaling
        attended_BS = position_BS >= 0
        scores_BGNS = scores_BGNS.masked_fill(~attended_BS[:, None, None], float("-inf"))
        return choose_scales(scores_BGNS.softmax(-1), attended_BS, self.settings)

    def _rotate(self, module: Any, states_BHLD: Tensor, position_BGL: Tensor) -> Tensor:
        """Rotate the heads of each group by positions of its own, with the model's own functions."""
        batch, groups, length = position_BGL.shape
        rotate = importlib.import_module(type(module).__module__).apply_rotary_pos_emb
        by_group = states_BHLD.reshape(batch * groups, -1, length, states_BHLD.shape[-1])
        cos, sin = self.rotary.forward(by_group, position_ids=position_BGL.reshape(batch * groups, length))
        rotated: Tensor = rotate(by_group, by_group, cos, sin)[0]
        return rotated.reshape(states_BHLD.shape)


def choose_scales(attention_BGNS: Tensor, attended_BS: Tensor, settings: MsPoeSection) -> Tensor:
    """The RoPE scale of each group of heads, (B, G), by how unevenly the last token of a prompt attends.

    A head's score is the fraction of keys with more than three times the mean attention; that of a group is the mean
    over its N heads. The group with the highest score gets the smallest scale. The first of equal scores comes first.

    Args:
        attention_BGNS: the attention of the last token, with unrotated queries and keys.
        attended_BS: which keys are not padding.
    """
    keys_B111 = attended_BS.sum(1)[:, None, None, None]
    is_outlier_BGNS = attention_BGNS > _OUTLIER / keys_B111
    score_BG = (is_outlier_BGNS.sum(-1, keepdim=True) / keys_B111).squeeze(-1).mean(-1)
    order_BG = score_BG.argsort(dim=1, descending=True, stable=True)
    scale_G = _scales_by_rank(score_BG.shape[1], settings).to(score_BG.device)
    if settings.ranking == "released":
        return scale_G[order_BG]
    # The argsort of a permutation is its inverse: the rank of each group.
    return scale_G[order_BG.argsort(dim=1)]


def _scales_by_rank(count: int, settings: MsPoeSection) -> Tensor:
    """The scales from the smallest to the largest, one for each rank."""
    intervals = count - 1 if settings.spacing == "closed" else count
    step = (settings.largest - settings.smallest) / max(1, intervals)
    return settings.smallest + step * torch.arange(count)


def apply_ms_poe(lm: PreTrainedModel, settings: MsPoeSection, model_name: str) -> MsPoe:
    """Change the attention of a loaded model. Its other uses, such as training, are undefined afterwards.

    Args:
        model_name: the model's name in messages.
    Raises:
        UserError: if the heads of this model cannot be rotated further.
    """
    decoder: Any = lm.get_decoder()
    rotary = getattr(decoder, "rotary_emb", None)
    # With several types of layers each would have frequencies of its own; a factor on the rotation would count twice.
    # Other types were not tested; those of `dynamic` and `longrope` depend on the largest position of a pass, and
    # rotating back uses negative positions.
    has_plain_rope = getattr(rotary, "attention_scaling", None) == 1.0 and set(rope_types(lm.config)) <= set(
        _ROPE_TYPES
    )
    if rotary is None or not has_plain_rope or not lm._supports_attention_backend:
        raise UserError(
            f"{model_name}: Ms-PoE needs plain RoPE ({', '.join(_ROPE_TYPES)}), the same in all layers, which "
            f"{type(lm).__name__} does not have (here {', '.join(rope_types(lm.config))})"
        )
    implementation = lm.config._attn_implementation
    layers: list[Any] = [layer.self_attn for layer in decoder.layers]
    kernel = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_kernel(layers[0]))
    state = MsPoe(rotary, kernel, settings)
    AttentionInterface.register(_NAME, _attend)
    # Masks have the form that the model's own kernel takes.
    AttentionMaskInterface.register(_NAME, ALL_MASK_ATTENTION_FUNCTIONS[implementation])
    for attention in layers:
        setattr(attention, _STATE, state)
    lm.set_attn_implementation(_NAME)
    return state


def _attend(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
    state: MsPoe = getattr(module, _STATE)
    return state.attend(module, *args, **kwargs)
