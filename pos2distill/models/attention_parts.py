"""Where a model attends: the attention of response tokens, summed over parts of their row, from one packed pass.

The model's own kernel computes the pass. In addition, its plain attention computes the weights of the requested queries
only, so no (length, length) matrix is built.

Shapes: T predicting positions of one row (the last prompt token to the last but one of the response), K tokens of that
row, P parts, N layers, H hidden size; S tokens of the packed sequence, D size of a head.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from pos2distill.models.attention import eager_kernel, window_as_mask, window_of
from pos2distill.models.hidden_states import SUMMED, response_hidden_states
from pos2distill.models.packing import PackedRows, ResponseBatch, causal_mask


class PartSums:
    """Collects the sums of every layer while packed rows pass through the model.

    Args:
        kernel: the model's own, for packed rows.
        one_hot_KP: for each row, which part a token belongs to.
        lengths: the length of each row's response.
    """

    def __init__(self, kernel: Callable[..., Any], one_hot_KP: Sequence[Tensor], lengths: Sequence[int]) -> None:
        self.kernel = kernel
        self.one_hot_KP = one_hot_KP
        self.lengths = lengths
        self.by_layer: dict[int, list[Tensor]] = {}

    def add(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        packed_rows: PackedRows,
        **settings: Any,
    ) -> None:
        """Sum one layer's weights over the tokens of each part, and average them over heads."""
        window = window_of(attention_mask)
        queries = query.split(packed_rows.query_lengths, 2)
        keys, values = packed_rows.whole_rows(key), packed_rows.whole_rows(value)
        sums: list[Tensor] = []
        for row, tokens in enumerate(self.lengths):
            # The last prompt token and the response, without its last token, which predicts nothing.
            predicting = queries[row][:, :, -tokens - 1 : -1]
            mask = causal_mask(tokens + 1, packed_rows.row_length(row), window, query)[:, :, :-1]
            _, weights_1HTK = eager_kernel(module)(module, predicting, keys[row], values[row], mask, **settings)
            sums.append((weights_1HTK[0].float() @ self.one_hot_KP[row]).mean(0))
        self.by_layer[int(module.layer_idx)] = sums  # type: ignore[arg-type]


def states_and_attention(
    lm: PreTrainedModel, batch: ResponseBatch, part_K: Sequence[Tensor], parts: int
) -> tuple[Tensor, list[Tensor]]:
    """The states that predict the responses, and how much the predicting tokens attend to each part of their row.

    A token's attention to all parts sums to 1, except in models with attention sinks outside of the row. A layer with a
    sliding window attends to the tokens within it.

    Args:
        lm: a model that was loaded with `packed=True`; its attention implementation is restored afterwards.
        part_K: for each row, the part of each token, prompt and response, 0 to `parts` - 1; int64.
    Returns: the states that `response_hidden_states` returns; for each row (N, T, P) float32, the mean over heads.
    """
    AttentionInterface.register(SUMMED, _attend_and_sum)
    AttentionMaskInterface.register(SUMMED, window_as_mask)
    implementation = lm.config._attn_implementation
    one_hot_KP = [nn.functional.one_hot(each, parts).float().to(lm.device) for each in part_K]
    lengths = torch.bincount(batch.row_T).tolist()
    sums = PartSums(ALL_ATTENTION_FUNCTIONS[implementation], one_hot_KP, lengths)
    lm.set_attn_implementation(SUMMED)
    try:
        hidden_TH = response_hidden_states(lm, batch, part_sums=sums)
    finally:
        lm.set_attn_implementation(implementation)
    layers = [sums.by_layer[layer] for layer in sorted(sums.by_layer)]
    return hidden_TH, [torch.stack(of_row) for of_row in zip(*layers, strict=True)]


def _attend_and_sum(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    part_sums: PartSums,
    packed_rows: PackedRows,
    **settings: Any,
) -> tuple[Tensor, Any]:
    """The model's own attention, with the weights of plain attention summed into `part_sums`."""
    part_sums.add(module, query, key, value, attention_mask, packed_rows, **settings)
    output: tuple[Tensor, Any] = part_sums.kernel(
        module, query, key, value, attention_mask, packed_rows=packed_rows, **settings
    )
    return output
