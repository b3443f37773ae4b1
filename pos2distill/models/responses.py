"""Prompt and response as one padded batch, and the hidden states that predict the response.

Shapes: B rows, L tokens of the longest row, T response tokens of all rows laid end to end, H hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from pos2distill.models.load import torch_dtype
from pos2distill.records import Tokens


@dataclass(frozen=True, slots=True)
class ResponseBatch:
    """B rows of prompt + response, padded on the right, and where each response is predicted.

    input_ids_BL, attention_mask_BL: int64. row_T: the row of each response token. position_T: the place in its row
    whose logits predict it. target_T: the response tokens themselves, int64.
    """

    input_ids_BL: Tensor
    attention_mask_BL: Tensor
    row_T: Tensor
    position_T: Tensor
    target_T: Tensor

    def to(self, device: torch.device | str) -> "ResponseBatch":
        """The same batch on a device."""
        return ResponseBatch(*(getattr(self, field.name).to(device) for field in fields(self)))


def collate(
    prompts: Sequence[Tokens],
    responses: Sequence[Tokens],
    *,
    alignment: Literal["shifted", "official"] = "shifted",
) -> ResponseBatch:
    """Join prompts and responses by their ids; they are never tokenised again together.

    Response token t (from 0) of a prompt of P tokens stands at P + t and is predicted at P + t - 1 (`shifted`).
    `official` reads one position later, as the authors' code does: it never distils the first token and distils one
    after the end.
    """
    lengths = [len(prompt) + len(response) for prompt, response in zip(prompts, responses, strict=True)]
    # Right padding, masked out: any token id will do, and 0 exists in every vocabulary.
    input_ids_BL = torch.zeros(len(prompts), max(lengths), dtype=torch.long)
    attention_mask_BL = torch.zeros_like(input_ids_BL)
    rows, positions = [], []
    lag = 1 if alignment == "shifted" else 0
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        input_ids_BL[row, : lengths[row]] = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))
        attention_mask_BL[row, : lengths[row]] = 1
        start = len(prompt) - lag
        positions.append(torch.arange(start, start + len(response)))
        rows.append(torch.full((len(response),), row))
    target_T = torch.from_numpy(np.concatenate(responses).astype(np.int64))
    return ResponseBatch(input_ids_BL, attention_mask_BL, torch.cat(rows), torch.cat(positions), target_T)


def predicting_hidden(lm: nn.Module, batch: ResponseBatch) -> Tensor:
    """The states (T, H) that enter lm_head at the positions that predict the response, after the final norm.

    Logits are made from these alone, so [B, L, V] never exists. The explicit mask keeps transformers from reading
    jumps in positions as packed sequences.
    """
    decoder: Any = lm.get_decoder()  # type: ignore[operator]
    output = decoder(input_ids=batch.input_ids_BL, attention_mask=batch.attention_mask_BL, use_cache=False)
    hidden_TH: Tensor = output.last_hidden_state[batch.row_T, batch.position_T]
    return hidden_TH


def hidden_to_bytes(hidden_TH: Tensor) -> bytes:
    """Row-major bytes: bfloat16 has no Arrow type."""
    return hidden_TH.contiguous().view(torch.uint8).numpy().tobytes()


def hidden_from_bytes(data: bytes, dtype: str, tokens: int) -> Tensor:
    """The (T, H) tensor that `hidden_to_bytes` wrote."""
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy()).view(torch_dtype(dtype)).view(tokens, -1)
