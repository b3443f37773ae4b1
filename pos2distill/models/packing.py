"""Prompts and responses of several rows laid end to end, and the hidden states that predict the responses.

Nothing is padded: a batch costs what its tokens cost, and a prefix that rows share costs once.
Shapes: B rows, S tokens of all rows laid end to end, T response tokens of all rows, H hidden size.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from pos2distill.models.attention import PACKED, PackedRows, pack_rows
from pos2distill.models.load import torch_dtype
from pos2distill.records import Tokens


@dataclass(frozen=True, slots=True)
class ResponseBatch:
    """B rows of prompt + response, and where each response is predicted.

    input_ids_S: int64. position_S: each token's place in its own row. packed: which of these tokens a row is made of.
    row_T: the row of each response token. logit_index_T: the place among all S tokens whose logits predict it. target_T: the
    response tokens themselves, int64.
    """

    input_ids_S: Tensor
    position_S: Tensor
    packed: PackedRows
    row_T: Tensor
    logit_index_T: Tensor
    target_T: Tensor

    @property
    def rows(self) -> int:
        """B."""
        return len(self.packed.shared)

    def to(self, device: torch.device | str) -> "ResponseBatch":
        """The same batch on a device."""
        names = ("input_ids_S", "position_S", "packed", "row_T", "logit_index_T", "target_T")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})


def collate(
    prompts: Sequence[Tokens],
    responses: Sequence[Tokens],
    *,
    alignment: Literal["shifted", "official"] = "shifted",
    group_ids: Sequence[Hashable] | None = None,
) -> ResponseBatch:
    """Join prompts and responses by their ids; they are never tokenised again together.

    Response token t (from 0) of a prompt of P tokens stands at P + t and is predicted at P + t - 1 (`shifted`).
    `official` reads one position later, as the authors' code does: it never distils the first token and distils one
    after the end.

    Args:
        group_ids: neighbours with the same value have what both prompts begin with laid down once. For models that
            `load_model` loaded packed.
    """
    lengths = [len(prompt) + len(response) for prompt, response in zip(prompts, responses, strict=True)]
    packed = pack_rows(prompts, lengths, group_ids)
    starts, shared = packed.start_B1.tolist(), packed.shared
    lag = 1 if alignment == "shifted" else 0
    first = [start + len(prompt) - skip - lag for start, prompt, skip in zip(starts, prompts, shared, strict=False)]
    pieces = [
        piece
        for prompt, skip, response in zip(prompts, shared, responses, strict=True)
        for piece in (prompt[skip:], response)
    ]
    return ResponseBatch(
        input_ids_S=torch.from_numpy(np.concatenate(pieces).astype(np.int64)),
        position_S=torch.cat([torch.arange(skip, length) for skip, length in zip(shared, lengths, strict=True)]),
        packed=packed,
        row_T=torch.repeat_interleave(torch.tensor([len(response) for response in responses])),
        logit_index_T=torch.cat(
            [torch.arange(at, at + len(response)) for at, response in zip(first, responses, strict=True)]
        ),
        target_T=torch.from_numpy(np.concatenate(responses).astype(np.int64)),
    )


def response_hidden_states(lm: nn.Module, batch: ResponseBatch) -> Tensor:
    """The states (T, H) that enter lm_head at the positions that predict the response, after the final norm.

    Logits are made from these alone, so that those of all tokens never exist. No token sees another row: attention that
    knows packed rows is told of them; to any other, positions that begin anew tell where rows end.

    Raises:
        ValueError: if rows share tokens and the model was not loaded for that.
    """
    decoder: Any = lm.get_decoder()  # type: ignore[operator]
    if any(batch.packed.shared) and decoder.config._attn_implementation not in PACKED.values():
        raise ValueError("rows that share a prefix want a model that was loaded packed")
    output = decoder(
        input_ids=batch.input_ids_S[None],
        position_ids=batch.position_S[None],
        use_cache=False,
        packed_rows=batch.packed,
    )
    hidden_TH: Tensor = output.last_hidden_state[0, batch.logit_index_T]
    return hidden_TH


def hidden_to_bytes(hidden_TH: Tensor) -> bytes:
    """Row-major bytes: bfloat16 has no Arrow type."""
    return hidden_TH.contiguous().view(torch.uint8).numpy().tobytes()


def hidden_from_bytes(data: bytes, dtype: str, tokens: int) -> Tensor:
    """The (T, H) tensor that `hidden_to_bytes` wrote."""
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy()).view(torch_dtype(dtype)).view(tokens, -1)
