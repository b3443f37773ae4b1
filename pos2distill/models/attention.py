"""Scaled dot-product attention over rows laid end to end.

flash-attn takes such rows as they are; to torch's own kernels transformers would give one mask over all pairs of
tokens, S x S. Here each row is attended to by itself, at the cost of its own pairs.
Shapes: S tokens of all rows, B rows, D size of a head.
"""

import itertools
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

PACKED_SDPA = "packed_sdpa"
"""The name that transformers knows it by."""


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seq_lens_q: Tensor,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Causal attention in each row: (1, heads, S, D) each -> (1, S, heads, D).

    Raises:
        TypeError: if the model does not hand down where rows begin; tokens would see other rows.
    """
    starts = cu_seq_lens_q.tolist()
    # Split, not sliced: a slice's gradient is as large as all rows.
    rows = zip(*(tensor.split(cu_seq_lens_q.diff().tolist(), 2) for tensor in (query, key, value)), strict=True)
    parts = []
    for (start, end), (query_own, key_own, value_own) in zip(itertools.pairwise(starts), rows, strict=True):
        mask = None if attention_mask is None else attention_mask[..., start:end, start:end]
        parts.append(sdpa_attention_forward(module, query_own, key_own, value_own, mask, **settings)[0])
    return torch.cat(parts, 1), None


def _mask(*, q_length: int, local_size: int | None = None, **settings: Any) -> Tensor | None:
    """None, which is plain causal attention, unless a window is shorter than the tokens."""
    if local_size is None or q_length <= local_size:
        return None
    return sdpa_mask(q_length=q_length, local_size=local_size, **settings)


AttentionInterface.register(PACKED_SDPA, _attend)
AttentionMaskInterface.register(PACKED_SDPA, _mask)
