"""Attention Buckets (arXiv:2312.04455): several RoPE bases side by side, whose next-token distributions are mixed.

Where one base attends little another attends more. Every prompt runs once for each base, so an answer costs that many
times as much. Only for transformers.

B: rows, N: bases, L: tokens, D: size of a head, V: vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LogitsProcessor, PreTrainedModel

from pos2distill.errors import UserError
from pos2distill.models.rope.layer_scales import rope_types


def use_bases(lm: PreTrainedModel, factors: Sequence[float], model_name: str) -> None:
    """Give the rows of every batch, in turn, the model's own RoPE base times each factor.

    Args:
        model_name: the model's name in messages.
    Raises:
        UserError: if the model has no plain RoPE, the same in all layers.
    """
    decoder: Any = lm.get_decoder()
    rotary = getattr(decoder, "rotary_emb", None)
    inv_freq = getattr(rotary, "inv_freq", None)
    if rotary is None or inv_freq is None or rope_types(lm.config) != ["default"]:
        raise UserError(f"{model_name}: Attention Buckets needs plain RoPE, which {type(lm).__name__} does not have")
    # With base b, frequency i of n is b^(-i/n): a factor on the base is a factor^(-i/n) on it.
    exponent_F = torch.arange(len(inv_freq), device=inv_freq.device) / len(inv_freq)
    frequency_NF = torch.stack([inv_freq * factor**-exponent_F for factor in factors])
    rotary.register_forward_hook(_RotateByRow(frequency_NF), with_kwargs=True)


class _RotateByRow:
    """A hook of the rotary embedding: (cos, sin) of shape (B, L, D), row b by the frequencies of base b mod N."""

    def __init__(self, frequency_NF: Tensor) -> None:
        self.frequency_NF = frequency_NF

    def __call__(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _output: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        states, position_BL = (*args, *kwargs.values())[:2]
        rows = len(states)
        row_B = torch.arange(rows, device=states.device) % len(self.frequency_NF)
        frequency_BF = self.frequency_NF.to(states.device)[row_B]
        # Positions may be given once for all rows.
        angle_BLF = position_BL.expand(rows, -1).float().unsqueeze(-1) * frequency_BF.unsqueeze(1)
        angle_BLD = torch.cat((angle_BLF, angle_BLF), dim=-1)
        return angle_BLD.cos().to(states.dtype), angle_BLD.sin().to(states.dtype)


class MixBases(LogitsProcessor):
    """Mixes the distributions of the N rows of each prompt, which are neighbors.

        p(v) = sum_n w_n p_n(v),   w = softmax_n(max_v p_n(v))

    A base that is surer of its next token counts more.
    """

    def __init__(self, bases: int) -> None:
        self.bases = bases

    def __call__(self, _input_ids: Tensor, scores: Tensor) -> Tensor:
        """The logarithm of the mixture, for all N rows of a prompt. scores: (B * N, V)."""
        probability_BNV = scores.float().softmax(-1).unflatten(0, (-1, self.bases))
        weight_BN1 = probability_BNV.amax(-1, keepdim=True).softmax(1)
        mixed_BV: Tensor = (weight_BN1 * probability_BNV).sum(1)
        return mixed_BV.log().repeat_interleave(self.bases, 0)
