"""Prompts and responses of several rows laid end to end, and the hidden states that predict the responses.

Nothing is padded: a batch costs what its tokens cost.
Shapes: B rows, S tokens of all rows laid end to end, T response tokens of all rows, H hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from pos2distill.models.load import torch_dtype
from pos2distill.records import Tokens


@dataclass(frozen=True, slots=True)
class ResponseBatch:
    """B rows of prompt + response, and where each response is predicted.

    input_ids_S: int64. position_S: each token's place in its own row. start_B1: (B + 1,) int32, where rows begin, and
    S. longest: tokens of the longest row. row_T: the row of each response token. place_T: the place among all S tokens
    whose logits predict it. target_T: the response tokens themselves, int64.
    """

    input_ids_S: Tensor
    position_S: Tensor
    start_B1: Tensor
    longest: int
    row_T: Tensor
    place_T: Tensor
    target_T: Tensor

    @property
    def rows(self) -> int:
        """B."""
        return len(self.start_B1) - 1

    def to(self, device: torch.device | str) -> "ResponseBatch":
        """The same batch on a device."""
        names = ("input_ids_S", "position_S", "start_B1", "row_T", "place_T", "target_T")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})


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
    starts = np.cumsum([0, *lengths])
    lag = 1 if alignment == "shifted" else 0
    first = [start + len(prompt) - lag for start, prompt in zip(starts, prompts, strict=False)]
    pieces = [piece for pair in zip(prompts, responses, strict=True) for piece in pair]
    return ResponseBatch(
        input_ids_S=torch.from_numpy(np.concatenate(pieces).astype(np.int64)),
        position_S=torch.cat([torch.arange(length) for length in lengths]),
        start_B1=torch.from_numpy(starts.astype(np.int32)),
        longest=max(lengths),
        row_T=torch.repeat_interleave(torch.tensor([len(response) for response in responses])),
        place_T=torch.cat(
            [torch.arange(at, at + len(response)) for at, response in zip(first, responses, strict=True)]
        ),
        target_T=torch.from_numpy(np.concatenate(responses).astype(np.int64)),
    )


def predicting_hidden(lm: nn.Module, batch: ResponseBatch) -> Tensor:
    """The states (T, H) that enter lm_head at the positions that predict the response, after the final norm.

    Logits are made from these alone, so that those of all tokens never exist. No token sees another row: positions
    that begin anew tell transformers where rows end, and attention that knows packed rows takes their starts.
    """
    decoder: Any = lm.get_decoder()  # type: ignore[operator]
    output = decoder(
        input_ids=batch.input_ids_S[None],
        position_ids=batch.position_S[None],
        use_cache=False,
        cu_seq_lens_q=batch.start_B1,
        cu_seq_lens_k=batch.start_B1,
        max_length_q=batch.longest,
        max_length_k=batch.longest,
    )
    hidden_TH: Tensor = output.last_hidden_state[0, batch.place_T]
    return hidden_TH


def hidden_to_bytes(hidden_TH: Tensor) -> bytes:
    """Row-major bytes: bfloat16 has no Arrow type."""
    return hidden_TH.contiguous().view(torch.uint8).numpy().tobytes()


def hidden_from_bytes(data: bytes, dtype: str, tokens: int) -> Tensor:
    """The (T, H) tensor that `hidden_to_bytes` wrote."""
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy()).view(torch_dtype(dtype)).view(tokens, -1)
