"""The hidden states that predict the responses: computed from a packed batch, and stored as bytes.

Shapes: S tokens of the packed sequence, T response tokens of all rows, H hidden size.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pos2distill.models.architecture import torch_dtype
from pos2distill.models.attention import PACKED
from pos2distill.models.packing import ResponseBatch

SUMMED = "packed_with_sums"
"""The name under which `attention_parts` registers its kernel for packed rows with transformers."""


def response_hidden_states(lm: nn.Module, batch: ResponseBatch, **for_attention: Any) -> Tensor:
    """The states (T, H) that enter lm_head at the positions that predict the response, after the final norm.

    The caller computes logits from these alone, so that logits of all S tokens never exist. No token sees another row:
    a model that was loaded with `packed=True` receives `batch.packed`; for any other, transformers detects the rows
    from positions that restart at 0 (transformers 5.19, `masking_utils.find_packed_sequence_indices`).

    Args:
        for_attention: what the model passes on to its attention layers.
    Raises:
        ValueError: if rows share tokens and the model was not loaded with `packed=True`.
    """
    # The decoder without lm_head, so that transformers computes no logits.
    decoder: Any = lm.get_decoder()  # type: ignore[operator]
    packed = decoder.config._attn_implementation in (*PACKED.values(), SUMMED)
    if any(batch.packed.shared_lengths) and not packed:
        raise ValueError("rows that share a prefix require a model loaded with packed=True")
    output = decoder(
        input_ids=batch.input_ids_S[None],
        position_ids=batch.position_S[None],
        use_cache=False,
        packed_rows=batch.packed,
        **for_attention,
    )
    hidden_TH: Tensor = output.last_hidden_state[0, batch.logit_index_T]
    return hidden_TH


def hidden_to_bytes(hidden_TH: Tensor) -> bytes:
    """Row-major bytes, as the sample store holds them: Arrow has no bfloat16."""
    return hidden_TH.contiguous().view(torch.uint8).numpy().tobytes()


def hidden_from_bytes(data: bytes, dtype: str, tokens: int) -> Tensor:
    """The (T, H) tensor that `hidden_to_bytes` wrote, with T = `tokens`."""
    # A copy, since `frombuffer` is read-only and tensors must be writable.
    values = np.frombuffer(data, np.uint8).copy()
    return torch.from_numpy(values).view(torch_dtype(dtype)).view(tokens, -1)
