"""Sequence packing: several rows of prompt + response concatenated into one sequence without padding.

A batch costs as much as its tokens. Rows of one example begin with the same documents, so a prefix that they have in
common is stored and computed only once. A causal model without dropout computes the same states for that prefix in
every row, so the result does not change.

Shapes: B rows, S tokens of the packed sequence, T response tokens of all rows; D size of an attention head; Q tokens of
one row that are not shared, K tokens of that row in all.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pos2distill.config.method import Alignment
from pos2distill.records import Tokens

MIN_SHARED_FRACTION = 1 / 8
"""A prefix is shared only if it is at least this fraction of its row. The few tokens that open every chat prompt are
less, and sharing them would cost more (masks, concatenations) than it saves."""

TokenRange = tuple[int, int]
"""Start (included) and end (excluded) in the packed sequence."""


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Which of the S packed tokens belong to each of the B rows.

    The packed sequence is cut into consecutive spans such that every row is a concatenation of whole spans: first the
    spans of its shared prefix, which an earlier row added, then its own tokens.

    Attributes:
        shared_lengths: for each row, the length of the prefix that an earlier row added.
        query_lengths: for each row, the number of tokens that it added itself. Only these are queries in attention.
        span_lengths: the length of each span; they sum to S.
        row_spans: for each row, the indices of its spans, in order.
        start_B1: (B + 1,) int32, where each row's own tokens begin in the packed sequence, and S.
        key_start_B1: (B + 1,) int32, the same for a sequence in which every row is stored whole.
    """

    shared_lengths: tuple[int, ...]
    query_lengths: tuple[int, ...]
    span_lengths: tuple[int, ...]
    row_spans: tuple[tuple[int, ...], ...]
    start_B1: Tensor
    key_start_B1: Tensor
    _masks: dict[tuple[Any, ...], Tensor] = field(default_factory=dict, compare=False, repr=False)

    def row_length(self, row: int) -> int:
        """Tokens of a row, its shared prefix included."""
        return self.shared_lengths[row] + self.query_lengths[row]

    @property
    def longest(self) -> int:
        """Tokens of the longest row, its shared prefix included."""
        return max(self.row_length(row) for row in range(len(self.query_lengths)))

    def to(self, device: torch.device | str) -> "PackedRows":
        """A copy on `device` with an empty mask cache, so that masks are freed with the copy after the pass."""
        return replace(self, start_B1=self.start_B1.to(device), key_start_B1=self.key_start_B1.to(device), _masks={})

    def whole_rows(self, states: Tensor) -> list[Tensor]:
        """Each row's states, (1, heads, K, D), from those of the packed sequence, (1, heads, S, D)."""
        spans = self.spans(states)
        return [self.whole_row(spans, row) for row in range(len(self.row_spans))]

    def spans(self, states: Tensor) -> tuple[Tensor, ...]:
        """The spans of packed states, (1, heads, span length, D) each."""
        # `split` and not slices: the gradient of each slice would be a tensor of the size of the whole sequence.
        spans: tuple[Tensor, ...] = states.split(self.span_lengths, 2)
        return spans

    def whole_row(self, spans: Sequence[Tensor], row: int) -> Tensor:
        """One row's states, (1, heads, K, D), from `spans`."""
        first, *others = [spans[index] for index in self.row_spans[row]]
        return torch.cat([first, *others], 2) if others else first

    def concatenated_rows(self, states: Tensor) -> Tensor:
        """The concatenation of `whole_rows`, (1, heads, sum of K, D)."""
        # The packed sequence then is this concatenation already, and nothing has to be copied.
        if not any(self.shared_lengths):
            return states
        spans = self.spans(states)
        pieces: list[Tensor] = []
        for span_indices in self.row_spans:
            pieces += [spans[index] for index in span_indices]
        return torch.cat(pieces, 2)

    def mask(self, row: int, window: int | None, like: Tensor) -> Tensor:
        """A row's attention mask, (1, 1, Q, K), added to the scores. It is cached, since all layers use the same one.

        Args:
            row: its index.
            window: how many tokens back a query sees, its own included; None: to the beginning.
            like: a tensor of the mask's dtype and device.
        """
        # Layers of one model can differ in their window, and autocast can change the dtype.
        key = (row, window, like.dtype, like.device)
        if key not in self._masks:
            self._masks[key] = causal_mask(self.query_lengths[row], self.row_length(row), window, like)
        return self._masks[key]


@dataclass(frozen=True, slots=True)
class PositionView:
    """Other positions of the same tokens.

    Attributes:
        position_S: (S,) int64.
        is_shifted_T: (T,) bool, whether the token is predicted at a position that has changed.
    """

    position_S: Tensor
    is_shifted_T: Tensor

    def to(self, device: torch.device | str) -> "PositionView":
        """The same view on a device."""
        return PositionView(self.position_S.to(device), self.is_shifted_T.to(device))


@dataclass(frozen=True, slots=True)
class ResponseBatch:
    """B packed rows of prompt + response, and the positions that predict each response.

    Attributes:
        input_ids_S: (S,) int64.
        position_S: (S,) int64, each token's position in its own row.
        packed: which tokens belong to which row.
        row_T: (T,) int64, the row of each response token.
        logit_index_T: (T,) int64, the index in the packed sequence whose logits predict each response token.
        target_T: (T,) int64, the response tokens.
        view: a second view of the same rows, if the method has one.
    """

    input_ids_S: Tensor
    position_S: Tensor
    packed: PackedRows
    row_T: Tensor
    logit_index_T: Tensor
    target_T: Tensor
    view: PositionView | None = None

    @property
    def row_count(self) -> int:
        """B."""
        return len(self.packed.query_lengths)

    def to(self, device: torch.device | str) -> "ResponseBatch":
        """The same batch on a device."""
        return ResponseBatch(
            input_ids_S=self.input_ids_S.to(device),
            position_S=self.position_S.to(device),
            packed=self.packed.to(device),
            row_T=self.row_T.to(device),
            logit_index_T=self.logit_index_T.to(device),
            target_T=self.target_T.to(device),
            view=None if self.view is None else self.view.to(device),
        )


def collate(
    prompts: Sequence[Tokens],
    responses: Sequence[Tokens],
    *,
    alignment: Alignment = "shifted",
    group_ids: Sequence[Hashable] | None = None,
) -> ResponseBatch:
    """Pack prompts and responses. Their ids are concatenated; nothing is tokenized again.

    Response token t (from 0) after a prompt of P tokens is at position P + t and is predicted at position P + t - 1
    (`shifted`). `official` reads one position later, as the authors' code does: it never distills the first token and
    distills one after the end.

    Args:
        prompts: each row's prompt.
        responses: each row's response.
        alignment: which position's logits belong to a response token.
        group_ids: each row's group. Neighboring rows with the same id share their common prompt prefix, which only
            models that were loaded with `packed=True` can compute. None: no row shares tokens.
    Raises:
        ValueError: if the numbers of prompts and responses differ.
    """
    lengths = [len(prompt) + len(response) for prompt, response in zip(prompts, responses, strict=True)]
    packed = pack_rows(prompts, lengths, group_ids)
    starts = packed.start_B1.tolist()
    lag = 1 if alignment == "shifted" else 0
    pieces: list[Tokens] = []
    positions: list[Tensor] = []
    logit_indices: list[Tensor] = []
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        shared = packed.shared_lengths[row]
        # Positions continue after the shared prefix, so that RoPE rotates as in the whole row.
        pieces += [prompt[shared:], response]
        positions.append(torch.arange(shared, lengths[row]))
        first = starts[row] + len(prompt) - shared - lag
        logit_indices.append(torch.arange(first, first + len(response)))
    response_lengths = torch.tensor([len(response) for response in responses])
    return ResponseBatch(
        input_ids_S=torch.from_numpy(np.concatenate(pieces).astype(np.int64)),
        position_S=torch.cat(positions),
        packed=packed,
        # With lengths as its only argument, it repeats each row's index as often as the row has tokens.
        row_T=torch.repeat_interleave(response_lengths),
        logit_index_T=torch.cat(logit_indices),
        target_T=torch.from_numpy(np.concatenate(responses).astype(np.int64)),
    )


def pack_rows(
    prompts: Sequence[Tokens], lengths: Sequence[int], group_ids: Sequence[Hashable] | None = None
) -> PackedRows:
    """Decide which prefixes are shared and where each row's tokens are in the packed sequence.

    Args:
        prompts: each row's prompt. All tokens but the last can be shared; the last one predicts the row's own response.
        lengths: each row's length, prompt and response.
        group_ids: see `collate`.
    """
    ranges: list[list[TokenRange]] = []  # for each row: its shared prefix, then its own tokens
    shared_lengths: list[int] = []
    query_lengths: list[int] = []
    end = 0
    for row, length in enumerate(lengths):
        shared, source = _shared_prefix(prompts, lengths, group_ids, 0, row)
        # Several ranges, because the source row may itself share its prefix with an earlier row.
        prefix = _first_tokens(ranges[source], shared) if shared else []
        own = length - shared
        ranges.append([*prefix, (end, end + own)])
        shared_lengths.append(shared)
        query_lengths.append(own)
        end += own
    span_lengths, row_spans = _cut_into_spans(ranges)
    return PackedRows(
        shared_lengths=tuple(shared_lengths),
        query_lengths=tuple(query_lengths),
        span_lengths=span_lengths,
        row_spans=row_spans,
        start_B1=_starts(query_lengths),
        key_start_B1=_starts(lengths),
    )


def count_own_tokens(
    prompts: Sequence[Tokens], lengths: Sequence[int], group_ids: Sequence[Hashable] | None, first: int, row: int
) -> int:
    """Tokens that a row adds to a pack that begins with row `first`, which may be the row itself.

    Args:
        prompts, lengths, group_ids: see `pack_rows`; those of all rows.
    """
    shared, _ = _shared_prefix(prompts, lengths, group_ids, first, row)
    return lengths[row] - shared


def causal_mask(queries: int, keys: int, window: int | None, like: Tensor) -> Tensor:
    """The causal mask of a row's last `queries` tokens, (1, 1, queries, keys), added to the scores.

    0 where a query sees a key, the dtype's lowest number where it does not.
    """
    query_Q1 = torch.arange(keys - queries, keys, device=like.device)[:, None]
    key_K = torch.arange(keys, device=like.device)
    masked_QK = key_K > query_Q1
    if window is not None:
        masked_QK |= key_K <= query_Q1 - window
    mask_QK = torch.zeros(queries, keys, dtype=like.dtype, device=like.device)
    return mask_QK.masked_fill(masked_QK, torch.finfo(like.dtype).min)[None, None]


def _shared_prefix(
    prompts: Sequence[Tokens], lengths: Sequence[int], group_ids: Sequence[Hashable] | None, first: int, row: int
) -> tuple[int, int]:
    """The longest prefix that a row shares with an earlier row of its group, from row `first` on, and that row's index.

    0 if it is so short that sharing does not pay. Groups are runs of neighboring rows, so the search ends at the first
    row of another group.
    """
    longest, source = 0, row
    if group_ids is None:
        return longest, source
    shareable = prompts[row][:-1]
    earlier = row - 1
    while earlier >= first and group_ids[earlier] == group_ids[row]:
        common = _common_prefix(shareable, prompts[earlier])
        if common > longest:
            longest, source = common, earlier
        earlier -= 1
    return (longest, source) if longest >= MIN_SHARED_FRACTION * lengths[row] else (0, row)


def _common_prefix(one: Tokens, other: Tokens) -> int:
    """The number of leading tokens that are equal."""
    size = min(len(one), len(other))
    differs = one[:size] != other[:size]
    if not differs.any():
        return size
    return int(differs.argmax())


def _first_tokens(ranges: list[TokenRange], tokens: int) -> list[TokenRange]:
    """The ranges of a row's first `tokens` tokens."""
    first = []
    for start, end in ranges:
        if tokens <= 0:
            break
        first.append((start, min(end, start + tokens)))
        tokens -= end - start
    return first


def _cut_into_spans(ranges: list[list[TokenRange]]) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Cut the packed sequence wherever a range begins or ends. Returns `span_lengths` and `row_spans`."""
    edges: set[int] = set()
    for row_ranges in ranges:
        for start, end in row_ranges:
            edges |= {start, end}
    # A row can end a shared prefix in the middle of another row's tokens, so every edge cuts.
    bounds = sorted(edges)
    span_at = {start: index for index, start in enumerate(bounds)}
    row_spans = []
    for row_ranges in ranges:
        spans: list[int] = []
        for start, end in row_ranges:
            spans += range(span_at[start], span_at[end])
        row_spans.append(tuple(spans))
    span_lengths = tuple(int(length) for length in np.diff(bounds))
    return span_lengths, tuple(row_spans)


def _starts(lengths: Sequence[int]) -> Tensor:
    """Where each of several consecutive pieces begins, and the end of the last one; int32, as flash-attn requires."""
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
